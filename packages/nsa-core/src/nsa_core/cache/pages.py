"""The pages of a cache: which are free, which sequences hold the others, and which of those may be
written. Host integers only, no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from nsa_core.errors import InvalidInput


class Changes(NamedTuple):
    """Changes to carry out in the store and the block table."""

    entries: list[tuple[int, int, int]]  # (sequence, place in its row of the block table, page)
    copies: list[tuple[int, int]]  # (from page, to page)


class Pages:
    """``total`` pages of ``size`` tokens, shared by sequences and snapshots by reference count.

    A page with several holders is read by all of them and written by none: :meth:`own` gives a
    writer a copy of its own.
    """

    def __init__(self, batch: int, size: int, total: int) -> None:
        self.size, self.total = size, total
        self.rows: list[list[int]] = [[] for _ in range(batch)]
        self._refs = [0] * total
        self._free = list(range(total - 1, -1, -1))

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def pages_of(self, tokens: int) -> int:
        """Pages that hold ``tokens`` tokens."""
        return -(-tokens // self.size)

    def own(self, wanted: Iterable[tuple[int, int, int]]) -> Changes:
        """Make pages writable for each (sequence, first, tokens): those from place ``first`` to the
        page of token ``tokens`` - 1 are held by that sequence alone.

        Missing pages are taken from the free ones, shared pages are replaced by copies.

        Raises:
            InvalidInput: too few pages are free; nothing has changed.
        """
        wanted = list(wanted)
        refs: dict[int, int] = {}
        missing: dict[int, list[int]] = {}  # sequence -> places that need a page
        for b, first, tokens in wanted:
            row, places = self.rows[b], []
            for place in range(first, max(len(row), self.pages_of(tokens))):
                if place >= len(row):
                    places.append(place)
                elif refs.setdefault(row[place], self._refs[row[place]]) > 1:
                    refs[row[place]] -= 1  # the last holder left keeps the page
                    places.append(place)
            if places:
                missing[b] = places
        needed = sum(map(len, missing.values()))
        if needed > self.free:
            sequences = ", ".join(map(str, missing))
            raise InvalidInput(
                f"out of pages: sequences {sequences} need {needed} more of {self.size} tokens,"
                f" {self.free} of {self.total} are free (reset sequences that are done, or take"
                " more num_pages)"
            )
        changes = Changes([], [])
        for b, places in missing.items():
            for place in places:
                self._take(b, place, changes)
        return changes

    def _take(self, b: int, place: int, changes: Changes) -> None:
        page, row = self._free.pop(), self.rows[b]
        self._refs[page] = 1
        if place < len(row):
            changes.copies.append((row[place], page))
            self.release([row[place]])
            row[place] = page
        else:
            row.append(page)
        changes.entries.append((b, place, page))

    def share(self, pages: Iterable[int]) -> None:
        """Add a holder to each page."""
        for page in pages:
            self._refs[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Remove a holder from each page; a page without holders is free."""
        for page in pages:
            self._refs[page] -= 1
            if not self._refs[page]:
                self._free.append(page)

    def trim(self, b: int, tokens: int) -> None:
        """Release the pages of sequence ``b`` that ``tokens`` tokens do not need."""
        keep, row = self.pages_of(tokens), self.rows[b]
        self.release(row[keep:])
        del row[keep:]

    def replace(self, rows: Mapping[int, Sequence[int]]) -> list[tuple[int, int, int]]:
        """Let each sequence b share the pages ``rows[b]`` instead of its own; return the changed
        entries (sequence, place, page) of the block table.
        """
        for pages in rows.values():
            self.share(pages)
        for b, pages in rows.items():
            self.release(self.rows[b])
            self.rows[b] = list(pages)
        return [(b, place, page) for b, pages in rows.items() for place, page in enumerate(pages)]

"""Page allocation of a cache, with reference counts. Host integers only, no tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from nsa_core.errors import InvalidInput


class Changes(NamedTuple):
    """Changes to apply to the store and the block table.

    Attributes:
        entries: (sequence, column in the block table, page).
        copies: (source page, target page).
    """

    entries: list[tuple[int, int, int]]
    copies: list[tuple[int, int]]


class Pages:
    """``total`` pages of ``size`` tokens, shared by sequences and snapshots by reference count.

    A page with several references is read-only. :meth:`own` copies it for a writer.

    Attributes:
        rows: the pages of each sequence, in order.
    """

    def __init__(self, batch: int, size: int, total: int) -> None:
        self.size, self.total = size, total
        self.rows: list[list[int]] = [[] for _ in range(batch)]
        self._refs = [0] * total
        self._free = list(range(total - 1, -1, -1))

    @property
    def free(self) -> int:
        """Number of pages without references."""
        return len(self._free)

    def pages_of(self, tokens: int) -> int:
        """Return the number of pages for ``tokens`` tokens."""
        return -(-tokens // self.size)

    def own(self, targets: Iterable[tuple[int, int, int]]) -> Changes:
        """Make the pages of sequences writable.

        For each (sequence, first, tokens), the pages from column ``first`` to the page of token
        ``tokens`` - 1 then belong to that sequence alone. Missing pages are allocated, shared pages
        are replaced by copies.

        Raises:
            InvalidInput: not enough pages are free; nothing has changed.
        """
        targets = list(targets)
        refs: dict[int, int] = {}
        missing: dict[int, list[int]] = {}  # sequence -> columns that need a page
        for b, first, tokens in targets:
            row, columns = self.rows[b], []
            for column in range(first, max(len(row), self.pages_of(tokens))):
                if column >= len(row):
                    columns.append(column)
                elif refs.setdefault(row[column], self._refs[row[column]]) > 1:
                    refs[row[column]] -= 1  # the last remaining sequence keeps the page
                    columns.append(column)
            if columns:
                missing[b] = columns
        needed = sum(map(len, missing.values()))
        if needed > self.free:
            sequences = ", ".join(map(str, missing))
            raise InvalidInput(
                f"out of pages: sequences {sequences} need {needed} more pages of {self.size}"
                f" tokens, {self.free} of {self.total} are free; reset finished sequences, or"
                " increase num_pages"
            )
        changes = Changes([], [])
        for b, columns in missing.items():
            for column in columns:
                self._allocate(b, column, changes)
        return changes

    def _allocate(self, b: int, column: int, changes: Changes) -> None:
        """Put a free page into ``column`` of sequence ``b``, and record the change."""
        page, row = self._free.pop(), self.rows[b]
        self._refs[page] = 1
        if column < len(row):
            changes.copies.append((row[column], page))
            self.release([row[column]])
            row[column] = page
        else:
            row.append(page)
        changes.entries.append((b, column, page))

    def share(self, pages: Iterable[int]) -> None:
        """Add a reference to each page."""
        for page in pages:
            self._refs[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Remove a reference from each page; a page without references is free."""
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
        """Let each sequence b share the pages ``rows[b]`` instead of its own.

        Returns:
            The changed entries (sequence, column, page) of the block table.
        """
        for pages in rows.values():
            self.share(pages)
        for b, pages in rows.items():
            self.release(self.rows[b])
            self.rows[b] = list(pages)
        return [(b, column, page) for b, pages in rows.items() for column, page in enumerate(pages)]

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


class _Counts(NamedTuple):
    """Numbers derived from the pages of all sequences and snapshots.

    Attributes:
        refs: number of references to each page.
        free: pages without references.
    """

    refs: list[int]
    free: list[int]

    def release(self, pages: Iterable[int]) -> None:
        """Remove a reference from each page; a page without references is free."""
        for page in pages:
            self.refs[page] -= 1
            if not self.refs[page]:
                self.free.append(page)


class Pages:
    """``total`` pages of ``size`` tokens, shared by sequences and snapshots by reference count.

    A page with several references is read-only. :meth:`own` copies it for a writer.

    The reference counts are derived from ``rows`` and from the pages of snapshots, so
    :meth:`restore` needs only the former ``rows`` to undo an operation that failed.

    Attributes:
        rows: the pages of each sequence, in order. The lists are replaced, and never changed.
    """

    def __init__(self, batch: int, size: int, total: int) -> None:
        self.size, self.total = size, total
        self.rows: list[list[int]] = [[] for _ in range(batch)]
        self._held: dict[object, list[int]] = {}  # pages of snapshots
        self._counts: _Counts | None = None  # None: to be counted again

    @property
    def free(self) -> int:
        """Number of pages without references."""
        return len(self._counted().free)

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
        counts = self._counted()
        refs: dict[int, int] = {}
        missing: dict[int, list[int]] = {}  # sequence -> columns that need a page
        for b, first, tokens in targets:
            row, columns = self.rows[b], []
            for column in range(first, max(len(row), self.pages_of(tokens))):
                if column >= len(row):
                    columns.append(column)
                elif refs.setdefault(row[column], counts.refs[row[column]]) > 1:
                    refs[row[column]] -= 1  # the last remaining sequence keeps the page
                    columns.append(column)
            if columns:
                missing[b] = columns
        needed, free = sum(map(len, missing.values())), len(counts.free)
        if needed > free:
            sequences = ", ".join(map(str, missing))
            raise InvalidInput(
                f"out of pages: sequences {sequences} need {needed} more pages of {self.size}"
                f" tokens, {free} of {self.total} are free; reset finished sequences, delete"
                " snapshots that hold pages, or increase num_pages"
            )
        changes, rows = Changes([], []), list(self.rows)
        for b, columns in missing.items():
            row = rows[b] = list(rows[b])
            for column in columns:
                page = counts.free.pop()
                counts.refs[page] = 1
                if column < len(row):
                    changes.copies.append((row[column], page))
                    counts.release([row[column]])
                    row[column] = page
                else:
                    row.append(page)
                changes.entries.append((b, column, page))
        self.rows = rows
        return changes

    def hold(self, holder: object, pages: list[int]) -> None:
        """Add a reference to each page, until ``holder`` is passed to :meth:`drop`."""
        self._held[holder] = pages
        self._counts = None

    def drop(self, holder: object) -> None:
        """Remove the references of ``holder``, if it has any."""
        self._held.pop(holder, None)
        self._counts = None

    def trim(self, tokens: Mapping[int, int]) -> None:
        """Release the pages of each sequence b that ``tokens[b]`` tokens do not need."""
        counts, rows = self._counted(), list(self.rows)
        for b, length in tokens.items():
            keep = self.pages_of(length)
            counts.release(rows[b][keep:])
            rows[b] = rows[b][:keep]
        self.rows = rows

    def replace(self, new_rows: Mapping[int, Sequence[int]]) -> list[tuple[int, int, int]]:
        """Let each sequence b share the pages ``new_rows[b]`` instead of its own.

        Returns:
            The changed entries (sequence, column, page) of the block table.
        """
        counts, rows = self._counted(), list(self.rows)
        for pages in new_rows.values():
            for page in pages:
                counts.refs[page] += 1
        for b, pages in new_rows.items():
            counts.release(rows[b])
            rows[b] = list(pages)
        self.rows = rows
        return self.entries(new_rows)

    @staticmethod
    def entries(rows: Mapping[int, Sequence[int]]) -> list[tuple[int, int, int]]:
        """Return the pages ``rows[b]`` of sequences b as (sequence, column, page)."""
        return [(b, column, page) for b, pages in rows.items() for column, page in enumerate(pages)]

    def restore(self, rows: list[list[int]]) -> None:
        """Return to the former ``rows``. The pages of snapshots stay as they are."""
        self.rows, self._counts = rows, None

    def _counted(self) -> _Counts:
        """Return the reference counts and the free pages, counted if necessary."""
        if self._counts is None:
            refs = [0] * self.total
            for pages in (*self.rows, *self._held.values()):
                for page in pages:
                    refs[page] += 1
            free = [page for page in range(self.total - 1, -1, -1) if not refs[page]]
            self._counts = counts = _Counts(refs, free)
            return counts
        return self._counts

"""The pages of a cache: their allocation, and the block table, on the host and on the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from nsa_core.cache.kv_store import KVStore
from nsa_core.errors import InvalidInput
from nsa_core.layout import BlockGeometry


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

    It has host integers only, no tensors.

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


class BlockTable:
    """The pages of ``batch`` sequences.

    All sequences share ``total`` pages. With ``total=None`` each sequence has one page, as long as
    the maximum length.

    A compressed token is stored in the page of its block's first token, and is written when the
    block's last token arrives. A sequence of n tokens therefore still writes to the page of token
    num_compressed(n) * d and to later pages.

    Attributes:
        entries: int32 [B, pages per sequence] on the device. Entries after a sequence's last token
            are arbitrary pages.
        room: the length to which each sequence can grow without new pages. The list is replaced,
            and never changed.
        device_room: ``room`` on the device, int32 [B].
    """

    def __init__(
        self,
        geometry: BlockGeometry,
        batch: int,
        max_len: int,
        page: int,
        total: int | None,
        device: torch.device,
    ) -> None:
        self._geometry, self._max_len, self.page, self._device = geometry, max_len, page, device
        self.pages = None if total is None else Pages(batch, page, total)
        self.room = [0 if self.pages else max_len] * batch
        self.entries = torch.zeros((batch, -(-max_len // page)), dtype=torch.int32, device=device)
        if self.pages is None:
            self.entries[:, 0] = torch.arange(batch, device=device)
        self.device_room = torch.full((batch,), self.room[0], dtype=torch.int32, device=device)

    def own(self, targets: Mapping[int, tuple[int, int]], store: KVStore) -> None:
        """Give sequences pages of their own, so that a step can write to them.

        Args:
            targets: for each sequence, its current length and the length up to which it will be
                written.
            store: the store in which shared pages are copied.

        Raises:
            InvalidInput: not enough pages are free; nothing has changed.
        """
        if self.pages is None:
            return
        d = self._geometry.compress_stride
        first = {
            b: self._geometry.num_compressed(length) * d // self.page
            for b, (length, _) in targets.items()
        }
        changes = self.pages.own((b, first[b], tokens) for b, (_, tokens) in targets.items())
        rows = self.pages.rows
        self._set_room({b: min(self._max_len, len(rows[b]) * self.page) for b in targets})
        store.copy_pages(changes.copies)
        self._update_device(changes.entries)

    def trim(self, tokens: Mapping[int, int]) -> None:
        """Free the pages of each sequence b that ``tokens[b]`` tokens do not need."""
        if self.pages is None:
            return
        self.pages.trim(tokens)
        self._clear_room(tokens)

    def share(self, b: int, length: int) -> list[int]:
        """Return the pages of the first ``length`` tokens of sequence ``b``, to be shared.

        The list is empty if the cache has no pages. The caller adds the references with
        :meth:`Pages.hold`.
        """
        if self.pages is None:
            return []
        self._clear_room({b: length})
        return self.pages.rows[b][: self.pages.pages_of(length)]

    def replace(self, rows: Mapping[int, Sequence[int]], lengths: Mapping[int, int]) -> None:
        """Let each sequence b share the pages ``rows[b]`` instead of its own.

        The sequence then has ``lengths[b]`` tokens.
        """
        if self.pages is None:
            return
        self._update_device(self.pages.replace(rows))
        self._clear_room(lengths)

    def _clear_room(self, lengths: Mapping[int, int]) -> None:
        """Set the room of these sequences to their lengths, because their pages may be shared now.

        The next step that writes to them requests pages of their own.
        """
        self._set_room(lengths)
        self._update_device([])

    def _set_room(self, changes: Mapping[int, int]) -> None:
        room = list(self.room)
        for b, length in changes.items():
            room[b] = length
        self.room = room

    def restore(self, room: list[int], rows: list[list[int]] | None) -> None:
        """Return to the former ``room`` and to the former pages, ``rows`` of :class:`Pages`."""
        if self.pages is None or rows is None:
            return
        if self.room is not room or self.pages.rows is not rows:
            self._update_device(Pages.entries(dict(enumerate(rows))), room)
        self.room = room
        self.pages.restore(rows)

    def _update_device(
        self, entries: Iterable[tuple[int, int, int]], room: list[int] | None = None
    ) -> None:
        """Write changed entries (sequence, column, page) and the room to the device."""
        changes = list(entries)
        if changes:
            on_host = torch.tensor(changes, device="cpu")
            sequence, column, page = on_host.T.to(self._device, non_blocking=True)
            self.entries[sequence, column] = page.to(torch.int32)
        new_room = torch.tensor(room or self.room, dtype=torch.int32, device="cpu")
        self.device_room.copy_(new_room, non_blocking=True)

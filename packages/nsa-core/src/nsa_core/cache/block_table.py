"""The block table of a cache: the page of each token, on the host and on the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from nsa_core.cache.kv_store import KVStore
from nsa_core.cache.pages import Pages
from nsa_core.layout import BlockGeometry


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
            sequence, column, page = torch.tensor(changes).T.to(self._device, non_blocking=True)
            self.entries[sequence, column] = page.to(torch.int32)
        new_room = torch.tensor(self.room if room is None else room, dtype=torch.int32)
        self.device_room.copy_(new_room, non_blocking=True)

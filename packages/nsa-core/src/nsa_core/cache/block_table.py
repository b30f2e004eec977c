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
        room: the length to which each sequence can grow without new pages.
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
        for b in targets:
            self.room[b] = min(self._max_len, len(self.pages.rows[b]) * self.page)
        store.copy_pages(changes.copies)
        self._update_device(changes.entries)

    def trim(self, tokens: Mapping[int, int]) -> None:
        """Free the pages of each sequence b that ``tokens[b]`` tokens do not need."""
        if self.pages is None:
            return
        for b, length in tokens.items():
            self.pages.trim(b, length)
        self._clear_room(tokens)

    def share(self, b: int, length: int) -> list[int]:
        """Add a reference to the pages of the first ``length`` tokens of sequence ``b``.

        Returns:
            The pages; an empty list if the cache has no pages.
        """
        if self.pages is None:
            return []
        pages = self.pages.rows[b][: self.pages.pages_of(length)]
        self.pages.share(pages)
        self._clear_room({b: length})
        return pages

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
        for b, length in lengths.items():
            self.room[b] = length
        self._update_device([])

    def _update_device(self, entries: Iterable[tuple[int, int, int]]) -> None:
        """Write changed entries (sequence, column, page) and the room to the device."""
        changes = list(entries)
        if changes:
            sequence, column, page = torch.tensor(changes).T.to(self._device, non_blocking=True)
            self.entries[sequence, column] = page.to(torch.int32)
        self.device_room.copy_(torch.tensor(self.room, dtype=torch.int32), non_blocking=True)

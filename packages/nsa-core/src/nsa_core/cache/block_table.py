"""The block table of a cache: which page holds which tokens, on the host and on the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from nsa_core.cache.kv_store import KVStore
from nsa_core.cache.pages import Pages
from nsa_core.layout import BlockGeometry


class BlockTable:
    """The pages of ``batch`` sequences, out of ``total`` pages that all of them share. With
    ``total=None`` each sequence keeps one page, which is as long as the sequence can become.

    A compressed token lies in the page of its first token and is written when its last token
    arrives. So a sequence of n tokens still writes to the page of token num_compressed(n) * d and
    to those after it.

    Attributes:
        entries: int32 [B, pages of a sequence] on the device. Entries past a sequence's last token
            are any page.
        room: the length up to which each sequence can grow without new pages.
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

    def own(self, wanted: Mapping[int, tuple[int, int]], store: KVStore) -> None:
        """Give sequences pages of their own, so that they can be written up to some length.

        Args:
            wanted: for each sequence, its present length and the length up to which it can be
                written.
            store: the store whose pages are copied where a sequence shares them.

        Raises:
            InvalidInput: too few pages are free; nothing has changed.
        """
        if self.pages is None:
            return
        d = self._geometry.compress_stride
        first = {
            b: self._geometry.num_compressed(length) * d // self.page
            for b, (length, _) in wanted.items()
        }
        changes = self.pages.own((b, first[b], tokens) for b, (_, tokens) in wanted.items())
        for b in wanted:
            self.room[b] = min(self._max_len, len(self.pages.rows[b]) * self.page)
        store.copy_pages(changes.copies)
        self._follow(changes.entries)

    def trim(self, tokens: Mapping[int, int]) -> None:
        """Each sequence gives back the pages that ``tokens[b]`` tokens do not need."""
        if self.pages is None:
            return
        for b, length in tokens.items():
            self.pages.trim(b, length)
        self._unsettle(tokens)

    def share(self, b: int, length: int) -> list[int]:
        """Add a holder to the pages of the ``length`` tokens of sequence ``b``, and return them; an
        empty list without pages.
        """
        if self.pages is None:
            return []
        pages = self.pages.rows[b][: self.pages.pages_of(length)]
        self.pages.share(pages)
        self._unsettle({b: length})
        return pages

    def replace(self, rows: Mapping[int, Sequence[int]], lengths: Mapping[int, int]) -> None:
        """Let each sequence b share the pages ``rows[b]`` instead of its own; it then has
        ``lengths[b]`` tokens.
        """
        if self.pages is None:
            return
        self._follow(self.pages.replace(rows))
        self._unsettle(lengths)

    def _unsettle(self, lengths: Mapping[int, int]) -> None:
        """Leave these sequences no room, because some of their pages may be shared now. The next
        step that writes to them asks for pages of its own.
        """
        for b, length in lengths.items():
            self.room[b] = length
        self._follow([])

    def _follow(self, entries: Iterable[tuple[int, int, int]]) -> None:
        """Write changed entries (sequence, place, page), and the room, to the device."""
        changes = list(entries)
        if changes:
            sequence, place, page = torch.tensor(changes).T.to(self._device, non_blocking=True)
            self.entries[sequence, place] = page.to(torch.int32)
        self.device_room.copy_(torch.tensor(self.room, dtype=torch.int32), non_blocking=True)

"""The block table of a cache: which page holds which tokens, on the host and on the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from nsa_core.cache.kv_store import Stores
from nsa_core.cache.pages import Pages
from nsa_core.layout import BlockGeometry


class BlockTable:
    """Pages of ``batch`` sequences; without ``total`` pages to share, one piece of ``page`` tokens
    each, for good.

    A compressed token lies in the page of its first token and is written when its last arrives:
    what a sequence of n tokens has yet to write begins in the page of token num_compressed(n) * d.

    Attributes:
        entries: int32 [B, pages of a sequence] on the device; those of tokens that a sequence has
            not are any page.
        room: how many tokens each sequence may get to have without asking for pages;
            ``device_room`` int32 [B] too.
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

    def own(self, wanted: Mapping[int, tuple[int, int]], stores: Stores) -> None:
        """``wanted[b] = (length, tokens)``: b, now of ``length`` tokens, can be written up to
        ``tokens`` of them.

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
        stores.copy_pages(changes.copies)
        self._follow(changes.entries)

    def trim(self, tokens: Mapping[int, int]) -> None:
        """Each sequence gives back the pages that ``tokens[b]`` tokens do not need."""
        if self.pages is None:
            return
        for b, kept in tokens.items():
            self.pages.trim(b, kept)
        self._unsettle(tokens)

    def share(self, b: int, length: int) -> list[int]:
        """The pages of the ``length`` tokens of ``b``, one more holder of each; no pages: none."""
        if self.pages is None:
            return []
        pages = self.pages.rows[b][: self.pages.pages_of(length)]
        self.pages.share(pages)
        self._unsettle({b: length})
        return pages

    def replace(self, rows: Mapping[int, Sequence[int]], lengths: Mapping[int, int]) -> None:
        """Each sequence b of ``rows`` holds those pages, shared, in place of its own, and
        ``lengths[b]`` tokens.
        """
        if self.pages is None:
            return
        self._follow(self.pages.replace(rows))
        self._unsettle(lengths)

    def _unsettle(self, lengths: Mapping[int, int]) -> None:
        """Who writes next to these sequences asks first: some of their pages may be shared."""
        for b, length in lengths.items():
            self.room[b] = length
        self._follow([])

    def _follow(self, entries: Iterable[tuple[int, int, int]]) -> None:
        """Tell the device."""
        changes = list(entries)
        if changes:
            sequence, place, page = torch.tensor(changes).T.to(self._device, non_blocking=True)
            self.entries[sequence, place] = page.to(torch.int32)
        self.device_room.copy_(torch.tensor(self.room, dtype=torch.int32), non_blocking=True)

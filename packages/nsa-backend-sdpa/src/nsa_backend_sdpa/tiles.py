"""Query tiles that never cross a document, computed on the device: one form for batches and for
packed documents.

A batch [B, S, ...] is B documents of S rows each. Every document is cut into tiles of ``size`` rows
from its first row on, so a document's tiles, and with them its bits, are the same alone, in a batch
and packed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from nsa_backend_sdpa.device import pieces
from nsa_backend_sdpa.engine import packed_as
from nsa_core.contract import SlotCall


def as_rows(x: Tensor, packed: bool) -> Tensor:
    """[B, S, ...] or [T, ...] as rows [T, ...]; a view wherever the strides allow."""
    return x if packed else x.flatten(0, 1)


def from_rows(rows: Tensor, x: Tensor, packed: bool) -> Tensor:
    """Inverse of :func:`as_rows`: [T, ...] with the leading axes of ``x``."""
    return rows if packed else rows.view(*x.shape[:2], *rows.shape[1:])


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tiles of ``size`` rows: first row, and the first and past-the-last row of their document,
    int64 [tiles].

    Packed tiles are an upper bound that needs no lengths: those past the last document hold no
    valid row.
    """

    size: int
    total: int  # T
    first: Tensor
    start: Tensor
    end: Tensor
    document: Tensor  # int64 [tiles]
    offsets: Tensor  # int64 [documents]: first tile of each document
    longest: int  # bound of how many rows of its document any of these tiles can see
    per_document: int  # tiles of every document of a batch; 0: packed

    def __len__(self) -> int:
        return len(self.first)

    def split(self, count: int) -> Iterator[Tiles]:
        """Runs of at most ``count`` tiles, each with its own bound ``longest``."""
        for part in pieces(len(self), count, self.per_document):
            last, longest = part.stop - 1, self.longest
            if self.per_document and part.start // self.per_document == last // self.per_document:
                longest = min(longest, (last % self.per_document + 1) * self.size)
            first, start, end, document = (
                x[part] for x in (self.first, self.start, self.end, self.document)
            )
            yield dataclasses.replace(
                self,
                first=first,
                start=start,
                end=end,
                document=document,
                longest=longest,
                per_document=0,
            )

    def rows(self) -> tuple[Tensor, Tensor]:
        """Row of each place [tiles, size], and which are rows of the tile's document."""
        rows = self.first[:, None] + torch.arange(self.size, device=self.first.device)
        return rows, (rows < self.end[:, None]) & (rows >= 0) & (rows < self.total)

    def clamp(self, rows: Tensor) -> Tensor:
        """``rows`` [tiles, ...] moved into the tile's own document, and into memory whatever
        cu_seqlens holds.
        """
        shape = (-1,) + (1,) * (rows.dim() - 1)
        rows = torch.minimum(
            torch.maximum(rows, self.start.view(shape)), (self.end - 1).view(shape)
        )
        return rows.clamp_(0, self.total - 1)

    def targets(self) -> Tensor:
        """Where to store each place's result, flat: its row, or the spare row T for places that are
        no row.
        """
        rows, valid = self.rows()
        return rows.masked_fill_(~valid, self.total).flatten()


def make_tiles(x: Tensor, size: int, call: SlotCall) -> Tiles:
    """Tiles over the rows of ``x`` [B, S, ...], or packed [T, ...]."""
    device = x.device
    if call.cu_seqlens is None:
        batch, length = x.shape[:2]
        count = -(-length // size)
        index, offsets = (
            torch.arange(batch * count, device=device),
            torch.arange(batch, device=device) * count,
        )
        document = index // count
        start = document * length
        first = start + (index - document * count) * size
        return Tiles(
            size, batch * length, first, start, start + length, document, offsets, length, count
        )
    total, bounds = len(x), call.cu_seqlens.long()
    counts = (bounds.diff() + size - 1).div(size, rounding_mode="floor").clamp_(min=0)
    ends = counts.cumsum(0)
    index = torch.arange(total // size + len(counts), device=device)
    document = torch.searchsorted(ends, index, right=True).clamp_(max=len(counts) - 1)
    start = bounds[document]
    first = start + (index - (ends - counts)[document]) * size
    longest = min(call.max_seqlen, total)
    return Tiles(
        size, total, first, start, bounds[document + 1], document, ends - counts, longest, 0
    )


def gather(
    x: Tensor,  # [T, G, ...]
    rows: Tensor,  # int64 [tiles, places]
    dtype: torch.dtype,
) -> Tensor:  # [G, tiles, places, ...] contiguous
    """The given rows, kv heads outermost."""
    picked = packed_as(x.index_select(0, rows.flatten()).transpose(0, 1), dtype)
    return picked.view(x.shape[1], *rows.shape, *x.shape[2:])


def store(
    rows: Tensor,  # [T + 1, G, ...]
    target: Tensor,  # int64 [tiles * places]
    values: Tensor,  # [G, tiles, places, ...]
) -> None:
    """Put ``values`` into the rows that ``target`` names."""
    rows.index_copy_(0, target, values.flatten(1, 2).transpose(0, 1).to(rows.dtype))

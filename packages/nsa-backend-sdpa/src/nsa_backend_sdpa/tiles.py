"""Query tiles within documents, computed on the device, for batches and packed documents alike.

A batch [B, S, ...] counts as B documents of S rows each. Every document is split into tiles of
``size`` rows that start at its first row. A document therefore has the same tiles, and bitwise the
same results, on its own, in a batch and packed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from nsa_backend_sdpa.device import chunks
from nsa_backend_sdpa.engine import contiguous_as
from nsa_core.contract import SlotCall


def as_rows(x: Tensor, packed: bool) -> Tensor:
    """Return [B, S, ...] or packed [T, ...] as rows [T, ...], as a view if the strides allow it."""
    return x if packed else x.flatten(0, 1)


def from_rows(rows: Tensor, x: Tensor, packed: bool) -> Tensor:
    """Return rows [T, ...] with the leading axes of ``x``; the inverse of :func:`as_rows`."""
    return rows if packed else rows.view(*x.shape[:2], *rows.shape[1:])


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tiles of rows. Every tile lies within one document.

    The number of packed tiles is an upper bound that needs no document lengths; tiles past the last
    document have no valid row.

    Attributes:
        size: Rows of a tile.
        total: Rows of the whole call, T.
        first: int64 [tiles], first row of each tile.
        start: int64 [tiles], first row of its document.
        end: int64 [tiles], end of its document, exclusive.
        document: int64 [tiles], its document.
        offsets: int64 [documents], first tile of each document.
        longest: Upper bound of the rows of its document that any of these tiles can see.
        per_document: Tiles of each document of a batch; 0 if packed.
    """

    size: int
    total: int
    first: Tensor
    start: Tensor
    end: Tensor
    document: Tensor
    offsets: Tensor
    longest: int
    per_document: int

    def __len__(self) -> int:
        return len(self.first)

    def split(self, count: int) -> Iterator[Tiles]:
        """Yield chunks of at most ``count`` tiles, each with its own bound ``longest``."""
        for part in chunks(len(self), count, self.per_document):
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
        """Return the rows [tiles, size], and a mask of those that lie in the tile's document."""
        rows = self.first[:, None] + torch.arange(self.size, device=self.first.device)
        return rows, (rows < self.end[:, None]) & (rows >= 0) & (rows < self.total)

    def clamp(self, rows: Tensor) -> Tensor:
        """Return ``rows`` [tiles, ...] clamped to the tile's document.

        They are also clamped to [0, T), so that malformed cu_seqlens cause no invalid access.
        """
        shape = (-1,) + (1,) * (rows.dim() - 1)
        rows = torch.minimum(
            torch.maximum(rows, self.start.view(shape)), (self.end - 1).view(shape)
        )
        return rows.clamp_(0, self.total - 1)

    def targets(self) -> Tensor:
        """Return the row for each result, flat; results of invalid rows go to the spare row T."""
        rows, valid = self.rows()
        return rows.masked_fill_(~valid, self.total).flatten()


def make_tiles(x: Tensor, size: int, call: SlotCall) -> Tiles:
    """Split the rows of ``x`` [B, S, ...], or packed [T, ...], into tiles of ``size`` rows."""
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
    rows: Tensor,  # int64 [tiles, size]
    dtype: torch.dtype,
) -> Tensor:  # [G, tiles, size, ...] contiguous
    """Gather ``rows`` of ``x``, with the kv heads as the outermost axis."""
    gathered = contiguous_as(x.index_select(0, rows.flatten()).transpose(0, 1), dtype)
    return gathered.view(x.shape[1], *rows.shape, *x.shape[2:])


def scatter(
    rows: Tensor,  # [T + 1, G, ...]
    target: Tensor,  # int64 [tiles * size]
    values: Tensor,  # [G, tiles, size, ...]
) -> None:
    """Store ``values`` into ``rows`` at the indices ``target``; the inverse of :func:`gather`."""
    rows.index_copy_(0, target, values.flatten(1, 2).transpose(0, 1).to(rows.dtype))

"""Query tiles within documents, computed on the device, for batches and packed documents alike.

A batch [B, S, ...] counts as B documents of S rows each. Every document is split into tiles of
``size`` rows that start at its first row. A document therefore has the same tiles, and bitwise the
same results, on its own, in a batch and packed.

If the queries begin inside a document, its tiles start at its first given query. Rows of the
queries and rows of the keys then count differently: :meth:`Tiles.on_keys` converts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

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


def widened(grad: Tensor, x: Tensor, rows: slice) -> Tensor:
    """Return the gradient of all rows of ``x``; ``grad`` is that of some rows, others have 0."""
    if grad.shape == x.shape:
        return grad
    whole = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    whole[..., rows, :, :] = grad
    return whole


class KeyRows(NamedTuple):
    """Rows of the keys of tiles whose queries begin inside a document.

    Attributes:
        shift: int64 [tiles], row of a token's key minus row of its query.
        start: int64 [tiles], first key row of the tile's document.
        total: Rows of the keys.
    """

    shift: Tensor
    start: Tensor
    total: int

    def part(self, tiles: slice) -> KeyRows:
        """Return the rows of some of the tiles."""
        return KeyRows(self.shift[tiles], self.start[tiles], self.total)


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
        before: Tokens of each document of a batch before its first row here; 0 if packed.
        keys: Where the tiles lie among the rows of the keys; None if rows of queries and keys are
            the same.
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
    before: int = 0
    keys: KeyRows | None = None

    def __len__(self) -> int:
        return len(self.first)

    def split(self, count: int) -> Iterator[Tiles]:
        """Yield chunks of at most ``count`` tiles, each with its own bound ``longest``."""
        for part in chunks(len(self), count, self.per_document):
            last, longest = part.stop - 1, self.longest
            if self.per_document and part.start // self.per_document == last // self.per_document:
                end = (last % self.per_document + 1) * self.size
                longest = min(longest, self.before + end)
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
                keys=self.keys and self.keys.part(part),
            )

    def on_keys(self) -> Tiles:
        """Return these tiles with the rows of the keys, in documents that start at token 0.

        They end at the last query, because no query sees a later key.
        """
        if self.keys is None:
            return self
        shift, start, total = self.keys
        return dataclasses.replace(
            self,
            first=self.first + shift,
            start=start,
            end=self.end + shift,
            total=total,
            keys=None,
        )

    def positions(self) -> Tensor:
        """Return the position of each query in its document, int64 [tiles, size]."""
        tiles = self.on_keys()
        return tiles.clamp(tiles.rows()[0]) - tiles.start[:, None]

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


def make_tiles(x: Tensor, size: int, call: SlotCall, key_rows: int | None = None) -> Tiles:
    """Split the rows of ``x`` [B, S, ...], or packed [T, ...], into tiles of ``size`` rows.

    Args:
        x: The queries, or other rows like them.
        size: Rows of a tile.
        call: The call; row 0 of x is its first query.
        key_rows: Rows of the keys of each sequence, or in all documents; None: as many as x.
    """
    device, length = x.device, x.shape[0 if call.cu_seqlens is not None else 1]
    first_query = call.first_query
    key_rows = length if key_rows is None else key_rows
    same_rows = not first_query and key_rows == length
    if call.cu_seqlens is None:
        batch, count = x.shape[0], -(-length // size)
        index, offsets = (
            torch.arange(batch * count, device=device),
            torch.arange(batch, device=device) * count,
        )
        document = index // count
        start = document * length
        first = start + (index - document * count) * size
        tiles = Tiles(
            size, batch * length, first, start, start + length, document, offsets, length, count
        )
        if same_rows:
            return tiles
        key_start = document * key_rows
        keys = KeyRows(key_start + first_query - start, key_start, batch * key_rows)
        longest = first_query + length
        return dataclasses.replace(tiles, longest=longest, before=first_query, keys=keys)
    bounds = call.cu_seqlens.long()
    own = bounds if same_rows else (bounds - first_query).clamp_(0, length)
    counts = (own.diff() + size - 1).div(size, rounding_mode="floor").clamp_(min=0)
    ends = counts.cumsum(0)
    index = torch.arange(length // size + len(counts), device=device)
    document = torch.searchsorted(ends, index, right=True).clamp_(max=len(counts) - 1)
    start = own[document]
    first = start + (index - (ends - counts)[document]) * size
    longest = min(call.max_seqlen, first_query + length)
    offsets = ends - counts
    tiles = Tiles(size, length, first, start, own[document + 1], document, offsets, longest, 0)
    if same_rows:
        return tiles
    keys = KeyRows(torch.full_like(start, first_query), bounds[document], key_rows)
    return dataclasses.replace(tiles, keys=keys)


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

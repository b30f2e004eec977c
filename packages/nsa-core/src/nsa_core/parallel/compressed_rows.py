"""Compressed tokens of a sequence whose rows lie on several ranks.

A compressed token belongs to the rank of its last token, which therefore needs only rows to the
left of its pieces. A piece of c rows has at most ceil(c / d) of them. Every piece sends that many,
so that shapes are equal on all ranks, and an index computed on the device finds each one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nsa_core.layer.phi.chunks import PackedBlocks
from nsa_core.layout import BlockGeometry
from nsa_core.packing import compressed_cu_seqlens, token_positions
from nsa_core.parallel.exchange_rows import Ranks


def capacity(ranks: Ranks, geometry: BlockGeometry) -> int:
    """Return the number of compressed tokens that a piece sends: ceil(c / d)."""
    return -(-ranks.chunk // geometry.compress_stride)


def blocks_before(cu_seqlens: torch.Tensor, row: int, geometry: BlockGeometry) -> torch.Tensor:
    """Return the number of compressed tokens of each document whose last token is before ``row``.

    Args:
        cu_seqlens: int32 [documents + 1].
        row: a row of the packed axis.
        geometry: the block sizes.

    Returns:
        int32 [documents]
    """
    tokens = (row - cu_seqlens[:-1]).clamp(min=0).minimum(cu_seqlens.diff())
    size, stride = geometry.compress_block_size, geometry.compress_stride
    blocks: torch.Tensor = ((tokens - size).div(stride, rounding_mode="floor") + 1).clamp(min=0)
    return blocks


def blocks_of_pieces(
    cu_seqlens: torch.Tensor, ranks: Ranks, geometry: BlockGeometry
) -> PackedBlocks:
    """Return the chunks and the compressed tokens of this rank's pieces, for phi.

    Args:
        cu_seqlens: int32 [documents + 1], of all ranks.
        ranks: the rows of this rank.
        geometry: the block sizes.

    Returns:
        Indices into the rows of the pieces, each extended by l - 1 rows to its left, one after the
        other; :func:`capacity` compressed tokens for each piece.
    """
    stride, halo = geometry.compress_stride, geometry.compress_block_size - 1
    per_block, length = geometry.compress_block_size // stride, halo + ranks.chunk
    rows, count = length // stride, capacity(ranks, geometry)
    tokens, chunks, starts = [], [], []
    for index, (first, end) in enumerate(ranks.pieces):
        before = blocks_before(cu_seqlens, first, geometry)
        owned = blocks_before(cu_seqlens, end, geometry) - before
        used = torch.where(owned > 0, owned + per_block - 1, owned)
        first_chunk = F.pad(used.cumsum(0, dtype=torch.int32), (1, 0))
        chunk = token_positions(first_chunk, rows)
        token = cu_seqlens.long()[chunk.document] - (first - halo)
        token += (before[chunk.document] + chunk.position) * stride
        token = token[:, None] + torch.arange(stride, device=cu_seqlens.device)
        tokens.append(token.flatten().clamp(0, length - 1) + index * length)
        block = token_positions(F.pad(owned.cumsum(0, dtype=torch.int32), (1, 0)), count)
        chunks.append(first_chunk.long()[block.document] + block.position + index * rows)
        starts.append((before[block.document] + block.position) * stride)
    unused = len(tokens) * length // stride - len(tokens) * rows  # phi expects a row for each d
    tokens.append(tokens[0].new_zeros(unused * stride))
    return PackedBlocks(torch.cat(tokens), torch.cat(chunks), torch.cat(starts))


def gathered_rows(
    cu_seqlens: torch.Tensor, ranks: Ranks, geometry: BlockGeometry, count: int
) -> torch.Tensor:
    """Return where the compressed tokens 0 .. count - 1 lie among those that all ranks send.

    Args:
        cu_seqlens: int32 [documents + 1], of all ranks.
        ranks: the rows of this rank.
        geometry: the block sizes.
        count: number of compressed rows of the packed axis.

    Returns:
        int64 [count]; rows after those of the last document repeat a row.
    """
    stride, size = geometry.compress_stride, geometry.compress_block_size
    block = token_positions(compressed_cu_seqlens(cu_seqlens, geometry), count)
    last = cu_seqlens.long()[block.document] + block.position * stride + size - 1
    length = max(1, ranks.chunk)  # a sequence without rows has chunks without rows
    chunk = last.clamp(0, max(0, ranks.total - 1)).div(length, rounding_mode="floor")
    firsts = range(0, max(1, ranks.total), length)
    before = torch.stack([blocks_before(cu_seqlens, row, geometry).sum() for row in firsts])
    sent, number = capacity(ranks, geometry), torch.arange(count, device=cu_seqlens.device)
    return _place(chunk, ranks) * sent + (number - before[chunk]).clamp(0, sent - 1)


def _place(chunk: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Return the places of chunks in the order of the ranks, without a table on the device."""
    if ranks.layout == "contiguous":
        return chunk
    last = 2 * ranks.world - 1
    return torch.where(chunk < ranks.world, 2 * chunk, 2 * (last - chunk) + 1)

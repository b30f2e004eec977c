"""Chunks of d tokens, of which compression blocks consist, in dense and packed sequences."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from nsa_core.dtypes import stats_dtype
from nsa_core.layout import BlockGeometry
from nsa_core.packing import compressed_cu_seqlens, token_positions
from nsa_core.torch_ops.torch_state import is_exporting


class PackedBlocks(NamedTuple):
    """The chunks and compression blocks of packed documents: T tokens, m = T // d rows.

    Rows after those of the last document have valid indices but no meaning, and are never read.

    Attributes:
        tokens: int64 [m * d], the token of each entry of each chunk.
        chunks: int64 [m], the first chunk of each compressed token.
        starts: int64 [m], the position of each compressed token's first token in its document.
    """

    tokens: torch.Tensor
    chunks: torch.Tensor
    starts: torch.Tensor


def packed_blocks(cu_seqlens: torch.Tensor, total: int, geometry: BlockGeometry) -> PackedBlocks:
    """Compute the chunks and blocks of packed documents, without synchronisation.

    A document of n tokens has n // d chunks and at most as many blocks, so T // d rows suffice for
    all documents.

    Args:
        cu_seqlens: int32 [documents + 1].
        total: number of packed rows, T.
        geometry: the block sizes.
    """
    stride, rows = geometry.compress_stride, geometry.max_compressed(total)
    first_chunk = F.pad((cu_seqlens.diff() // stride).cumsum(0, dtype=torch.int32), (1, 0))
    chunk = token_positions(first_chunk, rows)
    first_token = cu_seqlens.long()[chunk.document] + chunk.position * stride
    tokens = first_token[:, None] + torch.arange(stride, device=cu_seqlens.device)
    block = token_positions(compressed_cu_seqlens(cu_seqlens, geometry), rows)
    chunks = first_chunk.long()[block.document] + block.position
    return PackedBlocks(
        tokens.flatten().clamp(0, max(total - 1, 0)), chunks, block.position * stride
    )


class Chunks:
    """The tokens of x [B, S, G, D], or packed [T, G, D], as chunks of d tokens.

    Attributes:
        tokens: [B, m, G, d, D], or packed [m, G, d, D].
        rows: number of chunks, m.
        per_block: number of chunks per block, r = l / d.
    """

    def __init__(
        self, x: torch.Tensor, geometry: BlockGeometry, packed: PackedBlocks | None
    ) -> None:
        stride, length = geometry.compress_stride, x.shape[-3]
        self.rows, self._packed = geometry.max_compressed(length), packed
        self.per_block = geometry.compress_block_size // stride
        self._blocks = geometry.num_compressed(length)
        self._exporting = packed is None and is_exporting()
        if not self._exporting:  # Inductor cannot lower a view of a tensor whose size 0 is a symbol
            self.rows, self._blocks = self.rows or 0, self._blocks or 0
        x = x if packed is None else x.index_select(0, packed.tokens)
        # Slice after the transpose: torch.compile would specialise a slice of x on S = m * d.
        x = x.transpose(-3, -2)
        if self._exporting:  # the bounds of a slice would become guards on S
            x = x.index_select(-2, torch.arange(self.rows * stride, device=x.device))
        else:
            x = x[..., : self.rows * stride, :]
        self.tokens = x.unflatten(-2, (self.rows, stride)).transpose(-4, -3)

    def at(self, index: int, y: torch.Tensor, before: int = 0) -> torch.Tensor:
        """Return, for each block, the row of y of its chunk number ``index``.

        Args:
            index: number of the chunk in its block, from 0 to r - 1.
            y: one row per chunk, [B, m, ...] or packed [m, ...].
            before: number of further axes of y before these.

        Returns:
            One row per block, [B, n_c, ...] or packed [m, ...].
        """
        if self._packed is not None:
            rows = (self._packed.chunks + index).clamp(0, max(self.rows - 1, 0))
            return y.index_select(before, rows)
        if self._exporting:
            rows = torch.arange(self._blocks, device=y.device) + index
            return y.index_select(before + 1, rows)
        return y[(slice(None),) * (before + 1) + (slice(index, index + self._blocks),)]

    def total(self, y: torch.Tensor, before: int = 0) -> torch.Tensor:
        """Return the sum of y over the r chunks of each block, in fp32 (fp64 for fp64).

        Args:
            y: [..., m, G, X, r]; the last axis is the index of the chunk in the block.
            before: number of axes of y before those of the tokens.

        Returns:
            [..., n_c, G, X]
        """
        total = self.at(0, y[..., 0], before).to(stats_dtype(y.dtype))
        for index in range(1, self.per_block):
            total = total + self.at(index, y[..., index], before)
        return total

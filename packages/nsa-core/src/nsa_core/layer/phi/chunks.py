"""The chunks of d tokens that compression blocks consist of, in dense and in packed sequences."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from nsa_core.layout import BlockGeometry
from nsa_core.packing import compressed_cu_seqlens, token_places
from nsa_core.torch_ops.slot_op import stats_dtype


class PackedBlocks(NamedTuple):
    """The positions of the chunks and blocks of packed documents, int64 on the device, for T tokens
    and m = T // d rows.

    Rows past those of the last document are in bounds, have no meaning and are never read.
    """

    tokens: torch.Tensor  # [m * d] token at each place of each chunk
    chunks: torch.Tensor  # [m] first chunk of each compressed token
    starts: torch.Tensor  # [m] position of each compressed token's first token inside its document


def packed_blocks(cu_seqlens: torch.Tensor, total: int, geometry: BlockGeometry) -> PackedBlocks:
    """The chunks and blocks of documents with boundaries ``cu_seqlens`` int32 [documents + 1];
    never synchronises.

    A document of n tokens has n // d chunks and no more blocks than that, so T // d rows hold those
    of all documents.
    """
    stride, rows = geometry.compress_stride, geometry.max_compressed(total)
    first_chunk = F.pad((cu_seqlens.diff() // stride).cumsum(0, dtype=torch.int32), (1, 0))
    chunk = token_places(first_chunk, rows)
    first_token = cu_seqlens.long()[chunk.document] + chunk.position * stride
    tokens = first_token[:, None] + torch.arange(stride, device=cu_seqlens.device)
    block = token_places(compressed_cu_seqlens(cu_seqlens, geometry), rows)
    chunks = first_chunk.long()[block.document] + block.position
    return PackedBlocks(
        tokens.flatten().clamp(0, max(total - 1, 0)), chunks, block.position * stride
    )


class Chunks:
    """x as chunks of d tokens: ``tokens`` [B, m, G, d, D], or packed [m, G, d, D]."""

    def __init__(
        self, x: torch.Tensor, geometry: BlockGeometry, packed: PackedBlocks | None
    ) -> None:
        stride = geometry.compress_stride
        self.rows, self._packed = geometry.max_compressed(x.shape[-3]), packed
        self.places = geometry.compress_block_size // stride
        self._blocks = geometry.num_compressed(x.shape[-3])
        x = x if packed is None else x.index_select(0, packed.tokens)
        # Slice after the transpose: a slice of x itself would make torch.compile specialise on
        # S = m * d.
        x = x.transpose(-3, -2)[..., : self.rows * stride, :]
        self.tokens = x.unflatten(-2, (self.rows, stride)).transpose(-4, -3)

    def at(self, place: int, y: torch.Tensor) -> torch.Tensor:
        """For each block the row of y that belongs to its chunk number ``place``.

        Shapes:
            y: one row per chunk, [B, m, ...] or packed [m, ...].
            Returns: one row per block, [B, n_c, ...] or packed [m, ...].
        """
        if self._packed is None:
            return y[:, place : place + self._blocks]
        return y.index_select(0, (self._packed.chunks + place).clamp(0, max(self.rows - 1, 0)))

    def total(self, y: torch.Tensor) -> torch.Tensor:
        """The sum over each block's r chunks, [..., n_c, G, X], in fp32 (fp64 for fp64). The last
        axis of y [..., m, G, X, r] is the place of the chunk in the block.
        """
        total = self.at(0, y[..., 0]).to(stats_dtype(y.dtype))
        for place in range(1, self.places):
            total = total + self.at(place, y[..., place])
        return total

"""Lookup tables for the compression block that a decode step may complete."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from nsa_core.config import NSAConfig
from nsa_core.layer.rope import rope_table


class BlockLocations:
    """Location in the cache of the compression block that a step completes.

    A lookup takes fewer operators than the computation of the location.

    Attributes:
        blocks: int64 [C + 1, 4], one row per compressed token of a full sequence, and one more. The
            columns are the column in the block table, the row in the page, the sequence length that
            completes the block, and the ring row of the block's first token.
        ring: int64 [R, G * l], for each ring row the flat rows (ring row, kv head) of the l tokens
            that start there, heads outermost.
        firsts: int64 [B, 1], the first row of each sequence in the flat ring.
        angles: [C + 1, 2 * Dk], (cos, cos, -sin, sin) of each compressed token; None if k_cmp is
            not rotated after phi.
    """

    def __init__(
        self,
        config: NSAConfig,
        batch: int,
        max_len: int,
        page: int,  # compressed tokens per page
        ring: int,  # rows of the ring of phi's inputs
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        size, stride, heads = config.compress_block_size, config.compress_stride, config.n_kv_heads
        block = torch.arange(config.geometry.num_compressed(max_len) + 1, device=device)
        pages = -(-max_len // (page * stride))
        column = (block // page).clamp(max=pages - 1)
        self.blocks = torch.stack(
            [column, block % page, block * stride + size, block * stride % ring], 1
        )
        token = torch.arange(ring, device=device)[:, None, None] + torch.arange(size, device=device)
        self.ring = (token % ring * heads + torch.arange(heads, device=device)[:, None]).flatten(1)
        self.firsts = torch.arange(batch, device=device)[:, None] * (ring * heads)
        self.angles: torch.Tensor | None = None
        if config.rope and not config.rope_before_compress:
            table = rope_table(block * stride, config.qk_dim, config.frequencies, dtype)
            self.angles = torch.cat(table.wide(), -1).squeeze(1)


_shared: weakref.WeakValueDictionary[tuple[Any, ...], BlockLocations] = (
    weakref.WeakValueDictionary()
)


def block_locations(
    config: NSAConfig,
    batch: int,
    max_len: int,
    page: int,
    ring: int,
    dtype: torch.dtype,
    device: torch.device,
) -> BlockLocations:
    """Return the :class:`BlockLocations` of these arguments, shared by the caches of all layers."""
    key = (config, batch, max_len, page, ring, dtype, device)
    locations = _shared.get(key)
    if locations is None:
        locations = _shared[key] = BlockLocations(*key)
    return locations

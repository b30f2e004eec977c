"""Compressed tokens of the blocks that a step completes, by the layer's phi, into the cache.

A captured step does this for every token, masked, so what counts is how many operators it takes. A
step of at most d rows completes one block, and where that lies is looked up, not computed.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from nsa_core.layer.rope import RopeTable, rope_table, rotate, turn

if TYPE_CHECKING:
    from nsa_core.cache.kv_store import Stores
    from nsa_core.config import NSAConfig
    from nsa_core.contract import DecodeCall
    from nsa_core.layer.module import NSAttention


class BlockPlaces:
    """Where the one block that a step may complete lies; the same tensors for the caches of all
    layers of a model.

    Attributes:
        blocks: int64 [most + 1, 4], of each compressed token up to the one after a full sequence's
            last: its place in a row of the block table, its row in the page, the length that
            completes it, the ring's row of its first.
        ring: int64 [R, G * l], rows (ring row, kv head) of the l tokens from a ring's row on, heads
            outermost.
        firsts: int64 [B, 1], row of each sequence's first.
        angles: [most + 1, 2 * Dk], (cos, cos, -sin, sin) of each compressed token; None: phi's keys
            are not rotated.
    """

    def __init__(
        self,
        config: NSAConfig,
        batch: int,
        max_len: int,
        page: int,  # compressed tokens of a page
        ring: int,  # tokens of phi's ring
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        size, stride, heads = config.compress_block_size, config.compress_stride, config.n_kv_heads
        block = torch.arange(config.geometry.num_compressed(max_len) + 1, device=device)
        pages = -(-max_len // (page * stride))
        last = (block // page).clamp(max=pages - 1)
        self.blocks = torch.stack(
            [last, block % page, block * stride + size, block * stride % ring], 1
        )
        token = torch.arange(ring, device=device)[:, None, None] + torch.arange(size, device=device)
        self.ring = (token % ring * heads + torch.arange(heads, device=device)[:, None]).flatten(1)
        self.firsts = torch.arange(batch, device=device)[:, None] * (ring * heads)
        self.angles: torch.Tensor | None = None
        if config.rope and not config.rope_before_compress:
            table = rope_table(block * stride, config.qk_dim, config.rope_base, dtype)
            self.angles = torch.cat(table.wide(), -1).squeeze(1)


_known: weakref.WeakValueDictionary[tuple[Any, ...], BlockPlaces] = weakref.WeakValueDictionary()


def block_places(
    config: NSAConfig,
    batch: int,
    max_len: int,
    page: int,
    ring: int,
    dtype: torch.dtype,
    device: torch.device,
) -> BlockPlaces:
    """See :class:`BlockPlaces`."""
    key = (config, batch, max_len, page, ring, dtype, device)
    found = _known.get(key)
    if found is None:
        found = _known[key] = BlockPlaces(*key)
    return found


def compress(attn: NSAttention, stores: Stores, call: DecodeCall, rows: int) -> None:
    """Compressed tokens of the blocks that this step may complete, ceil(m / d) of each sequence."""
    number = -(-rows // call.geometry.compress_stride)
    if number == 1 and stores.raw.rows == len(
        stores.places.ring
    ):  # not a ring of a long step's own
        _compress_one(attn, stores, call)
    else:
        _compress_many(attn, stores, call, number)


def _compress_one(attn: NSAttention, stores: Stores, call: DecodeCall) -> None:
    places, heads, size = stores.places, stores.raw.k.shape[2], call.geometry.compress_block_size
    block = stores.compressed.index_select(0, call.starts)
    place, row, end, ring = places.blocks.index_select(0, block).unsqueeze(-1).unbind(1)  # [B, 1]
    index = (places.ring.index_select(0, ring[:, 0]) + places.firsts).flatten()
    k, v = (
        x.view(-1, x.shape[-1])
        .index_select(0, index)
        .view(-1, heads, size, x.shape[-1])
        .transpose(1, 2)
        for x in stores.raw.flat
    )
    k_cmp, v_cmp = attn.phi_k(k), attn.phi_v(v)
    if places.angles is not None:
        k_cmp = _turned(k_cmp, places.angles.index_select(0, block)[:, None, None])
    table = call.block_table
    page = table if table.shape[1] == 1 else table.gather(1, place)
    index = torch.add(row, page, alpha=stores.cmp.rows)
    stores.cmp.write(
        index.masked_fill(end > call.lengths[:, None], stores.cmp.nowhere), k_cmp, v_cmp
    )


def _turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """x [B, 1, G, D], angles [B, 1, 1, 2 * D]."""
    cos, sin = angles.split(x.shape[-1], -1)
    return turn(x, cos, sin, out=torch.empty_like(x))


def _compress_many(attn: NSAttention, stores: Stores, call: DecodeCall, number: int) -> None:
    size, stride = call.geometry.compress_block_size, call.geometry.compress_stride
    block = stores.compressed.index_select(0, call.starts)[:, None] + stores.count[:number]
    block.clamp_(max=stores.most_compressed)  # absent, from there on
    at = block * stride  # [B, number], first tokens
    k, v = stores.raw.read(
        stores.raw.in_ring(at[:, :1] + stores.count[: size + (number - 1) * stride], None)
    )
    k_cmp, v_cmp = attn.phi_k(k), attn.phi_v(v)
    if stores.rope is not None and not attn.config.rope_before_compress:
        k_cmp = rotate(k_cmp, RopeTable(stores.rope.cos[at], stores.rope.sin[at]))
    absent = at + size > call.lengths[:, None]
    stores.cmp.write(stores.cmp.in_pages(block, call.block_table, absent), k_cmp, v_cmp)

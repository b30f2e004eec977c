"""Compression of the blocks that a decode step completes.

A captured step runs the compression for every token, because the host cannot know whether a block
is complete. A step of at most d rows completes at most one block per sequence. The plan's fused
form compresses it if it takes these phis: its programs end at once if no block is complete.
Otherwise operators run whatever the lengths, and the result is masked. Their time is the number of
operators, so the location of the block is looked up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nsa_core.layer.phi.kinds import weights_of_pair
from nsa_core.layer.rope import RopeTable, rotate, rotate_pairs

if TYPE_CHECKING:
    from nsa_core.cache.kv_store import KVStore
    from nsa_core.contract import DecodeCall
    from nsa_core.layer.projection import NSAProjections
    from nsa_core.plan.plan import Plan


def compress(
    layer: NSAProjections, store: KVStore, call: DecodeCall, rows: int, plan: Plan
) -> None:
    """Compress the blocks that a step of ``rows`` rows completes.

    phi is applied to the blocks that the step may complete, ceil(m / d) per sequence. Only the
    compressed tokens of completed blocks are written.
    """
    number = -(-rows // call.geometry.compress_stride)
    is_cache_ring = store.raw.rows == len(store.locations.ring)  # the ring of a chunk is longer
    if not (number == 1 and is_cache_ring):
        _compress_many(layer, store, call, number)
    elif "compress" not in plan.fused or not _fused_compress(layer, store, call, plan):
        _compress_one(layer, store, call)


def _fused_compress(layer: NSAProjections, store: KVStore, call: DecodeCall, plan: Plan) -> bool:
    """Do :func:`_compress_one` with the plan's fused form; return False if it takes other phis."""
    raw, cmp = store.raw, store.cmp
    weights = weights_of_pair(layer.phi_k, layer.phi_v, raw.k, raw.v)
    if weights is None:
        return False
    rope = None if store.locations.angles is None else store.rope  # k_cmp is rotated after phi
    tables = None if rope is None else (rope.cos[:, 0], rope.sin[:, 0])
    plan.fused["compress"](raw.k, raw.v, cmp.k, cmp.v, *weights, rope=tables, call=call)
    return True


def _compress_one(layer: NSAProjections, store: KVStore, call: DecodeCall) -> None:
    """Compress the one block per sequence that a step may complete, with looked-up locations."""
    locations = store.locations
    heads, size = store.raw.k.shape[2], call.geometry.compress_block_size
    block = store.compressed.index_select(0, call.starts)
    location = locations.blocks.index_select(0, block).unsqueeze(-1)
    column, row, end, ring = location.unbind(1)  # each [B, 1]
    index = (locations.ring.index_select(0, ring[:, 0]) + locations.firsts).flatten()
    k, v = (
        x.view(-1, x.shape[-1])
        .index_select(0, index)
        .view(-1, heads, size, x.shape[-1])
        .transpose(1, 2)
        for x in store.raw.flat
    )
    k_cmp, v_cmp = layer.phi_k(k), layer.phi_v(v)
    if locations.angles is not None:
        cos, sin = locations.angles.index_select(0, block)[:, None, None].split(
            k_cmp.shape[-1], -1
        )  # [B, 1, 1, Dk]
        k_cmp = rotate_pairs(k_cmp, cos, sin, out=torch.empty_like(k_cmp))
    table = call.block_table
    page = table if table.shape[1] == 1 else table.gather(1, column)
    index = torch.add(row, page, alpha=store.cmp.rows)
    unfinished = end > call.lengths[:, None]
    store.cmp.write(index.masked_fill(unfinished, store.cmp.unread), k_cmp, v_cmp)


def _compress_many(layer: NSAProjections, store: KVStore, call: DecodeCall, number: int) -> None:
    """Compress up to ``number`` blocks per sequence."""
    size, stride = call.geometry.compress_block_size, call.geometry.compress_stride
    block = store.compressed.index_select(0, call.starts)[:, None] + store.count[:number]
    block.clamp_(max=store.max_num_compressed)  # block indices from here on do not exist
    first_token = block * stride  # [B, number]
    tokens = first_token[:, :1] + store.count[: size + (number - 1) * stride]
    k, v = store.raw.read(store.raw.in_ring(tokens, None))
    k_cmp, v_cmp = layer.phi_k(k), layer.phi_v(v)
    if store.rope is not None and not layer.config.rope_before_compress:
        cos, sin = store.rope.cos[first_token], store.rope.sin[first_token]
        k_cmp = rotate(k_cmp, RopeTable(cos, sin))
    unfinished = first_token + size > call.lengths[:, None]
    store.cmp.write(store.cmp.in_pages(block, call.block_table, unfinished), k_cmp, v_cmp)

"""The first step of empty sequences: run the layer as without a cache, then fill the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from nsa_core.cache.new_tokens import NewTokens
    from nsa_core.cache.state import CacheState
    from nsa_core.layer.projection import NSAProjections
    from nsa_core.plan.plan import Plan


def prefill(
    layer: NSAProjections, x: torch.Tensor, cache: CacheState, new: NewTokens, plan: Plan | None
) -> torch.Tensor:
    """Return the layer's output for x, both [B, m, dim], and fill the cache.

    Every sequence with new tokens must be empty.
    """
    assert new.counts is not None
    active = [b for b, n in enumerate(new.counts) if n]
    sequences, is_subset = cache.kv.count[: cache.batch], len(active) < cache.batch
    cache.advance(*new)
    lengths, padding = cache.lengths, None
    if is_subset:
        sequences = torch.tensor(active).to(cache.device, non_blocking=True)
        lengths, x = lengths[sequences], x[sequences]
    if new.on_device is not None:
        padding = (cache.kv.count[: new.rows] >= lengths[:, None])[..., None]
        x = x.masked_fill(padding, 0)
    projected, raw = layer.project_with_raw(x)
    o = layer.attend(x, projected, plan=plan)
    _fill(
        cache,
        sequences,
        lengths,
        padding is not None,
        (raw, (projected.k[1], projected.v[1]), (projected.k[2], projected.v[2])),
        (projected.k_cmp, projected.v_cmp),
    )
    y: torch.Tensor = layer.out(o.flatten(-2))
    y = y if padding is None else y.masked_fill(padding, 0)
    if is_subset:
        return y.new_zeros((cache.batch, *y.shape[1:])).index_copy(0, sequences, y)
    return y


def _fill(
    cache: CacheState,
    sequences: torch.Tensor,  # int64 [b]
    lengths: torch.Tensor,  # int32 [b]
    padded: bool,
    pairs: tuple[tuple[torch.Tensor, ...], ...],  # keys and values [b, S, G, D] of raw, sel, win
    compressed: tuple[torch.Tensor, torch.Tensor],  # [b, n_c, G, D]
) -> None:
    """Write sequences to the cache from their first token on."""
    store, geometry, table = cache.kv, cache.config.geometry, cache.table.entries[sequences]
    total, n_c, ends = pairs[0][0].shape[1], compressed[0].shape[1], lengths[:, None]
    positions = store.count[:total].expand(len(sequences), -1)
    store.sel.write(
        store.sel.in_pages(positions, table, positions >= ends if padded else None), *pairs[1]
    )
    blocks = store.count[:n_c].expand(len(sequences), -1)
    unfinished = blocks * geometry.compress_stride + geometry.compress_block_size > ends
    store.cmp.write(store.cmp.in_pages(blocks, table, unfinished if padded else None), *compressed)
    sequence = torch.arange(len(sequences), device=cache.device)[:, None]
    for ring, (k, v) in ((store.raw, pairs[0]), (store.win, pairs[2])):
        newest = (ends.long() - ring.rows).clamp(min=0) + store.count[: min(ring.rows, total)]
        token = newest.clamp(max=total - 1)
        index = ring.in_ring(newest, newest >= ends, sequences)
        ring.write(index, k[sequence, token], v[sequence, token])

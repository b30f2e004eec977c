"""The first tokens of empty sequences: the layer as it is without a cache, which is then filled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nsa_core.layer.attention import nsa_attention
from nsa_core.layer.gating import gates_of

if TYPE_CHECKING:
    from nsa_core.cache.cache import NSACache
    from nsa_core.cache.new_tokens import Arrival
    from nsa_core.dispatch.plan import Plan
    from nsa_core.layer.module import NSAttention


def prefill(
    attn: NSAttention, x: torch.Tensor, cache: NSACache, arrival: Arrival, plan: Plan | None
) -> torch.Tensor:
    """[B, m, dim] for x [B, m, dim], where all sequences that get tokens are empty."""
    assert arrival.counts is not None
    active = [b for b, n in enumerate(arrival.counts) if n]
    sequences, some = cache.stores.count[: cache.batch], len(active) < cache.batch
    with cache.unless_done() as undo:
        cache.advance(arrival.rows, arrival.counts, arrival.new, arrival.exact)
        lengths, padding = cache.lengths, None
        if some:
            sequences = torch.tensor(active).to(cache.device, non_blocking=True)
            lengths, x = lengths[sequences], x[sequences]
        if arrival.new is not None:
            padding = (cache.stores.count[: arrival.rows] >= lengths[:, None])[..., None]
            x = x.masked_fill(padding, 0)
        (q, k, v, k_cmp, v_cmp), raw = attn.project_with_raw(x)
        gates, plan = gates_of(attn.gate, x), attn.plan_of(x, q, False, plan)
        o = nsa_attention(q, k, v, gates, config=attn.config, k_cmp=k_cmp, v_cmp=v_cmp, plan=plan)
        _fill(
            cache,
            sequences,
            lengths,
            padding is not None,
            ((*raw,), (k[1], v[1]), (k[2], v[2])),
            (k_cmp, v_cmp),
        )
        undo.pop_all()
    result: torch.Tensor = attn.out(o.flatten(-2))
    result = result if padding is None else result.masked_fill(padding, 0)
    return (
        result.new_zeros((cache.batch, *result.shape[1:])).index_copy(0, sequences, result)
        if some
        else result
    )


def _fill(
    cache: NSACache,
    sequences: torch.Tensor,  # int64 [b]
    lengths: torch.Tensor,  # int32 [b]
    ragged: bool,
    pairs: tuple[tuple[torch.Tensor, ...], ...],  # keys and values [b, S, G, D] of raw, sel, win
    compressed: tuple[torch.Tensor, torch.Tensor],  # [b, n_c, G, D]
) -> None:
    """Put whole sequences from their first token on into the stores."""
    stores, geometry, table = cache.stores, cache.config.geometry, cache.table.entries[sequences]
    total, n_c, ends = pairs[0][0].shape[1], compressed[0].shape[1], lengths[:, None]
    positions = stores.count[:total].expand(len(sequences), -1)
    stores.sel.write(
        stores.sel.in_pages(positions, table, positions >= ends if ragged else None), *pairs[1]
    )
    blocks = stores.count[:n_c].expand(len(sequences), -1)
    unfinished = blocks * geometry.compress_stride + geometry.compress_block_size > ends
    stores.cmp.write(
        stores.cmp.in_pages(blocks, table, unfinished if ragged else None), *compressed
    )
    every = torch.arange(len(sequences), device=cache.device)[:, None]
    for ring, (k, v) in ((stores.raw, pairs[0]), (stores.win, pairs[2])):
        newest = (ends.long() - ring.rows).clamp(min=0) + stores.count[: min(ring.rows, total)]
        at = newest.clamp(max=total - 1)
        ring.write(ring.in_ring(newest, newest >= ends, sequences), k[every, at], v[every, at])

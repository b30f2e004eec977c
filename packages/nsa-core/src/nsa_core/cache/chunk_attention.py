"""Attention of a long chunk by the prefill kernels: queries that begin inside their sequences.

The decode forms of a plan serve steps of few rows. In a chunk of many rows they read the keys of a
sequence once per small tile of queries, where the prefill kernels share them between queries. These
take contiguous sequences, so pages and rings are copied in the order of their tokens first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from nsa_core.cache.kv_store import KVBuffer, KVStore
    from nsa_core.cache.state import CacheState
    from nsa_core.plan.plan import Plan

# Shorter chunks are left to the decode forms, which were faster in them: on a CPU of two cores, and
# on an H200 at 32k tokens.
MIN_ROWS = {"cpu": 16, "cuda": 2048}


def attend_chunk(
    plan: Plan,
    cache: CacheState,
    store: KVStore,  # with the rings of the chunk
    q: torch.Tensor,  # [B, m, Hq, Dk]
    gates: torch.Tensor,  # [B, m, Hq, 3]
    starts: list[int],  # tokens of each sequence before the chunk
) -> torch.Tensor:
    """Return Eq. 5 for the rows of a chunk, [B, m, Hq, Dv]; 0 in rows without a token.

    ``cache.bounds`` are the lengths after the chunk, and exact.
    """
    spans = list(zip(starts, cache.bounds))
    together = cache.pages is None and len(set(spans)) == 1
    groups = [slice(0, cache.batch)] if together else [slice(b, b + 1) for b in range(cache.batch)]
    o = gates.new_zeros((*q.shape[:-1], cache.config.v_dim), dtype=q.dtype)
    for rows in groups:
        start, end = spans[rows.start]
        if start < end:
            new = end - start
            o[rows, :new] = _attend(
                plan, cache, store, q[rows, :new], gates[rows, :new], rows, start
            )
    return o


def _attend(
    plan: Plan,
    cache: CacheState,
    store: KVStore,
    q: torch.Tensor,
    gates: torch.Tensor,
    sequences: slice,
    start: int,
) -> torch.Tensor:
    """Attend in sequences that all begin the chunk at token ``start``."""
    geometry, end = cache.config.geometry, start + q.shape[1]
    k_cmp, v_cmp = _in_pages(cache, store.cmp, sequences, geometry.num_compressed(end))
    k_sel, v_sel = _in_pages(cache, store.sel, sequences, end)
    first = max(start - geometry.window_size + 1, 0)
    tokens = store.count[first:end].expand(q.shape[0], -1)
    numbers = store.count[sequences]
    k_win, v_win = store.win.read(store.win.in_ring(tokens, None, numbers))
    o_cmp, lse = plan.cmp(q, k_cmp, v_cmp, first_query=start)
    blocks = plan.select(q, k_cmp, lse, first_query=start)
    o_sel, _ = plan.sel(q, k_sel, v_sel, blocks, first_query=start)
    o_win, _ = plan.win(q, k_win, v_win, first_query=start - first)
    o: torch.Tensor = plan.combine(gates, o_cmp, o_sel, o_win)
    return o


def _in_pages(
    cache: CacheState, buffer: KVBuffer, sequences: slice, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first ``rows`` rows [b, rows, G, D] of ``sequences``, copied if they have pages.

    Without pages, sequence b is page b.
    """
    if cache.pages is None:
        return buffer.k[sequences, :rows], buffer.v[sequences, :rows]
    pages = cache.table.entries[sequences, : -(-rows // buffer.rows)].long()
    return buffer.k[pages].flatten(1, 2)[:, :rows], buffer.v[pages].flatten(1, 2)[:, :rows]

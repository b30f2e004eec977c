"""Steps of many rows: the first tokens of empty sequences, and chunks of a long prompt.

A prefill of empty sequences runs the layer as without a cache, then fills the cache.

A chunk has more rows than the rings of a cache have room for, which hold the newest w or l tokens,
and a few more. It uses longer temporary rings, which begin with the tokens visible to its first
row. Afterwards, the newest tokens are copied back to the rings of the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nsa_core.cache.kv_store import new_pages
from nsa_core.cache.state import CacheState, NewTokens
from nsa_core.decode.chunks import attend_chunk
from nsa_core.decode.pages import LayerPages, PagedKV

if TYPE_CHECKING:
    from nsa_core.layer.projection import NSAProjections
    from nsa_core.plan.plan import Plan

# Shorter chunks are left to the decode forms, which were faster in them: on a CPU of two cores, and
# on an H200 at 32k tokens.
MIN_ROWS = {"cpu": 16, "cuda": 2048}


def prefill(
    layer: NSAProjections, x: torch.Tensor, cache: CacheState, new: NewTokens, plan: Plan | None
) -> torch.Tensor:
    """Return the layer's output for x, both [B, m, dim], and fill the cache.

    Every sequence with new tokens must be empty.
    """
    assert new.counts is not None
    active = [b for b, n in enumerate(new.counts) if n]
    sequences, is_subset = cache.kv.count[: cache.batch], len(active) < cache.batch
    cache.advance(new)
    lengths, padding = cache.lengths, None
    if is_subset:
        sequences = torch.tensor(active, device="cpu").to(cache.device, non_blocking=True)
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
    store, geometry, (cmp, sel, win, raw) = cache.kv, cache.config.geometry, cache.kv.pages
    total, n_c, ends = pairs[0][0].shape[1], compressed[0].shape[1], lengths[:, None]
    positions = store.count[:total].expand(len(sequences), -1)
    k, v = pairs[1]
    sel.write(positions, k, v, positions >= ends if padded else None, sequences)
    blocks = store.count[:n_c].expand(len(sequences), -1)
    incomplete = blocks * geometry.compress_stride + geometry.compress_block_size > ends
    cmp.write(blocks, *compressed, incomplete if padded else None, sequences)
    sequence = torch.arange(len(sequences), device=cache.device)[:, None]
    for ring, (k, v) in ((raw, pairs[0]), (win, pairs[2])):
        newest = (ends.long() - ring.rows).clamp(min=0) + store.count[: min(ring.rows, total)]
        token = newest.clamp(max=total - 1)
        ring.write(newest, k[sequence, token], v[sequence, token], newest >= ends, sequences)


def chunk_pages(cache: CacheState, rows: int) -> LayerPages:
    """Return the cache's pages with rings for ``rows`` more tokens from ``cache.starts`` on."""
    geometry, pages = cache.config.geometry, cache.kv.pages
    win = _chunk_ring(cache, pages.win, geometry.window_size - 1, rows)
    raw = _chunk_ring(cache, pages.raw, geometry.compress_block_size - 1, rows)
    return pages._replace(win=win, raw=raw)


def _chunk_ring(cache: CacheState, ring: PagedKV, before: int, rows: int) -> PagedKV:
    """Return a ring for ``before + rows`` tokens, the first ``before`` copied from ``ring``."""
    scales = None if ring.scales is None else ring.scales[0]
    size = cache.batch, before + rows
    longer = new_pages(cache.config, *size, ring.table, ring.k.dtype, scales)
    for store in (longer.k, longer.v):
        # Rows without a token are masked, not skipped, so they must be finite.
        store.zero_()
    tokens = cache.starts[:, None] - before + cache.kv.count[:before]
    longer.write(tokens, *ring.read(tokens), tokens < 0)
    return longer


def write_back_newest(cache: CacheState, chunk: LayerPages, rows: int) -> None:
    """Copy the newest tokens of a chunk of ``rows`` rows to the cache's rings.

    The rings have the tokens before ``cache.starts`` already.
    """
    pages = cache.kv.pages
    for ring, longer in ((pages.win, chunk.win), (pages.raw, chunk.raw)):
        count = min(ring.rows, rows)
        tokens = cache.lengths[:, None] - count + cache.kv.count[:count]
        ring.write(tokens, *longer.read(tokens), tokens < cache.starts[:, None])


def attend_chunks(
    plan: Plan,
    cache: CacheState,
    pages: LayerPages,  # with the rings of the chunk
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
            part = q[rows, :new], gates[rows, :new], rows, start
            o[rows, :new] = attend_chunk(plan, pages, *part, in_order=cache.pages is None)
    return o

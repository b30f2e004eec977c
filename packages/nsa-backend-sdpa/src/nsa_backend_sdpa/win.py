"""The sliding window: each tile of c = clamp(w, 64, 512) queries over the w + c - 1 keys it can see, O(S*w) in time.

Extra memory is O(S) for fp32 gradients of k and v, and a bounded tile of scores. A window that covers the whole
sequence is the plain causal call. Tiles never cross a document, so packed equals separate, bit for bit where both
choose the same c.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from nsa_core.contract import SlotCall
from torch import Tensor

from nsa_backend_sdpa import aten, engine
from nsa_backend_sdpa.engine import ieee_products, operand_dtype, stats_dtype
from nsa_backend_sdpa.tiles import Tiles, as_rows, from_rows, gather, make_tiles, store


def plan_tiles(
    window: int, tokens: int, documents: int, longest: int, heads: int, itemsize: int, budget: int
) -> tuple[int, int]:
    """Effective window, and queries per tile: fewer when documents are short or scores of one tile pass the bound."""
    window = min(window, longest)
    size = max(64, min(512, window, -(-tokens // documents)))
    while size > 64 and size * heads * min(window + size - 1, engine.MAX_KEYS) * itemsize > budget:
        size //= 2
    return window, size


def _setup(q: Tensor, k: Tensor, call: SlotCall) -> tuple[Tiles, int, int, int]:
    """Tiles, effective window, tiles per step, kv heads per step."""
    groups, heads, itemsize = k.shape[-2], q.shape[-2] // k.shape[-2], stats_dtype(q.dtype).itemsize
    packed, budget = call.cu_seqlens is not None, engine.score_bytes(q.device.type)
    documents = len(call.cu_seqlens) - 1 if call.cu_seqlens is not None else q.shape[0]
    tokens = len(q) if packed else q.shape[0] * q.shape[1]
    longest = min(call.max_seqlen, tokens) if packed else q.shape[1]
    window, size = plan_tiles(call.geometry.window_size, tokens, documents, longest, heads, itemsize, budget)
    unit = size * heads * min(window + size - 1, engine.MAX_KEYS) * itemsize
    together = max(1, budget // unit)
    return make_tiles(q, size, call), window, max(1, together // groups), min(groups, together)


def _key_parts(tiles: Tiles, window: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(key rows [tiles, L], hidden [tiles, R, 1, L]) for each run of at most MAX_KEYS keys."""
    device, count = tiles.first.device, window + tiles.size - 1
    queries, valid = tiles.rows()
    for a in range(0, count, engine.MAX_KEYS):
        place = torch.arange(a, min(a + engine.MAX_KEYS, count), device=device)
        rows = tiles.first[:, None] + (place - (window - 1))
        back = queries[:, :, None] - rows[:, None, :]  # how many tokens before the query
        seen = (back >= 0) & (back < window) & (rows >= tiles.start[:, None])[:, None, :] & valid[:, :, None]
        yield rows, seen.logical_not_().unsqueeze(2)


def _covers(q: Tensor, call: SlotCall) -> bool:
    return call.cu_seqlens is None and call.geometry.window_size >= q.shape[1]


def _by_group(x: Tensor, groups: int) -> Tensor:
    """[B, S, Hq, D] -> [B*G, h, S, D]."""
    by_group: Tensor = x.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4).flatten(0, 1)
    return by_group


def forward(
    q: Tensor,  # [B, S, Hq, Dk], packed [T, Hq, Dk]
    k: Tensor,  # [B, S, G, Dk]
    v: Tensor,  # [B, S, G, Dv]
    *,
    call: SlotCall,
) -> tuple[Tensor, Tensor]:
    """o [B, S, Hq, Dv] and lse [B, Hq, S] (packed [T, Hq, Dv] and [Hq, T])."""
    with torch.profiler.record_function("nsa_sdpa.win"), ieee_products(q):
        if not _covers(q, call):
            return _tiled_forward(q, k, v, call)
        groups, batch = k.shape[2], q.shape[0]
        o, lse = aten.causal(
            _by_group(q, groups), k.transpose(1, 2).flatten(0, 1), v.transpose(1, 2).flatten(0, 1), call.scale
        )
        o = o.unflatten(0, (batch, groups)).flatten(1, 2).transpose(1, 2)
        return o.contiguous(), lse.reshape(batch, q.shape[2], q.shape[1])


def _tiled_forward(q: Tensor, k: Tensor, v: Tensor, call: SlotCall) -> tuple[Tensor, Tensor]:
    packed = call.cu_seqlens is not None
    tiles, window, per_step, per_group = _setup(q, k, call)
    groups, heads, operand = k.shape[-2], q.shape[-2], operand_dtype(q)
    rows_q, rows_k, rows_v = (as_rows(x, packed) for x in (q, k, v))
    rows_q = rows_q.unflatten(1, (groups, -1))
    o = q.new_empty((tiles.total + 1, groups, heads // groups, v.shape[-1]))
    lse = q.new_empty((tiles.total + 1, groups, heads // groups), dtype=stats_dtype(q.dtype))
    for step in tiles.split(per_step):
        queries, target = step.clamp(step.rows()[0]), step.targets()
        for g in range(0, groups, per_group):
            part = slice(g, g + per_group)
            tile_q, total = gather(rows_q[:, part], queries, operand), None
            for keys, hidden in _key_parts(step, window):
                keys = step.clamp(keys)
                new = engine.attend(
                    tile_q, gather(rows_k[:, part], keys, operand), gather(rows_v[:, part], keys, operand),
                    hidden, call.scale,
                )  # fmt: skip
                total = engine.merge(total, new)
            assert total is not None
            store(o[:, part], target, total[0])
            store(lse[:, part], target, total[1])
    lse_rows = from_rows(lse[:-1].flatten(1, 2), q, packed)
    return from_rows(o[:-1].flatten(1, 2), q, packed), lse_rows.transpose(-1, -2).contiguous()


def backward(
    do: Tensor,  # [B, S, Hq, Dv]
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    *,
    call: SlotCall,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in the shapes of q, k, v."""
    with torch.profiler.record_function("nsa_sdpa.win_backward"), ieee_products(q):
        if not _covers(q, call):
            return _tiled_backward(do, q, k, v, o, lse, call)
        groups, batch = k.shape[2], q.shape[0]
        grads = aten.causal_backward(
            _by_group(do, groups), _by_group(q, groups), k.transpose(1, 2).flatten(0, 1),
            v.transpose(1, 2).flatten(0, 1), _by_group(o, groups), lse.unflatten(1, (groups, -1)).flatten(0, 1),
            call.scale, True,
        )  # fmt: skip
        dq = grads[0].unflatten(0, (batch, groups)).flatten(1, 2).transpose(1, 2).contiguous()
        dk, dv = (g.to(k.dtype).unflatten(0, (batch, groups)).transpose(1, 2).contiguous() for g in grads[1:])
        return dq, dk, dv


def _tiled_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, call: SlotCall
) -> tuple[Tensor, Tensor, Tensor]:
    packed = call.cu_seqlens is not None
    tiles, window, per_step, per_group = _setup(q, k, call)
    groups, operand, stats = k.shape[-2], operand_dtype(q), stats_dtype(q.dtype)
    rows_k, rows_v = as_rows(k, packed), as_rows(v, packed)
    rows_do, rows_q, rows_o = (as_rows(x, packed).unflatten(1, (groups, -1)) for x in (do, q, o))
    rows_lse = as_rows(lse.transpose(-1, -2), packed).unflatten(1, (groups, -1))
    dq = q.new_empty((tiles.total + 1, *rows_q.shape[1:]))
    dk, dv = (torch.zeros((tiles.total + 1, *x.shape[1:]), dtype=stats, device=x.device) for x in (rows_k, rows_v))
    for step in tiles.split(per_step):
        queries, target = step.clamp(step.rows()[0]), step.targets()
        for g in range(0, groups, per_group):
            part = slice(g, g + per_group)
            tile_do, tile_q = gather(rows_do[:, part], queries, operand), gather(rows_q[:, part], queries, operand)
            tile_lse = gather(rows_lse[:, part], queries, stats)
            delta = (tile_do.to(stats) * gather(rows_o[:, part], queries, stats)).sum(-1)
            tile_dq = torch.zeros(tile_q.shape, dtype=stats, device=q.device)
            for keys, hidden in _key_parts(step, window):
                places = step.clamp(keys)
                grads = engine.attend_backward(
                    tile_do, delta, tile_q, gather(rows_k[:, part], places, operand),
                    gather(rows_v[:, part], places, operand), tile_lse, hidden, call.scale,
                )  # fmt: skip
                tile_dq += grads[0]
                _add(dk[:, part], keys, step, grads[1])
                _add(dv[:, part], keys, step, grads[2])
            store(dq[:, part], target, tile_dq)
    rows = (dq[:-1].flatten(1, 2), dk[:-1].to(k.dtype), dv[:-1].to(v.dtype))
    d_q, d_k, d_v = (from_rows(x, q, packed) for x in rows)
    return d_q, d_k, d_v


def _add(rows: Tensor, keys: Tensor, step: Tiles, grads: Tensor) -> None:
    """Add [G, tiles, L, D] to the rows [T + 1, G, D] that ``keys`` [tiles, L] names, in a fixed order.

    Runs of ``size`` keys of different tiles never meet, so each run is one copy without a race.
    """
    outside = (keys < step.start[:, None]) | (keys >= step.end[:, None]) | (keys >= step.total)
    target = keys.masked_fill(outside, step.total)
    for a in range(0, keys.shape[1], step.size):
        run = slice(a, a + step.size)
        where = target[:, run].flatten()
        added = rows.index_select(0, where) + grads[:, :, run].flatten(1, 2).transpose(0, 1)
        rows.index_copy_(0, where, added)

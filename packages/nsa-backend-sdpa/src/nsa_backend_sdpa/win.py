"""The sliding window: each tile of c = clamp(w, 64, 512) queries over the w + c - 1 keys it can
see, O(S*w) in time.

Extra memory is O(S) for fp32 gradients of k and v, and a bounded tile of scores. A window that
covers the whole sequence is the plain causal call. Tiles never cross a document, so packed equals
separate, bit for bit where both choose the same c.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from nsa_backend_sdpa import aten, engine
from nsa_backend_sdpa.device import pieces
from nsa_backend_sdpa.engine import ieee_products, operand_dtype, stats_dtype
from nsa_backend_sdpa.tiles import Tiles, as_rows, from_rows, gather, make_tiles, store
from nsa_core.contract import SlotCall


@dataclasses.dataclass(frozen=True)
class Cut:
    """How a call is cut into tiles."""

    window: int  # at most the longest document
    size: int  # queries of a tile
    tiles: int  # of one step
    groups: int  # kv heads of one step

    @classmethod
    def of(
        cls,
        window: int,
        tokens: int,
        documents: int,
        longest: int,
        groups: int,
        heads: int,
        itemsize: int,
        budget: int,
    ) -> Cut:
        """Tiles of at most ``budget`` bytes of scores; small ones where documents are short."""
        window = max(1, min(window, longest))
        least = max(1, min(64, longest))
        size = max(least, min(512, window, -(-tokens // documents)))

        def scores() -> int:
            return size * heads * min(window + size - 1, engine.MAX_KEYS) * itemsize

        while size > least and scores() > budget:
            size = max(least, size // 2)
        together = max(1, budget // scores())
        return cls(window, size, max(1, together // groups), min(groups, together))


def _cut(q: Tensor, k: Tensor, call: SlotCall) -> Cut:
    if call.cu_seqlens is None:
        documents, longest = q.shape[:2]
        tokens = documents * longest
    else:
        documents, tokens, longest = len(call.cu_seqlens) - 1, len(q), min(call.max_seqlen, len(q))
    groups, heads = k.shape[-2], q.shape[-2] // k.shape[-2]
    itemsize, budget = stats_dtype(q.dtype).itemsize, engine.score_bytes(q)
    return Cut.of(
        call.geometry.window_size, tokens, documents, longest, groups, heads, itemsize, budget
    )


def _covers(q: Tensor, call: SlotCall) -> bool:
    return call.cu_seqlens is None and call.geometry.window_size >= q.shape[1]


def _by_group(x: Tensor, groups: int) -> Tensor:
    """[B, S, Hq, D] -> [B*G, h, S, D]."""
    by_group: Tensor = x.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4).flatten(0, 1)
    return by_group


def _by_token(x: Tensor, batch: int) -> Tensor:
    """Inverse of :func:`_by_group`, contiguous."""
    by_token: Tensor = x.unflatten(0, (batch, -1)).permute(0, 3, 1, 2, 4).contiguous().flatten(2, 3)
    return by_token


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
        keys, values = (x.transpose(1, 2).flatten(0, 1) for x in (k, v))
        o, lse = aten.causal(_by_group(q, groups), keys, values, call.scale)
        return _by_token(o, batch), lse.reshape(batch, q.shape[2], q.shape[1])


def _tiled_forward(q: Tensor, k: Tensor, v: Tensor, call: SlotCall) -> tuple[Tensor, Tensor]:
    packed, groups, heads = call.cu_seqlens is not None, k.shape[-2], q.shape[-2]
    cut = _cut(q, k, call)
    tiles = make_tiles(q, cut.size, call)
    rows = [as_rows(q, packed).unflatten(1, (groups, -1)), as_rows(k, packed), as_rows(v, packed)]
    o = q.new_empty((tiles.total + 1, groups, heads // groups, v.shape[-1]))
    lse = q.new_empty((tiles.total + 1, groups, heads // groups), dtype=stats_dtype(q.dtype))
    for step in tiles.split(cut.tiles):
        for part in pieces(groups, cut.groups):
            _forward_step(
                [x[:, part] for x in rows], o[:, part], lse[:, part], step, cut.window, call.scale
            )
    lse_rows = from_rows(lse[:-1].flatten(1, 2), q, packed)
    return from_rows(o[:-1].flatten(1, 2), q, packed), lse_rows.transpose(-1, -2).contiguous()


def _forward_step(
    rows: list[Tensor], o: Tensor, lse: Tensor, step: Tiles, window: int, scale: float
) -> None:
    """Attention of the step's queries, stored into rows of o [T + 1, g, h, Dv] and lse [T + 1, g,
    h].
    """
    q, k, v = rows
    operand = operand_dtype(q)
    tile = gather(q, step.clamp(step.rows()[0]), operand)
    total: tuple[Tensor, Tensor] | None = None
    for keys, hidden in _key_parts(step, window):
        places = step.clamp(keys)
        new = engine.attend(
            tile, gather(k, places, operand), gather(v, places, operand), hidden, scale
        )
        total = engine.merge(total, new)
    assert total is not None
    store(o, step.targets(), total[0])
    store(lse, step.targets(), total[1])


def _key_parts(step: Tiles, window: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(key rows [tiles, L], hidden [tiles, R, 1, L]) for each run of at most MAX_KEYS keys.

    Place j of a tile's w + c - 1 keys is row first - (w - 1) + j, which its query r sees where r <=
    j < r + w.
    """
    device, count = step.first.device, window + step.size - 1
    query, no_query = torch.arange(step.size, device=device)[:, None], ~step.rows()[1]
    for part in pieces(count, engine.MAX_KEYS):
        place = torch.arange(part.start, part.stop, device=device)
        keys = step.first[:, None] + (place - (window - 1))
        hidden = ((place < query) | (place >= query + window)) | (keys < step.start[:, None])[
            :, None, :
        ]
        yield keys, hidden.logical_or_(no_query[:, :, None]).unsqueeze(2)


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
        keys, values = (x.transpose(1, 2).flatten(0, 1) for x in (k, v))
        tile_do, tile_q, tile_o = (_by_group(x, groups) for x in (do, q, o))
        tile_lse = lse.unflatten(1, (groups, -1)).flatten(0, 1)
        grads = aten.causal_backward(
            tile_do, tile_q, keys, values, tile_o, tile_lse, call.scale, True
        )
        dk, dv = (
            g.to(k.dtype).unflatten(0, (batch, groups)).transpose(1, 2).contiguous()
            for g in grads[1:]
        )
        return _by_token(grads[0], batch), dk, dv


def _tiled_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, call: SlotCall
) -> tuple[Tensor, Tensor, Tensor]:
    packed, groups, stats = call.cu_seqlens is not None, k.shape[-2], stats_dtype(q.dtype)
    cut = _cut(q, k, call)
    tiles = make_tiles(q, cut.size, call)
    rows = [
        as_rows(x, packed).unflatten(1, (groups, -1)) for x in (do, q, o, lse.transpose(-1, -2))
    ]
    rows += [as_rows(k, packed), as_rows(v, packed)]
    dq = q.new_empty((tiles.total + 1, *rows[1].shape[1:]))
    dk, dv = (
        torch.zeros((tiles.total + 1, *x.shape[1:]), dtype=stats, device=x.device) for x in rows[4:]
    )
    for step in tiles.split(cut.tiles):
        for part in pieces(groups, cut.groups):
            grads = [x[:, part] for x in (dq, dk, dv)]
            _backward_step([x[:, part] for x in rows], grads, step, cut.window, call.scale)
    d_q = from_rows(dq[:-1].flatten(1, 2), q, packed)
    return d_q, from_rows(dk[:-1].to(k.dtype), k, packed), from_rows(dv[:-1].to(v.dtype), v, packed)


def _backward_step(
    rows: list[Tensor], grads: list[Tensor], step: Tiles, window: int, scale: float
) -> None:
    """Store the step's rows of dq [T + 1, g, h, Dk]; add to those of dk, dv [T + 1, g, D]."""
    do, q, o, lse, k, v = rows
    operand, stats, queries = operand_dtype(q), stats_dtype(q.dtype), step.clamp(step.rows()[0])
    tile_do, tile_q, tile_lse = (
        gather(do, queries, operand),
        gather(q, queries, operand),
        gather(lse, queries, stats),
    )
    delta = (tile_do.to(stats) * gather(o, queries, operand)).sum(-1)
    total: Tensor | None = None
    for keys, hidden in _key_parts(step, window):
        places = step.clamp(keys)
        tile_k, tile_v = gather(k, places, operand), gather(v, places, operand)
        dq, dk, dv = engine.attend_backward(
            tile_do, delta, tile_q, tile_k, tile_v, tile_lse, hidden, scale
        )
        del tile_k, tile_v, hidden
        total = dq if total is None else total.add_(dq)
        _add(grads[1], keys, step, dk)
        _add(grads[2], keys, step, dv)
    assert total is not None
    store(grads[0], step.targets(), total)


def _add(rows: Tensor, keys: Tensor, step: Tiles, grads: Tensor) -> None:
    """Add [g, tiles, L, D] to the rows [T + 1, g, D] that ``keys`` [tiles, L] names, in a fixed
    order.

    Runs of ``size`` keys of different tiles never meet, so each run is one copy without a race.
    """
    outside = (keys < step.start[:, None].clamp(min=0)) | (
        keys >= step.end[:, None].clamp(max=step.total)
    )
    target = keys.masked_fill(outside, step.total)
    for run in pieces(keys.shape[1], step.size):
        where = target[:, run].flatten()
        added = rows.index_select(0, where) + grads[:, :, run].flatten(1, 2).transpose(0, 1)
        rows.index_copy_(0, where, added)

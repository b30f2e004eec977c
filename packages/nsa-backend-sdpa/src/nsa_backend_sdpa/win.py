"""The slot win: each tile of c = clamp(w, 64, 512) queries attends to the w + c - 1 keys it sees.

The time is O(S * w). Extra memory is O(S) for fp32 gradients of k and v, plus a bounded tile of
scores. A window that covers the whole sequence runs as one causal attention call. Tiles never cross
a document, so that packed documents give the same results as separate calls: bitwise the same if
both use the same c.

Keys that no query sees are cut off first. Queries that begin inside a sequence then come at most
w - 1 tokens after the first key.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_backend_sdpa import aten, engine
from nsa_backend_sdpa.device import chunks
from nsa_backend_sdpa.engine import ieee_products, operand_dtype
from nsa_backend_sdpa.tiles import Tiles, as_rows, from_rows, gather, make_tiles, scatter, widened
from nsa_core.contract import SlotCall
from nsa_core.dtypes import stats_dtype


class _Tiling(NamedTuple):
    """How a call is split into chunks of several tiles.

    Attributes:
        window: Window size, at most the length of the longest document.
        size: Queries of a tile, c.
        tiles: Tiles of a chunk.
        groups: kv heads of a chunk.
    """

    window: int
    size: int
    tiles: int
    groups: int

    def parts(self, tiles: Tiles, groups: int) -> Iterator[tuple[Tiles, slice]]:
        """Yield the tiles and the kv heads of each chunk."""
        for chunk in tiles.split(self.tiles):
            for part in chunks(groups, self.groups):
                yield chunk, part


def _tiling(q: Tensor, k: Tensor, call: SlotCall) -> _Tiling:
    """Return chunks whose scores stay within their limit; short documents get small tiles.

    Tiles have at least 64 queries if a document has as many, even if their scores exceed the limit.
    """
    if call.cu_seqlens is None:
        documents, longest = q.shape[:2]
        tokens, seen = documents * longest, call.first_query + longest
    else:
        documents, tokens, longest = len(call.cu_seqlens) - 1, len(q), min(call.max_seqlen, len(q))
        seen = min(call.max_seqlen, call.first_query + len(q))
    groups, heads = k.shape[-2], q.shape[-2] // k.shape[-2]
    itemsize, budget = stats_dtype(q.dtype).itemsize, engine.score_bytes(q)
    window = max(1, min(call.geometry.window_size, seen))
    min_size = max(1, min(64, longest))
    size = max(min_size, min(512, window, -(-tokens // documents)))

    def tile_bytes() -> int:
        return size * heads * min(window + size - 1, engine.MAX_KEYS) * itemsize

    while size > min_size and tile_bytes() > budget:
        size = max(min_size, size // 2)
    per_chunk = max(1, budget // tile_bytes())
    return _Tiling(window, size, max(1, per_chunk // groups), min(groups, per_chunk))


def _visible_keys(q: Tensor, k: Tensor, call: SlotCall) -> tuple[slice, SlotCall]:
    """Return the rows of the keys that queries may see, and the call for these rows alone."""
    end = call.first_query + q.shape[-3]
    start = max(0, call.first_query - call.geometry.window_size + 1)
    if end - start == k.shape[-3]:
        return slice(0, end), call
    cu_seqlens = call.cu_seqlens
    if cu_seqlens is not None:
        cu_seqlens = (cu_seqlens - start).clamp_(0, end - start)
    first_query = call.first_query - start
    return slice(start, end), dataclasses.replace(
        call, cu_seqlens=cu_seqlens, first_query=first_query
    )


def _window_covers_sequence(q: Tensor, call: SlotCall) -> bool:
    is_whole = call.cu_seqlens is None and not call.first_query
    return is_whole and call.geometry.window_size >= q.shape[1]


def _by_group(x: Tensor, groups: int) -> Tensor:
    """Return [B, S, Hq, D] as [B*G, h, S, D]."""
    by_group: Tensor = x.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4).flatten(0, 1)
    return by_group


def _by_token(x: Tensor, batch: int) -> Tensor:
    """Return [B*G, h, S, D] as a contiguous [B, S, Hq, D]; the inverse of :func:`_by_group`."""
    by_token: Tensor = x.unflatten(0, (batch, -1)).permute(0, 3, 1, 2, 4).contiguous().flatten(2, 3)
    return by_token


def forward(
    q: Tensor,  # [B, S, Hq, Dk], packed [T, Hq, Dk]
    k: Tensor,  # [B, S, G, Dk]
    v: Tensor,  # [B, S, G, Dv]
    *,
    call: SlotCall,
) -> tuple[Tensor, Tensor]:
    """Return o [B, S, Hq, Dv] and lse [B, Hq, S] (packed [T, Hq, Dv] and [Hq, T])."""
    with torch.profiler.record_function("nsa_sdpa.win"), ieee_products(q):
        visible, part = _visible_keys(q, k, call)
        if part is not call:
            k, v, call = k[..., visible, :, :], v[..., visible, :, :], part
        if not _window_covers_sequence(q, call):
            return _tiled_forward(q, k, v, call)
        groups, batch = k.shape[2], q.shape[0]
        keys, values = (x.transpose(1, 2).flatten(0, 1) for x in (k, v))
        o, lse = aten.causal(_by_group(q, groups), keys, values, call.scale)
        return _by_token(o, batch), lse.reshape(batch, q.shape[2], q.shape[1])


def _tiled_forward(q: Tensor, k: Tensor, v: Tensor, call: SlotCall) -> tuple[Tensor, Tensor]:
    packed, groups, heads = call.cu_seqlens is not None, k.shape[-2], q.shape[-2]
    tiling = _tiling(q, k, call)
    tiles = make_tiles(q, tiling.size, call, k.shape[-3])
    rows = [as_rows(q, packed).unflatten(1, (groups, -1)), as_rows(k, packed), as_rows(v, packed)]
    o = q.new_empty((tiles.total + 1, groups, heads // groups, v.shape[-1]))
    lse = q.new_empty((tiles.total + 1, groups, heads // groups), dtype=stats_dtype(q.dtype))
    operand = operand_dtype(q)
    for chunk, part in tiling.parts(tiles, groups):
        tile_rows, on_keys = [x[:, part] for x in rows], chunk.on_keys()
        tile_q = gather(tile_rows[0], chunk.clamp(chunk.rows()[0]), operand)
        merged: tuple[Tensor, Tensor] | None = None
        for keys, hidden in _key_chunks(on_keys, tiling.window):
            tile_k, tile_v = (gather(x, on_keys.clamp(keys), operand) for x in tile_rows[1:])
            partial = engine.attend(tile_q, tile_k, tile_v, hidden, call.scale)
            merged = engine.merge(merged, partial)
        assert merged is not None
        scatter(o[:, part], chunk.targets(), merged[0])
        scatter(lse[:, part], chunk.targets(), merged[1])
        del tile_q, tile_k, tile_v, keys, hidden, partial, merged  # before the next chunk
    lse_rows = from_rows(lse[:-1].flatten(1, 2), q, packed)
    return from_rows(o[:-1].flatten(1, 2), q, packed), lse_rows.transpose(-1, -2).contiguous()


def _key_chunks(tiles: Tiles, window: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (key rows [tiles, L], hidden [tiles, R, 1, L]) for each chunk of at most MAX_KEYS keys.

    ``tiles`` has the rows of the keys. A tile has w + c - 1 keys. Key j is row first - (w - 1) + j;
    query r of the tile sees it if r <= j < r + w.
    """
    device, count = tiles.first.device, window + tiles.size - 1
    query, no_query = torch.arange(tiles.size, device=device)[:, None], ~tiles.rows()[1]
    for part in chunks(count, engine.MAX_KEYS):
        key = torch.arange(part.start, part.stop, device=device)
        keys = tiles.first[:, None] + (key - (window - 1))
        hidden = ((key < query) | (key >= query + window)) | (keys < tiles.start[:, None])[
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
    """Return dq, dk and dv, shaped like q, k and v."""
    visible, part = _visible_keys(q, k, call)
    if part is not call:
        keys, values = k[..., visible, :, :], v[..., visible, :, :]
        d_q, d_k, d_v = backward(do, q, keys, values, o, lse, call=part)
        return d_q, widened(d_k, k, visible), widened(d_v, v, visible)
    with torch.profiler.record_function("nsa_sdpa.win_backward"), ieee_products(q):
        if not _window_covers_sequence(q, call):
            return _tiled_backward(do, q, k, v, o, lse, call)
        groups, batch = k.shape[2], q.shape[0]
        keys, values = (x.transpose(1, 2).flatten(0, 1) for x in (k, v))
        tile_do, tile_q, tile_o = (_by_group(x, groups) for x in (do, q, o))
        tile_lse = lse.unflatten(1, (groups, -1)).flatten(0, 1)
        grads = aten.causal_backward(
            tile_do, tile_q, keys, values, tile_o, tile_lse, call.scale, True
        )
        dk, dv = (
            grad.to(k.dtype).unflatten(0, (batch, groups)).transpose(1, 2).contiguous()
            for grad in grads[1:]
        )
        return _by_token(grads[0], batch), dk, dv


def _tiled_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, call: SlotCall
) -> tuple[Tensor, Tensor, Tensor]:
    packed, groups, stats = call.cu_seqlens is not None, k.shape[-2], stats_dtype(q.dtype)
    tiling = _tiling(q, k, call)
    tiles = make_tiles(q, tiling.size, call, k.shape[-3])
    rows = [
        as_rows(x, packed).unflatten(1, (groups, -1)) for x in (do, q, o, lse.transpose(-1, -2))
    ]
    rows += [as_rows(k, packed), as_rows(v, packed)]
    key_rows = rows[4].shape[0]
    dq = q.new_empty((tiles.total + 1, *rows[1].shape[1:]))
    dk, dv = (
        torch.zeros((key_rows + 1, *x.shape[1:]), dtype=stats, device=x.device) for x in rows[4:]
    )
    for chunk, part in tiling.parts(tiles, groups):
        grads = [x[:, part] for x in (dq, dk, dv)]
        _backward_chunk([x[:, part] for x in rows], grads, chunk, tiling.window, call.scale)
    d_q = from_rows(dq[:-1].flatten(1, 2), q, packed)
    return d_q, from_rows(dk[:-1].to(k.dtype), k, packed), from_rows(dv[:-1].to(v.dtype), v, packed)


def _backward_chunk(
    rows: list[Tensor], grads: list[Tensor], tiles: Tiles, window: int, scale: float
) -> None:
    """Store the tiles' rows of dq [T + 1, g, h, Dk]; add to rows of dk and dv [T + 1, g, D]."""
    do, q, o, lse, k, v = rows
    operand, stats, queries = operand_dtype(q), stats_dtype(q.dtype), tiles.clamp(tiles.rows()[0])
    tile_do, tile_q, tile_lse = (
        gather(do, queries, operand),
        gather(q, queries, operand),
        gather(lse, queries, stats),
    )
    delta = (tile_do.to(stats) * gather(o, queries, operand)).sum(-1)
    tile_dq: Tensor | None = None
    on_keys = tiles.on_keys()
    for keys, hidden in _key_chunks(on_keys, window):
        key_rows = on_keys.clamp(keys)
        tile_k, tile_v = gather(k, key_rows, operand), gather(v, key_rows, operand)
        dq, dk, dv = engine.attend_backward(
            tile_do, delta, tile_q, tile_k, tile_v, tile_lse, hidden, scale
        )
        del tile_k, tile_v, hidden
        tile_dq = dq if tile_dq is None else tile_dq.add_(dq)
        _add(grads[1], keys, on_keys, dk)
        _add(grads[2], keys, on_keys, dv)
    assert tile_dq is not None
    scatter(grads[0], tiles.targets(), tile_dq)


def _add(rows: Tensor, keys: Tensor, tiles: Tiles, grads: Tensor) -> None:
    """Add [g, tiles, L, D] to ``rows`` [T + 1, g, D] at indices ``keys`` [tiles, L].

    The order is fixed. Chunks of ``size`` keys at the same offset in different tiles are disjoint,
    so that one index_copy_ per chunk has no conflicts.
    """
    outside = (keys < tiles.start[:, None].clamp(min=0)) | (
        keys >= tiles.end[:, None].clamp(max=tiles.total)
    )
    target = keys.masked_fill(outside, tiles.total)
    for part in chunks(keys.shape[1], tiles.size):
        index = target[:, part].flatten()
        updated = rows.index_select(0, index) + grads[:, :, part].flatten(1, 2).transpose(0, 1)
        rows.index_copy_(0, index, updated)

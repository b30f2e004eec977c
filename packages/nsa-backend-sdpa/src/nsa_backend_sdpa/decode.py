"""Decode forms: the newest queries of each sequence over keys that lie in a cache.

Queries are taken some at a time, as steps of their own, and keys in runs of a bounded number of
tokens (cmp, win, select), so extra memory grows neither with the step nor with the cache, except
for select's rows of probabilities, of a few queries. The contents of a cache past a sequence's last
token are never multiplied: the values count as 0, or another key is read instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from nsa_backend_sdpa import engine
from nsa_backend_sdpa.engine import ieee_products, operand_dtype, product, stats_dtype
from nsa_backend_sdpa.sel import distinct
from nsa_backend_sdpa.select import choose, columns, head_sums, tap_sums
from nsa_core.contract import DecodeCall

_LEAST_ROWS = 64  # of a step taken at once, whatever its scores need
_LEAST_CHOOSING = 16  # likewise, for select
_KEYS = 1024  # of a run, where many rows share it


def _steps(q: Tensor, rows: int, call: DecodeCall) -> Iterator[tuple[slice, DecodeCall]]:
    """The rows of q [B, m, ...] in steps of at most ``rows``, each as if no later one had come."""
    if q.shape[1] <= rows:
        yield slice(0, q.shape[1]), call
        return
    for first in range(0, q.shape[1], rows):
        last = min(first + rows, q.shape[1])
        ends = [torch.minimum(call.starts + n, call.lengths) for n in (first, last)]
        yield slice(first, last), dataclasses.replace(call, starts=ends[0], lengths=ends[1])


def _joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """o [B, m, Hq, Dv] and lse [B, Hq, m] of all steps."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([o for o, _ in parts], 1), torch.cat([lse for _, lse in parts], 2)


def _within_budget(q: Tensor, keys: int) -> int:
    """Rows of q [B, m, Hq, Dk] whose scores over ``keys`` keys are within the budget."""
    per_row = q.shape[0] * q.shape[2] * max(1, keys) * stats_dtype(q.dtype).itemsize
    return engine.score_bytes(q) // max(1, per_row)


def positions(q: Tensor, call: DecodeCall) -> Tensor:
    """Token of each query, int64 [B, m]; -1 for padding, which sees nothing."""
    position = call.starts.long()[:, None] + torch.arange(q.shape[1], device=q.device)
    return position.masked_fill(position >= call.lengths[:, None], -1)


def _rows(
    store: Tensor,  # [P, page, G, D]
    tokens: Tensor,  # int64 [B, ...], of the sequence
    call: DecodeCall,
) -> tuple[Tensor, Tensor]:
    """Page and row in it of each token; some row of the store for a token that has none."""
    size = store.shape[1]
    page = (tokens // size).clamp(0, call.block_table.shape[1] - 1)
    number = call.block_table.long().gather(1, page.flatten(1)).view(page.shape)
    return number.clamp(0, store.shape[0] - 1), tokens % size


def _heads_first(x: Tensor, present: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[B, L, G, D] as [B, G, L, D] in ``dtype``; 0 where ``present`` [B, L] is not."""
    x = x.transpose(1, 2).to(dtype)
    return x if present is None else x.masked_fill(~present[:, None, :, None], 0)


def _out(o: Tensor, lse: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """[B, G, m, h, Dv] and [B, G, m, h] in the contract's layouts."""
    o = o.transpose(1, 2).flatten(2, 3).to(q.dtype)
    return o.contiguous(), lse.transpose(2, 3).flatten(1, 2).contiguous()


def _grouped(q: Tensor, groups: int) -> Tensor:
    """[B, m, Hq, Dk] as [B, G, m, h, Dk], as products take it."""
    grouped: Tensor = q.unflatten(2, (groups, -1))
    return grouped.transpose(1, 2).to(operand_dtype(q))


def _run(q: Tensor, keys: int) -> int:
    """Keys of a run: the scores of one stay within the budget."""
    per_key = q.shape[:-1].numel() * stats_dtype(q.dtype).itemsize
    return max(1, min(keys, engine.MAX_KEYS, engine.score_bytes(q) // max(1, per_key)))


def cmp(
    q: Tensor,  # [B, m, Hq, Dk]
    k_cmp: Tensor,  # [P, page / d, G, Dk]
    v_cmp: Tensor,  # [P, page / d, G, Dv]
    *,
    call: DecodeCall,
) -> tuple[Tensor, Tensor]:
    """o [B, m, Hq, Dv] and lse [B, Hq, m] over the compressed tokens that each query sees."""
    rows = max(
        _LEAST_ROWS, _within_budget(q, min(_KEYS, call.geometry.num_compressed(call.max_len)))
    )
    with torch.profiler.record_function("nsa_sdpa.cmp"), ieee_products(q):
        return _joined(
            [_cmp_step(q[:, part], k_cmp, v_cmp, of) for part, of in _steps(q, rows, call)]
        )


def _cmp_step(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, call: DecodeCall) -> tuple[Tensor, Tensor]:
    geometry, operand = call.geometry, operand_dtype(q)
    rows, last = _grouped(q, k_cmp.shape[2]), positions(q, call)[:, None, :, None, None]
    count, total = geometry.num_compressed(call.max_len), None
    run = _run(q, max(1, count))
    for first in range(0, max(1, count), run):
        index = torch.arange(first, min(first + run, max(1, count)), device=q.device)
        ends = index * geometry.compress_stride + geometry.compress_block_size
        here = _rows(k_cmp, index.expand(len(q), -1), call)
        owned = ends <= call.lengths[:, None]
        k, v = _heads_first(k_cmp[here], None, operand), _heads_first(v_cmp[here], owned, operand)
        total = engine.merge(total, engine.attend(rows, k, v, ends > last + 1, call.scale))
    assert total is not None
    return _out(*total, q)


def win(
    q: Tensor,  # [B, m, Hq, Dk]
    k: Tensor,  # [B, R, G, Dk], a ring
    v: Tensor,  # [B, R, G, Dv]
    *,
    call: DecodeCall,
) -> tuple[Tensor, Tensor]:
    """o [B, m, Hq, Dv] and lse [B, Hq, m] over the last w tokens up to each query."""
    # so many see as many keys again, and a quarter more
    rows = max(_LEAST_ROWS, call.geometry.window_size // 4)
    with torch.profiler.record_function("nsa_sdpa.win"), ieee_products(q):
        return _joined([_win_step(q[:, part], k, v, of) for part, of in _steps(q, rows, call)])


def _win_step(q: Tensor, k: Tensor, v: Tensor, call: DecodeCall) -> tuple[Tensor, Tensor]:
    operand, total = operand_dtype(q), None
    k, v, tokens = _ring_of_step(q, k, v, call)
    rows, last = _grouped(q, k.shape[2]), positions(q, call)[:, None, :, None, None]
    run = _run(q, k.shape[1])
    for first in range(0, k.shape[1], run):
        part = slice(first, min(first + run, k.shape[1]))
        token = tokens[:, part]
        owned = (token >= 0) & (token < call.lengths[:, None])
        keys, values = (
            _heads_first(k[:, part], None, operand),
            _heads_first(v[:, part], owned, operand),
        )
        token = token[:, None, None, None]
        hidden = (token > last) | (token <= last - call.geometry.window_size) | (token < 0)
        total = engine.merge(total, engine.attend(rows, keys, values, hidden, call.scale))
    assert total is not None
    return _out(*total, q)


def _ring_of_step(
    q: Tensor, k: Tensor, v: Tensor, call: DecodeCall
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of the ring [B, R, G, D] that hold what the step sees, and their tokens int64 [B, R]."""
    seen, ring = call.geometry.window_size + q.shape[1] - 1, k.shape[1]
    if 4 * ring < 5 * seen:  # all of them: a copy costs more
        newest = call.lengths.long()[:, None] - 1
        return k, v, newest - (newest - torch.arange(ring, device=q.device)) % ring
    tokens = call.starts.long()[:, None] + torch.arange(
        1 - call.geometry.window_size, q.shape[1], device=q.device
    )
    sequence = torch.arange(len(q), device=q.device)[:, None]
    return k[sequence, tokens % ring], v[sequence, tokens % ring], tokens


def sel(
    q: Tensor,  # [B, m, Hq, Dk]
    k: Tensor,  # [P, page, G, Dk]
    v: Tensor,  # [P, page, G, Dv]
    blocks: Tensor,  # int32 or int64 [B, m, G, n]
    *,
    call: DecodeCall,
) -> tuple[Tensor, Tensor]:
    """o [B, m, Hq, Dv] and lse [B, Hq, m] over the chosen blocks, keys up to each query."""
    batch, rows, groups, n = blocks.shape
    size, operand = call.geometry.select_block_size, operand_dtype(q)
    o = q.new_empty((batch, groups, rows, q.shape[2] // groups, v.shape[-1]))
    lse = q.new_empty(o.shape[:-1], dtype=stats_dtype(q.dtype))
    grouped, last = _grouped(q, groups), positions(q, call)
    per_row = (
        batch * n * size * max(q.shape[2] * lse.itemsize, groups * (k.shape[-1] + v.shape[-1]) * 4)
    )
    run = max(1, engine.score_bytes(q) // max(1, per_row))
    group = torch.arange(groups, device=q.device)[:, None, None]
    with torch.profiler.record_function("nsa_sdpa.sel"), ieee_products(q):
        for first in range(0, rows, run):
            part = slice(first, min(first + run, rows))
            here = last[:, None, part, None]
            number, counted = distinct(
                blocks[:, part].transpose(1, 2), here.div(size, rounding_mode="floor")
            )
            number = number.where(counted, number[..., :1])  # the first counts, if any does
            # [B, G, r, n], last key of a block that the query sees
            seen = (here - number * size).clamp_(0, size - 1)
            page, row = _rows(k, number * size, call)
            inside = torch.arange(size, device=q.device)
            # A key that the query does not see is replaced by one that it does, so that an invalid
            # value is never multiplied.
            picked = torch.minimum(inside, seen[..., None]).mul_(groups)
            picked.add_(((page * k.shape[1] + row) * groups + group)[..., None])
            hidden = inside > seen.masked_fill(~counted, -1)[..., None]  # [B, G, r, n, l']
            keys, values = (_picked(x, picked).flatten(3, 4).to(operand) for x in (k, v))
            tile_o, tile_lse = engine.attend(
                grouped[:, :, part, None],
                keys,
                values,
                hidden.flatten(3, 4)[:, :, :, None, None],
                call.scale,
            )
            none = ~counted[..., 0, None, None]
            o[:, :, part], lse[:, :, part] = (
                tile_o[..., 0, :, :].masked_fill_(none, 0),
                tile_lse[..., 0, :],
            )
    return _out(o, lse, q)


def _picked(
    store: Tensor,  # [P, page, G, D]
    index: Tensor,  # int64 [...], (page, row, head) counted through
) -> Tensor:  # [..., D]
    """Rows of a store for each head, copied."""
    if store.is_contiguous():
        return (
            store.view(-1, store.shape[3]).index_select(0, index.flatten()).view(*index.shape, -1)
        )
    rest, head = index.div(store.shape[2], rounding_mode="floor"), index % store.shape[2]
    return store[rest.div(store.shape[1], rounding_mode="floor"), rest % store.shape[1], head]


def select(
    q: Tensor,  # [B, m, Hq, Dk]
    k_cmp: Tensor,  # [P, page / d, G, Dk]
    lse: Tensor,  # [B, Hq, m]
    *,
    call: DecodeCall,
) -> Tensor:
    """blocks int32 [B, m, G, n], ascending, -1 at the end."""
    rows = max(_LEAST_CHOOSING, _within_budget(q, columns(call.geometry, max(1, call.max_len))))
    with torch.profiler.record_function("nsa_sdpa.select"), ieee_products(q):
        parts = [
            _select_step(q[:, part], k_cmp, lse[..., part], of)
            for part, of in _steps(q, rows, call)
        ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _select_step(q: Tensor, k_cmp: Tensor, lse: Tensor, call: DecodeCall) -> Tensor:
    geometry, groups, longest = call.geometry, k_cmp.shape[2], max(1, call.max_len)
    index = (
        torch.arange(columns(geometry, longest), device=q.device) + geometry.overlap_taps()[0][0]
    )
    rows, last = _grouped(q, groups), positions(q, call)
    stats = lse.unflatten(1, (groups, -1)).transpose(2, 3)[..., None]  # [B, G, m, h, 1]
    p = lse.new_empty((*rows.shape[:-1], len(index)))
    for first in range(0, len(index), run := _run(q, len(index))):
        some = index[first : first + run]
        k = _heads_first(
            k_cmp[_rows(k_cmp, some.clamp(min=0).expand(len(q), -1), call)], None, rows.dtype
        )
        flat = product(rows.flatten(2, 3).flatten(0, 1), k.flatten(0, 1).transpose(1, 2))
        part = flat.view(*rows.shape[:-1], len(some)).mul_(call.scale).sub_(stats).exp_()
        ends = some * geometry.compress_stride + geometry.compress_block_size - 1
        hidden = (ends > last[..., None]) | (some < 0)
        p[..., first : first + run] = part.masked_fill_(hidden[:, None, :, None], 0)
    scores = head_sums(tap_sums(p, geometry, longest))  # [B, G, m, NB]
    blocks = choose(scores, last[:, None], geometry).transpose(1, 2)
    return blocks.masked_fill((last < 0)[..., None, None], -1).to(torch.int32)

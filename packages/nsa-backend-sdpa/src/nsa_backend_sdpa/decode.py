"""Decode forms: the newest queries of each sequence over keys that lie in a cache.

Keys are gathered in runs of a bounded number of tokens (cmp, win, select) or of queries (sel), so extra memory does
not grow with the cache, but for select's one row of probabilities per query and head. What a cache holds past a
sequence's last token is never multiplied: its values are taken as 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_backend_sdpa import engine
from nsa_backend_sdpa.engine import ieee_products, operand_dtype, product, stats_dtype
from nsa_backend_sdpa.sel import distinct
from nsa_backend_sdpa.select import choose, columns, head_sums, tap_sums
from nsa_core.contract import DecodeCall


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
    return max(1, min(keys, engine.MAX_KEYS, engine.score_bytes(q.device.type) // max(1, per_key)))


def cmp(
    q: Tensor,  # [B, m, Hq, Dk]
    k_cmp: Tensor,  # [P, page / d, G, Dk]
    v_cmp: Tensor,  # [P, page / d, G, Dv]
    *,
    call: DecodeCall,
) -> tuple[Tensor, Tensor]:
    """o [B, m, Hq, Dv] and lse [B, Hq, m] over the compressed tokens that each query sees."""
    geometry, operand = call.geometry, operand_dtype(q)
    rows, last = _grouped(q, k_cmp.shape[2]), positions(q, call)[:, None, :, None, None]
    count, total = geometry.num_compressed(call.max_len), None
    run = _run(q, max(1, count))
    with torch.profiler.record_function("nsa_sdpa.cmp"), ieee_products(q):
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
    operand, ring, total = operand_dtype(q), k.shape[1], None
    rows, last = _grouped(q, k.shape[2]), positions(q, call)[:, None, :, None, None]
    newest = call.lengths.long()[:, None] - 1
    run = _run(q, ring)
    with torch.profiler.record_function("nsa_sdpa.win"), ieee_products(q):
        for first in range(0, ring, run):
            part = slice(first, min(first + run, ring))
            token = newest - (newest - torch.arange(part.start, part.stop, device=q.device)) % ring
            owned = token >= 0
            keys, values = _heads_first(k[:, part], None, operand), _heads_first(v[:, part], owned, operand)
            token = token[:, None, None, None]
            hidden = (token > last) | (token <= last - call.geometry.window_size) | (token < 0)
            total = engine.merge(total, engine.attend(rows, keys, values, hidden, call.scale))
    assert total is not None
    return _out(*total, q)


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
    per_row = batch * n * size * max(q.shape[2] * lse.itemsize, groups * (k.shape[-1] + v.shape[-1]) * 4)
    run = max(1, engine.score_bytes(q.device.type) // max(1, per_row))
    with torch.profiler.record_function("nsa_sdpa.sel"), ieee_products(q):
        for first in range(0, rows, run):
            part = slice(first, min(first + run, rows))
            here = last[:, part, None, None]
            number, counted = distinct(blocks[:, part], here.div(size, rounding_mode="floor"))
            token = (number[..., None] * size + torch.arange(size, device=q.device)).flatten(3)  # [B, r, G, n*l']
            page, row = _rows(k, token, call)
            group = torch.arange(groups, device=q.device)[:, None]
            owned = token < call.lengths[:, None, None, None]
            keys = k[page, row, group].transpose(1, 2).to(operand)
            values = v[page, row, group].masked_fill(~owned[..., None], 0).transpose(1, 2).to(operand)
            hidden = (token > here) | ~counted.repeat_interleave(size, -1)
            hidden = hidden.transpose(1, 2)[:, :, :, None, None, :]
            got, got_lse = engine.attend(grouped[:, :, part, None], keys, values, hidden, call.scale)
            o[:, :, part], lse[:, :, part] = got[..., 0, :, :].to(o.dtype), got_lse[..., 0, :]
    return _out(o, lse, q)


def select(
    q: Tensor,  # [B, m, Hq, Dk]
    k_cmp: Tensor,  # [P, page / d, G, Dk]
    lse: Tensor,  # [B, Hq, m]
    *,
    call: DecodeCall,
) -> Tensor:
    """blocks int32 [B, m, G, n], ascending, -1 at the end."""
    geometry, groups, longest = call.geometry, k_cmp.shape[2], max(1, call.max_len)
    index = torch.arange(columns(geometry, longest), device=q.device) + geometry.overlap_taps()[0][0]
    rows, last = _grouped(q, groups), positions(q, call)
    stats = lse.unflatten(1, (groups, -1)).transpose(2, 3)[..., None]  # [B, G, m, h, 1]
    p = lse.new_empty((*rows.shape[:-1], len(index)))
    with torch.profiler.record_function("nsa_sdpa.select"), ieee_products(q):
        for first in range(0, len(index), run := _run(q, len(index))):
            some = index[first : first + run]
            k = _heads_first(k_cmp[_rows(k_cmp, some.clamp(min=0).expand(len(q), -1), call)], None, rows.dtype)
            flat = product(rows.flatten(2, 3).flatten(0, 1), k.flatten(0, 1).transpose(1, 2))
            part = flat.view(*rows.shape[:-1], len(some)).mul_(call.scale).sub_(stats).exp_()
            ends = some * geometry.compress_stride + geometry.compress_block_size - 1
            hidden = (ends > last[..., None]) | (some < 0)
            p[..., first : first + run] = part.masked_fill_(hidden[:, None, :, None], 0)
        scores = head_sums(tap_sums(p, geometry, longest))  # [B, G, m, NB]
        blocks = choose(scores, last[:, None], geometry).transpose(1, 2)
    return blocks.masked_fill((last < 0)[..., None, None], -1).to(torch.int32)

"""Decode forms: attention of the newest queries of each sequence over keys in a cache.

Long steps are split into chunks of queries, each handled like a step of its own, and the keys of
cmp, win and select are split into chunks of bounded size. Extra memory therefore grows neither with
the step nor with the cache, except for the probabilities of select, whose rows span the cache for a
few queries at a time.

The cache may hold any contents past the last token of a sequence. Products never use them: such
values are replaced by 0, or another key is read in their place.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from nsa_backend_sdpa import engine
from nsa_backend_sdpa.engine import ieee_products, operand_dtype, product
from nsa_backend_sdpa.sel import distinct
from nsa_backend_sdpa.select import choose, columns, head_sums, tap_sums
from nsa_core.contract import DecodeCall
from nsa_core.dtypes import as_bytes, stats_dtype

_MIN_ROWS = 64  # fewest queries of a chunk, even if their scores exceed the limit
_MIN_SELECT_ROWS = 16  # the same for select
_KEYS_PER_CHUNK = 1024  # keys whose scores must fit the limit for all queries of a chunk (cmp)

Form = TypeVar("Form", bound=Callable[..., Any])
_Rows = tuple[Tensor, Tensor]  # pages, and rows in them


def _in_fp32_if_quantized(form: Form) -> Form:
    """Decorate a decode form: products over quantized pages take fp32 operands (fp64 for fp64).

    16-bit operands would round the dequantized keys and values once more.
    """

    @functools.wraps(form)
    def run(q: Tensor, *tensors: Tensor, call: DecodeCall) -> Any:
        if call.scales is None or q.dtype == stats_dtype(q.dtype):
            return form(q, *tensors, call=call)
        results = form(q.to(stats_dtype(q.dtype)), *tensors, call=call)
        return (results[0].to(q.dtype), results[1]) if isinstance(results, tuple) else results

    return run  # type: ignore[return-value]


def _query_chunks(q: Tensor, rows: int, call: DecodeCall) -> Iterator[tuple[slice, DecodeCall]]:
    """Split q [B, m, ...] into chunks of at most ``rows`` queries.

    Yields:
        The slice of each chunk, and a call for it, as if later queries did not exist.
    """
    if q.shape[1] <= rows:
        yield slice(0, q.shape[1]), call
        return
    for first in range(0, q.shape[1], rows):
        end = min(first + rows, q.shape[1])
        starts, lengths = (torch.minimum(call.starts + n, call.lengths) for n in (first, end))
        yield slice(first, end), dataclasses.replace(call, starts=starts, lengths=lengths)


def _attend_by_chunks(
    attend: Callable[[Tensor, Tensor, Tensor, DecodeCall], tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: int,
    call: DecodeCall,
) -> tuple[Tensor, Tensor]:
    """Return o [B, m, Hq, Dv] and lse [B, Hq, m] of chunks of at most ``rows`` queries."""
    parts = [attend(q[:, n], k, v, part) for n, part in _query_chunks(q, rows, call)]
    if len(parts) == 1:
        return parts[0]
    return torch.cat([o for o, _ in parts], 1), torch.cat([lse for _, lse in parts], 2)


def _rows_in_budget(q: Tensor, keys: int) -> int:
    """Return how many rows of q [B, m, Hq, Dk] have scores over ``keys`` keys within the limit."""
    per_row = q.shape[0] * q.shape[2] * max(1, keys) * stats_dtype(q.dtype).itemsize
    return engine.score_bytes(q) // max(1, per_row)


def positions(q: Tensor, call: DecodeCall) -> Tensor:
    """Return the token of each query, int64 [B, m]; -1 for padding, which sees no key."""
    position = call.starts.long()[:, None]
    if q.shape[1] > 1:
        position = position + torch.arange(q.shape[1], device=q.device)
    return position.masked_fill(position >= call.lengths[:, None], -1)


def _page_rows(
    store: Tensor,  # [P, page, G, D]
    tokens: Tensor,  # int64 [B, ...], token of the sequence
    table: Tensor,  # int32 [B, columns]
) -> tuple[Tensor, Tensor]:
    """Return the page of each token and its row in the page.

    A token that is not in the cache gets an arbitrary row of the store.
    """
    size, columns = store.shape[1], table.shape[1]
    if columns == 1:
        page = table.long().view(-1, *(1,) * (tokens.dim() - 1)).expand_as(tokens)
    else:
        column = tokens.div(size, rounding_mode="floor") % columns
        page = table.long().gather(1, column.flatten(1)).view(column.shape)
    return page.clamp(0, store.shape[0] - 1), tokens % size


def _scales(call: DecodeCall, branch: str) -> tuple[Tensor | None, Tensor | None]:
    """Return the scales [P, G] of keys and of values; None if they are not quantized."""
    if call.scales is None:
        return None, None
    k, v = getattr(call.scales, branch).unbind(-1)
    return k, v


def _read(
    store: Tensor, rows: _Rows, scales: Tensor | None, present: Tensor | None, q: Tensor
) -> Tensor:
    """Return rows [B, L, G, D] as [B, G, L, D], dequantized, in the dtype of operands of ``q``.

    They are 0 where ``present`` [B, L] is False.
    """
    x = as_bytes(store)[rows].view(store.dtype).transpose(1, 2).to(operand_dtype(q))
    if scales is not None:
        x = x * scales[rows[0]].transpose(1, 2)[..., None]
    return x if present is None else x.masked_fill(~present[:, None, :, None], 0)


def _out(o: Tensor, lse: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Convert o [B, G, m, h, Dv] and lse [B, G, m, h] to the layouts of the contract."""
    o = o.transpose(1, 2).flatten(2, 3).to(q.dtype)
    return o.contiguous(), lse.transpose(2, 3).flatten(1, 2).contiguous()


def _grouped(q: Tensor, groups: int) -> Tensor:
    """Return q [B, m, Hq, Dk] as [B, G, m, h, Dk], in the dtype of product operands."""
    grouped: Tensor = q.unflatten(2, (groups, -1))
    return grouped.transpose(1, 2).to(operand_dtype(q))


def _chunk_size(q: Tensor, keys: int) -> int:
    """Return how many of ``keys`` keys make a chunk whose scores stay within the limit."""
    per_key = q.shape[:-1].numel() * stats_dtype(q.dtype).itemsize
    return max(1, min(keys, engine.MAX_KEYS, engine.score_bytes(q) // max(1, per_key)))


@_in_fp32_if_quantized
def cmp(
    q: Tensor,  # [B, m, Hq, Dk]
    k_cmp: Tensor,  # [P, page, G, Dk]
    v_cmp: Tensor,  # [P, page, G, Dv]
    *,
    call: DecodeCall,
) -> tuple[Tensor, Tensor]:
    """Return o [B, m, Hq, Dv] and lse [B, Hq, m] over the compressed tokens that queries see."""
    keys = min(_KEYS_PER_CHUNK, call.geometry.num_compressed(call.max_len))
    rows = max(_MIN_ROWS, _rows_in_budget(q, keys))
    with torch.profiler.record_function("nsa_sdpa.cmp"), ieee_products(q):
        return _attend_by_chunks(_cmp_chunk, q, k_cmp, v_cmp, rows, call)


def _cmp_chunk(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, call: DecodeCall) -> tuple[Tensor, Tensor]:
    geometry = call.geometry
    queries, last = _grouped(q, k_cmp.shape[2]), positions(q, call)[:, None, :, None, None]
    count, table, merged = geometry.num_compressed(call.max_len), call.table("cmp"), None
    k_scales, v_scales = _scales(call, "cmp")
    size = _chunk_size(q, max(1, count))
    for first in range(0, max(1, count), size):
        index = torch.arange(first, min(first + size, max(1, count)), device=q.device)
        # End of each compressed token's block, exclusive: the number of tokens it needs.
        ends = torch.add(geometry.compress_block_size, index, alpha=geometry.compress_stride)
        rows = _page_rows(k_cmp, index.expand(len(q), -1), table)
        present = ends <= call.lengths[:, None]
        k = _read(k_cmp, rows, k_scales, None, q)
        v = _read(v_cmp, rows, v_scales, present, q)
        merged = engine.merge(merged, engine.attend(queries, k, v, ends > last + 1, call.scale))
    assert merged is not None
    return _out(*merged, q)


@_in_fp32_if_quantized
def win(
    q: Tensor,  # [B, m, Hq, Dk]
    k: Tensor,  # [P, page, G, Dk]
    v: Tensor,  # [P, page, G, Dv]
    *,
    call: DecodeCall,
) -> tuple[Tensor, Tensor]:
    """Return o [B, m, Hq, Dv] and lse [B, Hq, m] over the last w tokens up to each query."""
    # A chunk of w / 4 queries sees 5/4 w keys, a quarter more than a single query.
    rows = max(_MIN_ROWS, call.geometry.window_size // 4)
    with torch.profiler.record_function("nsa_sdpa.win"), ieee_products(q):
        return _attend_by_chunks(_win_chunk, q, k, v, rows, call)


def _win_chunk(q: Tensor, k: Tensor, v: Tensor, call: DecodeCall) -> tuple[Tensor, Tensor]:
    merged, window = None, call.geometry.window_size
    queries, token = _grouped(q, k.shape[2]), positions(q, call)
    last, rows = token[:, None, :, None, None], q.shape[1]
    tokens = token[:, :1] + torch.arange(1 - window, rows, device=q.device)
    page, row = _page_rows(k, tokens, call.table("win"))
    k_scales, v_scales = _scales(call, "win")
    size = _chunk_size(q, tokens.shape[1])
    for first in range(0, tokens.shape[1], size):
        part = slice(first, min(first + size, tokens.shape[1]))
        token, at = tokens[:, part], (page[:, part], row[:, part])
        present = token >= 0
        if rows > 1:  # the tokens of a single query end at it
            present &= token < call.lengths[:, None]
        keys = _read(k, at, k_scales, None, q)
        values = _read(v, at, v_scales, present, q)
        token = token[:, None, None, None]
        hidden = token < 0
        if rows > 1:
            hidden = hidden | (token > last) | (token <= last - window)
        merged = engine.merge(merged, engine.attend(queries, keys, values, hidden, call.scale))
    assert merged is not None
    return _out(*merged, q)


@_in_fp32_if_quantized
def sel(
    q: Tensor,  # [B, m, Hq, Dk]
    k: Tensor,  # [P, page, G, Dk]
    v: Tensor,  # [P, page, G, Dv]
    blocks: Tensor,  # int32 or int64 [B, m, G, n]
    *,
    call: DecodeCall,
) -> tuple[Tensor, Tensor]:
    """Return o [B, m, Hq, Dv] and lse [B, Hq, m] over the selected blocks, up to each query."""
    batch, rows, groups, n = blocks.shape
    size, operand = call.geometry.select_block_size, operand_dtype(q)
    o = q.new_empty((batch, groups, rows, q.shape[2] // groups, v.shape[-1]))
    lse = q.new_empty(o.shape[:-1], dtype=stats_dtype(q.dtype))
    grouped, last, table = _grouped(q, groups), positions(q, call), call.table("sel")
    per_row = (
        batch * n * size * max(q.shape[2] * lse.itemsize, groups * (k.shape[-1] + v.shape[-1]) * 4)
    )
    chunk_rows = max(1, engine.score_bytes(q) // max(1, per_row))
    group = torch.arange(groups, device=q.device)[:, None, None]
    with torch.profiler.record_function("nsa_sdpa.sel"), ieee_products(q):
        for first in range(0, rows, chunk_rows):
            part = slice(first, min(first + chunk_rows, rows))
            token = last[:, None, part, None]
            block, valid = distinct(
                blocks[:, part].transpose(1, 2), token.div(size, rounding_mode="floor")
            )
            # Invalid entries read the first block, which is valid if any block is.
            first_key = block.where(valid, block[..., :1]) * size
            # Offset in the block of the last key that the query sees, [B, G, r, n].
            last_offset = (token - first_key).clamp_(0, size - 1)
            page, row = _page_rows(k, first_key, table)
            offset = torch.arange(size, device=q.device)
            # A hidden key is replaced by the last visible one, so that products never use invalid
            # contents of the cache.
            index = torch.minimum(offset, last_offset[..., None]).mul_(groups)
            index.add_(((page * k.shape[1] + row) * groups + group)[..., None])
            hidden = offset > last_offset.masked_fill(~valid, -1)[..., None]  # [B, G, r, n, l']
            keys, values = (_gathered(as_bytes(x), index).view(x.dtype).to(operand) for x in (k, v))
            if call.scales is not None:
                k_scales, v_scales = call.scales.sel[page, group, None].unbind(-1)
                keys, values = keys * k_scales[..., None], values * v_scales[..., None]
            keys, values = keys.flatten(3, 4), values.flatten(3, 4)
            tile_o, tile_lse = engine.attend(
                grouped[:, :, part, None],
                keys,
                values,
                hidden.flatten(3, 4)[:, :, :, None, None],
                call.scale,
            )
            no_block = ~valid[..., 0, None, None]
            o[:, :, part], lse[:, :, part] = (
                tile_o[..., 0, :, :].masked_fill_(no_block, 0),
                tile_lse[..., 0, :],
            )
    return _out(o, lse, q)


def _gathered(
    store: Tensor,  # [P, page, G, D]
    index: Tensor,  # int64 [...], flat index over (page, row, head)
) -> Tensor:  # [..., D]
    """Copy the vectors at ``index`` out of a store."""
    if store.is_contiguous():
        return (
            store.view(-1, store.shape[3]).index_select(0, index.flatten()).view(*index.shape, -1)
        )
    row, head = index.div(store.shape[2], rounding_mode="floor"), index % store.shape[2]
    return store[row.div(store.shape[1], rounding_mode="floor"), row % store.shape[1], head]


@_in_fp32_if_quantized
def select(
    q: Tensor,  # [B, m, Hq, Dk]
    k_cmp: Tensor,  # [P, page, G, Dk]
    lse: Tensor,  # [B, Hq, m]
    *,
    call: DecodeCall,
) -> Tensor:
    """Return blocks int32 [B, m, G, n], ascending, with -1 at the end."""
    keys = columns(call.geometry, max(1, call.max_len))
    rows = max(_MIN_SELECT_ROWS, _rows_in_budget(q, keys))
    with torch.profiler.record_function("nsa_sdpa.select"), ieee_products(q):
        parts = [
            _select_chunk(q[:, part], k_cmp, lse[..., part], part_call)
            for part, part_call in _query_chunks(q, rows, call)
        ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _select_chunk(q: Tensor, k_cmp: Tensor, lse: Tensor, call: DecodeCall) -> Tensor:
    geometry, groups, longest = call.geometry, k_cmp.shape[2], max(1, call.max_len)
    low = geometry.overlap_weights()[0][0]
    index = torch.arange(low, low + columns(geometry, longest), device=q.device)
    queries, last, table = _grouped(q, groups), positions(q, call), call.table("cmp")
    grouped_lse = lse.unflatten(1, (groups, -1)).transpose(2, 3)[..., None]  # [B, G, m, h, 1]
    p = lse.new_empty((*queries.shape[:-1], len(index)))
    for first in range(0, len(index), size := _chunk_size(q, len(index))):
        chunk = index[first : first + size]
        rows = _page_rows(k_cmp, chunk.clamp(min=0).expand(len(q), -1), table)
        k = _read(k_cmp, rows, _scales(call, "cmp")[0], None, q)
        flat = product(queries.flatten(2, 3).flatten(0, 1), k.flatten(0, 1).transpose(1, 2))
        part = flat.view(*queries.shape[:-1], len(chunk)).mul_(call.scale).sub_(grouped_lse).exp_()
        ends = chunk * geometry.compress_stride + geometry.compress_block_size - 1
        hidden = (ends > last[..., None]) | (chunk < 0)
        p[..., first : first + size] = part.masked_fill_(hidden[:, None, :, None], 0)
    scores = head_sums(tap_sums(p, geometry, longest))  # [B, G, m, NB]
    blocks = choose(scores, last[:, None], geometry).transpose(1, 2)
    return blocks.masked_fill((last < 0)[..., None, None], -1).to(torch.int32)

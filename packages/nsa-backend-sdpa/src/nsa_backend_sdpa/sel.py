"""The slot sel: every query attends to the blocks that were selected for its group.

k and v are copied once into blocks of l' rows per document ([NB, G, l' * D]). Chunks of queries
then gather n blocks each, so that extra memory is O(S) plus a bounded tile. The backward gathers
again and recomputes the scores. The gradients of k and v accumulate in fp32 (fp64) in a fixed
order. Keys after the last query, which no query sees, are cut off first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_backend_sdpa import engine
from nsa_backend_sdpa.device import chunks, device_type
from nsa_backend_sdpa.engine import ieee_products, operand_dtype
from nsa_backend_sdpa.tiles import Tiles, as_rows, from_rows, gather, make_tiles, widened
from nsa_core.contract import SlotCall
from nsa_core.dtypes import stats_dtype
from nsa_core.packing import token_positions


class _QueryChunk(NamedTuple):
    """A chunk of t queries, and the blocks that they see."""

    rows: slice
    block: Tensor  # int64 [t * G * n], row of the [NB * G, l' * D] layout
    hidden: Tensor  # bool [t * G, 1, 1, n * l']


def _visible(q: Tensor, k: Tensor, call: SlotCall) -> tuple[slice, Tiles]:
    """Return the rows of the keys that queries may see, and these rows as blocks.

    Boundaries may lie after these rows, because tiles clamp rows. A block has l' rows, but at most
    those rows: a longer block has no other key.
    """
    visible = slice(call.first_query + q.shape[-3])
    k = k[..., visible, :, :]
    size = min(call.geometry.select_block_size, max(1, k.shape[-3]))
    return visible, make_tiles(k, size, dataclasses.replace(call, first_query=0))


def _positions(q: Tensor, tiles: Tiles, call: SlotCall) -> tuple[Tensor, Tensor]:
    """Return each query's position in its document, and its document's first tile, int64 [T]."""
    if call.cu_seqlens is None:
        row = torch.arange(q.shape[0] * q.shape[1], device=q.device)
        document = row // q.shape[1]
        position = row - document * q.shape[1]
        if call.first_query:
            position += call.first_query
        return position, tiles.offsets[document]
    positions = token_positions(call.cu_seqlens, len(q), call.first_query)
    return positions.position, tiles.offsets[positions.document]


def distinct(blocks: Tensor, current: Tensor) -> tuple[Tensor, Tensor]:
    """Sort block indices [..., n], and mark the valid ones.

    Args:
        blocks: Block indices of each query, in any order.
        current: The block of the query itself, broadcast against ``blocks``.

    Returns:
        The indices in ascending order, with 0 for invalid ones, and a mask of the valid ones. An
        index is valid if it is in range, not in the future, and not a duplicate.
    """
    invalid = torch.iinfo(torch.int64).max
    blocks = blocks.long()
    blocks = blocks.masked_fill((blocks < 0) | (blocks > current), invalid).sort(dim=-1).values
    valid = blocks != invalid
    valid[..., 1:] &= blocks[..., 1:] != blocks[..., :-1]
    return blocks.masked_fill_(~valid, 0), valid


def _query_chunks(
    q: Tensor, blocks: Tensor, tiles: Tiles, width: int, call: SlotCall
) -> Iterator[_QueryChunk]:
    """Yield chunks of queries with the blocks that they see.

    The scores and the gathered keys and values of a chunk each stay within the limit of one tile of
    scores. ``tiles`` are the blocks, and ``width`` is Dk + Dv.
    """
    groups, n = blocks.shape[-2:]
    stats, operand = stats_dtype(q.dtype).itemsize, operand_dtype(q).itemsize
    size, per_key = tiles.size, max(q.shape[-2] * stats, groups * width * operand)
    count = max(1, engine.score_bytes(q) // (n * size * per_key))
    position, first_tile = _positions(q, tiles, call)
    offset = torch.arange(size, device=q.device)
    head = torch.arange(groups, device=q.device)[:, None]
    for rows in chunks(len(position), count):
        token = position[rows][:, None, None]
        index, valid = distinct(blocks[rows], token // size)
        block = (first_tile[rows][:, None, None] + index).clamp_(0, len(tiles) - 1) * groups + head
        hidden = (offset > (token - index * size)[..., None]).logical_or_(~valid[..., None])
        yield _QueryChunk(rows, block.flatten(), hidden.view(-1, 1, 1, n * size))


def _in_blocks(x: Tensor, tiles: Tiles) -> Tensor:
    """Return rows [T, G, D] as [NB * G, l' * D]; partial blocks repeat the document's last row."""
    rows = tiles.clamp(tiles.rows()[0])
    return gather(x, rows, operand_dtype(x)).transpose(0, 1).reshape(len(tiles) * x.shape[1], -1)


def _from_blocks(grad: Tensor, tiles: Tiles, x: Tensor, packed: bool) -> Tensor:
    """Return the gradient of ``x``, rounded once; the inverse of :func:`_in_blocks`."""
    rows = torch.empty((tiles.total + 1, *x.shape[-2:]), dtype=x.dtype, device=x.device)
    values = (
        grad.to(x.dtype).view(len(tiles), x.shape[-2], tiles.size, -1).transpose(1, 2).flatten(0, 1)
    )
    rows.index_copy_(0, tiles.targets(), values)
    return from_rows(rows[:-1], x, packed)


def forward(
    q: Tensor,  # [B, S, Hq, Dk], packed [T, Hq, Dk]
    k: Tensor,  # [B, S, G, Dk]
    v: Tensor,  # [B, S, G, Dv]
    blocks: Tensor,  # int32 or int64 [B, S, G, n]
    *,
    call: SlotCall,
) -> tuple[Tensor, Tensor]:
    """Return o [B, S, Hq, Dv] and lse [B, Hq, S] (packed [T, Hq, Dv] and [Hq, T])."""
    with torch.profiler.record_function("nsa_sdpa.sel"), ieee_products(q):
        packed, groups = call.cu_seqlens is not None, k.shape[-2]
        visible, tiles = _visible(q, k, call)
        k, v = k[..., visible, :, :], v[..., visible, :, :]
        rows_q = as_rows(q, packed).unflatten(1, (groups, 1, -1))  # [T, G, 1, h, Dk]
        o = q.new_empty((*rows_q.shape[:-1], v.shape[-1]))
        lse = q.new_empty(rows_q.shape[:-1], dtype=stats_dtype(q.dtype))
        keys, values = (_in_blocks(as_rows(x, packed), tiles) for x in (k, v))
        width = k.shape[-1] + v.shape[-1]
        for chunk in _query_chunks(q, as_rows(blocks, packed), tiles, width, call):
            tile_q = _tile(rows_q, chunk, operand_dtype(q))
            tile_k, tile_v = _gathered(keys, chunk), _gathered(values, chunk)
            tile_o, tile_lse = engine.attend(tile_q, tile_k, tile_v, chunk.hidden, call.scale)
            o[chunk.rows] = tile_o.view(-1, *o.shape[1:])
            lse[chunk.rows] = tile_lse.view(-1, *lse.shape[1:])
            del chunk, tile_q, tile_k, tile_v, tile_o, tile_lse  # before the next chunk
        lse_rows = from_rows(lse.flatten(1), q, packed)
        return from_rows(o.flatten(1, 3), q, packed), lse_rows.transpose(-1, -2).contiguous()


def _tile(rows: Tensor, chunk: _QueryChunk, dtype: torch.dtype) -> Tensor:
    """Return the chunk's rows of [T, G, 1, h, D] as [t * G, 1, h, D]."""
    return rows[chunk.rows].flatten(0, 1).to(dtype)


def _gathered(blocks: Tensor, chunk: _QueryChunk) -> Tensor:
    """Gather the chunk's blocks from [NB * G, l' * D], as [t * G, n * l', D]."""
    return blocks.index_select(0, chunk.block).view(len(chunk.hidden), chunk.hidden.shape[-1], -1)


def backward(
    do: Tensor,  # [B, S, Hq, Dv]
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    o: Tensor,
    lse: Tensor,
    *,
    call: SlotCall,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv, shaped like q, k and v."""
    with torch.profiler.record_function("nsa_sdpa.sel_backward"), ieee_products(q):
        packed, groups, stats = call.cu_seqlens is not None, k.shape[-2], stats_dtype(q.dtype)
        visible, tiles = _visible(q, k, call)
        whole_k, whole_v = k, v
        k, v = k[..., visible, :, :], v[..., visible, :, :]
        rows = [
            as_rows(x, packed).unflatten(1, (groups, 1, -1))
            for x in (do, q, o, lse.transpose(-1, -2))
        ]
        keys, values = (_in_blocks(as_rows(x, packed), tiles) for x in (k, v))
        dk, dv = (torch.zeros(x.shape, dtype=stats, device=x.device) for x in (keys, values))
        dq = torch.empty(rows[1].shape, dtype=q.dtype, device=q.device)
        width = k.shape[-1] + v.shape[-1]
        operand = operand_dtype(q)
        for chunk in _query_chunks(q, as_rows(blocks, packed), tiles, width, call):
            tile_do, tile_q, tile_o = (_tile(x, chunk, operand) for x in rows[:3])
            delta = (tile_do.to(stats) * tile_o).sum(-1)
            tile_lse = _tile(rows[3], chunk, stats)
            tile_k, tile_v = _gathered(keys, chunk), _gathered(values, chunk)
            grads = engine.attend_backward(
                tile_do, delta, tile_q, tile_k, tile_v, tile_lse, chunk.hidden, call.scale
            )
            del tile_k, tile_v
            dq[chunk.rows] = grads[0].view(-1, *dq.shape[1:])
            _add(dk, chunk.block, grads[1])
            _add(dv, chunk.block, grads[2])
            del chunk, tile_do, tile_q, tile_o, delta, tile_lse, grads  # before the next chunk
        del keys, values
        d_q = from_rows(dq.flatten(1, 3), q, packed)
        d_k, d_v = _from_blocks(dk, tiles, k, packed), _from_blocks(dv, tiles, v, packed)
        return d_q, widened(d_k, whole_k, visible), widened(d_v, whole_v, visible)


def _add(total: Tensor, index: Tensor, grads: Tensor) -> None:
    """Add [t * G, n * l', D] to ``total`` [NB * G, l' * D] at the rows ``index``, in a fixed order.

    On CUDA, index_add_ uses atomics, whose order varies; index_put_ sorts instead.
    """
    rows = grads.view(len(index), -1)
    if device_type(total) == "cuda":
        total.index_put_((index,), rows, accumulate=True)
    else:
        total.index_add_(0, index, rows)

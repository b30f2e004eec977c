"""The selected branch: every query gathers the blocks chosen for its group and attends to them.

K and V are laid out once as blocks of l' rows per document ([NB, G, l'*D]); then runs of queries
gather n blocks each, so extra memory is O(S) plus a bounded tile. Backward gathers again and
recomputes. Gradients of k and v are added in fp32 (fp64) in a fixed order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_backend_sdpa import engine
from nsa_backend_sdpa.device import device_type, pieces
from nsa_backend_sdpa.engine import ieee_products, operand_dtype, stats_dtype
from nsa_backend_sdpa.tiles import Tiles, as_rows, from_rows, gather, make_tiles
from nsa_core.contract import SlotCall
from nsa_core.packing import token_places


class _Picked(NamedTuple):
    """Some queries and the blocks they see."""

    rows: slice
    block: Tensor  # int64 [t * G * n], row of the [NB * G, l' * D] layout
    hidden: Tensor  # bool [t * G, 1, 1, n * l']


def _places(q: Tensor, tiles: Tiles, call: SlotCall) -> tuple[Tensor, Tensor]:
    """For each row: its position in its document, and the tile its document starts with; int64
    [T].
    """
    if call.cu_seqlens is None:
        row = torch.arange(tiles.total, device=q.device)
        document = row // q.shape[1]
        return row - document * q.shape[1], tiles.offsets[document]
    places = token_places(call.cu_seqlens, tiles.total)
    return places.position, tiles.offsets[places.document]


def distinct(blocks: Tensor, current: Tensor) -> tuple[Tensor, Tensor]:
    """Block numbers [..., n] made ascending, and which of them count: in range, not in the future,
    once.
    """
    beyond = torch.iinfo(torch.int64).max
    blocks = blocks.long()
    blocks = blocks.masked_fill((blocks < 0) | (blocks > current), beyond).sort(dim=-1).values
    counted = blocks != beyond
    counted[..., 1:] &= blocks[..., 1:] != blocks[..., :-1]
    return blocks.masked_fill_(~counted, 0), counted


def queries_per_run(
    heads: int, groups: int, keys: int, width: int, stats: int, operand: int, budget: int
) -> int:
    """How many queries keep both the scores and the gathered keys (``width`` = Dk + Dv) of a run
    within ``budget``.
    """
    return max(1, budget // (keys * max(heads * stats, groups * width * operand)))


def _pick(q: Tensor, blocks: Tensor, tiles: Tiles, width: int, call: SlotCall) -> Iterator[_Picked]:
    """Runs of queries with the blocks that they see."""
    groups, n = blocks.shape[-2:]
    stats, operand = stats_dtype(q.dtype).itemsize, operand_dtype(q).itemsize
    budget, size = engine.score_bytes(q), tiles.size
    count = queries_per_run(q.shape[-2], groups, n * size, width, stats, operand, budget)
    position, offset = _places(q, tiles, call)
    inside = torch.arange(size, device=q.device)
    head = torch.arange(groups, device=q.device)[:, None]
    for rows in pieces(tiles.total, count):
        here = position[rows][:, None, None]
        number, counted = distinct(blocks[rows], here // size)
        block = (offset[rows][:, None, None] + number).clamp_(0, len(tiles) - 1) * groups + head
        hidden = (inside > (here - number * size)[..., None]).logical_or_(~counted[..., None])
        yield _Picked(rows, block.flatten(), hidden.view(-1, 1, 1, n * size))


def _in_blocks(x: Tensor, tiles: Tiles) -> Tensor:
    """Rows [T, G, D] as [NB * G, l' * D]; places past a document's end repeat its last row."""
    places = tiles.clamp(tiles.rows()[0])
    return gather(x, places, operand_dtype(x)).transpose(0, 1).reshape(len(tiles) * x.shape[1], -1)


def _from_blocks(grad: Tensor, tiles: Tiles, x: Tensor, packed: bool) -> Tensor:
    """Inverse of :func:`_in_blocks` for the gradient of ``x``, rounded once."""
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
    """o [B, S, Hq, Dv] and lse [B, Hq, S] (packed [T, Hq, Dv] and [Hq, T])."""
    with torch.profiler.record_function("nsa_sdpa.sel"), ieee_products(q):
        packed, groups = call.cu_seqlens is not None, k.shape[-2]
        tiles = make_tiles(q, call.geometry.select_block_size, call)
        rows_q = as_rows(q, packed).unflatten(1, (groups, 1, -1))  # [T, G, 1, h, Dk]
        o = q.new_empty((tiles.total, *rows_q.shape[1:-1], v.shape[-1]))
        lse = q.new_empty(rows_q.shape[:-1], dtype=stats_dtype(q.dtype))
        keys, values = (_in_blocks(as_rows(x, packed), tiles) for x in (k, v))
        for run in _pick(q, as_rows(blocks, packed), tiles, k.shape[-1] + v.shape[-1], call):
            _forward_run(rows_q, keys, values, o, lse, run, call.scale)
        lse_rows = from_rows(lse.flatten(1), q, packed)
        return from_rows(o.flatten(1, 3), q, packed), lse_rows.transpose(-1, -2).contiguous()


def _tile(rows: Tensor, run: _Picked, dtype: torch.dtype) -> Tensor:
    """Rows [T, G, 1, h, D] of the run as [t * G, 1, h, D]."""
    return rows[run.rows].flatten(0, 1).to(dtype)


def _seen(blocks: Tensor, run: _Picked) -> Tensor:
    """The run's blocks gathered from [NB * G, l' * D]: [t * G, n * l', D]."""
    return blocks.index_select(0, run.block).view(len(run.hidden), run.hidden.shape[-1], -1)


def _forward_run(
    q: Tensor, keys: Tensor, values: Tensor, o: Tensor, lse: Tensor, run: _Picked, scale: float
) -> None:
    """Store the run's rows of o [T, G, 1, h, Dv] and lse [T, G, 1, h]."""
    tile = _tile(q, run, operand_dtype(q))
    tile_o, tile_lse = engine.attend(tile, _seen(keys, run), _seen(values, run), run.hidden, scale)
    o[run.rows] = tile_o.view(-1, *o.shape[1:])
    lse[run.rows] = tile_lse.view(-1, *lse.shape[1:])


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
    """dq, dk, dv in the shapes of q, k, v."""
    with torch.profiler.record_function("nsa_sdpa.sel_backward"), ieee_products(q):
        packed, groups, stats = call.cu_seqlens is not None, k.shape[-2], stats_dtype(q.dtype)
        tiles = make_tiles(q, call.geometry.select_block_size, call)
        rows = [
            as_rows(x, packed).unflatten(1, (groups, 1, -1))
            for x in (do, q, o, lse.transpose(-1, -2))
        ]
        keys, values = (_in_blocks(as_rows(x, packed), tiles) for x in (k, v))
        dk, dv = (torch.zeros(x.shape, dtype=stats, device=x.device) for x in (keys, values))
        dq = torch.empty(rows[1].shape, dtype=q.dtype, device=q.device)
        for run in _pick(q, as_rows(blocks, packed), tiles, k.shape[-1] + v.shape[-1], call):
            _backward_run(rows, keys, values, [dq, dk, dv], run, call.scale)
        del keys, values
        d_q = from_rows(dq.flatten(1, 3), q, packed)
        return d_q, _from_blocks(dk, tiles, k, packed), _from_blocks(dv, tiles, v, packed)


def _backward_run(
    rows: list[Tensor],
    keys: Tensor,
    values: Tensor,
    grads: list[Tensor],
    run: _Picked,
    scale: float,
) -> None:
    """Store the run's rows of dq [T, G, 1, h, Dk]; add to dk, dv [NB * G, l' * D]."""
    operand, stats = operand_dtype(rows[1]), stats_dtype(rows[1].dtype)
    do, q, lse = (
        _tile(rows[0], run, operand),
        _tile(rows[1], run, operand),
        _tile(rows[3], run, stats),
    )
    delta = (do.to(stats) * _tile(rows[2], run, operand)).sum(-1)
    seen_k, seen_v = _seen(keys, run), _seen(values, run)
    dq, dk, dv = engine.attend_backward(do, delta, q, seen_k, seen_v, lse, run.hidden, scale)
    del seen_k, seen_v
    grads[0][run.rows] = dq.view(-1, *grads[0].shape[1:])
    _add(grads[1], run.block, dk)
    _add(grads[2], run.block, dv)


def _add(total: Tensor, index: Tensor, grads: Tensor) -> None:
    """Add [t * G, n * l', D] to the blocks [NB * G, l' * D] that ``index`` names, in a fixed order.

    On CUDA index_add_ adds with atomics; index_put_ sorts.
    """
    rows = grads.view(len(index), -1)
    if device_type(total) == "cuda":
        total.index_put_((index,), rows, accumulate=True)
    else:
        total.index_add_(0, index, rows)

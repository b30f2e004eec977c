"""The selected branch: every query gathers the blocks chosen for its group and attends to them.

K and V are laid out once as blocks of l' rows per document ([NB, G, l'*D]); then runs of queries gather n blocks each,
so extra memory is O(S) plus a bounded tile. Backward gathers again and recomputes. Gradients of k and v are added in
fp32 (fp64) in a fixed order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_backend_sdpa import engine
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
    """For each row: its position in its document, and the tile its document starts with; int64 [T]."""
    if call.cu_seqlens is None:
        row = torch.arange(tiles.total, device=q.device)
        document = row // q.shape[1]
        return row - document * q.shape[1], tiles.offsets[document]
    places = token_places(call.cu_seqlens, tiles.total)
    return places.position, tiles.offsets[places.document]


def _distinct(blocks: Tensor, current: Tensor) -> tuple[Tensor, Tensor]:
    """Block numbers [..., n] made ascending, and which of them count: in range, not in the future, once."""
    beyond = torch.iinfo(torch.int64).max
    blocks = blocks.long()
    blocks = blocks.masked_fill((blocks < 0) | (blocks > current), beyond).sort(dim=-1).values
    counted = blocks != beyond
    counted[..., 1:] &= blocks[..., 1:] != blocks[..., :-1]
    return blocks.masked_fill_(~counted, 0), counted


def _pick(q: Tensor, blocks: Tensor, tiles: Tiles, width: int, call: SlotCall) -> Iterator[_Picked]:
    """Runs of queries whose gathered keys (``width`` = Dk + Dv) and scores are bounded."""
    groups, n = blocks.shape[-2:]
    stats, size = stats_dtype(q.dtype).itemsize, tiles.size
    per_query = n * size * max(q.shape[-2] * stats, groups * width * operand_dtype(q).itemsize)
    count = max(1, engine.score_bytes(q.device.type) // per_query)
    position, offset = _places(q, tiles, call)
    inside = torch.arange(size, device=q.device)
    head = torch.arange(groups, device=q.device)[:, None]
    for a in range(0, tiles.total, count):
        rows = slice(a, min(a + count, tiles.total))
        here = position[rows][:, None, None]
        number, counted = _distinct(blocks[rows], here // size)
        index = (offset[rows][:, None, None] + number).clamp_(0, len(tiles) - 1) * groups + head
        hidden = (number[..., None] * size + inside > here[..., None]) | ~counted[..., None]
        yield _Picked(rows, index.flatten(), hidden.view(-1, 1, 1, n * size))


def _in_blocks(x: Tensor, tiles: Tiles) -> Tensor:
    """Rows [T, G, D] as [NB * G, l' * D]; places past a document's end repeat its last row."""
    places = tiles.clamp(tiles.rows()[0])
    return gather(x, places, operand_dtype(x)).transpose(0, 1).reshape(len(tiles) * x.shape[1], -1)


def _from_blocks(grad: Tensor, tiles: Tiles, x: Tensor, packed: bool) -> Tensor:
    """Inverse of :func:`_in_blocks` for gradients, rounded once."""
    groups, width = x.shape[-2:]
    rows = torch.empty((tiles.total + 1, groups, width), dtype=x.dtype, device=x.device)
    values = grad.view(len(tiles), groups, tiles.size, width).transpose(1, 2).flatten(0, 1)
    rows.index_copy_(0, tiles.targets(), values.to(x.dtype))
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
        keys, values = (_in_blocks(as_rows(x, packed), tiles) for x in (k, v))
        o = q.new_empty((*q.shape[:-1], v.shape[-1]))
        lse = q.new_empty(q.shape[:-1], dtype=stats_dtype(q.dtype))
        rows_o, rows_lse = as_rows(o, packed), as_rows(lse, packed)
        for run in _pick(q, as_rows(blocks, packed), tiles, k.shape[-1] + v.shape[-1], call):
            tile_q = rows_q[run.rows].flatten(0, 1).to(operand_dtype(q))
            shape = (len(tile_q), run.hidden.shape[-1], -1)
            tile_o, tile_lse = engine.attend(
                tile_q, keys.index_select(0, run.block).view(shape), values.index_select(0, run.block).view(shape),
                run.hidden, call.scale,
            )  # fmt: skip
            rows_o[run.rows] = tile_o.view(rows_o[run.rows].shape)
            rows_lse[run.rows] = tile_lse.view(rows_lse[run.rows].shape)
        return o, lse.transpose(-1, -2).contiguous()


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
        packed, groups, operand, stats = (
            call.cu_seqlens is not None,
            k.shape[-2],
            operand_dtype(q),
            stats_dtype(q.dtype),
        )
        tiles = make_tiles(q, call.geometry.select_block_size, call)
        rows_do, rows_q, rows_o = (as_rows(x, packed).unflatten(1, (groups, 1, -1)) for x in (do, q, o))
        rows_lse = as_rows(lse.transpose(-1, -2), packed).unflatten(1, (groups, 1, -1))
        keys, values = (_in_blocks(as_rows(x, packed), tiles) for x in (k, v))
        dk, dv = (torch.zeros(x.shape, dtype=stats, device=x.device) for x in (keys, values))
        dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        rows_dq = as_rows(dq, packed)
        for run in _pick(q, as_rows(blocks, packed), tiles, k.shape[-1] + v.shape[-1], call):
            tile_do, tile_q = (x[run.rows].flatten(0, 1).to(operand) for x in (rows_do, rows_q))
            delta = (tile_do.to(stats) * rows_o[run.rows].flatten(0, 1)).sum(-1)
            shape = (len(tile_q), run.hidden.shape[-1], -1)
            grads = engine.attend_backward(
                tile_do, delta, tile_q, keys.index_select(0, run.block).view(shape),
                values.index_select(0, run.block).view(shape), rows_lse[run.rows].flatten(0, 1), run.hidden,
                call.scale,
            )  # fmt: skip
            rows_dq[run.rows] = grads[0].view(rows_dq[run.rows].shape)
            _add(dk, run.block, grads[1])
            _add(dv, run.block, grads[2])
        return dq, _from_blocks(dk, tiles, k, packed), _from_blocks(dv, tiles, v, packed)


def _add(total: Tensor, index: Tensor, grads: Tensor) -> None:
    """Add [t * G, n * l', D] to the blocks [NB * G, l' * D] that ``index`` names, in a fixed order.

    On CUDA index_add_ adds with atomics; index_put_ sorts.
    """
    rows = grads.view(len(index), -1)
    if total.device.type == "cuda":
        total.index_put_((index,), rows, accumulate=True)
    else:
        total.index_add_(0, index, rows)

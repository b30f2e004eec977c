"""Choice of blocks from the probabilities of the compressed branch (Eq. 8 to 12).

    p[h,t,i] = exp(scale * q.k_cmp[i] - lse)        score[t,j] = sum over heads of sum over taps of weight * p

per tile of queries of one document, so that no tensor of tokens times blocks exists. Taps are added in ascending i,
then heads in ascending order; a stable sort gives equal scores to the lower index.
"""

from __future__ import annotations

import torch
from nsa_core.contract import SlotCall
from nsa_core.layout import BlockGeometry
from nsa_core.packing import compressed_cu_seqlens
from torch import Tensor

from nsa_backend_sdpa import engine
from nsa_backend_sdpa.engine import ieee_products, operand_dtype, product, stats_dtype
from nsa_backend_sdpa.tiles import Tiles, as_rows, from_rows, gather, make_tiles, store

_TILE = 64


def forward(
    q: Tensor,  # [B, S, Hq, Dk], packed [T, Hq, Dk]
    k_cmp: Tensor,  # [B, n_c, G, Dk], packed [T // d, G, Dk]
    lse: Tensor,  # [B, Hq, S], packed [Hq, T]
    *,
    call: SlotCall,
) -> Tensor:
    """blocks int32 [B, S, G, n] (packed [T, G, n]), ascending, -1 at the end."""
    with torch.profiler.record_function("nsa_sdpa.select"), ieee_products(q):
        packed, geometry = call.cu_seqlens is not None, call.geometry
        groups, heads = k_cmp.shape[-2], q.shape[-2] // k_cmp.shape[-2]
        tiles, first_cmp = make_tiles(q, _TILE, call), _first_compressed(k_cmp, call)
        rows_q = as_rows(q, packed).unflatten(1, (groups, -1))
        rows_lse = as_rows(lse.transpose(-1, -2), packed).unflatten(1, (groups, -1))
        rows_k = as_rows(k_cmp, packed)
        blocks = torch.empty(
            (tiles.total + 1, groups, geometry.num_selected_blocks), dtype=torch.int32, device=q.device
        )
        columns = max(1, geometry.num_select_blocks(tiles.longest) * geometry.select_block_size)
        columns //= geometry.compress_stride
        unit = _TILE * heads * columns * stats_dtype(q.dtype).itemsize
        together = max(1, engine.score_bytes(q.device.type) // unit)
        per_group = min(groups, together)
        for step in tiles.split(max(1, together // groups)):
            queries = step.clamp(step.rows()[0])
            position = queries - step.start[:, None]
            for g in range(0, groups, per_group):
                part = slice(g, g + per_group)
                p = _probabilities(rows_q[:, part], rows_k[:, part], rows_lse[:, part], queries, position, step,
                                   first_cmp, call)  # fmt: skip
                chosen = choose(block_scores(p, geometry, geometry.num_select_blocks(step.longest)), position, geometry)
                store(blocks[:, part], step.targets(), chosen)
        return from_rows(blocks[:-1], q, packed)


def _first_compressed(k_cmp: Tensor, call: SlotCall) -> Tensor:
    """First compressed row of each document, int64 [documents]."""
    if call.cu_seqlens is None:
        return torch.arange(k_cmp.shape[0], device=k_cmp.device) * k_cmp.shape[1]
    return compressed_cu_seqlens(call.cu_seqlens, call.geometry)[:-1].long()


def _probabilities(
    rows_q: Tensor,  # [T, G, h, Dk]
    rows_k: Tensor,  # [R, G, Dk]
    rows_lse: Tensor,  # [T, G, h]
    queries: Tensor,  # [tiles, c] rows
    position: Tensor,  # [tiles, c] of those rows in their document
    step: Tiles,
    first_cmp: Tensor,  # [documents]
    call: SlotCall,
) -> Tensor:  # [G, tiles, c, h, C]
    """Eq. 8 over the C compressed tokens that any query of the step can see; exactly 0 where this one cannot."""
    geometry, operand = call.geometry, operand_dtype(rows_q)
    index = torch.arange(geometry.num_compressed(step.longest), device=rows_q.device)
    keys = (first_cmp[step.document][:, None] + index).clamp_(0, max(0, len(rows_k) - 1))
    q, k = gather(rows_q, queries, operand), gather(rows_k, keys, operand)
    s = product(q.flatten(2, 3).flatten(0, 1), k.flatten(0, 1).transpose(1, 2)).view(*q.shape[:-1], len(index))
    p = s.mul_(call.scale).sub_(gather(rows_lse, queries, s.dtype).unsqueeze(-1)).exp_()
    last = index * geometry.compress_stride + geometry.compress_block_size - 1
    return p.masked_fill_((last > position[..., None]).unsqueeze(2), 0)


def block_scores(
    p: Tensor,  # [..., h, C]
    geometry: BlockGeometry,
    count: int,
) -> Tensor:  # [..., count]
    """Group scores (Eq. 9 and 10) of the first ``count`` selection blocks."""
    taps, step = geometry.overlap_taps(), geometry.select_block_size // geometry.compress_stride
    before = -taps[0][0]
    padded = torch.nn.functional.pad(p, (before, count * step - p.shape[-1]))
    total: Tensor | None = None
    for tap, weight in taps:
        column = padded[..., tap + before :: step][..., :count]
        total = column * weight if total is None else total.add_(column, alpha=weight)
    assert total is not None
    score = total[..., 0, :].clone()
    for head in range(1, total.shape[-2]):
        score += total[..., head, :]
    return score


def choose(
    score: Tensor,  # [..., NB]
    position: Tensor,  # [...] of the query in its document, broadcast against score's leading axes
    geometry: BlockGeometry,
) -> Tensor:  # int64 [..., n]
    """The forced blocks and the best others, min(n, candidates) of them, ascending, -1 at the end."""
    count, n = score.shape[-1], geometry.num_selected_blocks
    current = (position // geometry.select_block_size)[..., None]
    block = torch.arange(count, device=score.device)
    forced = (block < geometry.init_blocks) | (block > current - geometry.local_blocks)
    rank = score.masked_fill(score.isnan(), -1.0)  # below every score, which is >= 0, above what is no candidate
    rank = rank.masked_fill_(forced, torch.inf).masked_fill_(block > current, -torch.inf)
    best = rank.sort(dim=-1, descending=True, stable=True).indices[..., :n]
    taken = torch.arange(best.shape[-1], device=score.device) <= current
    best = best.masked_fill_(~taken, count).sort(dim=-1).values
    best = best.masked_fill_(best == count, -1)
    return torch.nn.functional.pad(best, (0, n - best.shape[-1]), value=-1)

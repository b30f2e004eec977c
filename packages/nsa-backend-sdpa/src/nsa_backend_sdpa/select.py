"""The slot select: choose blocks from the probabilities of the compressed branch (Eq. 8 to 12).

    p[h,t,i]   = exp(scale * q[h,t] . k_cmp[i] - lse[h,t])
    score[t,j] = sum over h in the group and over i of weight(i, j) * p[h,t,i]

Scores are computed per tile of queries of one document, so that no tensor of size tokens times
blocks exists. Terms are added in ascending order of i, then heads in ascending order. The sort is
stable: among equal scores, the lower block index comes first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_backend_sdpa import engine
from nsa_backend_sdpa.device import chunks
from nsa_backend_sdpa.engine import ieee_products, operand_dtype, product
from nsa_backend_sdpa.tiles import Tiles, as_rows, from_rows, gather, make_tiles, scatter
from nsa_core.contract import SlotCall
from nsa_core.dtypes import stats_dtype
from nsa_core.layout import BlockGeometry
from nsa_core.packing import compressed_cu_seqlens


def columns(geometry: BlockGeometry, longest: int) -> int:
    """Return how many compressed tokens overlap the selection blocks of ``longest`` tokens.

    The count includes the nonexistent ones before compressed token 0 that would overlap block 0.
    """
    per_block = geometry.select_block_size // geometry.compress_stride
    return geometry.num_select_blocks(longest) * per_block - geometry.overlap_weights()[0][0]


def forward(
    q: Tensor,  # [B, S, Hq, Dk], packed [T, Hq, Dk]
    k_cmp: Tensor,  # [B, n_c, G, Dk], packed [T // d, G, Dk]
    lse: Tensor,  # [B, Hq, S], packed [Hq, T]
    *,
    call: SlotCall,
) -> Tensor:
    """Return blocks int32 [B, S, G, n] (packed [T, G, n]), ascending, with -1 at the end."""
    with torch.profiler.record_function("nsa_sdpa.select"), ieee_products(q):
        packed, geometry = call.cu_seqlens is not None, call.geometry
        groups, heads = k_cmp.shape[-2], q.shape[-2] // k_cmp.shape[-2]
        queries, seen = q.shape[-3], call.first_query + q.shape[-3]
        if packed:
            queries, seen = min(call.max_seqlen, queries), min(call.max_seqlen, seen)
        # The probabilities of a chunk of tiles stay within the limit, unless one tile exceeds it.
        size = max(1, min(64, queries))
        tile = size * heads * columns(geometry, max(1, seen)) * stats_dtype(q.dtype).itemsize
        per_chunk = max(1, engine.score_bytes(q) // tile)
        tiles = make_tiles(q, size, call, call.first_query + q.shape[-3])
        if call.cu_seqlens is None:  # the first compressed row of each document
            first_cmp = torch.arange(k_cmp.shape[0], device=k_cmp.device) * k_cmp.shape[1]
        else:
            first_cmp = compressed_cu_seqlens(call.cu_seqlens, geometry)[:-1].long()
        rows = [as_rows(q, packed).unflatten(1, (groups, -1)), as_rows(k_cmp, packed)]
        rows.append(as_rows(lse.transpose(-1, -2), packed).unflatten(1, (groups, -1)))
        shape = (tiles.total + 1, groups, geometry.num_selected_blocks)
        blocks = torch.empty(shape, dtype=torch.int32, device=q.device)
        for chunk in tiles.split(max(1, per_chunk // groups)):
            position = chunk.positions()
            for part in chunks(groups, min(groups, per_chunk)):
                scores = block_scores([x[:, part] for x in rows], first_cmp, chunk, position, call)
                scatter(blocks[:, part], chunk.targets(), choose(scores, position, geometry))
        return from_rows(blocks[:-1], q, packed)


def block_scores(
    rows: list[Tensor],  # q [T, g, h, Dk], k_cmp [R, g, Dk], lse [T, g, h]
    first_cmp: Tensor,  # int64 [documents]
    tiles: Tiles,
    position: Tensor,  # int64 [tiles, size], of each query in its document
    call: SlotCall,
) -> Tensor:  # [g, tiles, size, NB]
    """Return the group scores (Eq. 9 and 10) of each block that a query of the tiles may see."""
    p = _probabilities(rows, first_cmp, tiles, position, call)
    head_scores = tap_sums(p, call.geometry, tiles.longest)
    del p
    return head_sums(head_scores)


def tap_sums(p: Tensor, geometry: BlockGeometry, longest: int) -> Tensor:
    """Return the block scores of each head (Eq. 9).

    Args:
        p: Probabilities [..., h, columns()].
        geometry: Block sizes.
        longest: Tokens whose blocks are scored.

    Returns:
        [..., h, NB], NB the number of selection blocks of ``longest`` tokens.
    """
    weights, count = geometry.overlap_weights(), geometry.num_select_blocks(longest)
    first, per_block = weights[0][0], geometry.select_block_size // geometry.compress_stride
    scores: Tensor | None = None
    for offset, weight in weights:
        overlapping = p[..., offset - first :: per_block][..., :count]
        scores = overlapping * weight if scores is None else scores.add_(overlapping, alpha=weight)
    assert scores is not None
    return scores


def head_sums(scores: Tensor) -> Tensor:
    """Sum scores [..., h, NB] over the heads of a group, in ascending order (Eq. 10)."""
    group_scores = scores[..., 0, :].clone()
    for head in range(1, scores.shape[-2]):
        group_scores += scores[..., head, :]
    return group_scores


def _probabilities(
    rows: list[Tensor], first_cmp: Tensor, tiles: Tiles, position: Tensor, call: SlotCall
) -> Tensor:
    """Return the probabilities of Eq. 8, [g, tiles, size, h, columns].

    Column 0 is the first compressed token that would overlap block 0, whose index is negative or 0.
    A probability is exactly 0 if the compressed token does not exist or is not visible.
    """
    (q, k, lse), geometry, operand = rows, call.geometry, operand_dtype(rows[0])
    queries = tiles.clamp(tiles.rows()[0])
    index = (
        torch.arange(columns(geometry, tiles.longest), device=q.device)
        + geometry.overlap_weights()[0][0]
    )
    last = index * geometry.compress_stride + geometry.compress_block_size - 1
    hidden = (last > position[..., None]) | (index < 0)
    if not len(k):
        return lse.new_zeros((q.shape[1], *queries.shape, q.shape[2], len(index)))
    keys = (first_cmp[tiles.document][:, None] + index).clamp_(0, len(k) - 1)
    tile_q, tile_k = gather(q, queries, operand), gather(k, keys, operand)
    p = product(tile_q.flatten(2, 3).flatten(0, 1), tile_k.flatten(0, 1).transpose(1, 2))
    p = p.view(*tile_q.shape[:-1], len(index)).mul_(call.scale)
    p.sub_(gather(lse, queries, p.dtype).unsqueeze(-1)).exp_()
    return p.masked_fill_(hidden.unsqueeze(2), 0)


def choose(
    score: Tensor,  # [..., NB]
    position: Tensor,  # [...] of the query in its document, broadcast against score's leading axes
    geometry: BlockGeometry,
) -> Tensor:  # int64 [..., n]
    """Return the forced blocks and those with the best scores (Eq. 11 and 12).

    At most n blocks up to the query's own are returned, in ascending order, with -1 at the end.
    """
    count, n = score.shape[-1], geometry.num_selected_blocks
    current = (position // geometry.select_block_size)[..., None]
    block = torch.arange(count, device=score.device)
    forced = (block < geometry.init_blocks) | (block > current - geometry.local_blocks)
    # A NaN score ranks below all other scores, which are >= 0, and above future blocks.
    rank = score.masked_fill(score.isnan(), -1.0)
    rank = rank.masked_fill_(forced, torch.inf).masked_fill_(block > current, -torch.inf)
    best = rank.sort(dim=-1, descending=True, stable=True).indices[..., :n]
    is_candidate = torch.arange(best.shape[-1], device=score.device) <= current
    best = best.masked_fill_(~is_candidate, count).sort(dim=-1).values
    best = best.masked_fill_(best == count, -1)
    return torch.nn.functional.pad(best, (0, n - best.shape[-1]), value=-1)

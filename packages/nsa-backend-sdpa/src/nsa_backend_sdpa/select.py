"""Choice of blocks from the probabilities of the compressed branch (Eq. 8 to 12).

    p[h,t,i] = exp(scale * q.k_cmp[i] - lse)
    score[t,j] = sum over heads of sum over taps of weight * p

per tile of queries of one document, so that no tensor of tokens times blocks exists. Taps are added
in ascending i, then heads in ascending order; a stable sort gives equal scores to the lower index.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from nsa_backend_sdpa import engine
from nsa_backend_sdpa.device import pieces
from nsa_backend_sdpa.engine import ieee_products, operand_dtype, product, stats_dtype
from nsa_backend_sdpa.tiles import Tiles, as_rows, from_rows, gather, make_tiles, store
from nsa_core.contract import SlotCall
from nsa_core.layout import BlockGeometry
from nsa_core.packing import compressed_cu_seqlens


@dataclasses.dataclass(frozen=True)
class Cut:
    """How a call is cut into tiles."""

    size: int  # queries of a tile
    tiles: int  # of one step
    groups: int  # kv heads of one step

    @classmethod
    def of(
        cls,
        geometry: BlockGeometry,
        longest: int,
        groups: int,
        heads: int,
        itemsize: int,
        budget: int,
    ) -> Cut:
        """Tiles of at most ``budget`` bytes of probabilities, if 64 queries are not too many
        already.
        """
        size = max(1, min(64, longest))
        together = max(1, budget // (size * heads * columns(geometry, longest) * itemsize))
        return cls(size, max(1, together // groups), min(groups, together))


def columns(geometry: BlockGeometry, longest: int) -> int:
    """Compressed tokens that overlap any selection block of ``longest`` tokens, those before the
    first included.
    """
    per_block = geometry.select_block_size // geometry.compress_stride
    return geometry.num_select_blocks(longest) * per_block - geometry.overlap_taps()[0][0]


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
        longest = max(1, min(call.max_seqlen, len(q)) if packed else q.shape[1])
        itemsize, budget = stats_dtype(q.dtype).itemsize, engine.score_bytes(q)
        cut = Cut.of(geometry, longest, groups, heads, itemsize, budget)
        tiles, first_cmp = make_tiles(q, cut.size, call), _first_compressed(k_cmp, call)
        rows = [as_rows(q, packed).unflatten(1, (groups, -1)), as_rows(k_cmp, packed)]
        rows.append(as_rows(lse.transpose(-1, -2), packed).unflatten(1, (groups, -1)))
        shape = (tiles.total + 1, groups, geometry.num_selected_blocks)
        blocks = torch.empty(shape, dtype=torch.int32, device=q.device)
        for step in tiles.split(cut.tiles):
            position = step.clamp(step.rows()[0]) - step.start[:, None]
            for part in pieces(groups, cut.groups):
                scores = block_scores([x[:, part] for x in rows], first_cmp, step, call)
                store(blocks[:, part], step.targets(), choose(scores, position, geometry))
        return from_rows(blocks[:-1], q, packed)


def _first_compressed(k_cmp: Tensor, call: SlotCall) -> Tensor:
    """First compressed row of each document, int64 [documents]."""
    if call.cu_seqlens is None:
        return torch.arange(k_cmp.shape[0], device=k_cmp.device) * k_cmp.shape[1]
    return compressed_cu_seqlens(call.cu_seqlens, call.geometry)[:-1].long()


def block_scores(
    rows: list[Tensor],  # q [T, g, h, Dk], k_cmp [R, g, Dk], lse [T, g, h]
    first_cmp: Tensor,  # int64 [documents]
    step: Tiles,
    call: SlotCall,
) -> Tensor:  # [g, tiles, c, NB]
    """Group scores (Eq. 9 and 10) of every selection block that a query of the step may see."""
    p = _probabilities(rows, first_cmp, step, call)
    total = tap_sums(p, call.geometry, step.longest)
    del p
    return head_sums(total)


def tap_sums(p: Tensor, geometry: BlockGeometry, longest: int) -> Tensor:
    """Eq. 9 per head, [..., h, NB] for the blocks of ``longest`` tokens: probabilities [..., h,
    columns()] weighted.
    """
    taps, count = geometry.overlap_taps(), geometry.num_select_blocks(longest)
    first, every = taps[0][0], geometry.select_block_size // geometry.compress_stride
    total: Tensor | None = None
    for tap, weight in taps:
        overlapping = p[..., tap - first :: every][..., :count]
        total = overlapping * weight if total is None else total.add_(overlapping, alpha=weight)
    assert total is not None
    return total


def head_sums(scores: Tensor) -> Tensor:
    """Eq. 10: [..., h, NB] to [..., NB], heads in ascending order."""
    total = scores[..., 0, :].clone()
    for head in range(1, scores.shape[-2]):
        total += scores[..., head, :]
    return total


def _probabilities(rows: list[Tensor], first_cmp: Tensor, step: Tiles, call: SlotCall) -> Tensor:
    """Eq. 8, [g, tiles, c, h, columns], from the first compressed token that overlaps block 0 on,
    which is negative.

    Exactly 0 where there is no compressed token, or one that is not visible.
    """
    (q, k, lse), geometry, operand = rows, call.geometry, operand_dtype(rows[0])
    queries = step.clamp(step.rows()[0])
    index = (
        torch.arange(columns(geometry, step.longest), device=q.device)
        + geometry.overlap_taps()[0][0]
    )
    last = index * geometry.compress_stride + geometry.compress_block_size - 1
    hidden = (last > (queries - step.start[:, None])[..., None]) | (index < 0)
    if not len(k):
        return lse.new_zeros((q.shape[1], *queries.shape, q.shape[2], len(index)))
    keys = (first_cmp[step.document][:, None] + index).clamp_(0, len(k) - 1)
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
    """The forced blocks and the best others, min(n, candidates) of them, ascending, -1 at the
    end.
    """
    count, n = score.shape[-1], geometry.num_selected_blocks
    current = (position // geometry.select_block_size)[..., None]
    block = torch.arange(count, device=score.device)
    forced = (block < geometry.init_blocks) | (block > current - geometry.local_blocks)
    # below every score (they are >= 0), above every block that is no candidate
    rank = score.masked_fill(score.isnan(), -1.0)
    rank = rank.masked_fill_(forced, torch.inf).masked_fill_(block > current, -torch.inf)
    best = rank.sort(dim=-1, descending=True, stable=True).indices[..., :n]
    taken = torch.arange(best.shape[-1], device=score.device) <= current
    best = best.masked_fill_(~taken, count).sort(dim=-1).values
    best = best.masked_fill_(best == count, -1)
    return torch.nn.functional.pad(best, (0, n - best.shape[-1]), value=-1)

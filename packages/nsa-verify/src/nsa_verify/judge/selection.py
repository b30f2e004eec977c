"""Is this choice of blocks right? Near-equal blocks may be swapped by rounding, and by nothing
else.

The regret of a token's choice is the best golden score left out minus the worst golden score taken
freely (forced blocks apart), in units of the noise of the two. noise_j = 2^-24 * sum over heads of
(1 + a_h) * score_hj (2^-53 in float64), with a_h = |scale| * max over visible i of sum_d |q_d
k_id|: what rounding in logits and exp does to a score.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from nsa_core.layout import BlockGeometry
from nsa_verify.judge.truth_cache import recall
from nsa_verify.oracle import RowScores, row_scores

MAX_REGRET = 8.0
MAX_FLIP_RATE = 1e-3
TINY = 2.0**-100  # golden scores below count as 0: exp underflows in fp32


@dataclasses.dataclass(frozen=True)
class SelectionVerdict:
    """The judgement of a selection; true where it is right.

    Attributes:
        regret: the largest, in units of the noise of the two blocks; the limit is 8.
        flip_rate: share of the sets that leave out a block with a better golden score; the limit is
            0.1 %.
        where: (batch entry, token, kv head), without the batch entry when packed, of the first
            broken rule, else of the largest regret.
    """

    ok: bool
    regret: float = 0.0
    flip_rate: float = 0.0
    why: str = ""
    where: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return self.ok


def judge_selection(
    q: torch.Tensor,  # [B, S, Hq, Dk], packed [T, Hq, Dk]
    k_cmp: torch.Tensor,  # [B, n_c, G, Dk]
    lse: torch.Tensor,  # [B, Hq, S], of the cmp branch: what `select` received
    blocks: torch.Tensor,  # int32 [B, S, G, n]
    geometry: BlockGeometry,
    scale: float,
    *,
    cu_seqlens: torch.Tensor | None = None,
    rows: Sequence[int] | torch.Tensor | None = None,
) -> SelectionVerdict:
    """Judge the blocks that a `select` chose from bit for bit these tensors.

    Exactly min(n, candidates) distinct candidates, ascending, -1 at the end; the forced ones among
    them; regret at most 8; equal scores to the lower index where rounding cannot have told them
    apart; at most 0.1 % of the sets flipped.

    Raises:
        InvalidInput: S is so long that only sampled ``rows`` can be judged.
    """
    given = (q, k_cmp, lse, blocks, cu_seqlens, rows)
    return recall(
        ("judge_selection", geometry, scale),
        given,
        lambda: _judge_selection(*given, geometry, scale),
    )


def _judge_selection(
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    lse: torch.Tensor,
    blocks: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    rows: Sequence[int] | torch.Tensor | None,
    geometry: BlockGeometry,
    scale: float,
) -> SelectionVerdict:
    expected = (*q.shape[:-2], k_cmp.shape[-2], geometry.num_selected_blocks)
    if tuple(blocks.shape) != expected or blocks.dtype != torch.int32:
        found = (
            f"blocks are {list(blocks.shape)} {blocks.dtype}, expected {list(expected)} torch.int32"
        )
        return SelectionVerdict(False, math.inf, 1.0, found)
    starts = None if cu_seqlens is None else [int(x) for x in cu_seqlens.tolist()]
    unit = 2.0**-53 if q.dtype == torch.float64 else 2.0**-24
    exact, chosen = _exact_logits(q, k_cmp, unit), blocks.detach().cpu()
    worst, where, flips, sets = 0.0, (), 0, 0
    for row in row_scores(q, k_cmp, lse, geometry, scale, cu_seqlens=cu_seqlens, rows=rows):
        lead = (row.document, row.token) if starts is None else (starts[row.document] + row.token,)
        place = (*lead, row.kv_head)
        judged = _judge_row(row, chosen[place].tolist(), geometry, unit, exact)
        if isinstance(judged, str):
            return SelectionVerdict(
                False, math.inf, flips / max(sets, 1), f"{judged} at {place}", place
            )
        sets, flips = sets + 1, flips + (judged > 0)
        if judged > worst:
            worst, where = judged, place
    rate = flips / max(sets, 1)
    wrong = []
    if not worst <= MAX_REGRET:
        wrong.append(f"regret {worst:.3g} > {MAX_REGRET:g} at {where}")
    if rate > MAX_FLIP_RATE:
        wrong.append(f"{flips} of {sets} sets leave out a better block, limit {MAX_FLIP_RATE:.1%}")
    return SelectionVerdict(not wrong, worst, rate, "; ".join(wrong), where)


def _exact_logits(q: torch.Tensor, k_cmp: torch.Tensor, unit: float) -> bool:
    """No product or partial sum of q.k_cmp can round: small integers, or zeros."""
    a, b = q.detach().cpu().double(), k_cmp.detach().cpu().double()
    if not a.numel() or not b.numel() or not (bool(a.any()) and bool(b.any())):
        return True
    whole = bool((a == a.round()).all()) and bool((b == b.round()).all())
    return whole and float(a.abs().max() * b.abs().max()) * q.shape[-1] < 1 / unit


def _judge_row(
    row: RowScores, given: list[int], geometry: BlockGeometry, unit: float, exact: bool
) -> float | str:
    """Regret in noise units, or what is wrong with the set as such."""
    candidates = row.token // geometry.select_block_size + 1
    forced = {
        j
        for j in range(candidates)
        if j < geometry.init_blocks or j >= candidates - geometry.local_blocks
    }
    count = min(geometry.num_selected_blocks, candidates)
    mine, rest = given[:count], given[count:]
    if any(j != -1 for j in rest) or -1 in mine:
        return f"{sum(j != -1 for j in given)} blocks, expected {count} and then -1, got {given}"
    if any(not 0 <= j < candidates for j in mine):
        return f"a block that is no candidate (0 .. {candidates - 1}): {mine}"
    if len(set(mine)) < count:
        return f"a block chosen twice: {mine}"
    if mine != sorted(mine):
        return f"blocks not ascending: {mine}"
    if not forced <= set(mine):
        return f"forced blocks {sorted(forced - set(mine))} left out of {mine}"
    free, left = (
        [j for j in mine if j not in forced],
        [j for j in range(candidates) if j not in mine],
    )
    return _regret(row, free, left, unit, exact) if free and left else 0.0


def _regret(
    row: RowScores, free: list[int], left: list[int], unit: float, exact: bool
) -> float | str:
    raw = [-math.inf if math.isnan(s) else s for s in row.per_group().tolist()]
    worst, best = min(free, key=lambda j: (raw[j], -j)), max(left, key=lambda j: (raw[j], -j))
    if raw[worst] == raw[best]:
        for u in (j for j in left if raw[j] == raw[best]):
            for c in (j for j in free if raw[j] == raw[best] and j > u):
                if _indistinguishable(row.terms[..., u], row.terms[..., c], exact):
                    return f"blocks {u} and {c} score equal, and the higher was chosen"
        return 0.0
    gap = _counted(raw[best]) - _counted(raw[worst])
    if gap <= 0:
        return 0.0
    per_head = row.per_head()[:, [best, worst]]
    noise = unit * float(((1 + row.spread)[:, None] * per_head).sum())
    return gap / noise if noise > 0 else math.inf


def _counted(score: float) -> float:
    return 0.0 if 0 <= score < TINY else score


def _indistinguishable(a: torch.Tensor, b: torch.Tensor, exact: bool) -> bool:
    """Whatever the rounding, the two blocks' terms [h, taps] are the same: all NaN, all zero, or
    equal and exact.
    """
    if bool(torch.isnan(a).any()):
        return True
    return torch.equal(a, b) and (exact or not bool(a.any()))

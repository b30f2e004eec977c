"""Judge selected blocks. Only rounding may exchange blocks, and only nearly equal ones.

The regret of a token is the best golden score among blocks not selected, minus the worst golden
score among selected blocks that were not forced, in units of the noise of these two blocks. The
noise of block j is the effect of rounding in logits and exp on its score::

    noise_j = 2^-24 * sum over heads h of (1 + a_h) * score_hj    (2^-53 in float64)
    a_h = |scale| * max over visible i of sum_d |q_d k_id|
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch

from nsa_core.layout import BlockGeometry
from nsa_verify.judge.truth_cache import cached
from nsa_verify.oracle import RowScores, row_scores

MAX_REGRET = 8.0
MAX_FLIP_RATE = 1e-3
# The flip rate is judged in calls whose scores stay below this. A larger score saturates: several
# heads give their best block a probability of nearly 1, so many blocks have nearly equal scores,
# which the rounding of exp(score - lse) orders. The regret of each exchange is judged as always.
SATURATED = 16.0
# Golden scores that differ by less, relative to the score, are equal: they are rounded themselves.
GOLDEN_ROUNDING = 2.0**-50
TINY = 2.0**-100  # smaller golden scores count as 0, because exp underflows in fp32


@dataclasses.dataclass(frozen=True)
class SelectionVerdict:
    """The judgement of a selection; truthy if the selection is correct.

    Attributes:
        ok: Whether every rule holds.
        regret: Largest regret, in units of the noise of the two blocks; the limit is 8.
        flip_rate: Fraction of the sets that omit a block with a better golden score than a selected
            one; the limit is 0.1 %, in calls whose scores stay below 16.
        why: The broken rules; empty if the selection is correct.
        where: (batch entry, row, kv head), or (row, kv head) if packed, of the first broken
            rule, else of the largest regret.
    """

    ok: bool
    regret: float = 0.0
    flip_rate: float = 0.0
    why: str = ""
    where: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return self.ok


@cached
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
    first_query: int | None = None,
    exchanges: float = 0,
) -> SelectionVerdict:
    """Judge the blocks that `select` chose from bit for bit these tensors (Eq. 11 and 12).

    Every token and kv head needs exactly min(n, candidates) distinct candidates, in ascending
    order, with -1 in the remaining entries, and the forced blocks among them. The regret is at most
    8. Of blocks with equal scores, the lower index is selected unless rounding can make the scores
    differ. At most 0.1 % of the sets omit a better block.

    Args:
        q: Queries [B, S, Hq, Dk], packed [T, Hq, Dk].
        k_cmp: Compressed keys [B, n_c, G, Dk], packed [T // d, G, Dk].
        lse: Log-sum-exp of the cmp branch [B, Hq, S], packed [Hq, T], that `select` received.
        blocks: Selected blocks, int32 [B, S, G, n], packed [T, G, n], local to the document.
        geometry: Block sizes.
        scale: Softmax scale.
        cu_seqlens: Document bounds, int32 [documents + 1]; None if dense.
        rows: Rows of q to judge; None judges all.
        first_query: Position of row 0 of q, if q holds only some rows: see "Queries inside a
            sequence" in nsa_core.contract. None: whole sequences.
        exchanges: Number of sets that may omit a better block with a regret of at most 8, even if
            that is more than 0.1 %. For cases with fewer than a thousand sets.

    Raises:
        InvalidInput: S is too long to judge every row; pass sampled ``rows``.
    """
    expected = (*q.shape[:-2], k_cmp.shape[-2], geometry.num_selected_blocks)
    if tuple(blocks.shape) != expected or blocks.dtype != torch.int32:
        why = (
            f"blocks are {list(blocks.shape)} {blocks.dtype}, expected {list(expected)} torch.int32"
        )
        return SelectionVerdict(False, math.inf, 1.0, why)
    unit = 2.0**-53 if q.dtype == torch.float64 else 2.0**-24
    exact, chosen = _exact_logits(q, k_cmp, unit), blocks.detach().cpu()
    worst, where, flips, sets, largest = 0.0, (), 0, 0, 0.0
    call: dict[str, Any] = {"cu_seqlens": cu_seqlens, "rows": rows, "first_query": first_query}
    for row in row_scores(q, k_cmp, lse, geometry, scale, **call):
        lead = (row.document, row.row) if cu_seqlens is None else (row.row,)
        index = (*lead, row.kv_head)
        regret = _judge_row(row, chosen[index].tolist(), geometry, unit, exact)
        if isinstance(regret, str):
            return SelectionVerdict(
                False, math.inf, flips / max(sets, 1), f"{regret} at {index}", index
            )
        sets, flips = sets + 1, flips + (regret > 0)
        if row.logits.numel():
            largest = max(largest, float(row.logits.abs().amax()))
        if regret > worst:
            worst, where = regret, index
    rate = flips / max(sets, 1)
    broken = []
    if not worst <= MAX_REGRET:
        broken.append(f"regret {worst:.3g} > {MAX_REGRET:g} at {where}")
    if rate > MAX_FLIP_RATE and flips > exchanges and largest <= SATURATED:
        broken.append(f"{flips} of {sets} sets leave out a better block, limit {MAX_FLIP_RATE:.1%}")
    return SelectionVerdict(not broken, worst, rate, "; ".join(broken), where)


def _exact_logits(q: torch.Tensor, k_cmp: torch.Tensor, unit: float) -> bool:
    """Whether every product and partial sum of q.k_cmp is exact: zeros or small integers."""
    a, b = q.detach().cpu().double(), k_cmp.detach().cpu().double()
    if not (bool(a.any()) and bool(b.any())):  # also if one is empty
        return True
    integers = bool((a == a.round()).all()) and bool((b == b.round()).all())
    return integers and float(a.abs().max() * b.abs().max()) * q.shape[-1] < 1 / unit


def _judge_row(
    row: RowScores, blocks: list[int], geometry: BlockGeometry, unit: float, exact: bool
) -> float | str:
    """Return the regret in noise units, or the reason why the set of blocks is malformed."""
    candidates = row.token // geometry.select_block_size + 1
    forced = {
        j
        for j in range(candidates)
        if j < geometry.init_blocks or j >= candidates - geometry.local_blocks
    }
    count = min(geometry.num_selected_blocks, candidates)
    selected, padding = blocks[:count], blocks[count:]
    if any(j != -1 for j in padding) or -1 in selected:
        return f"{sum(j != -1 for j in blocks)} blocks, expected {count} and then -1, got {blocks}"
    if any(not 0 <= j < candidates for j in selected):
        return f"a block that is no candidate (0 .. {candidates - 1}): {selected}"
    if len(set(selected)) < count:
        return f"a block chosen twice: {selected}"
    if selected != sorted(selected):
        return f"blocks not ascending: {selected}"
    if not forced <= set(selected):
        return f"forced blocks {sorted(forced - set(selected))} left out of {selected}"
    free, omitted = (
        [j for j in selected if j not in forced],
        [j for j in range(candidates) if j not in selected],
    )
    return _regret(row, free, omitted, unit, exact) if free and omitted else 0.0


def _regret(
    row: RowScores, free: list[int], omitted: list[int], unit: float, exact: bool
) -> float | str:
    """Return the regret of omitting ``omitted`` for ``free``, or the reason why a tie is wrong."""
    scores = [-math.inf if math.isnan(s) else s for s in row.per_group().tolist()]
    worst = min(free, key=lambda j: (scores[j], -j))
    best = max(omitted, key=lambda j: (scores[j], -j))
    if scores[worst] == scores[best]:
        for lower in (j for j in omitted if scores[j] == scores[best]):
            for higher in (j for j in free if scores[j] == scores[best] and j > lower):
                if _indistinguishable(row.terms[..., lower], row.terms[..., higher], exact):
                    return f"blocks {lower} and {higher} score equal, and the higher was chosen"
        return 0.0
    gap = _flushed(scores[best]) - _flushed(scores[worst])
    if gap <= GOLDEN_ROUNDING * scores[best]:
        return 0.0
    per_head = row.per_head()[:, [best, worst]]
    noise = unit * float(((1 + row.spread)[:, None] * per_head).sum())
    return gap / noise if noise > 0 else math.inf


def _flushed(score: float) -> float:
    """Return 0 for a score that underflows in fp32."""
    return 0.0 if 0 <= score < TINY else score


def _indistinguishable(a: torch.Tensor, b: torch.Tensor, exact: bool) -> bool:
    """Whether no rounding can make the scores of two blocks with terms [h, weights] differ.

    This holds for terms with NaN, for terms that are all zero, and for equal and exact terms.
    """
    if bool(torch.isnan(a).any()):
        return True
    return torch.equal(a, b) and (exact or not bool(a.any()))

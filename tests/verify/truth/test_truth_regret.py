"""A selection is judged by the form of its sets, by its regret, and by ties."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest
import torch

from nsa_core.layout import BlockGeometry
from nsa_verify import oracle
from nsa_verify.judge.selection import SelectionVerdict, judge_selection
from truth_cases import oracle_scores

GEOMETRY = BlockGeometry(8, 4, 16, 5, 1, 2, 9)
S, H, G, D = 300, 4, 2, 16


@dataclasses.dataclass
class Choice:
    """The inputs of `select` and the blocks that it returned."""

    q: torch.Tensor
    k_cmp: torch.Tensor
    lse: torch.Tensor
    blocks: torch.Tensor
    cu_seqlens: torch.Tensor | None = None
    geometry: BlockGeometry = GEOMETRY
    scale: float = 0.25

    def judged(self, **changes: object) -> SelectionVerdict:
        c = dataclasses.replace(self, **changes)
        return judge_selection(
            c.q, c.k_cmp, c.lse, c.blocks, c.geometry, c.scale, cu_seqlens=c.cu_seqlens
        )

    def judged_with(self, index: tuple[int, ...], row: list[int]) -> SelectionVerdict:
        """Judge the choice with other blocks in one row."""
        blocks = self.blocks.clone()
        blocks[index] = torch.tensor(row, dtype=torch.int32)
        return self.judged(blocks=blocks)


def choose(
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    cu: torch.Tensor | None = None,
    geometry: BlockGeometry = GEOMETRY,
) -> Choice:
    lse = oracle.cmp(q, k_cmp, k_cmp, geometry, 0.25, cu_seqlens=cu).lse
    assert lse is not None
    lse = lse.to(torch.float64 if q.dtype == torch.float64 else torch.float32)
    return Choice(
        q, k_cmp, lse, oracle.select(q, k_cmp, lse, geometry, 0.25, cu_seqlens=cu), cu, geometry
    )


@pytest.fixture(params=["dense", "packed"])
def choice(request: pytest.FixtureRequest) -> Choice:
    r = torch.Generator().manual_seed(0)
    lead, cu = (
        ((1, S), None)
        if request.param == "dense"
        else ((450,), torch.tensor([0, 0, 250, 450], dtype=torch.int32))
    )
    n_c = (S - 8) // 4 + 1 if cu is None else 450 // 4
    q, k = torch.randn(*lead, H, D, generator=r), torch.randn(*lead[:-1], n_c, G, D, generator=r)
    return choose(q, k, cu)


def at(choice: Choice, *index: int) -> tuple[int, ...]:
    return index if choice.cu_seqlens is not None else (0, *index)


@pytest.mark.few_cases("dense")
def test_choice_of_the_oracle_has_no_regret(choice: Choice) -> None:
    assert choice.judged() == SelectionVerdict(True, 0.0, 0.0, "", ())


@pytest.mark.few_cases("dense-row0-4 blocks, expected 5")
@pytest.mark.parametrize(
    ("row", "why"),
    [
        ([0, 3, 5, 11, -1], "4 blocks, expected 5"),
        ([0, -1, 5, 11, 12], "4 blocks, expected 5"),
        ([0, 3, 11, 12, 13], "no candidate"),
        ([0, 3, 3, 11, 12], "twice"),
        ([0, 5, 3, 11, 12], "not ascending"),
        ([1, 3, 5, 11, 12], r"forced blocks \[0\]"),
        ([0, 3, 5, 7, 12], r"forced blocks \[11\]"),
        ([0, 3, 5, 7, 11], r"forced blocks \[12\]"),
    ],
)
def test_malformed_set_is_refused(choice: Choice, row: list[int], why: str) -> None:
    index = at(choice, 12 * 16 + 3, 1)
    verdict = choice.judged_with(index, row)
    assert not verdict
    assert verdict.where == index
    assert re.search(why, verdict.why), verdict.why


@pytest.mark.few_cases("dense")
def test_row_7_fewer_candidates_than_n(choice: Choice) -> None:
    index = at(choice, 20, 0)
    assert choice.blocks[index].tolist() == [0, 1, -1, -1, -1]
    assert "2 blocks" not in choice.judged().why
    assert "3 blocks, expected 2" in choice.judged_with(index, [0, 1, 2, -1, -1]).why


@pytest.mark.slow
def test_omitting_a_better_block_exceeds_the_regret_limit(choice: Choice) -> None:
    index = at(choice, 240, 0)
    args = (choice.q, choice.k_cmp, choice.lse, choice.geometry, choice.scale)
    score = oracle_scores(*args, cu_seqlens=choice.cu_seqlens)[index][1:14]
    worst = int(score.argmin()) + 1
    free = next(j for j in choice.blocks[index].tolist() if j not in (0, 14, 15))
    verdict = choice.judged_with(index, sorted([0, free, worst, 14, 15]))
    assert not verdict
    assert verdict.where == index
    assert verdict.regret > 1e4
    assert "regret" in verdict.why


@pytest.mark.few_cases("dense")
def test_wrong_dtype_or_shape_is_refused(choice: Choice) -> None:
    assert "torch.int64" in choice.judged(blocks=choice.blocks.long()).why
    assert "expected" in choice.judged(blocks=choice.blocks[..., :4]).why


def near_tie(
    gap: float, dtype: torch.dtype = torch.float32, height: float = 1.0, length: int = 200
) -> Choice:
    """Return a choice in which blocks 3 and 5 score highest, with a relative gap between them."""
    q = torch.zeros(1, length, 1, 16, dtype=dtype)
    q[..., 0] = height
    k = torch.zeros(1, length // 4 - 1, 1, 16, dtype=dtype)
    k[0, 13, 0, 0], k[0, 21, 0, 0] = 4.0, 4.0 * (1 + gap)
    return choose(q, k, geometry=dataclasses.replace(GEOMETRY, num_selected_blocks=4))


@pytest.mark.parametrize(("ulps", "ok"), [(2, True), (60, False)])
def test_row_40_near_ties_may_be_exchanged_within_the_noise(ulps: int, ok: bool) -> None:
    choice = near_tie(ulps * 2.0**-23)
    index = (0, 195, 0)
    assert choice.blocks[index].tolist() == [0, 5, 11, 12]
    verdict = choice.judged_with(index, [0, 3, 11, 12])
    assert (verdict.regret <= 8) is ok
    assert verdict.regret > 0
    assert verdict.flip_rate == pytest.approx(1 / 200)
    assert "1 of 200 sets leave out a better block" in verdict.why


def test_large_logits_increase_the_noise() -> None:
    index = (0, 195, 0)
    assert near_tie(2.0**-22, height=64.0).judged_with(index, [0, 3, 11, 12]).regret <= 8
    # The same scores from small logits have less noise.
    assert near_tie(64 * 2.0**-22).judged_with(index, [0, 3, 11, 12]).regret > 8


@pytest.mark.slow
def test_flip_rate_is_limited_to_one_in_a_thousand() -> None:
    choice = near_tie(2.0**-22, length=1100)
    blocks = choice.blocks.clone()
    blocks[0, 900, 0, 1] = 3
    verdict = choice.judged(blocks=blocks)
    assert verdict, verdict
    assert 0 < verdict.regret <= 8
    assert verdict.flip_rate == pytest.approx(1 / 1100)
    blocks[0, 901, 0, 1] = 3
    verdict = choice.judged(blocks=blocks)
    assert not verdict
    assert verdict.regret <= 8
    assert "2 of 1100 sets" in verdict.why
    clear = near_tie(2.0**-10, length=1100)
    # The flip rate is low, but rounding cannot explain this flip.
    verdict = clear.judged_with((0, 900, 0), [0, 3, 55, 56])
    assert not verdict
    assert verdict.flip_rate < 1e-3
    assert verdict.why.startswith("regret")
    assert verdict.why.endswith("> 8 at (0, 900, 0)")


@pytest.mark.slow
@pytest.mark.parametrize(("height", "ok"), [(15.9, False), (16.1, True)])
def test_flip_rate_is_not_judged_if_scores_saturate(height: float, ok: bool) -> None:
    choice = near_tie(2.0**-22, height=height, length=1100)  # the largest score is `height`
    blocks = choice.blocks.clone()
    blocks[0, 900:1000, 0, 1] = 3
    verdict = choice.judged(blocks=blocks)
    assert 0 < verdict.regret <= 8
    assert verdict.flip_rate == pytest.approx(100 / 1100)
    assert bool(verdict) is ok, verdict


@pytest.mark.slow
def test_regret_is_judged_if_scores_saturate() -> None:
    clear = near_tie(2.0**-10, height=16.1, length=1100)
    verdict = clear.judged_with((0, 900, 0), [0, 3, 55, 56])
    assert not verdict
    assert verdict.regret > 8
    assert verdict.why.startswith("regret")


def test_float64_is_judged_by_the_noise_of_float64() -> None:
    assert near_tie(2.0**-40).judged_with((0, 195, 0), [0, 3, 11, 12]).regret <= 8
    double = near_tie(2.0**-40, torch.float64)
    assert double.judged_with((0, 195, 0), [0, 3, 11, 12]).regret > 8


@pytest.mark.parametrize(("gap", "flips"), [(2.0**-51, 0), (2.0**-46, 1)])
def test_a_gap_of_the_rounding_of_golden_is_none(gap: float, flips: int) -> None:
    """Golden scores are sums in float64, whose order decides their last bits."""
    choice = near_tie(gap, torch.float64)
    other = [0, 8 - choice.blocks[0, 195, 0, 1].item(), 11, 12]
    assert choice.judged_with((0, 195, 0), other).flip_rate == flips / 200


def test_row_39_equal_scores_go_to_the_lower_index() -> None:
    choice = near_tie(0.0)
    assert choice.blocks[0, 195, 0].tolist() == [0, 3, 11, 12]
    verdict = choice.judged_with((0, 195, 0), [0, 5, 11, 12])
    assert not verdict
    assert verdict.why == "blocks 3 and 5 score equal, and the higher was chosen at (0, 195, 0)"


def test_row_39_all_scores_equal() -> None:
    q, k = torch.randn(1, 200, 2, 16), torch.zeros(1, 49, 1, 16)
    choice = choose(q, k)
    assert choice.blocks[0, 199, 0].tolist() == [0, 1, 2, 11, 12]
    assert choice.judged()
    assert "blocks 2 and 3 score equal" in choice.judged_with((0, 199, 0), [0, 1, 3, 11, 12]).why


def test_scores_are_equal_without_a_visible_compressed_token() -> None:
    geometry = BlockGeometry(16, 16, 16, 2, 0, 0, 9)
    q, k = torch.randn(1, 40, 2, 16), torch.randn(1, 2, 1, 16)
    choice = choose(q, k, geometry=geometry)
    assert choice.blocks[0, 10, 0].tolist() == [0, -1]
    one_block = dataclasses.replace(geometry, num_selected_blocks=1)
    first = choose(q, k, geometry=one_block)
    assert first.blocks[0, 16, 0].tolist() == [0]
    assert not first.judged_with((0, 16, 0), [1])


def test_ties_that_rounding_can_break_count_as_near_ties() -> None:
    choice = near_tie(0.0)
    # The logits are not exact in fp32, but the two golden scores have equal bits.
    q = torch.full_like(choice.q, 0.1)
    q[..., 0] = 1.0
    inexact = choose(q, choice.k_cmp + 0.1 * (choice.k_cmp == 0), geometry=choice.geometry)
    assert inexact.blocks[0, 195, 0].tolist() == [0, 3, 11, 12]
    assert inexact.judged_with((0, 195, 0), [0, 5, 11, 12])


def test_scores_that_underflow_in_fp32_count_as_zero() -> None:
    q, k = torch.ones(1, 200, 1, 1) * 8, torch.zeros(1, 49, 1, 1)
    k[0, 2:] = -100.0
    k[0, 21] = -95.0  # block 5 is better than block 3; both scores are far below 2^-100
    choice = choose(q, k, geometry=dataclasses.replace(GEOMETRY, num_selected_blocks=4))
    assert choice.blocks[0, 195, 0].tolist() == [0, 5, 11, 12]
    verdict = choice.judged_with((0, 195, 0), [0, 1, 11, 12])
    assert verdict, verdict
    assert verdict.flip_rate == 0


def test_row_39_scores_that_underflow_in_golden_too_are_equal() -> None:
    q, k = torch.ones(1, 200, 1, 1) * 8.1, torch.zeros(1, 49, 1, 1)
    k[0, 2:] = -400.1  # exp of this difference is 0 in float64, although no logit is exact
    choice = choose(q, k, geometry=dataclasses.replace(GEOMETRY, num_selected_blocks=4))
    assert choice.blocks[0, 195, 0].tolist() == [0, 1, 11, 12]
    assert "blocks 1 and 2 score equal" in choice.judged_with((0, 195, 0), [0, 2, 11, 12]).why


def test_row_34_nan_scores_rank_last() -> None:
    choice = near_tie(0.5)
    choice.k_cmp[0, 29] = math.nan  # in block 7; the LSE is the one without NaN
    blocks = oracle.select(choice.q, choice.k_cmp, choice.lse, choice.geometry, choice.scale)
    assert choice.judged(blocks=blocks)
    assert choice.judged_with((0, 195, 0), [0, 7, 11, 12]).regret == math.inf
    nan_lse = dataclasses.replace(choice, lse=torch.full_like(choice.lse, math.nan))
    blocks = oracle.select(nan_lse.q, nan_lse.k_cmp, nan_lse.lse, nan_lse.geometry, nan_lse.scale)
    assert blocks[0, 195, 0].tolist() == [0, 1, 11, 12]
    assert nan_lse.judged(blocks=blocks)
    nan_lse = dataclasses.replace(nan_lse, blocks=blocks)
    assert "score equal" in nan_lse.judged_with((0, 195, 0), [0, 2, 11, 12]).why


@pytest.mark.few_cases("dense")
def test_sampled_rows_ignore_other_rows(choice: Choice) -> None:
    blocks = choice.blocks.clone()
    blocks[at(choice, 10, 0)] = -1
    args = (choice.q, choice.k_cmp, choice.lse, blocks, choice.geometry, choice.scale)
    assert judge_selection(*args, cu_seqlens=choice.cu_seqlens, rows=[0, 11, 299])
    assert judge_selection(*args, cu_seqlens=choice.cu_seqlens, rows=[10]).where == at(
        choice, 10, 0
    )


@pytest.mark.parametrize("lead", [(0, S), (2, 0)])
def test_a_selection_without_rows_is_correct_if_its_shape_is(lead: tuple[int, int]) -> None:
    q = torch.randn(*lead, H, D)
    k_cmp = torch.randn(lead[0], GEOMETRY.num_compressed(lead[1]), G, D)
    choice = choose(q, k_cmp)
    assert choice.judged() == SelectionVerdict(True, 0.0, 0.0, "", ())
    assert "expected" in choice.judged(blocks=choice.blocks[..., :4]).why


@pytest.mark.few_cases("dtype0")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_selection_in_fp32_passes_for_low_precision_inputs(dtype: torch.dtype) -> None:
    """Scores in float32 with terms and heads added in order, as every backend computes them."""
    r = torch.Generator().manual_seed(1)
    q, k = (
        torch.randn(1, S, H, D, generator=r).to(dtype),
        torch.randn(1, 74, G, D, generator=r).to(dtype),
    )
    choice = choose(q, k)
    p = torch.einsum("bsghd,bigd->bsghi", q.float().unflatten(2, (G, 2)), k.float()) * 0.25
    p = (p - choice.lse.transpose(1, 2).unflatten(2, (G, 2))[..., None]).exp()
    p = p.masked_fill(torch.arange(74) * 4 + 7 > torch.arange(S)[:, None, None, None], 0.0)
    p = torch.nn.functional.pad(p, (1, 3))
    weights = (1, 2, 2, 2, 1)
    per_head = sum(w * p[..., i : i + 4 * 19 : 4][..., :19] for i, w in enumerate(weights))
    score = per_head.sum(3)
    assert score.dtype == torch.float32
    t = torch.arange(S)[:, None, None]
    j = torch.arange(19)
    newest = t // 16
    key = score.masked_fill((j < 1) | (j > newest - 2), math.inf).masked_fill(j > newest, -math.inf)
    best = key.argsort(dim=-1, descending=True, stable=True)[..., :5]
    blocks = best.masked_fill(best > newest, 99).sort(-1).values
    verdict = choice.judged(blocks=blocks.masked_fill(blocks == 99, -1).to(torch.int32))
    assert verdict, verdict

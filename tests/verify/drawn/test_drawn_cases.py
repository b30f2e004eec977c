"""Generated cases: their designs, their lines, their tensors, their shrinking and their counts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import pytest
import torch

from generated_faults import FAULTS, Fault
from nsa_backend_sdpa.plugin import nsa_register_backends
from nsa_core.contract import DTYPES, SLOTS, Reason, Request
from nsa_core.plan.registry import Registry
from nsa_verify.drawn.case import SlotCase
from nsa_verify.drawn.draw import draw
from nsa_verify.drawn.function_levels import FUNCTIONS
from nsa_verify.drawn.jobs import case_edges, count_cases
from nsa_verify.drawn.judge import judge
from nsa_verify.drawn.parser import parse
from nsa_verify.drawn.shrink import ShrinkBudget, shrink
from nsa_verify.drawn.tensors import LARGE_SCORE, problem_of
from nsa_verify.drawn.verdicts import without_bias
from nsa_verify.problems.combination import Combination
from nsa_verify.problems.findings import Finding
from nsa_verify.run import suite


def quick(slot: str) -> Sequence[SlotCase]:
    """Return the quick cases of a slot; nsa_verify keeps them."""
    return draw(slot, "quick", DTYPES)


@pytest.mark.slow
def test_quick_cases_reach_past_the_limits_of_the_hand_written_ones() -> None:
    def some(slot: str, condition: object) -> bool:
        return any(condition(case) for case in quick(slot))  # type: ignore[operator]

    for slot in ("select", "sel"):
        assert some(slot, lambda c: c.n > 16 and max(c.lengths) > 17 * c.block), slot
    assert some("win", lambda c: c.w > 512 and max(c.lengths) > c.w)
    for slot in SLOTS:
        assert some(slot, lambda c: c.batch >= 8), slot
        assert some(slot, lambda c: c.groups >= 9), slot
        assert some(slot, lambda c: 0 in c.documents and 1 in c.documents), slot
        assert {c.dtype for c in quick(slot)} == set(DTYPES)
    assert {c.blocks for c in quick("sel")} >= {"messy64", "sorted64", "none"}


def test_layouts_change_strides_and_not_values() -> None:
    plain = SlotCase("win", tokens=7, batch=2, groups=3, h=2)
    expected = problem_of(plain).inputs["v"]
    seen = set()
    for layout in ("transposed", "gaps", "offset", "strided"):
        v = problem_of(dataclasses.replace(plain, layout=layout)).inputs["v"]
        assert torch.equal(v, expected), layout
        seen.add((v.stride(), v.storage_offset()))
    assert len(seen | {(expected.stride(), 0)}) == 5
    expanded = problem_of(dataclasses.replace(plain, layout="expanded")).inputs
    assert expanded["k"].stride(0) == expanded["v"].stride(0) == 0
    do = problem_of(dataclasses.replace(plain, do_layout="expanded")).do
    assert do is not None
    assert do.stride(-2) == 0


@pytest.mark.parametrize(("scores", "largest"), [("tiny", 1e-2), ("large", LARGE_SCORE)])
def test_scores_have_the_size_of_their_level_for_any_scale(scores: str, largest: float) -> None:
    for scale in (None, -0.3, 2.0):
        case = SlotCase("win", scale=scale, scores=scores, tokens=9, dtype="float64")
        inputs = problem_of(case).inputs
        products = torch.einsum("bshd,bthd->bsht", inputs["q"], inputs["k"])
        assert float(products.abs().max()) * abs(case.config.softmax_scale) == pytest.approx(
            largest
        )


def _finite(results: list[torch.Tensor], inputs: dict[str, torch.Tensor]) -> None:
    results[:] = [x.nan_to_num(0.0, 0.0, 0.0) for x in results]


def _everywhere(results: list[torch.Tensor], inputs: dict[str, torch.Tensor]) -> None:
    results[:] = [x if x.isfinite().all() else torch.full_like(x, torch.nan) for x in results]


@pytest.mark.parametrize(
    "line",
    [
        # one column: `rounded` is nearly exact in a row whose terms cancel
        "sel dtype=bfloat16 l=6 d=3 block=9 n=2 h=17 dk=1 dv=1 tokens=88 scores=large "
        "poison=nan_q seed=42",
        # no score limits q, so a steep gradient of o would make dk overflow
        "sel dtype=float16 l=12 block=16 h=16 groups=3 dk=128 dv=64 scale=2.5 tokens=15 "
        "do_layout=expanded scores=zero values=steep seed=26",
    ],
)
def test_a_correct_backend_passes(line: str) -> None:
    combination = Combination(dict.fromkeys(SLOTS, "sdpa"))
    findings = judge(combination, parse(line))
    assert len(findings) >= 7
    assert all(finding.ok for finding in findings), findings


@pytest.mark.parametrize("slot", ["cmp", "select", "sel", "win"])
def test_a_case_without_tokens_and_with_tiny_scores_is_judged(slot: str) -> None:
    """One query of such a case is exactly 0, if there is one."""
    line = f"{slot} tokens=0 batch=5 scores=tiny poison=nan_k"
    combination = Combination(dict.fromkeys(SLOTS, "sdpa"))
    findings = judge(combination, parse(line))
    assert findings
    assert all(finding.ok for finding in findings), findings


@pytest.mark.few_cases
@pytest.mark.parametrize("slot", ["cmp", "sel", "win"])
@pytest.mark.parametrize("poison", ["nan_q", "nan_k", "nan_v", "inf_v", "nan_do"])
def test_nan_reaches_the_gradients_that_read_it_and_no_others(slot: str, poison: str) -> None:
    lengths = "tokens=12 batch=2" if slot == "win" else "documents=3,12,0,5"
    case = parse(f"{slot} h=2 groups=2 n=2 {lengths} poison={poison}")

    def failed(combination: Combination) -> set[str]:
        findings = judge(combination, case)
        assert any(f"of {poison.split('_')[0]} in" in f.quantity for f in findings)
        return {f.quantity.partition(" ")[0] for f in findings if f.ok is False}

    assert failed(Combination({slot: "sdpa"}, "cpu")) == set()
    gradients = {"dq", "dk", "dv", "dk_cmp", "dv_cmp"}
    for fault in (_finite, _everywhere):
        planted = Fault(f"{fault.__name__} {slot}", slot, grads=fault)
        names = failed(planted.combination())
        assert "dq" in names
        assert names <= gradients


@pytest.mark.slow
def test_a_failing_case_shrinks_to_the_smallest_that_fails() -> None:
    fault = next(f for f in FAULTS if f.name == "win takes a negative scale as positive")
    combination = fault.combination()

    def fails(case: SlotCase) -> bool:
        return any(f.ok is False for f in judge(combination, case))

    large = next(
        case for case in quick("win") if (case.scale or 0) < 0 and case.groups > 1 and fails(case)
    )
    small = shrink(large, fails, ShrinkBudget(10))
    assert fails(small)
    assert (small.tokens, small.batch, small.h, small.groups) == (1, 1, 1, 1), str(small)
    assert (small.scale or 0) < 0
    assert fails(parse(str(small)))


def test_shrinking_stops_in_time_and_keeps_a_failing_case() -> None:
    case = SlotCase("win", tokens=60, batch=3)
    assert shrink(case, lambda candidate: True, ShrinkBudget(0.0)) == case


def refuse_wide(request: Request) -> Sequence[Reason]:
    """A probe that accepts values of width 16 only."""
    return [] if request.v_head_dim == 16 else [Reason("wide", f"no Dv={request.v_head_dim}")]


def refuse_all(request: Request) -> Sequence[Reason]:
    """A probe that accepts nothing."""
    return [Reason("never", "accepts nothing")]


def refusing(probe: str) -> Combination:
    """Return sdpa in every slot, with the backend "picky" and its probe in win."""
    spec = nsa_register_backends()
    module = "test_drawn_cases"
    picky = dataclasses.replace(
        spec, name="picky", slots={"win": spec.slots["win"]}, probe=f"{module}:{probe}"
    )
    registry = Registry(()).with_backend(spec).with_backend(picky)
    return Combination({"win": "picky"}, "cpu", registry)


@pytest.mark.parametrize("slot", SLOTS)
def test_calls_without_a_token_a_sequence_or_a_query_are_judged(slot: str) -> None:
    for case in case_edges(slot):
        findings = judge(Combination({}), case)
        assert findings
        assert all(finding.ok for finding in findings), case
    for function in FUNCTIONS:
        assert all(f.ok for f in judge(Combination({}), parse(f"{function} batch=0")))


@pytest.mark.slow
def test_refused_cases_are_counted_with_their_reasons() -> None:
    def findings(probe: str) -> list[object]:
        jobs = suite.jobs("quick", [torch.float32], cases_per_slot=12, phase="prefill")
        return [
            finding
            for job in jobs
            if job.name == "generated win"
            for finding in job.run(refusing(probe))
        ]

    some = count_cases(findings("refuse_wide"))["win"]  # type: ignore[arg-type]
    assert some.cases == 12
    assert 0 < some.refused < 12
    assert all("no Dv=" in reason for reason in some.reasons)
    every = count_cases(findings("refuse_all"))["win"]  # type: ignore[arg-type]
    assert (every.cases, every.refused) == (12, 12)


def test_a_slot_is_judged_although_another_slot_refuses_the_case() -> None:
    combination = refusing("refuse_all")
    findings = judge(combination, parse("sel block=8 n=2"))
    assert findings
    assert all(finding.ok for finding in findings)


@pytest.mark.slow
def test_number_of_generated_jobs_is_that_asked_for() -> None:
    def names(cases: int | None = None) -> list[str]:
        jobs = suite.jobs("quick", [torch.float32], phase="prefill", cases_per_slot=cases)
        return [job.name for job in jobs if job.name.startswith("generated")]

    assert names(0) == []
    kinds = [f"generated {name}" for name in (*FUNCTIONS, *SLOTS)]
    assert names(3) == [name for name in kinds for _ in range(3)]
    assert len(names()) > 5 * 25  # every pair of five values takes 25 rows
    interpreted = suite.jobs("interpreter", [torch.float32])
    generated = {job.name for job in interpreted if job.name.startswith("generated")}
    assert generated == set(kinds[: len(FUNCTIONS)])


def test_equal_roundings_of_equal_probabilities_are_no_bias() -> None:
    """fp16 rounds every 1/5 of a window of 5 down, so dv of a correct kernel is too small."""

    def round_probabilities(grads: list[torch.Tensor], x: dict[str, torch.Tensor]) -> None:
        token = torch.arange(x["do"].shape[1])
        distance = token[:, None] - token
        seen = ((distance >= 0) & (distance < 5)).float()
        p = (seen / seen.sum(-1, keepdim=True)).half().float()
        grads[2].copy_(torch.einsum("st,bshd->bthd", p, x["do"].float()))

    fault = Fault("P is rounded", "win", grads=round_probabilities)
    case = parse("win dtype=float16 w=5 dk=1 scale=0.0 tokens=55 seed=9")
    findings = judge(fault.combination(), case)
    assert findings
    assert all(f.ok for f in findings), findings


@pytest.mark.parametrize(
    ("quantity", "row", "elem", "passes"),
    [
        ("dv", 0.5, 0.5, True),
        ("dv", 1.1, 0.5, False),
        ("dv", 0.5, 1.1, False),
        ("dv", math.nan, 0.5, False),
        ("dv", 0.5, math.nan, False),
        ("lse", 0.5, 0.5, False),
    ],
)
def test_only_a_bias_is_forgiven(quantity: str, row: float, elem: float, passes: bool) -> None:
    finding = Finding("c", "win", "case", "float16", quantity, False, row, elem, 1.2, "bias 1.2")
    judged = without_bias(finding)
    assert (judged.ok, judged.bias) == ((True, None) if passes else (False, 1.2))

"""Generated cases of queries that begin inside a sequence (contract 1.1)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nsa_core.contract import DTYPES, BackendSpec, import_named
from nsa_core.plan.registry import Registry, discover
from nsa_verify.drawn.case import PARTIAL_CHECK, SlotCase
from nsa_verify.drawn.draw import draw
from nsa_verify.drawn.jobs import case_jobs, job_of
from nsa_verify.drawn.judge import judge
from nsa_verify.drawn.parser import parse
from nsa_verify.drawn.partial_levels import PARTIAL_SLOTS as SLOTS
from nsa_verify.drawn.shrink import ShrinkBudget, shrink
from nsa_verify.drawn.tensors import problem_of
from nsa_verify.problems.combination import Combination
from nsa_verify.run import suite
from semantic.model import FUNCTIONS, healthy_combination, healthy_spec

QUICK = {slot: draw(f"partial {slot}", "quick", DTYPES) for slot in SLOTS}


@pytest.mark.parametrize("slot", SLOTS)
def test_queries_of_quick_begin_at_every_residue(slot: str) -> None:
    """Modulo 8, so modulo every d and l' = 8: the position of the first query in its document."""
    residues: dict[tuple[int, int], set[int]] = {}
    for case in QUICK[slot]:
        position = next(start for begin, end, start in case.query_spans if end > begin)
        residues.setdefault((case.d, case.block), set()).add(position % case.block)
    for (_, block), positions in residues.items():
        assert {position % 8 for position in positions} == set(range(8))
        assert block == 8 or len(positions) >= 8  # of 16; full has all of them
    assert slot == "win" or {d for d, _ in residues} == {1, 2, 4, 8}


@pytest.mark.parametrize("slot", SLOTS)
def test_quick_cuts_everywhere(slot: str) -> None:
    def some(condition: Callable[[SlotCase, int, int], bool]) -> bool:
        return any(condition(case, *case.query_rows) for case in QUICK[slot])

    def starts(case: SlotCase) -> set[int]:
        return {sum(case.documents[:i]) for i in range(len(case.documents) + 1)}

    assert some(lambda c, first, end: end == first + 1)
    assert some(lambda c, first, end: first == 0 and end < c.axis)
    assert some(lambda c, first, end: not c.packed and c.batch > 1 and 0 < first < end < c.axis)
    assert some(lambda c, first, end: not c.packed and first > 0 and end == c.axis)
    assert some(lambda c, first, end: c.packed and 0 < first in starts(c))
    assert some(lambda c, first, end: c.packed and first not in starts(c) and end not in starts(c))
    assert some(lambda c, first, end: c.packed and end < c.axis and end in starts(c))
    assert some(lambda c, first, end: c.packed and sum(s[0] < s[1] for s in c.query_spans) >= 3)
    assert {c.dtype for c in QUICK[slot]} == set(DTYPES)


def test_tensors_have_the_rows_of_the_queries_and_all_keys() -> None:
    case = parse("sel dk=3 dv=2 block=4 n=3 documents=3,0,9 seed=4 first_query=5")
    part = problem_of(case)
    assert part.first_query == 5
    assert part.do is not None
    assert (len(part.inputs["q"]), len(part.do), len(part.inputs["k"])) == (7, 7, 12)
    # Token 2 of the second document, and its last one: blocks 0, and 0 to 2.
    assert set(part.inputs["blocks"][0].flatten().tolist()) == {0, -1}
    assert set(part.inputs["blocks"].flatten().tolist()) == {-1, 0, 1, 2}
    case = parse("select l=4 d=2 tokens=9 batch=2 first_query=2 queries=3")
    inputs = problem_of(case).inputs
    assert inputs["lse"].shape == (2, 1, 3)
    # Token 2 sees no compressed token, token 3 the first, and token 4 no other.
    assert torch.equal(inputs["lse"].isinf(), torch.tensor([[[True, False, False]]] * 2))
    score = (inputs["q"][0, 1, 0] @ inputs["k_cmp"][0, 0, 0]) / 4
    torch.testing.assert_close(inputs["lse"][0, 0, 1], score)


@pytest.mark.few_cases("cmp", "win")
@pytest.mark.parametrize("slot", SLOTS)
def test_padded_calls_pass(slot: str) -> None:
    """The padding backend is right; every fifteenth case, no query, and one with NaN or Inf."""
    poisons = {"cmp": "nan_k", "select": "nan_q", "sel": "inf_v", "win": "nan_q"}
    poisoned = dataclasses.replace(QUICK[slot][7], poison=poisons[slot])
    empty = dataclasses.replace(QUICK[slot][0], queries=0)
    for case in (*QUICK[slot][::15], poisoned, empty):
        case.check()
        findings = judge(healthy_combination(), case)
        assert findings, str(case)
        assert [f for f in findings if f.ok is not True] == []
        assert {f.check for f in findings} == {PARTIAL_CHECK}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("slot", SLOTS)
def test_padded_calls_pass_the_full_design(slot: str, seed: int) -> None:
    cases = draw(f"partial {slot}", "full", DTYPES, seed=seed)
    spans = [span for case in cases if case.block == 16 for span in case.query_spans]
    if slot in ("select", "sel"):  # the others have few blocks of 16
        assert {position % 16 for _, _, position in spans} == set(range(16))
    for case in cases:
        case.check()
        if case.axis > 3000:
            continue  # padding computes every row
        failed = [f for f in judge(healthy_combination(), case) if f.ok is not True]
        assert failed == []


def planted(name: str, slot: str, change: Callable[[list[torch.Tensor], Any], None]) -> Combination:
    """Return the padding backend with ``change`` of the results of partial forwards of ``slot``."""
    spec = healthy_spec()
    healthy = import_named(spec.slots[slot].forward)

    def forward(*tensors: torch.Tensor, call: Any) -> Any:
        results = healthy(*tensors, call=call)
        listed = [results] if isinstance(results, torch.Tensor) else list(results)
        change(listed, call)
        return listed[0] if isinstance(results, torch.Tensor) else tuple(listed)

    setattr(FUNCTIONS, name, forward)
    own = dataclasses.replace(spec.slots[slot], forward=f"{FUNCTIONS.__name__}:{name}")
    faulty = dataclasses.replace(spec, name=name, slots={**spec.slots, slot: own})
    return Combination({slot: name}, registry=discover().with_backend(faulty))


def test_nan_that_is_lost_in_a_cut_is_found() -> None:
    line = "win w=3 tokens=12 first_query=5 queries=4 poison=nan_v"
    case = parse(line)
    assert all(f.ok for f in judge(healthy_combination(), case))
    finite = planted("partial_finite", "win", lambda out, call: out[0].nan_to_num_())
    failed = [f for f in judge(finite, case) if f.ok is False]
    assert "nan in v" in [f.quantity for f in failed]


def test_nan_of_a_query_that_leaves_its_row_is_found() -> None:
    def spread(out: list[torch.Tensor], call: Any) -> None:
        if bool(out[0].isnan().any()):
            out[0][..., 0, :, :] = torch.nan

    line = "win w=3 documents=4,12 first_query=6 queries=5 poison=nan_q"
    failed = [
        f for f in judge(planted("partial_spread", "win", spread), parse(line)) if f.ok is False
    ]
    assert [f.quantity for f in failed] == ["o beside nan in q", "dq beside nan in q"]


@pytest.mark.slow
def test_a_failing_cut_shrinks_and_stays_a_cut() -> None:
    def wrong(out: list[torch.Tensor], call: Any) -> None:
        if call.first_query >= 3:
            out[0].mul_(2)

    combination = planted("partial_wrong", "win", wrong)

    def fails(case: SlotCase) -> bool:
        return any(f.ok is False for f in judge(combination, case))

    large = next(c for c in QUICK["win"] if c.packed and c.groups > 1 and fails(c))
    small = shrink(large, fails, ShrinkBudget(10))
    assert (small.first_query, small.queries, small.groups) == (3, 1, 1), str(small)
    assert small.axis <= 4, str(small)
    assert fails(parse(str(small)))


def without_partial(spec: BackendSpec, *slots: str) -> BackendSpec:
    changed = {slot: dataclasses.replace(spec.slots[slot], partial=False) for slot in slots}
    return dataclasses.replace(spec, slots={**spec.slots, **changed})


def registry_of(spec: BackendSpec) -> Combination:
    return Combination({}, registry=Registry(()).with_backend(spec))


def test_a_slot_that_does_not_declare_partial_is_not_asked() -> None:
    combination = registry_of(without_partial(healthy_spec(), "sel", "cmp"))
    cases = [QUICK[slot][0] for slot in SLOTS]
    todo = [job_of(case, "case", suite.Job, ShrinkBudget(0), if_declared=True) for case in cases]
    assert {job.name for job in todo} == {PARTIAL_CHECK}
    findings = [finding for job in todo for finding in job.run(combination)]
    assert {f.slot for f in findings} == {"select", "win"}
    assert all(f.ok for f in findings)
    assert [combination.declares_partial(slot) for slot in SLOTS] == [False, True, False, True]


def test_a_slot_is_judged_although_no_other_slot_declares_partial() -> None:
    combination = registry_of(without_partial(healthy_spec(), "cmp", "select", "sel"))
    findings = judge(combination, parse("win tokens=9 first_query=4"))
    assert findings
    assert all(f.ok for f in findings)


def test_a_line_for_a_backend_without_partial_gives_its_reason() -> None:
    combination = registry_of(without_partial(healthy_spec(), "win"))
    (finding,) = judge(combination, parse("win tokens=9 first_query=4"))
    assert finding.ok is None
    assert "does not take queries that begin inside a sequence in win" in finding.detail


@pytest.mark.slow
def test_number_of_partial_jobs_is_that_asked_for() -> None:
    def count(preset: str, asked: int | None) -> int:
        listed = case_jobs(preset, [torch.float32], 0, asked, suite.Job)
        return sum(job.name == PARTIAL_CHECK for job in listed)

    assert count("interpreter", None) == 0
    assert count("quick", 3) == 4 * 3

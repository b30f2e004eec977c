"""The check of block_attention passes correct kernels, and fails faulty kernels and splits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import killers
import pytest
import torch

import toy_blocks
from nsa_core.block import attention as core
from nsa_core.contract import DTYPES
from nsa_verify.drawn.case import SlotCase
from nsa_verify.drawn.draw import draw
from nsa_verify.drawn.function_levels import FUNCTIONS
from nsa_verify.drawn.jobs import job_of
from nsa_verify.drawn.judge import judge
from nsa_verify.drawn.shrink import ShrinkBudget
from nsa_verify.problems.combination import Combination
from nsa_verify.problems.findings import Finding
from nsa_verify.run import suite

KERNELS = sorted(name for name in vars(toy_blocks) if name.startswith(("forward_", "backward_")))


def cases(preset: str, dtype: str = "float32") -> Sequence[SlotCase]:
    return draw("block_attention", preset, [dtype], seed=3)


def findings(
    combination: Combination, preset: str = "interpreter", dtype: str = "float32"
) -> list[Finding]:
    return [f for case in cases(preset, dtype) for f in judge(combination, case)]


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize(
    "preset", ["interpreter", *(pytest.param(p, marks=pytest.mark.slow) for p in ("quick", "full"))]
)
def test_correct_kernels_pass(preset: str, dtype: str) -> None:
    results = findings(toy_blocks.subject(), preset, dtype)
    assert {f.case for f in results} == {str(case) for case in cases(preset, dtype)}
    assert all(finding.ok for finding in results), [f for f in results if not f.ok]


@pytest.mark.few_cases("backward_at_the_start")
@pytest.mark.parametrize(
    "kernel",
    [
        *KERNELS[::4],
        *(pytest.param(k, marks=pytest.mark.slow) for k in KERNELS if k not in KERNELS[::4]),
    ],
)
def test_a_faulty_kernel_fails(kernel: str) -> None:
    direction = kernel.partition("_")[0]
    combination = toy_blocks.subject(**{direction: kernel})
    for case in cases("quick"):
        failed = [f for f in judge(combination, case) if f.ok is False]
        if failed:
            break
    assert failed, kernel
    if direction == "backward":
        assert {finding.quantity.partition(" ")[0] for finding in failed} <= {"dq", "dk", "dv"}
    killers.expect("block attention", kernel, killers.killer(failed[0]))


def _unsplit(blocks: torch.Tensor, sizes: Any, keys: int) -> torch.Tensor:
    return blocks.long().repeat_interleave(sizes.parts, -1)


def _first_parts(blocks: torch.Tensor, sizes: Any, keys: int) -> torch.Tensor:
    return torch.where(blocks.long() < 2**30, blocks.long() * sizes.parts, -1)


def _wrapping(blocks: torch.Tensor, sizes: Any, keys: int) -> torch.Tensor:
    return split(blocks.long().to(torch.int8), sizes, keys)


split = core.split_blocks
SPLITS = (_unsplit, _first_parts, _wrapping)


@pytest.mark.slow
@pytest.mark.parametrize("faulty_split", SPLITS)
def test_a_faulty_split_fails(
    faulty_split: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "split_blocks", faulty_split)
    results = (judge(toy_blocks.subject(), case) for case in cases("quick"))
    first = next(finding for case in results for finding in case if finding.ok is False)
    killers.expect("block attention", f"split {faulty_split.__name__}", killers.killer(first))


@pytest.mark.slow
def test_a_backend_without_partial_is_judged_on_whole_sequences_alone() -> None:
    drawn = cases("interpreter")
    inside = {case for case in drawn if case.first_query is not None}
    assert inside
    todo = [
        job_of(x, "case", suite.Job, ShrinkBudget(0), if_declared=True)
        for x in cases("interpreter")
    ]
    results = [f for job in todo for f in job.run(toy_blocks.subject(partial=False))]
    whole = {str(case) for case in drawn if case not in inside}
    assert {finding.case for finding in results} == whole
    assert all(finding.ok for finding in results)


def test_quick_has_every_group_size() -> None:
    for name in FUNCTIONS:
        assert {case.h for case in draw(name, "quick", DTYPES)} == {*range(1, 21), 64}


@pytest.mark.few_cases("quick")
@pytest.mark.parametrize("preset", ["interpreter", "quick"])
def test_the_jobs_of_a_preset_have_the_check(preset: str) -> None:
    jobs = suite.jobs(preset, [torch.float32], phase="prefill")
    for name in FUNCTIONS:
        count = sum(job.name == f"generated {name}" for job in jobs)
        assert count == len(draw(name, preset, ["float32"])) >= 5

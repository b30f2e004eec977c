"""The jobs of generated cases, and the count of the cases that a backend refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from nsa_core.contract import SLOTS
from nsa_core.dtypes import dtype_name
from nsa_verify.checks.calls import CORE, PREFILL, prefill
from nsa_verify.generated.case import GeneratedCase
from nsa_verify.generated.checks import judge_generated, judge_if_declared
from nsa_verify.generated.functions import FUNCTIONS, function_cases
from nsa_verify.generated.levels import generated_cases
from nsa_verify.generated.partial import partial_cases
from nsa_verify.generated.shrink import OnGenerated, ShrinkBudget
from nsa_verify.problems.findings import Finding

_Job = TypeVar("_Job")


def jobs_for(
    preset: str,
    dtypes: Sequence[torch.dtype],
    seed: int,
    count: int | None,
    job: Callable[[str, Any, Any, torch.dtype], _Job],
) -> list[_Job]:
    """Return one job per generated case.

    Args:
        preset: "quick", "full" or "interpreter". The slow interpreter has those of functions alone
            unless ``count`` asks for the others.
        dtypes: Dtypes of the cases.
        seed: Seed of the design.
        count: Cases of each slot, and as many with first_query; None takes the whole designs.
        job: Creates a job from its name, check, case and dtype.
    """
    names = [dtype_name(d) for d in dtypes]
    options: dict[str, Any] = {"seed": seed, "count": count}
    cases = function_cases(preset, names, **options)
    if count is not None or preset != "interpreter":
        cases += generated_cases(preset, names, **options) + partial_cases(preset, names, **options)
    budgets = {slot: ShrinkBudget() for slot in (*SLOTS, *FUNCTIONS)}
    return [job_of(case, job, budgets[case.slot], if_declared=True) for case in cases]


def job_of(
    generated: GeneratedCase,
    job: Callable[[str, Any, Any, torch.dtype], _Job],
    budget: ShrinkBudget,
    *,
    if_declared: bool = False,
) -> _Job:
    """Return the job of one generated case, made by ``job`` as in :func:`jobs_for`.

    ``if_declared`` leaves a case with first_query out where no backend declares such queries.
    """
    partial = generated.first_query is not None
    name = f"{generated.slot} {generated.seed}" if partial else f"case {generated.seed}"
    case = dataclasses.replace(generated.as_case(), name=name)
    judge = judge_if_declared if if_declared and partial else judge_generated
    calls = (*PREFILL, CORE) if generated.slot == "core" else prefill(generated.kernel)
    check = OnGenerated(generated, judge, budget, frozenset(calls))
    return job(generated.check_name, check, case, getattr(torch, generated.dtype))


@dataclasses.dataclass(frozen=True)
class GeneratedCount:
    """The generated cases of one slot.

    Attributes:
        cases: Number of cases that ran or were refused.
        refused: Number of cases that the probe refused.
        reasons: The distinct reasons of the refusals, most frequent first.
    """

    cases: int
    refused: int
    reasons: list[str]


def count_cases(findings: Sequence[Finding]) -> Mapping[str, GeneratedCount]:
    """Count the generated cases of each slot, and those that the backend refused."""
    cases: dict[str, set[str]] = {}
    refusals: dict[str, list[str]] = {}
    for finding in findings:
        if finding.check != f"generated {finding.slot}":
            continue
        cases.setdefault(finding.slot, set()).add(finding.case)
        if finding.ok is None:
            refusals.setdefault(finding.slot, []).append(finding.detail)
    return {
        slot: GeneratedCount(
            len(names),
            len(refusals.get(slot, ())),
            sorted(set(refusals.get(slot, ())), key=lambda r: -refusals[slot].count(r)),
        )
        for slot, names in cases.items()
    }

"""The parts of `nsa verify` that run plugins outside of the checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from nsa_core.plan.plan import Plan
    from nsa_verify.problems.combination import Combination
    from nsa_verify.problems.findings import Finding


def default_job_limit_s(device: str, interpreted: bool) -> float:
    """Return the seconds of one check without --job-timeout; kernels compile within the check."""
    return 300.0 if device == "cuda" or interpreted else 60.0


def plan_all(
    combinations: Sequence[Combination], dtypes: Sequence[torch.dtype], preset: str, phase: str
) -> tuple[bool, list[dict[str, str]]]:
    """Plan every combination; return whether one needs an interpreter, and the backends of each.

    Raises:
        NSAError: A combination cannot run; see :func:`plan_one`.
    """
    from nsa_verify.run.contexts import needs_judge_context

    interpreted = any(map(needs_judge_context, combinations))
    preset = "interpreter" if interpreted else preset
    plans = [plan_one(combination, dtypes, preset, phase) for combination in combinations]
    return interpreted, [
        {slot: f"{choice.backend} {choice.version}" for slot, choice in plan.choices.items()}
        for plan in plans
    ]


def plan_one(
    combination: Combination, dtypes: Sequence[torch.dtype], preset: str, phase: str
) -> Plan:
    """Return the combination's plan in the first dtype that it supports.

    Planning before the checks refuses unknown and unavailable backends early. With ``phase``
    "decode", the plan is that of a decode step.

    Raises:
        Unsupported: The combination supports none of ``dtypes``; the message has the reasons
            against the first.
    """
    from nsa_core.errors import Unsupported
    from nsa_verify.problems import cases

    config, refusals = cases.PRESETS[preset]()[0].config, []
    for dtype in dtypes:
        try:
            if phase == "decode":
                return combination.plan(config, dtype, needs_grad=False, phase=phase)
            return combination.plan(config, dtype)
        except Unsupported as refusal:
            refusals.append(refusal)
    raise refusals[0]


def reads_or_failure(
    combination: Combination, dtypes: Sequence[torch.dtype], limit_s: float
) -> tuple[dict[str, Any], list[Finding]]:
    """Count the cached tokens that a decode step reads; a failure is a finding instead.

    Args:
        combination: The combination.
        dtypes: Candidate dtypes.
        limit_s: Seconds for the child process that counts them, if it has a third-party backend.
    """
    from nsa_core.errors import NSAError
    from nsa_core.util.child import Child
    from nsa_verify.problems.findings import Finding

    name = str(dtypes[0]).removeprefix("torch.")
    try:
        if not (plugins := combination.plugins()):
            return _count_reads(combination, dtypes), []
        child = Child(f"backend {' or '.join(map(repr, plugins))}")
        call = (_count_guarded_reads, combination.for_child(), dtypes)
        return child.call(*call, limit_s=limit_s, doing="in this check"), []
    except NSAError as error:
        failed = Finding("reads", "", "", name, "run", False, detail=str(error))
        return {"reads": [], "reads_refused": str(error)}, [failed]


def _count_guarded_reads(combination: Combination, dtypes: Sequence[torch.dtype]) -> dict[str, Any]:
    from nsa_verify.isolation.call_guard import guarded_calls

    with guarded_calls():
        return _count_reads(combination, dtypes)


def _count_reads(combination: Combination, dtypes: Sequence[torch.dtype]) -> dict[str, Any]:
    """Count the cached tokens that a decode step reads, in the first dtype with decode forms.

    The counts cover every length of :data:`nsa_verify.checks.reads.LENGTHS`.
    """
    from nsa_core.errors import Unsupported
    from nsa_verify.checks.reads import LENGTHS, PAPER_BOUND, count_reads, reads_config

    config, refusals = reads_config(), []
    for dtype in dtypes:
        try:
            entries = [
                entry
                for length in LENGTHS
                for entry in count_reads(combination, config, length, dtype)
            ]
        except Unsupported as refusal:
            refusals.append(str(refusal))
            continue
        bounds = {str(length): PAPER_BOUND[length] for length in LENGTHS if length in PAPER_BOUND}
        return {"reads": [dataclasses.asdict(entry) for entry in entries], "reads_bounds": bounds}
    return {"reads": [], "reads_refused": refusals[0]}

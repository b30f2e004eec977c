"""Run the checks of `nsa verify` on combinations of backends, and make the reports."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nsa_cli import output
from nsa_core.errors import Unsupported
from nsa_core.util.interruption import Interruption

if TYPE_CHECKING:
    import torch

    from nsa_core.plan.plan import Plan
    from nsa_core.plan.registry import Registry
    from nsa_verify.drawn.line import Drawn
    from nsa_verify.problems.combination import Combination

SCHEMA_VERSION = 1
_MANY_JOBS = 500


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """The options of `nsa verify` that say what runs.

    Attributes:
        device: Torch device.
        dtypes: Dtypes of the checks.
        only_accepted: Leave out dtypes that every combination refuses.
        preset: "quick" or "full"; kernels that need an interpreter run "interpreter" instead.
        seed: Seed of all random numbers.
        phase: "prefill", "decode" or "both".
        jobs: Processes; None chooses by device.
        job_timeout: Seconds of a check of a third-party backend; None chooses by device.
        cases: Generated cases per slot; None is the design of the preset.
        only: The one case, decode step or history that runs; None runs the preset.
        shard: (I, N) runs the I-th of N parts of the jobs, I from 1; None runs all.
    """

    device: str
    dtypes: Sequence[torch.dtype]
    only_accepted: bool
    preset: str
    seed: int
    phase: str
    jobs: int | None
    job_timeout: float | None
    cases: int | None
    only: Drawn | None
    shard: tuple[int, int] | None = None


def run_combinations(
    combinations: Sequence[dict[str, str]],
    options: RunOptions,
    registry: Registry,
    stop: Interruption,
) -> list[dict[str, Any]]:
    """Run the checks and return a report per combination.

    After a signal (``stop``), the reports hold the checks that had ended by then.
    """
    import torch

    from nsa_verify.drawn.jobs import count_cases
    from nsa_verify.problems.combination import Combination, accepted_dtypes
    from nsa_verify.run import suite
    from nsa_verify.run.contexts import needs_judge_context
    from nsa_verify.run.runner import run_jobs
    from nsa_verify.run.schedule import cost

    device, dtypes, phase = options.device, options.dtypes, options.phase
    # Cases are small: starting more threads takes longer than the computation.
    torch.set_num_threads(1 if device == "cpu" else min(4, torch.get_num_threads()))
    combos = [Combination(named, device, registry) for named in combinations]
    interpreted = any(map(needs_judge_context, combos))
    if interpreted:
        options = dataclasses.replace(options, preset="interpreter")
    plans = [plan_one(combination, dtypes, options.preset, phase) for combination in combos]
    if options.only_accepted:
        candidates = dtypes[:2] if interpreted else dtypes
        step = phase == "decode"
        accepted = {d for c in combos for d in accepted_dtypes(c, candidates, step)}
        dtypes = [dtype for dtype in candidates if dtype in accepted] or dtypes
    # Kernels compile within the check.
    job_limit_s = options.job_timeout or (300.0 if device == "cuda" or interpreted else 60.0)
    if options.only is not None:
        suite_jobs = [suite.job_of_line(options.only)]
    else:
        suite_jobs = suite.jobs(
            options.preset,
            dtypes,
            seed=options.seed,
            phase=phase,
            cases_per_slot=options.cases,
        )
    if options.shard is not None:
        index, count = options.shard
        suite_jobs = suite_jobs[index - 1 :: count]
    processes = options.jobs or _default_processes(device, interpreted, len(suite_jobs))
    expected = sum(map(cost, suite_jobs)) * len(combos)
    is_known = device == "cpu" and not interpreted
    seconds = expected / 1000 / processes if is_known else 0.0
    with output.progress(len(suite_jobs) * len(combos), expected, seconds) as advance:
        results = run_jobs(
            combos,
            suite_jobs,
            processes=processes,
            job_limit_s=job_limit_s,
            stop=stop,
            advance=advance,
        )
    common = _common(options, dtypes, interpreted, results.peak_bytes)
    checks, reports = len(suite_jobs), []
    for index, (named, plan) in enumerate(zip(combinations, plans)):
        findings = results.findings[index]
        left = checks - len(findings)
        report = {
            **common,
            "backends": {s: f"{c.backend} {c.version}" for s, c in plan.choices.items()},
            "named": named,
            "seconds": round(results.seconds[index], 2),
            "interrupted": (
                {"signal": stop.name, "checks_left": left, "checks": checks} if left else None
            ),
            "generated": {
                slot: dataclasses.asdict(count)
                for slot, count in count_cases(list(itertools.chain(*findings))).items()
            },
            "findings": [dataclasses.asdict(f) for job in findings for f in job],
        }
        reports.append(report)
    return reports


def _common(
    options: RunOptions,
    dtypes: Sequence[torch.dtype],
    interpreted: bool,
    peak_bytes: int,
) -> dict[str, Any]:
    """Return the fields that the reports of all combinations share."""
    import torch

    from nsa_core.dtypes import dtype_name

    cuda = options.device == "cuda"
    return {
        "schema_version": SCHEMA_VERSION,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "interpreted": interpreted,
        "dtypes": [dtype_name(dtype) for dtype in dtypes],
        "preset": options.preset,
        "phase": options.phase,
        "seed": options.seed,
        "shard": "/".join(map(str, options.shard)) if options.shard else None,
        "environment": output.environment(),
        "peak_memory_bytes": (max(peak_bytes, torch.cuda.max_memory_allocated()) if cuda else None),
    }


def _default_processes(device: str, interpreted: bool, jobs: int) -> int:
    """Return the number of processes without --jobs: one per available core, at most 16.

    A process takes two seconds to start, and holds half a gigabyte of GPU memory. On the CPU, few
    jobs run in this process.
    """
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    parallel = device == "cuda" or interpreted or jobs >= _MANY_JOBS
    return min(cores, 16) if parallel else 1


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

"""Run the checks of `nsa verify` on combinations of backends, and make the reports."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nsa_cli import output
from nsa_cli.verify_isolated import default_job_limit_s, plan_all, reads_or_failure
from nsa_core.util.interruption import Interruption

if TYPE_CHECKING:
    import torch

    from nsa_core.plan.registry import Registry
    from nsa_verify.drawn.line import Drawn
    from nsa_verify.problems.combination import Combination
    from nsa_verify.problems.findings import Finding
    from nsa_verify.run.suite import Job

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
        text: Name and bytes of the text of the real case.
        seed: Seed of all random numbers.
        phase: "prefill", "decode" or "both".
        reads: Count the cached tokens that a decode step reads.
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
    text: tuple[str, bytes]
    seed: int
    phase: str
    reads: bool
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

    from nsa_verify.problems.combination import Combination
    from nsa_verify.run.runner import run_jobs

    device, dtypes, phase = options.device, options.dtypes, options.phase
    # Cases are small: starting more threads takes longer than the computation.
    torch.set_num_threads(1 if device == "cpu" else min(4, torch.get_num_threads()))
    combos = [Combination(named, device, registry) for named in combinations]
    interpreted, chosen = plan_all(combos, dtypes, options.preset, phase)
    if interpreted:
        options = dataclasses.replace(options, preset="interpreter", text=("none", b""))
    if options.only_accepted:
        candidates = dtypes[:2] if interpreted else dtypes
        dtypes = _accepted(combos, candidates, phase) or dtypes
    job_limit_s = options.job_timeout or default_job_limit_s(device, interpreted)
    suite_jobs = _jobs(options, dtypes)
    if options.shard is not None:
        index, count = options.shard
        suite_jobs = suite_jobs[index - 1 :: count]
    processes = options.jobs or _default_processes(device, interpreted, len(suite_jobs))
    with output.progress(len(suite_jobs) * len(combos)) as advance:
        results = run_jobs(
            combos,
            suite_jobs,
            processes=processes,
            job_limit_s=job_limit_s,
            stop=stop,
            advance=advance,
        )
    read_counts: list[dict[str, Any]] = [{} for _ in combos]
    failed: list[list[Finding]] = [[] for _ in combos]
    with stop.stop_on_interrupt():
        for index, combination in enumerate(combos if options.reads else ()):
            if not stop.received:
                read_counts[index], failed[index] = reads_or_failure(
                    combination, dtypes, job_limit_s
                )
    checks = len(suite_jobs) + options.reads
    checks_left = [
        checks - len(findings) - bool(counts)
        for findings, counts in zip(results.findings, read_counts)
    ]
    common = _common(options, dtypes, interpreted, results.peak_bytes)
    return [
        {
            **common,
            **counts,
            "backends": backends,
            "named": named,
            "seconds": round(seconds, 2),
            "interrupted": (
                {"signal": stop.name, "checks_left": left, "checks": checks} if left else None
            ),
            "generated": _count_generated(findings),
            "findings": [
                dataclasses.asdict(finding) for job in [*findings, fault] for finding in job
            ],
        }
        for named, backends, seconds, findings, counts, fault, left in zip(
            combinations,
            chosen,
            results.seconds,
            results.findings,
            read_counts,
            failed,
            checks_left,
        )
    ]


def _common(
    options: RunOptions, dtypes: Sequence[torch.dtype], interpreted: bool, peak_bytes: int
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
        "text": {"name": options.text[0], "bytes": len(options.text[1])},
        "environment": output.environment(),
        "peak_memory_bytes": (max(peak_bytes, torch.cuda.max_memory_allocated()) if cuda else None),
    }


def _count_generated(findings: Sequence[Sequence[Finding]]) -> dict[str, Any]:
    """Count the generated cases of each slot, and those that the probe refused."""
    from nsa_verify.drawn.jobs import count_cases

    counts = count_cases([finding for job in findings for finding in job])
    return {slot: dataclasses.asdict(count) for slot, count in counts.items()}


def _jobs(options: RunOptions, dtypes: Sequence[torch.dtype]) -> list[Job]:
    """List the jobs of the preset, or those of the one case, step or history of ``options``."""
    from nsa_verify.run import suite

    if options.only is not None:
        return [suite.job_of_line(options.only)]
    return suite.jobs(
        options.preset,
        dtypes,
        text=options.text[1] or None,
        seed=options.seed,
        phase=options.phase,
        cases_per_slot=options.cases,
    )


def _accepted(
    combos: Sequence[Combination], dtypes: Sequence[torch.dtype], phase: str
) -> list[torch.dtype]:
    """Return those of ``dtypes`` that at least one combination accepts."""
    from nsa_verify.problems.combination import accepted_dtypes

    accepted = {d for c in combos for d in accepted_dtypes(c, dtypes, phase == "decode")}
    return [dtype for dtype in dtypes if dtype in accepted]


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

"""Run jobs in this process or in several, with the same findings in the same order."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence

from nsa_core.dtypes import dtype_name
from nsa_core.util.interruption import NEVER, Interruption
from nsa_verify.problems.combination import Combination
from nsa_verify.problems.findings import Finding
from nsa_verify.run.schedule import cost
from nsa_verify.run.suite import Job
from nsa_verify.run.workers import run_tasks

GRACE_S = 1.0  # after a signal, a check in this process may take this long to end by itself


@dataclasses.dataclass
class RunResult:
    """The results of all jobs.

    Attributes:
        findings: For each combination, the findings of each completed job, in the order of jobs.
        seconds: For each combination, its share of the elapsed time.
        peak_bytes: Largest GPU memory use of one process, in bytes.
    """

    findings: list[list[list[Finding]]]
    seconds: list[float]
    peak_bytes: int


def run_jobs(
    combinations: Sequence[Combination],
    todo: Sequence[Job],
    *,
    processes: int = 1,
    job_limit_s: float = float("inf"),
    stop: Interruption = NEVER,
    advance: Callable[[str, float], None] = lambda label, cost: None,
) -> RunResult:
    """Run every job on every combination.

    Args:
        combinations: Combinations to judge.
        todo: Jobs to run.
        processes: Number of worker processes. With more than one, jobs and combinations are
            pickled. A worker that dies becomes a failed finding of its job, and a new worker
            replaces it.
        job_limit_s: Seconds after which a job with a third-party backend counts as hanging.
            Whatever such a backend does becomes a failed finding.
        stop: After it is set, no new job starts. Worker processes end at once; a job in this
            process may end within GRACE_S.
        advance: Called with a label and the cost (:func:`nsa_verify.run.schedule.cost`) of a job,
            after each job on each combination.

    Raises:
        InvalidInput: A job raised it.
        BackendUnavailable: A job raised it, or no worker process can start on this machine.
    """
    findings: list[dict[int, list[Finding]]] = [{} for _ in combinations]
    busy, peak, started = [0.0] * len(combinations), 0, time.perf_counter()
    results = run_tasks(
        combinations,
        todo,
        processes=max(min(processes, len(todo)), 1),
        stop=stop,
        job_limit_s=job_limit_s,
    )
    with stop.stop_on_interrupt(GRACE_S), contextlib.closing(results):
        for result in results:
            # A signal to the process group also ends the compiler of a kernel. The failure is not
            # the kernel's.
            if stop.received and any(
                f.quantity == "run" and f.ok is False for f in result.findings
            ):
                continue
            findings[result.combination][result.job] = result.findings
            busy[result.combination] += result.seconds
            peak = max(peak, result.peak_bytes)
            job = todo[result.job]
            advance(f"{job.name}, {job.case.name}, {dtype_name(job.dtype)}", cost(job))
    scale = (time.perf_counter() - started) / (sum(busy) or 1.0)
    in_order = [[by_job[index] for index in sorted(by_job)] for by_job in findings]
    return RunResult(in_order, [seconds * scale for seconds in busy], peak)

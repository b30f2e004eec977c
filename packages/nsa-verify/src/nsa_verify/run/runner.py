"""Jobs judged in this process or spread over several, with the same findings in the same order."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence

from nsa_core.dtypes import dtype_name
from nsa_core.util.interruption import NEVER, Interruption
from nsa_verify.combination import Combination
from nsa_verify.findings import Finding
from nsa_verify.run.suite import Job, run_each
from nsa_verify.run.workers import spread


@dataclasses.dataclass
class Judgement:
    """What many jobs found, of each combination."""

    findings: list[list[list[Finding]]]  # of every job that ended, in the order of the jobs
    seconds: list[float]  # its share of the time that passed
    peak_bytes: int  # of GPU memory, in the process that took most


def run_jobs(
    combinations: Sequence[Combination],
    todo: Sequence[Job],
    *,
    processes: int = 1,
    stop: Interruption = NEVER,
    advance: Callable[[str], None] = lambda label: None,
) -> Judgement:
    """Run every job on every combination; once ``stop`` has come, end behind what is under way.

    Args:
        processes: how many judge. Above one, jobs and combinations are pickled, a process that dies
            is a red finding of the job it had, and another takes its place.
        advance: told of each job that ended on a combination.

    Raises:
        InvalidInput, BackendUnavailable: as a job raises them.
        BackendUnavailable: no other process can start here.
    """
    found: list[dict[int, list[Finding]]] = [{} for _ in combinations]
    busy, peak, started = [0.0] * len(combinations), 0, time.perf_counter()
    processes = min(processes, len(todo))
    each = (
        spread(combinations, todo, processes, stop)
        if processes > 1
        else run_each(combinations, todo, stop=stop)
    )
    with stop.cuts_short(), contextlib.closing(each):
        for judged in each:
            # A signal to a group of processes ends the compilers that run for a kernel, too: no
            # fault of the kernel's.
            if stop.came and any(f.quantity == "run" and f.ok is False for f in judged.findings):
                continue
            found[judged.combination][judged.job] = judged.findings
            busy[judged.combination] += judged.seconds
            peak = max(peak, judged.peak_bytes)
            job = todo[judged.job]
            advance(f"{job.name}, {job.case.name}, {dtype_name(job.dtype)}")
    share = (time.perf_counter() - started) / (sum(busy) or 1.0)
    in_order = [[done[index] for index in sorted(done)] for done in found]
    return Judgement(in_order, [seconds * share for seconds in busy], peak)

"""The benchmark of context parallelism: failures of a rank, verdicts, figures and commands."""

from __future__ import annotations

import time

import pytest

from nsa_bench.parallel.workers import reason_of
from parallel_bench_tasks import Fault, run_tasks, settings

SUM = 3.0  # of the numbers of two ranks


def test_a_rank_that_fails_leaves_no_other_rank_waiting() -> None:
    faults = [("memory", 1), ("error", 0), ("exit", 1)]
    tasks = [Fault(0, "")]
    for kind, rank in faults:
        tasks += [Fault(rank, kind), Fault(0, "")]
    started = time.monotonic()
    both = run_tasks(settings(), tasks, 300)
    assert time.monotonic() - started < 200  # the workers would wait for 18 minutes
    reasons = [
        "out of memory on rank 1",
        "failed: ValueError: planted on rank 0",
        "failed: ended its process with exit status 3 in a worker on rank 1",
    ]
    for answers in both:
        assert [a.value for a in answers[0]] == [SUM, SUM]
        for index, reason in enumerate(reasons):
            # gloo raises on the other rank too if a process ends.
            assert reason in reason_of(answers[1 + 2 * index]).split("; ")
            assert [a.value for a in answers[2 + 2 * index]] == [SUM, SUM]  # a new set of workers


def test_a_task_ends_at_the_end_of_the_run() -> None:
    started = time.monotonic()
    both = run_tasks(settings(), [Fault(0, "sleep"), Fault(0, "")], 25)
    assert time.monotonic() - started < 100
    for answers in both:
        late = "not measured: the time limit was reached"
        assert [reason_of(each) for each in answers] == [late, late]

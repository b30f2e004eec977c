"""`nsa verify --jobs`: equal findings from any number of processes; crashes and signals."""

from __future__ import annotations

import dataclasses
import itertools
import json
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest
import torch
from typer.testing import CliRunner

import nsa_cli.verify_run
from nsa_backend_sdpa.plugin import nsa_register_backends as sdpa
from nsa_cli.app import app
from nsa_cli.verify_run import _default_processes
from nsa_core.errors import BackendUnavailable, InvalidInput
from nsa_core.plan.registry import Registry
from nsa_core.util.child import Child
from nsa_core.util.interruption import deferred_signals
from nsa_verify.problems import cases
from nsa_verify.problems.combination import Combination
from nsa_verify.problems.findings import Finding
from nsa_verify.run import runner, suite, workers
from nsa_verify.run.runner import run_jobs
from nsa_verify.run.schedule import _MILLISECONDS, Schedule, cost

DTYPES = [torch.float32, torch.bfloat16]


def jobs_of(check: suite.Check, count: int) -> list[suite.Job]:
    return [
        suite.Job(check.__name__, check, case, torch.float32)
        for case in cases.quick_cases()[:count]
    ]


def report_process(subject: Combination, case: cases.Case, dtype: torch.dtype) -> Iterator[Finding]:
    yield Finding("report_process", "", case.name, "float32", "o", True, detail=str(os.getpid()))


def end_process(subject: Combination, case: cases.Case, dtype: torch.dtype) -> Iterator[Finding]:
    if (case.name, subject.device) == ("h=1", "cpu"):
        os.kill(os.getpid(), signal.SIGKILL)
    if (case.name, subject.device) == ("S=w", "cpu"):
        raise ValueError("no job expects this")
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal signals the whole process group
        os.kill(os.getpid(), number)
    yield from report_process(subject, case, dtype)


def sleep_after_the_first(
    subject: Combination, case: cases.Case, dtype: torch.dtype
) -> Iterator[Finding]:
    if case.name != cases.quick_cases()[0].name:
        time.sleep(600)
    yield from report_process(subject, case, dtype)


def refuse_case(subject: Combination, case: cases.Case, dtype: torch.dtype) -> Iterator[Finding]:
    raise InvalidInput("wrong for every backend")
    yield


@pytest.mark.slow
def test_each_job_runs_once_and_kernels_stay_with_a_worker():
    jobs = suite.jobs("full", DTYPES, cases_per_slot=0)
    schedule, taken = Schedule(jobs), {0: [], 1: [], 2: []}
    turns = [0, 1, 1, 2, 2, 2] * len(jobs)  # worker 0 is slow, and the others help it at the end
    for worker in turns:
        if (job := schedule.take(worker)) is not None:
            taken[worker].append(job)
    assert sorted(job for indices in taken.values() for job in indices) == list(range(len(jobs)))
    compiled_by = {
        (jobs[job].case.config, jobs[job].dtype, worker)
        for worker, indices in taken.items()
        for job in indices
    }
    kernels = {(config, dtype) for config, dtype, _ in compiled_by}
    assert len(compiled_by) < 1.5 * len(kernels), (
        "a decode step and a case may share a configuration, and the last group is shared"
    )
    assert schedule.take(0) is None
    group = [job for job in jobs if job.case.name == "h=7" and job.dtype == DTYPES[0]]
    one_group = Schedule(group)
    assert (one_group.take(0), one_group.take(1)) == (0, len(group) - 1)


def test_measured_costs_are_those_of_checks_and_grow_with_the_case():
    jobs = suite.jobs("quick", DTYPES[:1])
    assert {job.name for job in jobs} >= _MILLISECONDS.keys()
    assert len({cost(job) for job in jobs if job.name == "generated sel"}) > 10


def test_default_processes_are_one_per_core_on_a_gpu_and_in_the_interpreter(monkeypatch):
    for cores, expected in ((2, 2), (64, 16)):
        monkeypatch.setattr(
            os, "sched_getaffinity", lambda pid, cores=cores: set(range(cores)), raising=False
        )
        for device, interpreted, jobs in (
            ("cuda", False, 1),
            ("cpu", True, 1),
            ("cpu", False, 999),
        ):
            assert _default_processes(device, interpreted, jobs) == expected
        assert _default_processes("cpu", False, 99) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("options", "expected"), [((), 7), (("--jobs", "3"), 3)])
def test_jobs_option_replaces_the_default_number_of_processes(monkeypatch, options, expected):
    def run_nothing(*_, processes, **named):
        raise KeyError(processes)

    monkeypatch.setattr(nsa_cli.verify_run, "_default_processes", lambda *others: 7)
    monkeypatch.setattr(runner, "run_jobs", run_nothing)
    done = CliRunner().invoke(app, ["verify", "--device", "cpu", *options])
    assert repr(done.exception) == f"KeyError({expected})"


@pytest.mark.slow
def test_two_processes_give_the_findings_of_one():
    twin = Registry(()).with_backend(sdpa()).with_backend(dataclasses.replace(sdpa(), name="twin"))
    combinations = [Combination({"win": name}, "cpu", twin) for name in ("sdpa", "twin")]
    jobs = [
        job
        for job in suite.jobs("quick", DTYPES, cases_per_slot=0)
        if job.case.name in ("S=w", "S=1", "one token")
        if job.name in ("parity", "ties", "causality", "decode")
    ]
    progress: list[str] = []
    one, two = (
        run_jobs(combinations, jobs),
        run_jobs(combinations, jobs, processes=2, advance=lambda label, _: progress.append(label)),
    )
    assert two.findings == one.findings
    assert [len(findings) for findings in two.findings] == [len(jobs)] * 2
    assert len(progress) == 2 * len(jobs)
    assert all(finding.ok for job in two.findings[1] for finding in job)


@pytest.mark.slow
def test_a_process_that_dies_is_a_failed_finding_and_other_jobs_run():
    jobs = jobs_of(end_process, 8)
    combinations = [Combination({}, "cpu"), Combination({}, "meta")]
    results = run_jobs(combinations, jobs, processes=2).findings
    cpu, meta = ({f.case: f for job in findings for f in job} for findings in results)
    assert list(cpu) == list(meta) == [job.case.name for job in jobs]
    failed = {name: f for name, f in cpu.items() if not f.ok}
    assert {name: (f.check, f.quantity) for name, f in failed.items()} == dict.fromkeys(
        ("h=1", "S=w"), ("end_process", "run")
    )
    assert failed["h=1"].detail == "killed its process with SIGKILL in this check"
    assert failed["S=w"].detail == "ValueError: no job expects this"
    assert all(f.ok for f in meta.values())
    assert all(cpu[name].detail == meta[name].detail for name in cpu if name not in failed), (
        "one process runs a job for all combinations, which share its truth"
    )
    assert str(os.getpid()) not in {f.detail for f in meta.values()}


@pytest.mark.slow
def test_the_first_signal_ends_the_worker_processes():
    before, jobs = {*multiprocessing.active_children()}, jobs_of(sleep_after_the_first, 4)
    with deferred_signals() as stop:
        (findings,) = run_jobs(
            [Combination({})],
            jobs,
            processes=2,
            stop=stop,
            advance=lambda *_: signal.raise_signal(signal.SIGTERM),
        ).findings
        ended = time.monotonic() - stop._received_at
    assert (stop.name, [[f.case for f in job] for job in findings]) == (
        "SIGTERM",
        [[jobs[0].case.name]],
    )
    assert ended < 5
    assert {*multiprocessing.active_children()} <= before  # other tests may have children


@pytest.mark.slow
def test_errors_of_a_worker_are_raised_in_the_caller():
    with pytest.raises(InvalidInput, match="wrong for every backend"):
        run_jobs([Combination({})], jobs_of(refuse_case, 2), processes=2)
    if not torch.cuda.is_available():
        with pytest.raises(
            BackendUnavailable,
            match=r"no process can start: .*; set processes=1 \(--jobs 1\)",
        ):
            run_jobs([Combination({}, "cuda")], jobs_of(report_process, 4), processes=2)


@pytest.mark.slow
def test_an_error_ends_a_worker_process_that_is_starting(monkeypatch):
    before, numbers, closed = {*multiprocessing.active_children()}, itertools.count(), Event()
    close = workers._Worker.close

    def start_the_second_late(name):
        if next(numbers):
            assert closed.wait(60)
        return Child(name)

    def close_and_tell(worker):
        close(worker)
        if not worker._children:  # the second one
            closed.set()

    monkeypatch.setattr(workers, "Child", start_the_second_late)
    monkeypatch.setattr(workers._Worker, "close", close_and_tell)
    with pytest.raises(InvalidInput) as caught:  # its traceback keeps the workers
        run_jobs([Combination({})], jobs_of(refuse_case, 2), processes=2)
    assert {*multiprocessing.active_children()} <= before, caught


@pytest.mark.slow
def test_a_job_without_a_process_fails_for_every_combination():
    combinations = [Combination({}, "cuda:99"), Combination({"win": "sdpa"}, "cuda:99")]
    results = run_jobs(combinations, jobs_of(report_process, 2), processes=2).findings
    assert [[(f.quantity, f.ok) for job in findings for f in job] for findings in results] == [
        [("run", False)] * 2
    ] * 2


@pytest.mark.slow
def test_shards_are_parts_of_the_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    some = suite.jobs("quick", DTYPES, phase="prefill")[:31]
    monkeypatch.setattr(suite, "jobs", lambda *_, **__: some)
    command = ["verify", "--device", "cpu", "--jobs", "1"]
    counts = {}
    for shard in (None, "1/2", "2/2"):
        file = tmp_path / f"{str(shard)[0]}.json"
        options = ["--shard", shard] if shard else []
        done = CliRunner().invoke(app, [*command, *options, "--json", str(file)])
        assert done.exit_code == 0, done.output
        assert (f", shard {shard}" in " ".join(done.output.split())) == bool(shard)
        report = json.loads(file.read_text())
        assert report["shard"] == shard
        keys = ("check", "slot", "case", "dtype", "quantity")
        counts[shard] = Counter(tuple(f[key] for key in keys) for f in report["findings"])
    assert counts["1/2"] + counts["2/2"] == counts[None]
    assert min(counts["1/2"].total(), counts["2/2"].total()) > counts[None].total() / 4

"""`nsa verify --jobs`: several processes find what one finds; one that dies, or a signal, costs
what it had in hand.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from collections.abc import Iterator

import pytest
import torch
from typer.testing import CliRunner

import nsa_cli.verify
from nsa_backend_sdpa.plugin import nsa_register_backends as sdpa
from nsa_cli.app import app
from nsa_cli.verify import _jobs
from nsa_core.dispatch.registry import Registry
from nsa_core.errors import BackendUnavailable, InvalidInput
from nsa_core.util.interruption import held
from nsa_verify import cases
from nsa_verify.combination import Combination
from nsa_verify.findings import Finding
from nsa_verify.run import runner, suite
from nsa_verify.run.runner import run_jobs
from nsa_verify.run.schedule import Schedule

DTYPES = [torch.float32, torch.bfloat16]


def jobs_of(check: suite.Check, count: int) -> list[suite.Job]:
    return [
        suite.Job(check.__name__, check, case, torch.float32)
        for case in cases.quick_cases()[:count]
    ]


def own_process(subject: Combination, case: cases.Case, dtype: torch.dtype) -> Iterator[Finding]:
    yield Finding("own_process", "", case.name, "float32", "o", True, detail=str(os.getpid()))


def deadly(subject: Combination, case: cases.Case, dtype: torch.dtype) -> Iterator[Finding]:
    if (case.name, subject.device) == ("h=1", "cpu"):
        os.kill(os.getpid(), signal.SIGKILL)
    if (case.name, subject.device) == ("S=w", "cpu"):
        raise ValueError("no job expects this")
    for number in (signal.SIGINT, signal.SIGTERM):  # as a terminal sends them, to the group
        os.kill(os.getpid(), number)
    yield from own_process(subject, case, dtype)


def refused(subject: Combination, case: cases.Case, dtype: torch.dtype) -> Iterator[Finding]:
    raise InvalidInput("wrong for every backend")
    yield


def test_each_job_is_taken_once_and_kernels_stay_with_a_worker():
    todo = suite.jobs("full", DTYPES, text=b"text")
    piles, taken = Schedule(todo), {0: [], 1: [], 2: []}
    turns = [0, 1, 1, 2, 2, 2] * len(todo)  # one is slow, and others help it in the end
    for worker in turns:
        if (job := piles.take(worker)) is not None:
            taken[worker].append(job)
    assert sorted(job for jobs in taken.values() for job in jobs) == list(range(len(todo)))
    where = {(todo[j].case.config, todo[j].dtype, w) for w, jobs in taken.items() for j in jobs}
    alone = {(config, dtype) for config, dtype, _ in where}
    assert len(where) < 1.5 * len(alone), (
        "a decode step and a case may share a configuration, and the last pile is shared"
    )
    assert piles.take(0) is None
    one_pile = Schedule([job for job in todo if job.case.name == "h=7" and job.dtype == DTYPES[0]])
    assert (one_pile.take(0), one_pile.take(1)) == (0, 12)


def test_a_gpu_and_the_interpreter_are_judged_on_by_as_many_as_there_are_cores(monkeypatch):
    for cores, many in ((2, 2), (64, 8)):
        monkeypatch.setattr(
            os, "sched_getaffinity", lambda pid, cores=cores: set(range(cores)), raising=False
        )
        assert (_jobs("cuda", False), _jobs("cpu", True), _jobs("cpu", False)) == (many, many, 1)


@pytest.mark.parametrize(("given", "many"), [((), 7), (("--jobs", "3"), 3)])
def test_processes_left_out_are_as_many_as_fit(monkeypatch, given, many):
    def run_nothing(*_, processes, **named):
        raise KeyError(processes)

    monkeypatch.setattr(nsa_cli.verify, "_jobs", lambda device, interpreted: 7)
    monkeypatch.setattr(runner, "run_jobs", run_nothing)
    done = CliRunner().invoke(app, ["verify", "--device", "cpu", *given])
    assert repr(done.exception) == f"KeyError({many})"


def test_two_processes_find_what_one_finds():
    twin = Registry(()).with_backend(sdpa()).with_backend(dataclasses.replace(sdpa(), name="twin"))
    combinations = [Combination({"win": name}, "cpu", twin) for name in ("sdpa", "twin")]
    small = [
        j
        for j in suite.jobs("quick", DTYPES, text=None)
        if j.case.name in ("S=w", "S=1", "one token")
    ]
    todo = [j for j in small if j.name in ("parity", "ties", "causality", "decode")]
    progress: list[str] = []
    one, two = (
        run_jobs(combinations, todo),
        run_jobs(combinations, todo, processes=2, advance=progress.append),
    )
    assert two.findings == one.findings
    assert [len(found) for found in two.findings] == [len(todo)] * 2
    assert len(progress) == 2 * len(todo)
    assert all(finding.ok for job in two.findings[1] for finding in job)


def test_a_process_that_dies_is_a_red_finding_and_the_rest_goes_on(capfd):
    todo = jobs_of(deadly, 8)
    found = run_jobs([Combination({}, "cpu"), Combination({}, "meta")], todo, processes=2).findings
    told, other = ({f.case: f for job in done for f in job} for done in found)
    assert list(told) == list(other) == [job.case.name for job in todo]
    bad = {name: f for name, f in told.items() if not f.ok}
    assert {name: (f.check, f.quantity) for name, f in bad.items()} == dict.fromkeys(
        ("h=1", "S=w"), ("deadly", "run")
    )
    assert bad["h=1"].detail == "killed its process with SIGKILL in this check"
    assert "ended its process with exit status 1 in this check" in bad["S=w"].detail
    assert "no job expects this" in capfd.readouterr().err
    assert all(f.ok for f in other.values())
    assert all(told[name].detail == other[name].detail for name in told if name not in bad), (
        "truths of a job are shared"
    )
    assert str(os.getpid()) not in {f.detail for f in other.values()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signals", "most"),
    [((signal.SIGTERM,) * 2, 2), ((signal.SIGINT,), 2), ((signal.SIGINT,) * 2, 1)],
)
def test_a_signal_ends_the_run_behind_the_jobs_under_way(signals, most):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt(label: str) -> None:
        for number in signals * (not stop.came):
            signal.raise_signal(number)

    try:
        with held() as stop:
            (found,) = run_jobs(
                [Combination({})],
                jobs_of(own_process, 8),
                processes=2,
                stop=stop,
                advance=interrupt,
            ).findings
    finally:
        signal.signal(signal.SIGINT, before)
    assert stop.signal == signals[0]
    assert 1 <= len(found) <= most


@pytest.mark.slow
def test_what_one_process_would_raise_is_raised():
    with pytest.raises(InvalidInput, match="wrong for every backend"):
        run_jobs([Combination({})], jobs_of(refused, 2), processes=2)
    if not torch.cuda.is_available():
        with pytest.raises(
            BackendUnavailable,
            match=r"no process is left to judge in: .* exit status 1 while it started",
        ):
            run_jobs([Combination({}, "cuda")], jobs_of(own_process, 4), processes=2)


@pytest.mark.slow
def test_a_job_whose_process_never_began_is_red_for_every_subject():
    combinations = [Combination({}, "cuda:99"), Combination({"win": "sdpa"}, "cuda:99")]
    found = run_jobs(combinations, jobs_of(own_process, 2), processes=2).findings
    assert [[(f.quantity, f.ok) for job in done for f in job] for done in found] == [
        [("run", False)] * 2
    ] * 2


@pytest.mark.slow
def test_the_command_writes_the_same_report(nsa, tmp_path):
    reports = []
    for jobs in ("1", "2"):
        file = tmp_path / f"{jobs}.json"
        done = nsa(
            "verify", "--device", "cpu", "--cmp", "sdpa", "--jobs", jobs, "--json", str(file)
        )
        assert done.code == 0, done.err
        reports.append({k: v for k, v in json.loads(file.read_text()).items() if k != "seconds"})
    assert reports[0] == reports[1]

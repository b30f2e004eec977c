"""A signal in the middle of a command: the exit code, and the results that are kept.

tests/models has the signals of `nsa train`, and tests/core/util those of any block.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from nsa_bench import clocks, decode, gate, prefill, roofline, subjects, timing
from nsa_bench.result import read_result
from nsa_cli import output, verify
from nsa_core.plan import registry
from nsa_core.plan.registry import discover
from nsa_core.util import interruption
from nsa_core.util.interruption import SIGNALS, deferred_signals, exit_code
from nsa_verify.problems import cases
from nsa_verify.problems.findings import Finding
from nsa_verify.run import runner, suite
from nsa_verify.run.suite import Job

ONCE, TWICE = 1, 2  # the second signal ends the current work too
BENCH = ["--device", "cpu", "--shape", "2/1/8", "--combo", "sdpa"]
BENCH += ["--blocks", "8,4,16,3,24", "--budget", "0.001"]
VERIFY = ["verify", "--device", "cpu", "--dtype", "float32"]
VERIFY += [f"--{slot}=sdpa" for slot in ("cmp", "sel", "win")]


def bench(phase: str) -> list[str]:
    """Return the arguments of a benchmark of ``phase``."""
    return ["bench", *(["decode"] if phase == "decode" else ["--phase", phase]), *BENCH]


@pytest.fixture(autouse=True)
def default_signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Handle SIGINT as a foreground job does (background jobs ignore it), and time briefly."""
    monkeypatch.setattr(clocks, "SAMPLE_MS", 0.1)
    monkeypatch.setattr(roofline, "measure_peaks", lambda device, dtype: roofline.Peaks(1e11, 1e10))
    monkeypatch.setattr(interruption, "_SAME_S", 0.0)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def send(number: signal.Signals, times: int = ONCE) -> None:
    for _ in range(times):
        signal.raise_signal(number)


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that sends a signal at a call of ``owner.name``, by default the first."""

    def patch(
        owner: object, name: str, number: signal.Signals, times: int = ONCE, call: int = 1
    ) -> None:
        calls, original = [], getattr(owner, name)

        def interrupted(*arguments, **options):
            calls.append(1)
            send(number, times * (len(calls) == call))
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, interrupted)

    return patch


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("command", ["backends list", "verify", "tune --device cpu"])
def test_a_command_that_has_nothing_to_keep_ends_at_once(nsa, interrupt, command, number):
    interrupt(registry, "discover", number)
    done = nsa(*command.split())
    code, name = exit_code(number.name), number.name
    assert (done.code, done.out, done.err) == (code, "", f"nsa: interrupted by {name}\n")


@pytest.mark.few_cases("forward SIGTERM", "decode SIGHUP")
@pytest.mark.parametrize(
    ("phase", "number", "times"),
    [
        ("forward", signal.SIGTERM, ONCE),
        ("forward", signal.SIGINT, TWICE),
        ("decode", signal.SIGHUP, ONCE),
    ],
    ids=["forward SIGTERM", "forward SIGINT twice", "decode SIGHUP"],
)
def test_an_interrupted_bench_keeps_its_figures(phase, number, times, nsa, tmp_path, interrupt):
    owner, name = (decode, "make_state") if phase == "decode" else (subjects, "make_inputs")
    interrupt(owner, name, number, times, call=2)
    file, page = tmp_path / "r.json", tmp_path / "r.html"
    files = ["--json", str(file), *["--html", str(page)] * (phase == "forward")]
    done = nsa(*bench(phase), "--length", "40,80,120", *files)
    assert done.code == exit_code(number.name), done.err
    result = read_result(file)
    assert (result.interrupted.signal, result.interrupted.cells_left) == (number.name, 2)
    assert result.interrupted.cells == 3
    assert all(m.performance for m in result.measurements if m.length == 40)
    rest = {(m.length, m.reason) for m in result.measurements if m.length != 40}
    assert rest == ({(80, timing.INTERRUPTED)} if times == ONCE else set())
    line = (
        f"INTERRUPTED by {number.name}, 2 of 3 cells left, 0 of 1 correctness checks failed so far"
    )
    assert line in done.out
    assert phase == "decode" or line in page.read_text()
    assert "passed" not in done.out


def test_the_progress_of_bench_does_not_count_the_interrupted_cell(nsa, interrupt, monkeypatch):
    labels: list[str] = []
    monkeypatch.setattr(output, "progress", lambda steps: contextlib.nullcontext(labels.append))
    interrupt(subjects, "make_inputs", signal.SIGTERM, call=2)
    assert nsa(*bench("forward"), "--length", "40,80").code == 143
    assert [label.rpartition("S=")[2] for label in labels if "S=" in label] == ["40"]


@pytest.mark.parametrize(("phase", "owner"), [("forward", prefill), ("decode", gate)])
def test_a_bench_interrupted_in_its_first_gate_reports_it(phase, owner, nsa, tmp_path, interrupt):
    interrupt(owner, "gate_case", signal.SIGTERM)
    page = tmp_path / "r.html"
    done = nsa(*bench(phase), "--length", "40", "--html", str(page))
    assert done.code == 143, done.err
    assert "INTERRUPTED by SIGTERM, 1 of 1 cells left" in done.out
    assert "INTERRUPTED by SIGTERM" in page.read_text()


def test_an_interrupted_workload_keeps_its_samples():
    calls: list[int] = []

    def signal_in_second_sample():
        calls.append(1)
        send(signal.SIGTERM, len(calls) == 4)  # after two preparing calls

    def compiler_fails():
        send(signal.SIGTERM)
        raise RuntimeError("ptxas died of a signal")

    workloads = [
        timing.Workload("a", lambda: signal_in_second_sample),
        timing.Workload("b", lambda: lambda: None),
    ]
    clock = clocks.CpuClock()
    clock.sample = lambda call, calls: call() or 1.0
    with deferred_signals() as stop:
        timings = timing.measure(workloads, clock, budget_s=1.0, stop=stop)
        assert [len(timings[key].performance.samples_ms) for key in "ab"] == [2, 1]
    with deferred_signals() as stop:
        timings = timing.measure(
            [timing.Workload("c", compiler_fails)], clock, budget_s=1.0, stop=stop
        )
    assert (timings["c"].reason, timings["c"].performance) == (timing.INTERRUPTED, None)


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that sets the checks of `nsa verify`: name, result, what happens in it."""
    monkeypatch.setattr(verify.output, "find_backends", discover)

    def use(*rows: tuple[str, bool, Callable[[], object]]) -> None:
        def check(name: str, ok: bool, happens: Callable[[], object]) -> Job:
            def findings(subject, case, dtype):
                happens()
                quantity = "o" if name != "broken" else "run"
                detail = f"detail of {name}"
                yield Finding(name, "cmp", case.name, "float32", quantity, ok, detail=detail)

            return Job(name, findings, cases.quick_cases()[0], torch.float32)

        jobs = [check(*row) for row in rows]
        monkeypatch.setattr(suite, "jobs", lambda *a, **o: jobs)

    return use


def nothing() -> None:
    """Happens in a check without a signal."""


@pytest.mark.few_cases
@pytest.mark.parametrize("every", [False, True], ids=["one", "every combination"])
@pytest.mark.parametrize("times", [ONCE, TWICE])
@pytest.mark.parametrize("number", SIGNALS)
def test_an_interrupted_verify_reports_the_finished_checks(
    every, number, times, nsa, tmp_path: Path, checks
):
    checks(
        ("good", True, nothing),
        ("bad", False, nothing),
        ("interrupted", True, lambda: send(number, times)),
        ("not started", False, nothing),
    )
    file = tmp_path / "r.json"
    options = ["--json", str(file), *["--every-combination"] * every]
    done = nsa(*VERIFY, *options)
    assert done.code == exit_code(number.name), done.err
    report = json.loads(file.read_text())
    (report,) = report["combinations"] if every else [report]
    # Left are the last check, and a check that a second signal ended.
    left = 1 if times == ONCE else 2
    assert report["interrupted"] == {"signal": number.name, "checks_left": left, "checks": 4}
    assert [f["check"] for f in report["findings"]] == ["good", "bad", "interrupted"][: 4 - left]
    assert f"INTERRUPTED by {number.name}, {left} of 4 groups of checks left" in done.out
    assert "FAILED bad, cmp" in done.out
    assert every or "ok so far" in done.out
    last = done.out.splitlines()[-1]
    assert last.startswith("INTERRUPTED")
    assert not every or "0 of 1 combinations passed" in last


def test_a_check_that_goes_on_after_the_signal_ends_after_its_grace(nsa, checks, monkeypatch):
    monkeypatch.setattr(runner, "GRACE_S", 0.2)
    checks(("slow", True, lambda: (send(signal.SIGTERM), [time.sleep(0.05) for _ in range(100)])))
    started = time.monotonic()
    done = nsa(*VERIFY)
    assert time.monotonic() - started < 3
    assert (done.code, "1 of 1 groups of checks left" in done.out) == (143, True)


@pytest.mark.parametrize(
    ("options", "passed"),
    [((), "0 checks passed, 0 failed"), (("--every-combination",), "0 of 1 combinations passed")],
)
def test_a_check_that_fails_after_the_signal_counts_as_left(nsa, checks, options, passed):
    checks(("broken", False, lambda: send(signal.SIGTERM)))  # ptxas died of a signal
    done = nsa(*VERIFY, *options)
    assert done.code == 143
    assert f"INTERRUPTED by SIGTERM, 1 of 1 groups of checks left; {passed}" in done.out


def test_a_signal_in_the_last_check_leaves_a_complete_report(nsa, checks):
    checks(("last", True, lambda: send(signal.SIGTERM)))
    done = nsa(*VERIFY)
    assert (done.code, "1 check passed, 0 failed" in done.out) == (0, True)


def test_a_signal_while_the_report_is_written_leaves_no_part_of_it(
    nsa, tmp_path: Path, checks, monkeypatch
):
    checks(("good", True, nothing))
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: (fsync(number), send(signal.SIGINT)))
    folder = tmp_path / "reports"
    folder.mkdir()
    done = nsa(*VERIFY, "--json", str(folder / "r.json"))
    assert (done.code, done.err.splitlines()[-1]) == (130, "nsa: interrupted by SIGINT")
    assert list(folder.iterdir()) == []

"""SIGTERM and Ctrl-C in a long run: partial results are written and marked as interrupted."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nsa_bench import clocks, decode, decode_gate, roofline, run, subjects, timing
from nsa_bench.result import read_result
from nsa_cli import verify
from nsa_cli.conformance import _PytestPlugin
from nsa_core.plan.registry import discover
from nsa_core.util.interruption import deferred_signals
from nsa_verify.problems import cases
from nsa_verify.problems.findings import Finding
from nsa_verify.run import suite

SIGNALS = [((signal.SIGTERM,) * 2, 143), ((signal.SIGINT,), 130), ((signal.SIGINT,) * 2, 130)]
SIGNAL_IDS = ["SIGTERM twice, as timeout sends it", "SIGINT", "SIGINT twice"]


@pytest.fixture(autouse=True)
def default_signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Handle SIGINT as a foreground job does (background jobs ignore it), and time briefly."""
    monkeypatch.setattr(clocks, "SAMPLE_MS", 0.1)
    monkeypatch.setattr(roofline, "measure_peaks", lambda device, dtype: roofline.Peaks(1e11, 1e10))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


@pytest.mark.parametrize(
    ("phase", "signals", "code"),
    [*(("forward", *row) for row in SIGNALS), ("decode", *SIGNALS[0])],
    ids=[*(f"forward {text}" for text in SIGNAL_IDS), "decode SIGTERM"],
)
def test_an_interrupted_bench_keeps_its_figures(phase, signals, code, nsa, tmp_path, monkeypatch):
    module, name = (decode, "make_state") if phase == "decode" else (subjects, "make_inputs")
    calls, original = [], getattr(module, name)

    def interrupted(*arguments, **options):
        calls.append(1)
        for number in signals * (len(calls) == 2):
            signal.raise_signal(number)
        return original(*arguments, **options)

    monkeypatch.setattr(module, name, interrupted)
    file, plots = (
        tmp_path / "r.json",
        [f"--{kind}={tmp_path / 'r'}.{kind}" for kind in ("html", "png")],
    )
    done = nsa(
        "bench",
        "--device",
        "cpu",
        "--phase",
        phase,
        "--shape",
        "2/1/8",
        "--length",
        "40,80,120",
        "--combo",
        "sdpa",
        "--blocks",
        "8,4,16,3,24",
        "--budget",
        "0.001",
        "--json",
        str(file),
        *plots * (code == 143),
    )
    assert done.code == code, done.err
    result = read_result(file)
    interruption = result.interrupted
    assert (interruption.signal, interruption.cells_left) == (signals[0].name, 2)
    assert interruption.cells == 3
    assert all(m.performance for m in result.measurements if m.length == 40)
    interrupted_cell = [m for m in result.measurements if m.length == 80]
    assert {m.reason for m in interrupted_cell} == (
        set() if signals == SIGNALS[2][0] else {timing.INTERRUPTED}
    )
    assert len({m.length for m in result.measurements}) == 1 + bool(interrupted_cell)
    line = (
        f"INTERRUPTED by {signals[0].name}, 2 of 3 cells left, 0 of 1 correctness checks failed"
        " so far"
    )
    assert line in done.out
    assert code != 143 or line in (tmp_path / "r.html").read_text()
    assert code != 143 or (tmp_path / "r.png").stat().st_size
    assert "passed" not in done.out


@pytest.mark.parametrize("phase", ["forward", "decode"])
def test_a_bench_interrupted_in_its_first_gate_reports_it(phase, nsa, tmp_path, monkeypatch):
    module = decode_gate if phase == "decode" else run
    original = module.gate_case
    monkeypatch.setattr(
        module,
        "gate_case",
        lambda *arguments: signal.raise_signal(signal.SIGTERM) or original(*arguments),
    )
    done = nsa(
        "bench",
        "--device",
        "cpu",
        "--phase",
        phase,
        "--shape",
        "2/1/8",
        "--length",
        "40",
        "--combo",
        "sdpa",
        "--blocks",
        "8,4,16,3,24",
        "--html",
        str(tmp_path / "r.html"),
    )
    assert done.code == 143, done.err
    assert "INTERRUPTED by SIGTERM, 1 of 1 cells left" in done.out
    assert "INTERRUPTED by SIGTERM" in (tmp_path / "r.html").read_text()


def test_an_interrupted_workload_keeps_its_samples():
    calls: list[int] = []

    def signal_in_second_sample():
        calls.append(1)
        if len(calls) == 4:  # after two preparing calls
            signal.raise_signal(signal.SIGTERM)

    def compiler_fails():
        signal.raise_signal(signal.SIGTERM)
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


@pytest.mark.parametrize(("signals", "code"), SIGNALS, ids=SIGNAL_IDS)
@pytest.mark.parametrize("every", [False, True], ids=["one", "every combination"])
def test_an_interrupted_verify_reports_the_finished_checks(
    every, signals, code, nsa, tmp_path: Path, monkeypatch
):
    def check(name, ok, raised_signals=()):
        def findings(subject, case, dtype):
            for number in raised_signals:
                signal.raise_signal(number)
            yield Finding(name, "cmp", case.name, "float32", "o", ok, detail=f"detail of {name}")

        return suite.Job(name, findings, cases.quick_cases()[0], torch.float32)

    jobs = [
        check("good", True),
        check("bad", False),
        check("interrupted", True, signals),
        check("not started", False),
    ]
    monkeypatch.setattr(suite, "jobs", lambda *a, **o: jobs)
    monkeypatch.setattr(verify.output, "find_backends", discover)
    slots = [f"--{slot}=sdpa" for slot in ("cmp", "sel", "win")]
    options = [
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--json",
        str(tmp_path / "r.json"),
        "--reads",
    ]
    done = nsa("verify", *slots, *options, *["--every-combination"] * every)
    assert done.code == code, done.err
    report = json.loads((tmp_path / "r.json").read_text())
    (report,) = report["combinations"] if every else [report]
    # Left are the last check, the reads, and a check that a second Ctrl-C ended.
    left = 3 if signals == SIGNALS[2][0] else 2
    assert report["interrupted"] == {"signal": signals[0].name, "checks_left": left, "checks": 5}
    assert [f["check"] for f in report["findings"]] == ["good", "bad", "interrupted"][: 5 - left]
    assert "reads" not in report
    assert f"INTERRUPTED by {signals[0].name}, {left} of 5 checks left" in done.out
    assert "FAILED bad, cmp" in done.out
    assert every or "ok so far" in done.out
    last = done.out.splitlines()[-1]
    assert last.startswith("INTERRUPTED")
    assert not every or "0 of 1 combinations passed" in last


def test_a_check_that_fails_after_the_signal_counts_as_left(nsa, monkeypatch):
    def broken(subject, case, dtype):
        signal.raise_signal(signal.SIGTERM)
        yield Finding(
            "broken", "", case.name, "float32", "run", False, detail="ptxas died of a signal"
        )

    job = suite.Job("broken", broken, cases.quick_cases()[0], torch.float32)
    monkeypatch.setattr(suite, "jobs", lambda *a, **o: [job])
    done = nsa("verify", "--device", "cpu", "--dtype", "float32")
    assert done.code == 143
    assert "INTERRUPTED by SIGTERM, 1 of 1 checks left; 0 checks passed, 0 failed" in done.out


def test_a_signal_in_the_last_check_leaves_a_complete_report(nsa, monkeypatch):
    def last(subject, case, dtype):
        signal.raise_signal(signal.SIGTERM)
        yield Finding("last", "cmp", case.name, "float32", "o", True)

    job = suite.Job("last", last, cases.quick_cases()[0], torch.float32)
    monkeypatch.setattr(suite, "jobs", lambda *a, **o: [job])
    done = nsa("verify", "--device", "cpu", "--dtype", "float32")
    assert (done.code, "1 checks passed, 0 failed" in done.out) == (0, True)


def test_conformance_without_kernel_tests_exits_with_code_3(nsa):
    done = nsa("conformance", "sdpa", "--device", "cpu", "-k", "test_backend_loads")
    assert (done.code, "nothing could be tested" in done.err) == (3, True)


def test_an_interrupted_conformance_run_ends_after_the_current_test(nsa, monkeypatch):
    original = _PytestPlugin.pytest_runtest_logreport

    def interrupted(self, report):
        original(self, report)
        if report.when == "call":
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(_PytestPlugin, "pytest_runtest_logreport", interrupted)
    done = nsa(
        *("conformance", "sdpa", "--device", "cpu"),
        *("-k", "test_backend_loads or test_probe_gives_reasons"),
    )
    assert done.code == 143, done.out + done.err
    assert "1 passed" in done.out
    assert re.search(r"INTERRUPTED by SIGTERM, [1-9]\d* of \d+ tests left", done.out)

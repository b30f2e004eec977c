"""SIGTERM and Ctrl-C in a long run: what is done is written, told apart from a whole run, and
nothing of it passes.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nsa_bench import clocks, decode, roofline, run, timing
from nsa_bench.result import read_result
from nsa_cli import verify
from nsa_cli.conformance import _Run
from nsa_core.dispatch.registry import discover
from nsa_core.util.interruption import held
from nsa_verify import cases
from nsa_verify.findings import Finding
from nsa_verify.run import suite

SIGNALS = [((signal.SIGTERM,) * 2, 143), ((signal.SIGINT,), 130), ((signal.SIGINT,) * 2, 130)]
TWICE = ["SIGTERM twice, as timeout sends it", "SIGINT", "SIGINT twice"]


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Signals as a shell's foreground job has them (a background job ignores SIGINT), and a quick
    bench.
    """
    monkeypatch.setattr(clocks, "SAMPLE_MS", 0.1)
    monkeypatch.setattr(roofline, "measure_peaks", lambda device, dtype: roofline.Peaks(1e11, 1e10))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


@pytest.mark.parametrize(
    ("phase", "signals", "code"),
    [*(("forward", *of) for of in SIGNALS), ("decode", *SIGNALS[0])],
    ids=[*(f"forward {text}" for text in TWICE), "decode SIGTERM"],
)
def test_a_bench_keeps_its_figures(phase, signals, code, nsa, tmp_path, monkeypatch):
    module, name = (decode, "make_state") if phase == "decode" else (run, "make_inputs")
    made, real = [], getattr(module, name)

    def interrupted(*arguments, **options):
        made.append(1)
        for number in signals * (len(made) == 2):
            signal.raise_signal(number)
        return real(*arguments, **options)

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
    cut = result.interrupted
    assert (cut.signal, cut.cells_left, cut.cells) == (signals[0].name, 2, 3)
    assert all(m.performance for m in result.measurements if m.length == 40)
    begun = [m for m in result.measurements if m.length == 80]
    assert {m.reason for m in begun} == (
        set() if signals == SIGNALS[2][0] else {timing.INTERRUPTED}
    )
    assert len({m.length for m in result.measurements}) == 1 + bool(begun)
    line = f"INTERRUPTED by {signals[0].name}, 2 of 3 cells left, 0 of 1 gate(s) judged so far red"
    assert line in done.out
    assert code != 143 or line in (tmp_path / "r.html").read_text()
    assert code != 143 or (tmp_path / "r.png").stat().st_size
    assert "passed" not in done.out


@pytest.mark.parametrize("phase", ["forward", "decode"])
def test_a_bench_interrupted_in_its_first_gate_tells_so(phase, nsa, tmp_path, monkeypatch):
    module = decode if phase == "decode" else run
    real = module.gate_case
    monkeypatch.setattr(
        module, "gate_case", lambda *a: signal.raise_signal(signal.SIGTERM) or real(*a)
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


def test_a_work_that_was_being_timed_keeps_the_samples_it_has():
    calls: list[int] = []

    def second_sample():
        calls.append(1)
        if len(calls) == 4:  # two calls prepare it
            signal.raise_signal(signal.SIGTERM)

    def compiler_ended():
        signal.raise_signal(signal.SIGTERM)
        raise RuntimeError("ptxas died of a signal")

    works = [
        timing.Workload("a", lambda: second_sample),
        timing.Workload("b", lambda: lambda: None),
    ]
    monkey = clocks.CpuClock()
    monkey.sample = lambda call, calls: call() or 1.0
    with held() as stop:
        found = timing.measure(works, monkey, budget_s=1.0, stop=stop)
        assert [len(found[key].performance.samples_ms) for key in "ab"] == [2, 1]
    with held() as stop:
        late = timing.measure(
            [timing.Workload("c", compiler_ended)], monkey, budget_s=1.0, stop=stop
        )
    assert (late["c"].reason, late["c"].performance) == (timing.INTERRUPTED, None)


@pytest.mark.parametrize(("signals", "code"), SIGNALS, ids=TWICE)
@pytest.mark.parametrize("every", [False, True], ids=["one", "every combination"])
def test_verify_reports_the_checks_it_made(every, signals, code, nsa, tmp_path: Path, monkeypatch):
    def check(name, ok, interrupting=()):
        def findings(subject, case, dtype):
            for number in interrupting:
                signal.raise_signal(number)
            yield Finding(name, "cmp", case.name, "float32", "o", ok, detail=f"{name} says so")

        return suite.Job(name, findings, cases.quick_cases()[0], torch.float32)

    todo = [
        check("good", True),
        check("bad", False),
        check("cut", True, signals),
        check("never", False),
    ]
    monkeypatch.setattr(suite, "jobs", lambda *a, **o: todo)
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
    # the check that a second Ctrl-C ends has no verdict; and the reads
    left = 3 if signals == SIGNALS[2][0] else 2
    assert report["interrupted"] == {"signal": signals[0].name, "checks_left": left, "checks": 5}
    assert [f["check"] for f in report["findings"]] == ["good", "bad", "cut"][: 5 - left]
    assert "reads" not in report
    assert f"INTERRUPTED by {signals[0].name}, {left} of 5 checks left" in done.out
    assert "FAILED bad, cmp" in done.out
    assert every or "ok so far" in done.out
    last = done.out.splitlines()[-1]
    assert last.startswith("INTERRUPTED")
    assert not every or "0 of 1 combinations passed" in last


def test_a_check_that_the_signal_broke_is_left_and_not_failed(nsa, monkeypatch):
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


def test_a_run_that_was_whole_when_the_signal_came_is_judged(nsa, monkeypatch):
    def last(subject, case, dtype):
        signal.raise_signal(signal.SIGTERM)
        yield Finding("last", "cmp", case.name, "float32", "o", True)

    job = suite.Job("last", last, cases.quick_cases()[0], torch.float32)
    monkeypatch.setattr(suite, "jobs", lambda *a, **o: [job])
    done = nsa("verify", "--device", "cpu", "--dtype", "float32")
    assert (done.code, "1 checks passed, 0 failed" in done.out) == (0, True)


def test_conformance_that_tests_nothing_is_not_a_success(nsa):
    done = nsa("conformance", "sdpa", "--device", "cpu", "-k", "test_is_installed")
    assert (done.code, "nothing could be tested" in done.err) == (3, True)


def test_conformance_ends_behind_the_test_under_way(nsa, monkeypatch):
    real = _Run.pytest_runtest_logreport

    def interrupted(self, report):
        real(self, report)
        if report.when == "call":
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(_Run, "pytest_runtest_logreport", interrupted)
    done = nsa(
        "conformance", "sdpa", "--device", "cpu", "-k", "test_is_installed or test_probe_answers"
    )
    assert done.code == 143, done.out + done.err
    assert "1 passed" in done.out
    assert re.search(r"INTERRUPTED by SIGTERM, [1-9]\d* of \d+ tests left", done.out)

"""A call, a gate or a decode step that takes a minute ends at the limits, and after a signal."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

import slow_backend
from nsa_bench import child_call, isolation, prefill, roofline, slow_calls
from nsa_bench.cells import Cell
from nsa_bench.decode import DecodeBench
from nsa_bench.estimates import Estimates, probe_length
from nsa_bench.inputs import make_inputs
from nsa_bench.prefill import PrefillBench
from nsa_bench.result import read_result
from nsa_bench.settings import DecodeCell, DecodeSettings
from nsa_bench.shapes import Shape, parse_shape
from nsa_bench.subjects import Subjects, workload_in_child
from nsa_bench.timing import INTERRUPTED, LATE
from nsa_core.plan.plan import resolve
from nsa_core.plan.registry import discover
from nsa_core.util.interruption import deferred_signals
from nsa_verify.problems.combination import parse_combination

SLOW = (parse_combination("win=slow"),)
TOO_SLOW = "not measured: a call took longer than --max-call {:g} s"


def registry(function: str = "forward"):
    return discover().with_backend(slow_backend.spec(function), version="1.0")


def reasons(result) -> dict[str, str]:
    return {m.subject: m.reason for m in result.measurements}


@pytest.fixture
def all_in_children(monkeypatch):
    """Run every call in a child process: the machine seems slow, so every call is uncertain."""
    monkeypatch.setattr(roofline, "measure_peaks", lambda device, dtype: roofline.Peaks(1e3, 1e3))
    monkeypatch.setattr(slow_calls, "CHILD_MS", 0.0)


@pytest.fixture
def seconds_after_sigterm(monkeypatch):
    """Return a function that sends SIGTERM half a second after ``owner.name`` is called.

    It returns the seconds from the signal to the end of the run, and the result.
    """

    def run(bench, owner, name: str, subject: str = ""):
        sent: list[float] = []
        real = getattr(owner, name)

        def send() -> None:
            sent.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGTERM)

        def signalled(*arguments, **options):
            if subject in str(arguments):
                threading.Timer(0.5, send).start()
            return real(*arguments, **options)

        monkeypatch.setattr(owner, name, signalled)
        with deferred_signals() as stop:
            result = bench.run(stop=stop)
        assert sent, "the run ended before the signal"
        return time.monotonic() - sent[0], result

    return run


@pytest.mark.slow
def test_a_first_call_of_a_minute_ends_at_max_call(run):
    started = time.monotonic()
    result = run(registry(), lengths=[40], phases=["forward"], combos=SLOW, max_call_s=0.3)
    assert time.monotonic() - started < 20
    assert reasons(result) == {"win=slow": TOO_SLOW.format(0.3), "dense flash": ""}
    parts = result.measurements[0].parts
    assert parts["win"].reason == TOO_SLOW.format(0.3)
    assert parts["cmp"].performance is not None
    assert not result.failed


@pytest.mark.slow
def test_a_call_of_one_long_operation_ends_in_its_child(run, all_in_children):
    started = time.monotonic()
    options = {"lengths": [40], "phases": ["forward"], "combos": SLOW, "max_call_s": 0.8}
    result = run(registry("one_operation"), time_limit_s=40.0, **options)
    assert time.monotonic() - started < 40
    assert reasons(result) == {"win=slow": TOO_SLOW.format(0.8), "dense flash": ""}
    dense = result.measurements[1]
    assert len(dense.performance.samples_ms) >= 3
    assert dense.peak_memory_bytes > 0


@pytest.mark.slow
def test_sigterm_ends_a_long_operation_in_a_child(small, all_in_children, seconds_after_sigterm):
    options = {"lengths": [40], "phases": ["forward"], "combos": SLOW, "max_call_s": 50.0}
    bench = PrefillBench(small(**options), registry("one_operation"), {})
    seconds, result = seconds_after_sigterm(bench, child_call, "ChildCall", "total win=slow")
    assert seconds < 2.0
    assert result.interrupted.signal == "SIGTERM"
    assert reasons(result)["win=slow"] == INTERRUPTED


def test_sigterm_ends_a_gate_of_a_minute(small, seconds_after_sigterm, monkeypatch):
    monkeypatch.setattr(slow_backend, "LENGTH", 81)  # of the gate's case
    bench = PrefillBench(small(lengths=[40], phases=["forward"], combos=SLOW), registry(), {})
    seconds, result = seconds_after_sigterm(bench, prefill, "judge_plan")
    assert seconds < 2.0
    assert (result.interrupted.cells_left, result.gates) == (1, [])


def test_a_gate_ends_at_the_time_limit(run, monkeypatch):
    monkeypatch.setattr(slow_backend, "LENGTH", 81)
    started = time.monotonic()
    options = {"lengths": [40], "phases": ["forward"], "combos": SLOW, "time_limit_s": 0.5}
    result = run(registry(), **options)
    assert time.monotonic() - started < 20
    assert reasons(result) == {"win=slow": LATE, "dense flash": LATE}
    assert (result.gates, result.failed, result.interrupted) == ([], False, None)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["gate", "state"])
def test_decode_ends_at_the_time_limit(where, monkeypatch):
    from nsa_bench import decode

    slept: list[str] = []

    def sleep(*arguments: object) -> None:
        slept.append(where)
        time.sleep(60)

    monkeypatch.setattr(decode, {"gate": "judge_step", "state": "make_state"}[where], sleep)
    cells = [DecodeCell(Shape(4, 2, 16, 16), 2, 150, 32)]
    settings = DecodeSettings(
        cells=cells,
        blocks=(16, 8, 32, 4, 32),
        budget_s=0.001,
        combos=[parse_combination("sdpa")],
        time_limit_s={"gate": 1.5, "state": 8.0}[where],  # the gate before takes a second or two
    )
    started = time.monotonic()
    result = DecodeBench(settings, discover(), {}).run()
    assert time.monotonic() - started < 30
    assert slept == [where]
    assert reasons(result) == {"sdpa": LATE}
    assert len(result.gates) == (where == "state")


def test_a_child_computes_the_same_call_as_this_process(small):
    config = parse_shape("2/1/8").config((8, 4, 16, 3, 24))
    cell = Cell(config, "2/1/8", "float32", "random", "forward", 1, 40)
    settings = small(lengths=[40], phases=["forward"])
    subjects = Subjects(settings, discover())
    options = dataclasses.replace(subjects.options("float32"), backends="sdpa")
    plan = resolve(config, options, registry=discover())
    planner = isolation.planner(discover(), plan, options)
    of_sdpa = (planner, "sdpa", cell, "total sdpa")
    in_child = workload_in_child(settings, *of_sdpa).make()()
    (here,) = [w for w in subjects.workloads(cell, {"sdpa": plan}, []) if w.key == "total sdpa"]
    assert torch.equal(in_child, here.make()())
    other = workload_in_child(small(seed=1), *of_sdpa).make()()
    assert not torch.equal(in_child, other)
    dense = workload_in_child(settings, None, "", cell, "dense flash").make()()
    x = make_inputs("random", config, batch=1, length=40, dtype=torch.float32, device="cpu", seed=0)
    assert dense.shape == x.do.shape


def test_a_probe_skips_only_calls_that_are_far_over_the_limit():
    config = parse_shape("2/1/8").config((8, 4, 16, 3, 24))
    cell = Cell(config, "2/1/8", "float32", "random", "forward", 1, 65536)
    estimates = Estimates()
    assert estimates.too_long(cell, "a", 5.0) == ""
    estimates.add_probe(cell, "a", 1024, 19_000.0)
    assert estimates.expected_ms(cell, "a") == 19_000.0
    assert estimates.too_long(cell, "a", 5.0) == ""  # 3.8 times the limit: a child tries it
    estimates.add_probe(cell, "a", 1024, 210_000.0)
    assert estimates.too_long(cell, "a", 5.0) == (
        "not measured: a call would take about 210 s, judged by one of 1024 tokens, over"
        " --max-call 5"
    )
    estimates.add(cell, "a", 6_000.0)  # a measured time counts instead
    assert "about 6 s, over" in estimates.too_long(cell, "a", 5.0)


def test_a_probe_selects_blocks_if_the_call_does():
    def probe(length: int, device: str) -> int:
        config = parse_shape("tiny").config()  # n * l' = 1024
        cell = Cell(config, "4/2/32", "float32", "random", "forward", 1, length)
        return probe_length(cell, device)

    lengths = (1, 512, 1024, 1025, 2048, 65536, 2**31 - 1)
    assert [probe(n, "cpu") for n in lengths] == [1, 128, 256, 1025, 1088, 1088, 1088]
    assert [probe(n, "cuda") for n in lengths] == [1, 128, 256, 1025, 1088, 16384, 16384]


@pytest.mark.slow
def test_the_command_ends_within_2_s_of_sigterm_in_a_long_call(tmp_path):
    """Dense attention over 64k tokens takes about a minute; one operation computes it."""
    file = tmp_path / "r.json"
    options = "--device cpu --phase forward --length 64k --combo sdpa --max-call 500"
    command = [sys.executable, "-m", "nsa_cli", "bench", *options.split()]
    process = subprocess.Popen(
        [*command, "--time-limit", "500", "--json", str(file)], stdout=subprocess.PIPE, text=True
    )
    time.sleep(20)
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert time.monotonic() - started < 2.0
    assert process.returncode == 143
    assert "INTERRUPTED by SIGTERM, 1 of 1 cells left" in out
    assert set(reasons(read_result(file)).values()) == {INTERRUPTED}

"""Choice between CUDA graphs and eager timing, its record in results, and its effect on reports."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import pathlib
import types

import pytest
import torch

from nsa_bench import child_call
from nsa_bench.clocks import CpuClock, CudaClock, may_be_launch_bound
from nsa_bench.compare import compare
from nsa_bench.crossover import crossovers
from nsa_bench.limits import Limits
from nsa_bench.render.summary import summary
from nsa_bench.render.tables import changes_tables, rows_of
from nsa_bench.result import Measurement, read_result
from nsa_bench.timing import Performance, Prepared, Workload, measure, take_sample
from nsa_core.util.interruption import NEVER

RESULTS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "h200"


@pytest.mark.parametrize(
    ("event_ms", "host_ms", "bound"),
    [
        (1.26, 1.2, True),  # the core at 8k tokens: ten launches from Python, 0.5 ms of kernels
        (4.3, 4.2, True),  # its training step
        (6.0, 1.2, True),  # kernels hide most launches, but only a graph shows how many
        (32.5, 1.2, False),
        (0.02, 0.01, True),  # one short kernel
        (2.1, 0.03, False),  # one long kernel
        (1.0, 0.05, False),
        (1.0, 0.051, True),
    ],
)
def test_a_call_may_be_launch_bound_above_5_percent_of_host_time(event_ms, host_ms, bound):
    assert may_be_launch_bound(event_ms, host_ms) is bound


class ScriptedClock(CudaClock):
    """A clock whose calls return their own (event time, host launch time)."""

    def __init__(self, refusal: str = "") -> None:
        self.refusal = refusal

    def _timed(self, call):
        return call()

    def _captured(self, make):
        return (None, self.refusal) if self.refusal else (lambda: (0.5, 0.01), "")


@pytest.fixture
def device(monkeypatch):
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 7)


def timed(clock, *times):
    """Time a call that takes each of ``times`` once, and then the last one repeatedly."""
    remaining = list(times)
    work = Workload("x", lambda: lambda: remaining.pop(0) if len(remaining) > 1 else remaining[0])
    return measure([work], clock, budget_s=0.001)["x"].performance


def test_a_launch_bound_call_is_timed_as_a_graph_and_eagerly(device):
    performance = timed(ScriptedClock(), (90.0, 90.0), (2.4, 2.3), (2.0, 1.9), (2.1, 2.0))
    assert (
        performance.method,
        performance.median_ms,
        performance.host_ms,
        performance.not_captured,
    ) == (
        "graph",
        0.5,
        1.9,
        "",
    )
    # The first calls, which compile and decide the method, are no samples.
    assert (performance.eager.method, performance.eager.samples_ms) == (
        "events",
        [2.1] * 5,
    )
    assert performance.eager_ms == 2.1


def test_a_device_bound_call_is_timed_with_events(device):
    # The first host time is an outlier.
    performance = timed(ScriptedClock(), (90.0, 90.0), (2.1, 2.0), (2.0, 0.03))
    assert (performance.method, performance.median_ms, performance.host_ms) == ("events", 2.0, 0.03)
    assert (performance.eager, performance.not_captured, performance.eager_ms) == (None, "", 2.0)


def test_a_call_that_cannot_be_captured_has_a_reason(device):
    performance = timed(ScriptedClock("RuntimeError: it waits"), (2.1, 2.0))
    assert (performance.method, performance.median_ms, performance.eager) == ("events", 2.1, None)
    assert performance.not_captured == "RuntimeError: it waits"
    slow = timed(ScriptedClock(), (201.0, 100.0))
    assert (slow.method, slow.not_captured) == ("events", "a call takes over 200 ms")
    assert timed(ScriptedClock(), (201.0, 1.0)).not_captured == ""


class GpuAtItsPowerLimit:
    """A clock of calls that take 10 % longer, or less, for 40 ms after a call of the other kind."""

    turns, lead_ms = 3, 50.0

    def __init__(self) -> None:
        self.last, self.since_ms, self.order = "", 0.0, []

    def run(self, name: str, ms: float, after_other_ms: float) -> float:
        if name != self.last:
            self.last, self.since_ms = name, 0.0
            self.order.append(name)
        ms = ms if self.since_ms >= 40 else after_other_ms
        self.since_ms += ms
        return ms

    def prepare(self, workload):
        call = workload.make()
        return Prepared(call, "events", 1, call(), 0)

    def sample(self, call, calls):
        return call()


@pytest.mark.parametrize("lead_ms", [50.0, 0.0])
def test_samples_of_a_gpu_do_not_depend_on_the_workload_before(lead_ms):
    clock = GpuAtItsPowerLimit()
    clock.lead_ms = lead_ms
    workloads = [
        Workload("NSA", lambda: lambda: clock.run("NSA", 20.0, 22.0)),
        Workload("dense", lambda: lambda: clock.run("dense", 30.0, 27.0)),
    ]
    outcomes = measure(workloads, clock, budget_s=0.1)
    samples = {key: outcome.performance.samples_ms for key, outcome in outcomes.items()}
    if lead_ms:
        assert samples == {"NSA": [20.0] * 4, "dense": [30.0] * 3}
    else:  # the times differ without the untimed calls
        assert samples == {"NSA": [22.0] * 4, "dense": [27.0] * 3}
    assert clock.order == ["NSA", "dense"] * 4  # prepared, then in three turns


@pytest.mark.parametrize(("ms", "calls"), [(0.4, 125), (60.0, 1), (199.0, 1), (200.0, 0)])
def test_a_turn_begins_with_enough_untimed_calls(ms, calls):
    clock, made = GpuAtItsPowerLimit(), []
    prepared = Prepared(lambda: made.append(1) or ms, "events", 1, ms, 0)
    assert take_sample(clock, prepared, begins_turn=False) == ms
    assert take_sample(clock, prepared, begins_turn=True) == ms
    assert len(made) == calls + 2


def test_a_call_with_state_has_no_untimed_calls_before_its_samples(device):
    """A step of a layer appends a token at each call, and its cache has room for few of them."""
    made = []
    work = Workload("step", lambda: lambda: made.append(1) or (0.5, 0.4), has_state=True)
    performance = measure([work], ScriptedClock("it waits"), budget_s=0.01)["step"].performance
    # Three calls prepare it, and five eager ones precede the attempt to capture it.
    assert len(made) == 3 + 5 + len(performance.samples_ms) == 28


@pytest.mark.parametrize(("device", "limit_s"), [("cuda", 0.9), ("cpu", 0.4)])
def test_a_child_has_time_for_the_untimed_calls_of_a_gpu(monkeypatch, device, limit_s):
    sent, results = [], [Prepared(child_call.not_here, "events", 1, 390.0, 0), 390.0]
    child = types.SimpleNamespace(
        send=lambda *message: sent.append(message),
        poll=lambda seconds: True,
        receive=lambda limit, doing: results.pop(0),
    )
    monkeypatch.setattr(child_call, "Child", lambda: child)
    call = child_call.ChildCall(None, device, Limits(max_call_s=0.4), NEVER)
    assert call.prepare().take(begins_turn=True) == 390.0
    assert sent[-1][1:] == (True,)
    assert call._sample_limit_s == pytest.approx(limit_s)  # a sample and a call, and 0.1 s


def test_the_samples_of_a_workload_are_spread_over_all_turns(monkeypatch):
    clock, order = CpuClock(), []
    monkeypatch.setattr(clock, "sample", lambda call, calls: call())
    workloads = [
        Workload(name, lambda name=name, ms=ms: lambda: (order.append(name), ms)[1])
        for name, ms in (("short", 10.0), ("long", 25.0))
    ]
    measure(workloads, clock, budget_s=0.1)
    preparing = ["short"] * 2 + ["long"] * 2
    timed = "short long short short long short short short long short short long short short"
    assert order == preparing + timed.split()


class FakeCuda:
    """torch.cuda's streams and sync modes; a failed capture leaves its stream current."""

    def __init__(
        self, monkeypatch, capture_fails: bool, replay_fails: bool = False, open_after: bool = True
    ) -> None:
        self.current, self.mode, self.captures, self.fails = "before", 0, 0, capture_fails
        self.open_after, self.released = open_after, []
        names = ("stream", "graph", "set_stream", "get_sync_debug_mode", "set_sync_debug_mode")
        for name in names:
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(
            torch.cuda, "Stream", lambda: types.SimpleNamespace(wait_stream=lambda other: None)
        )
        replay = self.refuse if replay_fails else lambda: None
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: types.SimpleNamespace(replay=replay))
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
        for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            monkeypatch.setattr(
                torch._C, name, functools.partial(self.release, name), raising=False
            )

    def release(self, name, device, pool):
        if not self.open_after:
            raise RuntimeError("not recording")
        self.released.append((name, device, pool))

    def refuse(self):
        raise ValueError("no replay")  # as a compiler of another library may

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def graph(self, graph, pool, stream):
        self.captures += 1
        self.current = stream
        yield
        if self.fails:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.current = "before"

    def set_stream(self, stream):
        self.current = stream

    def get_sync_debug_mode(self):
        return self.mode

    def set_sync_debug_mode(self, mode):
        self.mode = mode


def test_a_failed_capture_restores_the_stream_and_the_sync_mode(monkeypatch):
    cuda = FakeCuda(monkeypatch, capture_fails=True)
    assert CudaClock._captured(ScriptedClock(), lambda: lambda: None) == (
        None,
        "RuntimeError: operation failed due to a previous error during capture",
    )
    assert (cuda.current, cuda.mode, cuda.captures) == ("before", 0, 1)


@pytest.mark.parametrize(
    ("fails", "released"),
    [
        (
            {"capture_fails": True},
            [(f"_cuda_{name}", 3, "pool") for name in ("endAllocateToPool", "releasePool")],
        ),
        ({"capture_fails": True, "open_after": False}, []),  # PyTorch ended the recording itself
        ({"capture_fails": False, "replay_fails": True}, []),  # the graph owns the pool
        ({"capture_fails": False}, []),
    ],
)
def test_a_failed_capture_releases_its_memory_pool(monkeypatch, fails, released):
    cuda = FakeCuda(monkeypatch, **fails)
    replay, reason = CudaClock._captured(ScriptedClock(), lambda: lambda: None)
    assert (replay is None) == any(fails.get(name) for name in ("capture_fails", "replay_fails")), (
        reason
    )
    assert cuda.released == released


def test_a_call_that_synchronises_is_detected_before_capture(monkeypatch):
    cuda = FakeCuda(monkeypatch, capture_fails=False)

    def waits():
        if cuda.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    replay, reason = CudaClock._captured(ScriptedClock(), lambda: waits)
    assert (replay, reason) == (None, "RuntimeError: called a synchronizing CUDA operation")
    assert (cuda.current, cuda.mode, cuda.captures) == ("before", 0, 0)
    replay, reason = CudaClock._captured(ScriptedClock(), lambda: lambda: None)
    assert (replay is not None, reason, cuda.captures) == (True, "", 1)


def performance(ms, eager=None, **more):
    eager_performance = (
        None if eager is None else Performance(eager, eager, eager, "events", [eager])
    )
    return Performance(
        ms, ms, ms, "events" if eager is None else "graph", [ms], eager=eager_performance, **more
    )


def measured(kind, length, performance):
    where = {
        "shape": "2/1/8",
        "dtype": "float32",
        "inputs": "random",
        "phase": "forward",
        "batch": 1,
    }
    return Measurement(
        kind=kind,
        subject=kind,
        length=length,
        performance=performance,
        reason="",
        peak_memory_bytes=1,
        flops=1,
        bytes=1,
        floor_ms=0.1,
        floor_fraction=0.1,
        ratio_to_dense=None,
        parts={},
        **where,
    )


def test_the_crossover_sentence_adds_a_different_eager_crossover():
    both = [
        measured("combo", 1024, performance(0.5, 2.0)),
        measured("combo", 4096, performance(1.0, 2.0)),
    ]
    both += [
        measured("dense", 1024, performance(0.4, 0.5)),
        measured("dense", 4096, performance(4.0)),
    ]
    (crossover,) = crossovers(both)
    # Eager ratios: 2.0 / 0.5 = 4, then 2.0 / 4.0 = 1/2; the ratio is 1 at two thirds of the way.
    assert 1024 < crossover.length < crossover.eager_length == round(1024 * 4 ** (2 / 3))
    assert crossover.sentence.count("faster than dense from about") == 2
    assert (
        f"; without CUDA graphs faster than dense from about {crossover.eager_length} tokens"
        in crossover.sentence
    )
    (same,) = crossovers(
        [measured("combo", 1024, performance(1.0)), measured("dense", 1024, performance(2.0))]
    )
    assert "without CUDA graphs" not in same.sentence
    assert same.eager_length == same.length == 1024


@pytest.fixture
def result(run):
    return run(lengths=[40], phases=["forward"])


def with_performances(result, *performances):
    """Return ``result`` with one measurement per performance."""
    measurements = [measured("combo", index, one) for index, one in enumerate(performances, 1)]
    return dataclasses.replace(result, measurements=measurements)


@pytest.mark.few_cases("old4-new4-same-")
@pytest.mark.parametrize(
    ("old", "new", "verdict", "note"),
    [
        # Only the capture rule changed, not the code.
        (performance(2.0), performance(0.5, 2.0), "same", "eager calls"),
        (performance(2.0), performance(0.5, 4.0), "slower", "eager calls"),
        (performance(0.5, 2.0), performance(2.0), "same", "eager calls"),
        (
            performance(0.5, 2.0),
            performance(2.0, not_captured="RuntimeError: it waits"),
            "slower",
            "no longer captured: Run",
        ),
        (performance(0.5, 2.0), performance(0.5, 2.0), "same", ""),
        (performance(0.5, 2.0), performance(1.5, 2.0), "slower", ""),
    ],
)
def test_compare_uses_times_of_the_same_method(result, old, new, verdict, note):
    change, *_ = compare(
        with_performances(result, old), with_performances(result, new), fail_over=0.05
    )
    assert (change.verdict, change.key[-1]) == (verdict, "total")
    assert change.note.startswith(note)
    assert bool(change.note) == bool(note)
    ((_, columns, (row,)),) = changes_tables([change])
    assert row[columns.index("verdict")] == verdict
    assert (row[-1] == change.note) if note else ("note" not in columns)


@pytest.mark.slow
def test_compare_detects_slower_eager_calls(result):
    total, eager = compare(
        with_performances(result, performance(0.5, 2.0)),
        with_performances(result, performance(0.5, 9.0)),
        fail_over=0.05,
    )
    assert (total.verdict, total.key[-1]) == ("same", "total")
    assert (eager.verdict, eager.key[-1], eager.old_ms, eager.new_ms) == (
        "slower",
        "eager",
        2.0,
        9.0,
    )


@pytest.mark.slow
def test_the_report_has_eager_times_and_the_reasons_of_failed_captures(result):
    shown = with_performances(
        result,
        performance(0.8, 2.1),
        performance(3.0),
        performance(4.0, not_captured="RuntimeError: it waits"),
    )
    (table,) = rows_of(shown)
    _, columns, rows = table
    assert {len(row) for row in rows} == {len(columns)}
    eager, total = columns.index("eager ms"), columns.index("ms")
    assert [(row[total], row[eager]) for row in rows] == [
        ("0.800", "2.10"),
        ("3.00", "3.00"),
        ("4.00", "4.00"),
    ]
    lines = [line for _, line in summary(shown)]
    assert [line for line in lines if line.startswith("not captured")] == [
        "not captured, so its time includes host launches: combo, 2/1/8 float32 random,"
        " forward, 3 tokens: RuntimeError: it waits"
    ]
    assert sum(line.startswith("eager: ") for line in lines) == 1
    (plain,) = rows_of(result)
    assert "eager ms" not in plain[1]
    assert not [line for _, line in summary(result) if line.startswith(("eager: ", "not captured"))]


def performances_in(document):
    """Yield every performance in a result file's document."""
    for m in document["measurements"]:
        for holder in (m, *m["parts"].values()):
            if holder["performance"] is not None:
                yield holder["performance"]


@pytest.mark.slow
def test_older_results_without_optional_fields_are_readable(result, tmp_path):
    document = json.loads((RESULTS / "core_64_4_128.json").read_text())
    for values in performances_in(document):
        for field in ("host_ms", "not_captured", "eager"):
            del values[field]
    (tmp_path / "old.json").write_text(json.dumps(document))
    old = read_result(tmp_path / "old.json")
    measured = [m.performance for m in old.measurements if m.performance]
    assert {(p.host_ms, p.not_captured, p.eager) for p in measured} == {(None, "", None)}
    assert not [c for c in compare(old, old, fail_over=0.0) if c.verdict not in ("same", "missing")]
    shown = with_performances(
        result,
        performance(0.8, 2.1, host_ms=2.0),
        performance(4.0, not_captured="RuntimeError: it waits"),
    )
    file = tmp_path / "r.json"
    file.write_text(shown.to_json())
    assert read_result(file) == shown
    document = json.loads(file.read_text())
    del document["measurements"][0]["performance"]["samples_ms"]
    file.write_text(json.dumps(document))
    with pytest.raises(Exception, match=r"measurements\[0\].performance lacks samples_ms"):
        read_result(file)

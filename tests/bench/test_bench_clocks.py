"""What is timed as a CUDA graph and what as it is, what a figure says about that, and what follows
from the figures.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import pathlib
import types

import pytest
import torch

from nsa_bench.clocks import CudaClock, host_may_bind
from nsa_bench.compare import compare
from nsa_bench.crossover import crossovers
from nsa_bench.render.summary import summary
from nsa_bench.render.tables import changes_rows, rows_of
from nsa_bench.result import Measurement, read_result
from nsa_bench.timing import Performance, Workload, measure

RESULTS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "h200"


@pytest.mark.parametrize(
    ("event_ms", "host_ms", "bound"),
    [
        (1.26, 1.2, True),  # a core at 8k tokens: ten launches from Python, 0.5 ms of kernels
        (4.3, 4.2, True),  # its training step
        (6.0, 1.2, True),  # most of the launches lie behind kernels, but which, only a graph tells
        (32.5, 1.2, False),
        (0.02, 0.01, True),  # one short kernel
        (2.1, 0.03, False),  # one long one
        (1.0, 0.05, False),
        (1.0, 0.051, True),
    ],
)
def test_the_host_binds_from_a_twentieth_of_the_time_on(event_ms, host_ms, bound):
    assert host_may_bind(event_ms, host_ms) is bound


class ScriptedClock(CudaClock):
    """A device on which a call tells by itself how long it takes by events, and how long the host
    launches it.
    """

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


def figure(clock, *times):
    """The performance of a call that takes ``times``, the last of them from then on."""
    left = list(times)
    work = Workload("x", lambda: lambda: left.pop(0) if len(left) > 1 else left[0])
    return measure([work], clock, budget_s=0.001)["x"].performance


def test_a_call_that_the_host_holds_up_is_a_graph_and_tells_its_eager_time(device):
    found = figure(ScriptedClock(), (90.0, 90.0), (2.4, 2.3), (2.0, 1.9), (2.1, 2.0))
    assert (found.method, found.median_ms, found.host_ms, found.not_captured) == (
        "graph",
        0.5,
        1.9,
        "",
    )
    # The call that compiles is none of them.
    assert (found.eager.method, found.eager.samples_ms) == ("events", [2.4, 2.0, 2.1, 2.1, 2.1])
    assert found.eager_ms == 2.1


def test_a_call_that_the_device_holds_up_is_timed_as_it_is(device):
    # the first host time was an accident
    found = figure(ScriptedClock(), (90.0, 90.0), (2.1, 2.0), (2.0, 0.03))
    assert (found.method, found.median_ms, found.host_ms) == ("events", 2.0, 0.03)
    assert (found.eager, found.not_captured, found.eager_ms) == (None, "", 2.0)


def test_what_cannot_be_captured_says_so(device):
    found = figure(ScriptedClock("RuntimeError: it waits"), (2.1, 2.0))
    assert (found.method, found.median_ms, found.eager) == ("events", 2.1, None)
    assert found.not_captured == "RuntimeError: it waits"
    slow = figure(ScriptedClock(), (201.0, 100.0))
    assert (slow.method, slow.not_captured) == ("events", "a call takes over 200 ms")
    assert figure(ScriptedClock(), (201.0, 1.0)).not_captured == ""


class FakeCuda:
    """Streams and modes of torch.cuda, without a device; a capture fails as torch's does, its
    stream left current.
    """

    def __init__(
        self, monkeypatch, capture_fails: bool, replay_fails: bool = False, open_after: bool = True
    ) -> None:
        self.current, self.mode, self.captures, self.fails = "before", 0, 0, capture_fails
        self.open_after, self.given_back = open_after, []
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
                torch._C, name, functools.partial(self.give_back, name), raising=False
            )

    def give_back(self, name, device, pool):
        if not self.open_after:
            raise RuntimeError("not recording")
        self.given_back.append((name, device, pool))

    def refuse(self):
        raise RuntimeError("no replay")

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


def test_a_failed_capture_leaves_the_stream_and_the_mode_as_they_were(monkeypatch):
    cuda = FakeCuda(monkeypatch, capture_fails=True)
    assert CudaClock._captured(ScriptedClock(), lambda: lambda: None) == (
        None,
        "RuntimeError: operation failed due to a previous error during capture",
    )
    assert (cuda.current, cuda.mode, cuda.captures) == ("before", 0, 1)


@pytest.mark.parametrize(
    ("fails", "given_back"),
    [
        (
            {"capture_fails": True},
            [(f"_cuda_{name}", 3, "pool") for name in ("endAllocateToPool", "releasePool")],
        ),
        ({"capture_fails": True, "open_after": False}, []),  # a torch that has ended it itself
        ({"capture_fails": False, "replay_fails": True}, []),  # torch has the pool in hand
        ({"capture_fails": False}, []),
    ],
)
def test_a_failed_capture_gives_its_memory_back(monkeypatch, fails, given_back):
    cuda = FakeCuda(monkeypatch, **fails)
    replay, why = CudaClock._captured(ScriptedClock(), lambda: lambda: None)
    assert (replay is None) == any(fails.get(name) for name in ("capture_fails", "replay_fails")), (
        why
    )
    assert cuda.given_back == given_back


def test_a_call_that_waits_for_the_device_is_found_out_before_a_capture(monkeypatch):
    cuda = FakeCuda(monkeypatch, capture_fails=False)

    def waits():
        if cuda.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    replay, why = CudaClock._captured(ScriptedClock(), lambda: waits)
    assert (replay, why) == (None, "RuntimeError: called a synchronizing CUDA operation")
    assert (cuda.current, cuda.mode, cuda.captures) == ("before", 0, 0)
    replay, why = CudaClock._captured(ScriptedClock(), lambda: lambda: None)
    assert (replay is not None, why, cuda.captures) == (True, "", 1)


def took(ms, eager=None, **more):
    other = None if eager is None else Performance(eager, eager, eager, "events", 1, [eager])
    return Performance(
        ms, ms, ms, "events" if eager is None else "graph", 1, [ms], eager=other, **more
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


def test_the_crossover_without_graphs_is_told_where_it_is_another():
    both = [measured("combo", 1024, took(0.5, 2.0)), measured("combo", 4096, took(1.0, 2.0))]
    both += [measured("dense", 1024, took(0.4, 0.5)), measured("dense", 4096, took(4.0))]
    (found,) = crossovers(both)
    # Ratios without graphs: 2.0 / 0.5 = 4, then 2.0 / 4.0 = 1/2: it is 1 two thirds of the way.
    assert 1024 < found.length < found.eager_length == round(1024 * 4 ** (2 / 3))
    assert found.sentence.count("faster than dense from about") == 2
    assert (
        f"; without CUDA graphs faster than dense from about {found.eager_length} tokens"
        in found.sentence
    )
    (alike,) = crossovers([measured("combo", 1024, took(1.0)), measured("dense", 1024, took(2.0))])
    assert "without CUDA graphs" not in alike.sentence
    assert alike.eager_length == alike.length == 1024


@pytest.fixture
def result(run):
    return run(lengths=[40], phases=["forward"])


def having(result, *performances):
    """``result`` with one measurement for each."""
    found = [
        measured("combo", index, performance) for index, performance in enumerate(performances)
    ]
    return dataclasses.replace(result, measurements=found)


@pytest.mark.parametrize(
    ("old", "new", "verdict", "note"),
    [
        # the rule for what is captured changed, the code did not
        (took(2.0), took(0.5, 2.0), "same", "eager calls"),
        (took(2.0), took(0.5, 4.0), "slower", "eager calls"),
        (took(0.5, 2.0), took(2.0), "same", "eager calls"),
        (
            took(0.5, 2.0),
            took(2.0, not_captured="RuntimeError: it waits"),
            "slower",
            "no longer captured: Run",
        ),
        (took(0.5, 2.0), took(0.5, 2.0), "same", ""),
        (took(0.5, 2.0), took(1.5, 2.0), "slower", ""),
    ],
)
def test_compare_sets_like_beside_like(result, old, new, verdict, note):
    change, *_ = compare(having(result, old), having(result, new), fail_over=0.05)
    assert (change.verdict, change.key[-1]) == (verdict, "total")
    assert change.note.startswith(note)
    assert bool(change.note) == bool(note)
    assert len(changes_rows([change])[2]) == 1


def test_compare_sees_eager_calls_that_became_slower(result):
    total, eager = compare(
        having(result, took(0.5, 2.0)), having(result, took(0.5, 9.0)), fail_over=0.05
    )
    assert (total.verdict, total.key[-1]) == ("same", "total")
    assert (eager.verdict, eager.key[-1], eager.old_ms, eager.new_ms) == (
        "slower",
        "eager",
        2.0,
        9.0,
    )


def test_the_report_tells_both_times_and_what_was_not_captured(result):
    shown = having(
        result, took(0.8, 2.1), took(3.0), took(4.0, not_captured="RuntimeError: it waits")
    )
    (table,) = rows_of(shown)
    _, columns, rows = table
    assert {len(row) for row in rows} == {len(columns)}
    eager, total = columns.index("eager"), columns.index("total")
    assert [(row[total], row[eager]) for row in rows] == [("0.8", "2.1"), ("3", "3"), ("4", "4")]
    said = [line for _, line in summary(shown)]
    assert [line for line in said if line.startswith("not captured")] == [
        "not captured, its figure holds the host's launches too: combo, 2/1/8 float32 random,"
        " forward, 2 tokens: RuntimeError: it waits"
    ]
    assert sum(line.startswith("eager: ") for line in said) == 1
    (plain,) = rows_of(result)
    assert "eager" not in plain[1]
    assert not [line for _, line in summary(result) if line.startswith(("eager: ", "not captured"))]


def performances_in(document):
    """Every performance of a result file's document."""
    for m in document["measurements"]:
        for holder in (m, *m["parts"].values()):
            if holder["performance"] is not None:
                yield holder["performance"]


def test_results_of_before_these_fields_are_read(result, tmp_path):
    document = json.loads((RESULTS / "core.json").read_text())
    for performance in performances_in(document):
        for field in ("host_ms", "not_captured", "eager"):
            del performance[field]
    (tmp_path / "old.json").write_text(json.dumps(document))
    old = read_result(tmp_path / "old.json")
    measured = [m.performance for m in old.measurements if m.performance]
    assert {(p.host_ms, p.not_captured, p.eager) for p in measured} == {(None, "", None)}
    assert not [c for c in compare(old, old, fail_over=0.0) if c.verdict not in ("same", "missing")]
    shown = having(
        result, took(0.8, 2.1, host_ms=2.0), took(4.0, not_captured="RuntimeError: it waits")
    )
    file = tmp_path / "r.json"
    file.write_text(shown.to_json())
    assert read_result(file) == shown
    document = json.loads(file.read_text())
    del document["measurements"][0]["performance"]["samples_ms"]
    file.write_text(json.dumps(document))
    with pytest.raises(Exception, match=r"measurements\[0\].performance lacks samples_ms"):
        read_result(file)

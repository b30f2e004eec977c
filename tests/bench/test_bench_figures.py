"""Entries of a result file: floors, ratios to dense attention, and the backends of each plan."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from nsa_bench.entries import add_dense_ratios, measurement, part, record_backends
from nsa_bench.render.summary import summary
from nsa_bench.result import Result
from nsa_bench.roofline import Cost, Peaks
from nsa_bench.timing import Outcome, Performance

PEAKS = Peaks(flops_per_s=1e6, bytes_per_s=1e3)
COST = Cost(flops=10, bytes=6)  # 6 ms of bytes
WHERE = {
    "shape": "4/2/8",
    "dtype": "float32",
    "inputs": "random",
    "phase": "forward",
    "batch": 1,
    "length": 64,
}


def outcome(ms: float | None, reason: str = "") -> Outcome:
    return Outcome(None if ms is None else Performance(ms, ms, ms, "events", [ms]), 5, reason)


def entry(kind: str, ms: float | None):
    return measurement(
        kind, outcome(ms, "late" * (ms is None)), COST, PEAKS, subject=kind, parts={}, **WHERE
    )


def test_an_entry_has_its_floor_and_share_of_the_floor():
    timed = entry("combo", 24.0)
    assert (timed.floor_ms, timed.floor_fraction, timed.peak_memory_bytes, timed.subject) == (
        6.0,
        0.25,
        5,
        "combo",
    )
    assert entry("layer", 24.0).floor_fraction is None  # its projections are not counted
    untimed = entry("combo", None)
    assert (
        untimed.floor_ms,
        untimed.floor_fraction,
        untimed.peak_memory_bytes,
        untimed.reason,
    ) == (
        6.0,
        None,
        None,
        "late",
    )
    assert part("sdpa", outcome(12.0), COST, PEAKS).floor_fraction == 0.5
    assert part("sdpa", outcome(None, "late"), COST, PEAKS).floor_fraction is None


@pytest.mark.parametrize(("dense", "ratio"), [((8.0, 4.0, None), 2.0), ((None,), None), ((), None)])
def test_ratios_are_to_the_fastest_dense_kernel(dense, ratio):
    entries = [
        entry("combo", 2.0),
        entry("combo", None),
        entry("layer", 2.0),
        *(entry("dense", ms) for ms in dense),
    ]
    assert [m.ratio_to_dense for m in add_dense_ratios(entries)[:3]] == [ratio, None, None]


def whole(ms: float, parts: dict[str, float], phase: str = "forward", **fields) -> Result:
    """Return a result of one combination whose kernels took ``parts``."""
    parts_ = {name: part("sdpa", outcome(ms), COST, PEAKS) for name, ms in parts.items()}
    where = {**WHERE, "phase": phase}
    m = measurement("combo", outcome(ms), COST, PEAKS, subject="auto", parts=parts_, **where)
    facts = {"settings": {}, "environment": {}, "skipped": {}, "peaks": {"float32": PEAKS}}
    empty = {"combos": {}, "gates": [], "crossovers": [], "seconds": 1.0}
    return Result(**{**facts, **empty, **fields}, measurements=[m])


def timed_as(result: Result, whole_method: dict, part_method: dict) -> Result:
    """Return ``result`` with fields of its whole call and of its part sel replaced."""
    (m,) = result.measurements
    sel = m.parts["sel"]
    changed = dataclasses.replace(
        m,
        performance=dataclasses.replace(m.performance, **whole_method),
        parts=m.parts
        | {
            "sel": dataclasses.replace(
                sel, performance=dataclasses.replace(sel.performance, **part_method)
            )
        },
    )
    return dataclasses.replace(result, measurements=[changed])


def shares_and_reason(result: Result) -> tuple[dict[str, float], str]:
    (m,) = result.measurements
    return result.shares(m), result.not_comparable(m)


def test_parts_are_shares_of_the_whole_call():
    result = whole(8.0, {"cmp": 2.0, "sel": 5.0, "win": 1.5})
    assert shares_and_reason(result) == ({"cmp": 0.25, "sel": 0.625, "win": 0.1875}, "")
    lines = [line for _, line in summary(result)]
    assert "parts of auto, 4/2/8 float32 random, forward: together 106 % of ms" in lines
    assert not any("not comparable" in line for line in lines)


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({"cmp": 1.0, "sel": 66.7}, "sel took longer than the whole call that contains it"),
        ({"cmp": 6.0, "sel": 5.0}, "together, the parts took over 125 % of the whole call"),
        ({"cmp": 6.0, "sel": -0.1}, "one is negative"),
    ],
)
def test_times_that_cannot_be_shares_are_not_printed_as_shares(parts, why):
    result = whole(8.0, parts)
    shares, reason = shares_and_reason(result)
    assert shares == {}
    assert why in reason
    lines = [line for _, line in summary(result)]
    problem = "auto, 4/2/8 float32 random, forward, 64 tokens"
    assert f"not comparable: the parts of {problem}: {reason}" in lines
    assert not any("together" in line and "% of ms" in line for line in lines)


@pytest.mark.parametrize(
    ("phase", "parts", "fused"),
    [
        ("backward", {"cmp": 2.0, "sel": 5.0}, True),
        ("both", {"cmp": 2.0, "sel": 5.0}, True),
        ("forward", {"cmp": 2.0, "sel": 5.0}, False),
        ("backward", {"cmp": 2.0, "causal": 5.0}, False),  # not run by the fused kernel
    ],
)
def test_kernels_are_no_shares_of_a_fused_backward(phase, parts, fused):
    backends = {"sel": "triton 1", "backward": "triton, fused"}
    shares, reason = shares_and_reason(whole(8.0, parts, phase, combos={"auto": backends}))
    assert (not shares, "one fused kernel" in reason) == (fused, fused)
    here = {"auto": backends, "auto, 4/2/8 float32": {"sel": "triton 1"}}  # of this problem
    assert shares_and_reason(whole(8.0, parts, phase, combos=here))[1] == ""


def test_shares_compare_times_of_one_clock():
    """A kernel that was not captured is compared with the whole call launched from Python."""
    result = whole(4.0, {"cmp": 1.0, "sel": 17.0})  # 425 % of the graph
    graph = {"method": "graph", "eager": outcome(20.0).performance}
    mixed = timed_as(result, graph, {"not_captured": "a call takes over 200 ms"})
    assert shares_and_reason(mixed) == ({"cmp": 0.05, "sel": 0.85}, "")
    assert shares_and_reason(timed_as(result, graph, {}))[0] == {}


def test_backends_of_a_plan_are_recorded_again_only_if_they_differ():
    def plan(win: str, **fused: str):
        choices = {"win": SimpleNamespace(backend=win, version="1")}
        return SimpleNamespace(
            choices=choices, fused={n: SimpleNamespace(backend=b) for n, b in fused.items()}
        )

    combos: dict[str, dict[str, str]] = {}
    record_backends(combos, "auto", plan("sdpa"), "here")
    record_backends(combos, "auto", plan("sdpa"), "there")
    record_backends(combos, "auto", plan("triton", step="triton"), "there")
    assert combos == {
        "auto": {"win": "sdpa 1"},
        "auto, there": {"win": "triton 1", "step": "triton, fused"},
    }

"""Entries of a result file: floors, ratios to dense attention, and the backends of each plan."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from nsa_bench.entries import add_dense_ratios, measurement, part, record_backends
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
    return Outcome(None if ms is None else Performance(ms, ms, ms, "events", 1, [ms]), 5, reason)


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

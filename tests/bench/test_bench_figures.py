"""Entries of a result file: floors, ratios to dense attention, and who ran what, where it
differs.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from nsa_bench.entries import beside_dense, measurement, note_combo, part
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


def took(ms: float | None, reason: str = "") -> Outcome:
    return Outcome(None if ms is None else Performance(ms, ms, ms, "events", 1, [ms]), 5, reason)


def entry(kind: str, ms: float | None):
    return measurement(
        kind, took(ms, "late" * (ms is None)), COST, PEAKS, subject=kind, parts={}, **WHERE
    )


def test_a_figure_stands_beside_its_floor():
    made = entry("combo", 24.0)
    assert (made.floor_ms, made.floor_fraction, made.peak_memory_bytes, made.subject) == (
        6.0,
        0.25,
        5,
        "combo",
    )
    assert entry("layer", 24.0).floor_fraction is None  # it also projects
    none = entry("combo", None)
    assert (none.floor_ms, none.floor_fraction, none.peak_memory_bytes, none.reason) == (
        6.0,
        None,
        None,
        "late",
    )
    assert part("sdpa", took(12.0), COST, PEAKS).floor_fraction == 0.5
    assert part("sdpa", took(None, "late"), COST, PEAKS).floor_fraction is None


@pytest.mark.parametrize(("dense", "ratio"), [((8.0, 4.0, None), 2.0), ((None,), None), ((), None)])
def test_the_ratio_is_to_the_fastest_dense_kernel(dense, ratio):
    made = [
        entry("combo", 2.0),
        entry("combo", None),
        entry("layer", 2.0),
        *(entry("dense", ms) for ms in dense),
    ]
    assert [m.ratio_to_dense for m in beside_dense(made)[:3]] == [ratio, None, None]


def test_who_ran_what_is_said_again_only_where_it_differs():
    def plan(win: str, **fused: str):
        choices = {"win": SimpleNamespace(backend=win, version="1")}
        return SimpleNamespace(
            choices=choices, fused={n: SimpleNamespace(backend=b) for n, b in fused.items()}
        )

    combos: dict[str, dict[str, str]] = {}
    note_combo(combos, "auto", plan("sdpa"), "here")
    note_combo(combos, "auto", plan("sdpa"), "there")
    note_combo(combos, "auto", plan("triton", step="triton"), "there")
    assert combos == {
        "auto": {"win": "sdpa 1"},
        "auto, there": {"win": "triton 1", "step": "triton, fused"},
    }

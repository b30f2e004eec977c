"""benchmarks/kernels/triton_sanitize.py: the part of queries that begin inside a sequence."""

from __future__ import annotations

import itertools
import pathlib
import sys
from typing import Any

import pytest
import torch

from nsa_core import NSAConfig
from nsa_core.layout import BlockGeometry
from nsa_core.torch_ops.kernel import Kernel
from nsa_verify.judge.selection import judge_selection
from nsa_verify.judge.slot import judge_slot
from nsa_verify.problems.cases import CaseData
from nsa_verify.problems.slot_runs import SlotRun, run_kernel

SCRIPTS = pathlib.Path(__file__).resolve().parents[3] / "benchmarks" / "kernels"
SMALL = {
    "n_heads": 2,
    "n_kv_heads": 1,
    "head_dim": 16,
    "compress_block_size": 8,
    "compress_stride": 4,
    "select_block_size": 16,
    "num_selected_blocks": 3,
    "window_size": 7,
}
GRADIENTS = {
    "cmp": {"dq", "dk_cmp", "dv_cmp"},
    "select": set(),
    "sel": {"dq", "dk", "dv"},
    "win": {"dq", "dk", "dv"},
}


@pytest.fixture
def sanitize(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the script, on CPU tensors."""
    monkeypatch.syspath_prepend(SCRIPTS)
    import triton_sanitize

    monkeypatch.setattr(triton_sanitize, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return triton_sanitize


def verdicts_of(kernel: Kernel, run: SlotRun, data: CaseData, first: int) -> list[Any]:
    """Return the verdicts on all results of a call whose queries begin at row ``first``."""
    geometry = BlockGeometry.from_ints(kernel.geometry)
    places: dict[str, Any] = {"cu_seqlens": data.cu_seqlens, "first_query": first}
    if kernel.slot == "select":
        tensors: dict[str, Any] = {**run.inputs, **run.outputs}
        return [judge_selection(**tensors, geometry=geometry, scale=kernel.scale, **places)]
    sizes = (geometry, kernel.scale)
    verdicts = judge_slot(kernel.slot, run.inputs, run.outputs, *sizes, do=run.do, **places)
    return list(verdicts.values())


@pytest.mark.slow
def test_partial_runs_each_slot_correctly_on_the_rows_of_each_cut(
    sanitize: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[str, bool, bool, int, int]] = []

    def run(
        kernel: Kernel, inputs: Any, do: Any, data: CaseData, first_query: int | None = None
    ) -> SlotRun:
        result = run_kernel(kernel, inputs, do, data, first_query)
        assert first_query is not None
        assert {n for n in result.outputs if n[0] == "d"} == GRADIENTS[kernel.slot]
        verdicts = verdicts_of(kernel, result, data, first_query)
        assert all(verdicts), (kernel.slot, first_query, verdicts)
        place = (first_query, first_query + result.inputs["q"].shape[-3])
        seen.append((kernel.slot, data.cu_seqlens is not None, kernel.deterministic, *place))
        return result

    monkeypatch.setattr(sanitize, "run_kernel", run)
    monkeypatch.setattr(sanitize, "SHAPES", {"small": SMALL})
    monkeypatch.setattr(sanitize, "LENGTHS", {"dense": (28,), "packed": (0, 9, 18, 1)})
    monkeypatch.setattr(sanitize, "CUTS", {"dense": ((13, 25),), "packed": ((5, 21),)})
    monkeypatch.setattr(sys, "argv", ["triton_sanitize.py", "--part", "partial"])
    sanitize.main()
    calls = itertools.product(((False, 13, 25), (True, 5, 21)), (False, True), GRADIENTS)
    assert seen == [(slot, packed, d, *rows) for (packed, *rows), d, slot in calls]
    assert capsys.readouterr().out.splitlines() == [
        f"small, partial, {cut}, deterministic {deterministic}: ran"
        for cut in ("dense, queries 13 to 24", "packed, queries 5 to 20")
        for deterministic in (False, True)
    ]


def test_cuts_lie_inside_documents_at_their_borders_and_between(sanitize: Any) -> None:
    assert {"dense", "packed", "buckets"} == set(sanitize.CUTS)
    borders = set(itertools.accumulate(sanitize.LENGTHS["packed"]))
    block = NSAConfig(dim=64, n_heads=2, n_kv_heads=2).select_block_size

    def crossed(first: int, end: int) -> bool:
        return any(first < border < end for border in borders)

    packed = {
        (first in borders, crossed(first, end), end in borders)
        for first, end in sanitize.CUTS["packed"]
    }
    assert packed == {
        (False, False, False),
        (True, False, True),
        (False, True, False),
        (False, True, True),
    }
    dense = {(first % block == 0, end % block == 0) for first, end in sanitize.CUTS["dense"]}
    assert dense == {(False, False), (True, True)}
    for kind, cuts in sanitize.CUTS.items():
        axis = sum(sanitize.LENGTHS[kind])
        assert all(0 < first < end <= axis for first, end in cuts)
        assert any(end < axis for _, end in cuts)  # keys that no query sees

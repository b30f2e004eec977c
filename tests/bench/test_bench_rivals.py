"""Other libraries' NSA in a benchmark, with a fake package: timed, missing, refused or failing."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nsa_bench import rivals
from nsa_bench.result import read_result
from nsa_bench.shapes import parse_shape
from nsa_core import nsa_attention
from nsa_core.errors import InvalidInput

SHAPE = parse_shape("16/1/8")
NAME = "fla NSA, l=d=16"
SETTINGS = {
    "shapes": [SHAPE],
    "lengths": [80],
    "rivals": ["fla"],
    "phases": ["forward", "backward"],
}


def attention(
    q: Any, k: Any, v: Any, g_cmp: Any, g_slc: Any, g_swa: Any, **options: Any
) -> torch.Tensor:
    """Compute the documented result of parallel_nsa with nsa_core."""
    block = options["block_size"]
    config = SHAPE.config((block, block, block, options["block_counts"], options["window_size"]))
    gates = torch.stack([g_cmp, g_slc, g_swa], -1).float()
    return nsa_attention(q, k, v, gates, config=dataclasses.replace(config, scale=options["scale"]))


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> Callable[..., types.ModuleType]:
    """Install a fake fla whose parallel_nsa is the given function."""

    def install(function: Callable[..., Any] = attention) -> types.ModuleType:
        for name in ("fla", "fla.ops", "fla.ops.nsa", "fla.ops.nsa.parallel"):
            module = types.ModuleType(name)
            module.__spec__, module.__path__ = importlib.machinery.ModuleSpec(name, None), []
            monkeypatch.setitem(sys.modules, name, module)
        module.parallel_nsa = function
        return module

    return install


def rival_measurements(result: Any) -> list[Any]:
    return [m for m in result.measurements if m.kind == "rival"]


def test_a_rival_is_timed_in_the_same_cells(run, fla, tmp_path):
    fla()
    result = run(**SETTINGS)
    measurements = rival_measurements(result)
    assert [(m.subject, m.phase) for m in measurements] == [(NAME, "forward"), (NAME, "backward")]
    assert all(m.performance for m in measurements)
    assert all(m.ratio_to_dense for m in measurements)
    assert not result.failed
    (ours,) = {m.flops for m in result.measurements if m.kind == "combo" and m.phase == "forward"}
    # Its configuration has fewer compressed keys, so fewer operations are counted.
    assert 0 < measurements[0].flops < ours
    assert not any("fla" in name for name in result.skipped)
    assert {c.subject for c in result.crossovers}.isdisjoint({NAME})
    path = tmp_path / "r.json"
    path.write_text(result.to_json())
    assert read_result(path) == result


def test_a_rival_is_not_a_dense_kernel(run, fla):
    """Ratios and crossovers are against dense attention, even if the rival is faster."""
    fla(lambda q, k, v, *gates, **how: q * v.mean() * k.mean() * sum(g.mean() for g in gates))
    result = run(**SETTINGS)
    dense = {m.phase: m.performance.median_ms for m in result.measurements if m.kind == "dense"}
    for m in result.measurements:
        if m.kind != "dense":
            assert m.ratio_to_dense == pytest.approx(dense[m.phase] / m.performance.median_ms)


class BadBackward(torch.autograd.Function):
    """A function whose backward raises an exception that our kernels never raise."""

    armed = False

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return q.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if BadBackward.armed:
            raise KeyError("no such tile")
        return grad, *[torch.zeros_like(grad[..., :1, :])] * 2, *[grad[..., 0]] * 3


def test_a_rival_that_fails_during_timing_has_its_error_as_reason(run, fla, monkeypatch):
    fla(lambda q, k, v, *gates, **how: BadBackward.apply(q, k, v, *gates))
    monkeypatch.setattr(BadBackward, "armed", False)
    real = rivals._refusal
    monkeypatch.setattr(
        rivals, "_refusal", lambda *x: (real(*x), setattr(BadBackward, "armed", True))[0]
    )
    result = run(**SETTINGS)
    forward, backward = rival_measurements(result)
    assert forward.performance
    assert backward.performance is None
    assert "KeyError" in backward.reason
    assert "no such tile" in backward.reason
    assert not result.failed  # rivals do not count
    assert all(m.performance for m in result.measurements if m.kind != "rival")


@pytest.mark.parametrize(
    "error",
    [TypeError("a surprise"), AssertionError(), SyntaxError("bad kernel"), ImportError("x")],
)
def test_a_rival_that_fails_at_once_is_skipped_with_its_error(error, run, fla):
    def broken(*tensors: Any, **options: Any) -> Any:
        raise error

    fla(broken)
    result = run(**SETTINGS)
    assert not rival_measurements(result)
    (reason,) = [text for name, text in result.skipped.items() if NAME in name]
    assert type(error).__name__ in reason
    assert not result.failed


def test_a_rival_without_flash_attn_is_skipped_with_a_reason(run, fla):
    fla().flash_attn_func = None
    (reason,) = [text for name, text in run(**SETTINGS).skipped.items() if NAME in name]
    assert "its window needs the package flash-attn" in reason


def test_unsupported_shapes_of_a_rival_are_skipped_with_a_reason(run, fla):
    fla()
    result = run(**{**SETTINGS, "shapes": [parse_shape("12/2/8")]})
    assert [text for name, text in result.skipped.items() if NAME in name] == [
        "needs 16, 32, 64, ... query heads per kv head, got 6"
    ]


def test_a_rival_that_is_not_installed_is_skipped_with_a_reason(run, monkeypatch):
    monkeypatch.setattr(rivals.importlib.util, "find_spec", lambda name: None)
    result = run(**SETTINGS)
    assert [text for name, text in result.skipped.items() if NAME in name] == [
        "the package fla-core is not installed"
    ]
    assert not result.failed


def test_default_rivals_and_unknown_names(fla):
    config = SHAPE.config((8, 4, 16, 3, 24))
    fla()
    assert rivals.rivals(None, config, "cpu", torch.float32) == []
    assert [r.name for r in rivals.rivals(["fla"], config, "cpu", torch.float32)] == [NAME]
    with pytest.raises(InvalidInput, match="did you mean 'fla'"):
        rivals.check_rivals(["flaa"])


def test_the_command_accepts_known_rivals_and_refuses_others(nsa, fla, tmp_path):
    fla()
    options = (
        "--shape",
        "16/1/8",
        "--length",
        "64",
        "--blocks",
        "8,4,16,3,24",
        "--budget",
        "0.001",
        "--combo",
        "sdpa",
    )
    done = nsa("bench", *options, "--rival", "fla", "--png", str(tmp_path / "p.png"))
    assert done.code == 0, done.err
    assert NAME in done.out
    done = nsa("bench", *options, "--rival", "xla")
    assert done.code == 2
    assert "rival must be one of fla, got 'xla'" in done.err

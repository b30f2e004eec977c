"""Somebody else's NSA beside ours, with a stand-in for the package: timed, absent, refused, or
failing anywhere.
"""

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
    q: Any, k: Any, v: Any, g_cmp: Any, g_slc: Any, g_swa: Any, **how: Any
) -> torch.Tensor:
    """What parallel_nsa is documented to compute, by ours."""
    block = how["block_size"]
    config = SHAPE.config((block, block, block, how["block_counts"], how["window_size"]))
    gates = torch.stack([g_cmp, g_slc, g_swa], -1).float()
    return nsa_attention(q, k, v, gates, config=dataclasses.replace(config, scale=how["scale"]))


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> Callable[..., types.ModuleType]:
    """Put a stand-in for fla in place, whose parallel_nsa is the given function."""

    def install(function: Callable[..., Any] = attention) -> types.ModuleType:
        for name in ("fla", "fla.ops", "fla.ops.nsa", "fla.ops.nsa.parallel"):
            module = types.ModuleType(name)
            module.__spec__, module.__path__ = importlib.machinery.ModuleSpec(name, None), []
            monkeypatch.setitem(sys.modules, name, module)
        module.parallel_nsa = function
        return module

    return install


def of_rival(result: Any) -> list[Any]:
    return [m for m in result.measurements if m.kind == "rival"]


def test_it_is_timed_in_the_same_cells(run, fla, tmp_path):
    fla()
    result = run(**SETTINGS)
    found = of_rival(result)
    assert [(m.subject, m.phase) for m in found] == [(NAME, "forward"), (NAME, "backward")]
    assert all(m.performance for m in found)
    assert all(m.ratio_to_dense for m in found)
    assert not result.failed
    (ours,) = {m.flops for m in result.measurements if m.kind == "combo" and m.phase == "forward"}
    # fewer compressed keys: the work of what it computes, not of ours
    assert 0 < found[0].flops < ours
    assert not any("fla" in name for name in result.skipped)
    assert {c.subject for c in result.crossovers}.isdisjoint({NAME})
    path = tmp_path / "r.json"
    path.write_text(result.to_json())
    assert read_result(path) == result


def test_it_is_no_dense_kernel(run, fla):
    """However fast: ratios and crossovers are against dense attention."""
    fla(lambda q, k, v, *gates, **how: q * v.mean() * k.mean() * sum(g.mean() for g in gates))
    result = run(**SETTINGS)
    dense = {m.phase: m.performance.median_ms for m in result.measurements if m.kind == "dense"}
    for m in result.measurements:
        if m.kind != "dense":
            assert m.ratio_to_dense == pytest.approx(dense[m.phase] / m.performance.median_ms)


class BadBackward(torch.autograd.Function):
    """Forward runs; backward raises what no kernel of ours would."""

    armed = False

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return q.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if BadBackward.armed:
            raise KeyError("no such tile")
        return grad, *[torch.zeros_like(grad[..., :1, :])] * 2, *[grad[..., 0]] * 3


def test_one_that_fails_while_it_is_timed_is_a_row_with_its_error(run, fla, monkeypatch):
    fla(lambda q, k, v, *gates, **how: BadBackward.apply(q, k, v, *gates))
    monkeypatch.setattr(BadBackward, "armed", False)
    real = rivals._refusal
    monkeypatch.setattr(
        rivals, "_refusal", lambda *x: (real(*x), setattr(BadBackward, "armed", True))[0]
    )
    result = run(**SETTINGS)
    forward, backward = of_rival(result)
    assert forward.performance
    assert backward.performance is None
    assert "KeyError" in backward.reason
    assert "no such tile" in backward.reason
    assert not result.failed  # ours are well
    assert all(m.performance for m in result.measurements if m.kind != "rival")


@pytest.mark.parametrize(
    "error",
    [TypeError("a surprise"), AssertionError(), SyntaxError("bad kernel"), ImportError("x")],
)
def test_one_that_fails_at_once_is_left_out_with_the_reason(error, run, fla):
    def broken(*given: Any, **how: Any) -> Any:
        raise error

    fla(broken)
    result = run(**SETTINGS)
    assert not of_rival(result)
    (reason,) = [text for name, text in result.skipped.items() if NAME in name]
    assert type(error).__name__ in reason
    assert not result.failed


def test_without_flash_attn_it_says_so(run, fla):
    fla().flash_attn_func = None
    (reason,) = [text for name, text in run(**SETTINGS).skipped.items() if NAME in name]
    assert "its window needs the package flash-attn" in reason


def test_shapes_that_it_does_not_take(run, fla):
    fla()
    result = run(**{**SETTINGS, "shapes": [parse_shape("12/2/8")]})
    assert [text for name, text in result.skipped.items() if NAME in name] == [
        "needs 16, 32, 64, ... query heads to a kv head, got 6"
    ]


def test_absent_it_is_listed_with_the_reason(run, monkeypatch):
    monkeypatch.setattr(rivals.importlib.util, "find_spec", lambda name: None)
    result = run(**SETTINGS)
    assert [text for name, text in result.skipped.items() if NAME in name] == [
        "the package fla-core is not installed"
    ]
    assert not result.failed


def test_who_is_asked_when_nobody_is_named(fla):
    config = SHAPE.config((8, 4, 16, 3, 24))
    fla()
    assert rivals.rivals(None, config, "cpu", torch.float32) == []
    assert [r.name for r in rivals.rivals(["fla"], config, "cpu", torch.float32)] == [NAME]
    with pytest.raises(InvalidInput, match="did you mean 'fla'"):
        rivals.check_rivals(["flaa"])


def test_the_command_names_and_refuses(nsa, fla, tmp_path):
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
    assert (done.code, "rival must be of fla, got 'xla'" in done.err) == (2, True)

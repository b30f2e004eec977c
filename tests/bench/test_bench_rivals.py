"""Other libraries' NSA in a benchmark, with a fake package: timed, missing, refused or failing."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nsa_bench import rivals
from nsa_bench.inputs import make_inputs
from nsa_bench.result import read_result
from nsa_bench.shapes import parse_shape
from nsa_cli import bench
from nsa_core import nsa_attention, resolve

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
            module.__spec__, module.__path__ = (
                importlib.machinery.ModuleSpec(name, None, origin="here"),
                [],
            )
            monkeypatch.setitem(sys.modules, name, module)
        module.parallel_nsa = function
        return module

    return install


def rival_measurements(result: Any) -> list[Any]:
    return [m for m in result.measurements if m.kind == "rival"]


@pytest.mark.slow
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


@pytest.mark.slow
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
    real = rivals.refusal
    monkeypatch.setattr(
        rivals, "refusal", lambda *x: (real(*x), setattr(BadBackward, "armed", True))[0]
    )
    result = run(**SETTINGS)
    forward, backward = rival_measurements(result)
    assert forward.performance
    assert backward.performance is None
    assert "KeyError" in backward.reason
    assert "no such tile" in backward.reason
    assert not result.failed  # rivals do not count
    assert all(m.performance for m in result.measurements if m.kind != "rival")


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_rival_without_flash_attn_is_skipped_with_a_reason(run, fla):
    fla().flash_attn_func = None
    (reason,) = [text for name, text in run(**SETTINGS).skipped.items() if NAME in name]
    assert "its window needs the package flash-attn" in reason


@pytest.mark.slow
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


def test_default_and_known_rivals(fla):
    config = SHAPE.config((8, 4, 16, 3, 24))
    fla()
    assert rivals.rivals(None, config, "cpu", torch.float32) == []
    assert [r.name for r in rivals.rivals(["fla"], config, "cpu", torch.float32)] == [NAME]
    assert {"fla", "sfnsa", "xunhao"} == set(rivals.KNOWN)


def test_the_command_reads_several_names_and_none(monkeypatch):
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: name)
    assert bench._named_rivals(["fla,sfnsa", "xunhao"]) == ["fla", "sfnsa", "xunhao"]
    assert bench._named_rivals(["none"]) == []


@pytest.mark.slow
def test_the_command_accepts_known_rivals_and_none(nsa, fla, tmp_path):
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
    done = nsa("bench", *options, "--rival", "none", "--json", str(tmp_path / "r.json"))
    assert (done.code, NAME in done.out) == (0, False)
    # On a GPU, None would stand for all libraries.
    assert read_result(tmp_path / "r.json").settings["rivals"] == []


@pytest.fixture
def packed_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install fakes of flash_nsa, native_sparse_attention and flash_attn that run our slots."""
    config = SHAPE.config((8, 4, 16, 3, 24))
    plan = resolve(config, device="cpu", dtype="float64", needs_grad=True, varlen=True)

    def bounded(bounds: torch.Tensor) -> dict[str, Any]:
        assert bounds.dtype == torch.int32
        return {"cu_seqlens": bounds, "max_seqlen": int(bounds.diff().max())}

    def avgpool_compress(x: Any, weight: Any, bounds: Any, size: int, stride: int) -> Any:
        assert (weight, size, stride) == (None, 8, 4)
        ends = zip(bounds.tolist(), bounds.tolist()[1:])
        rows = [x[start:end].unfold(0, size, stride).mean(-1) for start, end in ends]
        lengths = torch.tensor([0] + [len(part) for part in rows], dtype=torch.int32)
        return torch.cat(rows), lengths.cumsum(0).to(torch.int32)

    def compressed_attention(
        q: Any,
        k: Any,
        v: Any,
        size: int,
        stride: int,
        block: int,
        top: int,
        *rest: Any,
        **forced: int,
    ) -> Any:
        bounds, bounds_cmp, longest, longest_cmp = rest
        assert (size, stride, block, top) == (8, 4, 16, 3)
        assert forced == {"init_blocks": 1, "local_blocks": 2}
        assert longest == int(bounds.diff().max())
        assert longest_cmp == int(bounds_cmp.diff().max())
        room = config.geometry.max_compressed(len(q))
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, room - len(x))) for x in (k, v))
        o, lse = plan.cmp(q, k, v, **bounded(bounds))
        return o, plan.select(q, k, lse, **bounded(bounds))

    def topk_sparse_attention(q: Any, k: Any, v: Any, blocks: Any, size: int, bounds: Any) -> Any:
        assert size == 16
        return plan.sel(q, k, v, blocks, **bounded(bounds))[0]

    def flash_attn_varlen_func(q: Any, k: Any, v: Any, *limits: Any, **options: Any) -> Any:
        assert options == {"causal": True, "window_size": (24, -1)}
        assert limits[2:] == (80, 80)
        return plan.win(q, k, v, **bounded(limits[0]))[0]

    class HFNSACore:
        def __init__(self, sizes: types.SimpleNamespace) -> None:
            assert vars(sizes) == {
                **{"qk_head_dim": 8, "v_head_dim": 8, "num_heads": 16, "num_kv_heads": 1},
                **{"kernel_size": 8, "stride": 4, "block_size": 16, "top_n": 3},
                **{"num_init_blocks": 1, "num_local_blocks": 2, "window_size": 24},
            }

        def __call__(self, q: Any, k: Any, v: Any, logits: Any, bounds: Any) -> torch.Tensor:
            gates = torch.sigmoid(logits)
            return nsa_attention(q, k, v, gates, config=config, **bounded(bounds))

    fakes = {
        "flash_attn": {"flash_attn_varlen_func": flash_attn_varlen_func},
        "flash_nsa": {"HFNSACore": HFNSACore, "NSAConfig": types.SimpleNamespace},
        "native_sparse_attention": {},
        "native_sparse_attention.ops": {
            "avgpool_compress": avgpool_compress,
            "compressed_attention": compressed_attention,
            "topk_sparse_attention": topk_sparse_attention,
        },
    }
    for name, contents in fakes.items():
        module = types.ModuleType(name)
        module.__spec__, module.__path__ = (
            importlib.machinery.ModuleSpec(name, None, origin="here"),
            [],
        )
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("name", ["sfnsa", "xunhao"])
def test_a_packed_library_gets_the_tensors_of_the_batch(packed_libraries, name):
    """Fakes that run our slots give the output and the gradients of nsa_attention."""
    config = SHAPE.config((8, 4, 16, 3, 24))
    x = make_inputs("random", config, batch=2, length=80, dtype=torch.float64, device="cpu", seed=0)
    leaves = [x.q, x.k, x.v, x.gates]
    rival = rivals.KNOWN[name](config)
    assert rival.reason == ""
    o = rival.forward(x)
    expected = nsa_attention(x.q, x.k, x.v, x.gates, config=config)
    torch.testing.assert_close(o, expected, rtol=1e-9, atol=1e-9)
    for ours, theirs in zip(
        torch.autograd.grad(expected, leaves, x.do), torch.autograd.grad(o, leaves, x.do)
    ):
        torch.testing.assert_close(theirs, ours, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", ["sfnsa", "xunhao"])
def test_a_packed_library_has_a_reason_where_it_computes_something_else(packed_libraries, name):
    config = dataclasses.replace(SHAPE.config((8, 4, 16, 3, 24)), scale=0.5)
    assert rivals.KNOWN[name](config).reason == "always scales scores by 0.3536, not by 0.5"


@pytest.mark.parametrize("name", ["sfnsa", "xunhao"])
def test_a_packed_library_needs_flash_attn(packed_libraries, monkeypatch, name):
    config, found = SHAPE.config((8, 4, 16, 3, 24)), importlib.util.find_spec
    missing = {"flash_attn"}
    monkeypatch.setattr(
        rivals.importlib.util, "find_spec", lambda name: None if name in missing else found(name)
    )
    assert "flash-attn, which is not installed" in rivals.KNOWN[name](config).reason
    missing |= {"flash_nsa", "native_sparse_attention"}
    assert "is not installed" in rivals.KNOWN[name](config).reason


def test_xunhao_needs_v_as_wide_as_q_and_k(packed_libraries):
    reason = rivals.KNOWN["xunhao"](parse_shape("16/1/8/4").config((8, 4, 16, 3, 24))).reason
    assert reason == "needs v as wide as q and k, got 4 and 8"

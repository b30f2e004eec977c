"""A compiled layer on a GPU: output and gradients are as precise as those of the eager layer."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

from nsa_core import NSAttention, resolve
from nsa_verify.judge.layer_gradients import golden_layer
from nsa_verify.judge.tensor import judge
from nsa_verify.problems.cases import config_of

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

DEVICE = "cuda"
TOKENS = 100
DOCUMENTS = (0, 37, 1, 62)
CONFIG = config_of(4, 2, 16, 16, (8, 4, 16, 3, 20), qk_norm=True)
# Rounding changes the selection in bf16, not in fp32. With all blocks, there is none to change.
CONFIGS = {
    torch.float32: CONFIG,
    torch.bfloat16: dataclasses.replace(
        CONFIG, num_selected_blocks=-(-TOKENS // CONFIG.select_block_size)
    ),
}
# A CUDA graph is warmed up, recorded and replayed, in this order.
CALLS = {"default": 1, "reduce-overhead": 3}
Results = dict[str, torch.Tensor]


def inputs(
    dtype: torch.dtype, packed: bool, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return x, the gradient of the output, and the document bounds."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    shape = (*(() if packed else (2,)), TOKENS, CONFIG.dim)
    x, do = (torch.randn(shape, device=DEVICE, dtype=dtype, generator=generator) for _ in range(2))
    bounds = torch.tensor([0, *DOCUMENTS]).cumsum(0).to(DEVICE, torch.int32)
    return x, do, bounds if packed else None


def results(
    call: Any,
    layer: NSAttention,
    x: torch.Tensor,
    do: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
) -> Results:
    """Return the output "y" and the gradients of "x" and of each parameter of ``layer``."""
    packing = {} if cu_seqlens is None else {"max_seqlen": max(DOCUMENTS)}
    parameters = dict(layer.named_parameters())
    leaf = x.clone().requires_grad_()
    y = call(leaf, cu_seqlens, **packing)
    gradients = torch.autograd.grad(y, [leaf, *parameters.values()], do)
    # The next replay of a CUDA graph overwrites its results.
    return {
        name: tensor.detach().clone()
        for name, tensor in zip(("y", "x", *parameters), (y, *gradients), strict=True)
    }


def golden(
    layer: NSAttention, x: torch.Tensor, do: torch.Tensor, cu_seqlens: torch.Tensor | None
) -> tuple[Results, Results]:
    """Return the results of the layer in float64 by the oracle, and their magnitudes."""
    exact = copy.deepcopy(layer).to("cpu", torch.float64)
    packed = cu_seqlens is not None
    plan = resolve(layer.config, device="cpu", dtype=torch.float64, backends="sdpa", varlen=packed)
    bounds = None if cu_seqlens is None else cu_seqlens.cpu()
    return golden_layer(exact, x.cpu().double(), do.cpu().double(), plan, bounds)


def faults(
    compiled: Results, eager: Results, truth: tuple[Results, Results], dtype: torch.dtype
) -> dict[str, str]:
    """Judge the compiled results; the rounded results of the verdict are those of eager mode."""
    expected, magnitude = truth
    assert compiled.keys() == eager.keys() == expected.keys()
    verdicts = {}
    for name, actual in compiled.items():
        tensors = (actual, expected[name], eager[name], magnitude[name])
        rows = [t.reshape(-1, t.shape[-1]) for t in tensors]  # a vector is one row
        verdicts[name] = judge(*rows, dtype, grad=name != "y")
    return {name: verdict.why for name, verdict in verdicts.items() if not verdict}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize(
    ("backend", "mode"),
    [("triton", "default"), ("sdpa", "default"), ("triton", "reduce-overhead")],
)
def test_output_and_gradients_are_as_precise_as_in_eager_mode(
    backend: str, mode: str, packed: bool, dtype: torch.dtype
) -> None:
    torch._dynamo.reset()
    counters.clear()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = NSAttention(CONFIGS[dtype], backends=backend).to(DEVICE, dtype)
    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    for seed in range(CALLS[mode]):
        problem = inputs(dtype, packed, seed)
        torch.compiler.cudagraph_mark_step_begin()
        actual = results(compiled, layer, *problem)
    assert not counters["inductor"]["cudagraph_skips"]
    eager = results(layer, layer, *problem)
    assert faults(actual, eager, golden(layer, *problem), dtype) == {}

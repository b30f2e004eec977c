"""Quantised and re-classed projections equal plain ones of the same weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cases import boundaries, layer_of
from nsa_core import InvalidInput, NSAttention
from nsa_core.layer.gating import has_sigmoid, plain_linear_gate
from nsa_core.layer.phi.kinds import weights_of_pair
from nsa_core.layer.plain_linear import are_plain_linear

LENGTH = 13  # blocks of l = 8, d = 4 end at tokens 8 and 12


class Int8Linear(nn.Linear):
    """An integer weight, and a scale that is no parameter, as of bitsandbytes."""

    def __init__(self, dense: nn.Linear) -> None:
        super().__init__(dense.in_features, dense.out_features, bias=False, device="meta")
        weight = dense.weight.detach()
        self.scale = weight.abs().amax(1, keepdim=True) / 127
        quantised = (weight / self.scale).round().to(torch.int8)
        self.weight = nn.Parameter(quantised, requires_grad=False)

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        return self.weight.to(dtype) * self.scale.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):  # bitsandbytes returns the dtype of x
            return F.linear(x, self.dequantised(x.dtype))


class BufferLinear(nn.Module):
    """Integers in a buffer and no parameter, as of GPTQ."""

    def __init__(self, dense: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = dense.in_features, dense.out_features
        of_parameter = Int8Linear(dense)
        self.scale = of_parameter.scale
        self.register_buffer("qweight", of_parameter.weight.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.qweight.to(x.dtype) * self.scale.to(x.dtype))


class Float8Linear(Int8Linear):
    """A floating-point weight that no product takes as it is."""

    def __init__(self, dense: nn.Linear) -> None:
        super().__init__(dense)
        self.weight = nn.Parameter(self.weight.to(torch.float8_e5m2), requires_grad=False)


class LoRA(nn.Module):
    """An fp32 adapter that returns the dtype of its base, as of peft."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.a = nn.Parameter(0.1 * torch.randn(2, base.in_features))
        self.b = nn.Parameter(0.1 * torch.randn(base.out_features, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base_layer(x)
        return y + (x.to(self.a.dtype) @ self.a.T @ self.b.T).to(y.dtype)


def qlora(dense: nn.Linear) -> nn.Module:
    return LoRA(Int8Linear(dense))


KINDS = {
    "int8": Int8Linear,
    "buffer": BufferLinear,
    "float8": Float8Linear,
    "LoRA": LoRA,
    "QLoRA": qlora,
    "LoRA over a buffer": lambda dense: LoRA(BufferLinear(dense)),
}


def quantised(attn: NSAttention, kind: Any) -> NSAttention:
    result = copy.deepcopy(attn)
    result.qkv, result.out = kind(result.qkv), kind(result.out)
    return result


def dequantised(attn: NSAttention) -> NSAttention:
    """A layer with plain projections that compute what those of ``attn`` compute."""
    result = copy.deepcopy(attn)
    for name in ("qkv", "out"):
        layer = attn.get_submodule(name)
        inputs = attn.config.dim if name == "qkv" else attn.config.n_heads * attn.config.v_dim
        with torch.no_grad():
            weight = layer(torch.eye(inputs, dtype=torch.float64)).T
        plain = nn.Linear(*reversed(weight.shape), bias=False, dtype=torch.float64)
        plain.weight = nn.Parameter(weight.contiguous())
        setattr(result, name, plain)
    return result


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_projections_equal_dequantised_ones_on_every_path(kind):
    attn = quantised(layer_of(), KINDS[kind])
    if kind == "LoRA":
        attn.double()
    reference = dequantised(attn)
    x = torch.randn(1, LENGTH, 24, dtype=torch.float64, requires_grad=True)
    expected = reference(x)
    (gradient,) = torch.autograd.grad(expected.sin().sum(), x)
    y = attn(x)
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(torch.autograd.grad(y.sin().sum(), x)[0], gradient)
    packed = attn(x[0], boundaries(5, 8))
    torch.testing.assert_close(packed, reference(x[0], boundaries(5, 8)))
    for steps in ([1] * LENGTH, [9, 1, 1, 2]):
        cache = attn.new_cache(1, LENGTH)
        with torch.no_grad():
            outputs = [attn(part, cache=cache) for part in x.split(steps, 1)]
        torch.testing.assert_close(torch.cat(outputs, 1), expected.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_dtype_is_that_of_x(kind, dtype):
    attn = quantised(layer_of().to(dtype), KINDS[kind]).eval()
    x = torch.randn(2, LENGTH, 24).to(dtype)
    cache = attn.new_cache(2, LENGTH)
    with torch.no_grad():
        y = attn(x)
        assert y.dtype == cache.dtype == attn(x[:, :9], cache=cache).dtype == dtype
        assert attn.plan.requests["cmp"].dtype == str(dtype).removeprefix("torch.")
        reference = dequantised(attn.double()).double()
    expected = reference(x.double())
    error = (y.double() - expected).norm() / expected.norm()
    assert error < (1e-5 if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_the_dtype_is_that_of_autocast(kind):
    attn = quantised(layer_of().float(), KINDS[kind])
    x = torch.randn(2, LENGTH, 24)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert attn.project(x).q.dtype == attn(x).dtype == torch.bfloat16
        cache = attn.new_cache(2, LENGTH)
        assert cache.dtype == attn(x, cache=cache).dtype == torch.bfloat16


def test_autocast_leaves_float64():
    attn, x = layer_of(), torch.randn(1, LENGTH, 24, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        y = attn(x, cache=attn.new_cache(1, LENGTH))
    torch.testing.assert_close(y, attn(x))


@pytest.mark.parametrize("quantise", [lambda dense: dense, Int8Linear], ids=["plain", "int8"])
@pytest.mark.parametrize("length", [LENGTH, 8, 3])
@pytest.mark.parametrize("compress", ["mlp", "linear", "conv", "attn_pool", "mean"])
def test_phi_and_gate_may_have_another_dtype(compress, length, quantise):
    """Parameters that train whole are often fp32 above a base of bfloat16."""
    attn = quantised(layer_of(compress=compress).bfloat16(), quantise)
    for part in (attn.phi_k, attn.phi_v, attn.gate):
        part.float()
    x = torch.randn(2, length, 24).bfloat16()
    y = attn(x)
    y.float().sin().sum().backward()
    for part, trains in ((attn.phi_v, length >= 8), (attn.gate, True)):
        for name, parameter in part.named_parameters():
            assert parameter.grad.dtype == torch.float32, name
            assert bool(parameter.grad.any()) is trains, name
    packed = attn(x.flatten(0, 1), boundaries(length, length))
    cache = attn.new_cache(2, 20, dtype=x.dtype)
    with torch.no_grad():
        steps = torch.cat([attn(row, cache=cache) for row in x.split(1, 1)], 1)
        reference = dequantised(copy.deepcopy(attn).double()).double()
        expected = reference(x.double())
    for output in (y, packed.view_as(y), steps):
        assert output.dtype == torch.bfloat16
        assert (output.double() - expected).norm() / expected.norm() < 0.05


def test_inputs_of_quantised_projections_are_checked():
    attn = quantised(layer_of().bfloat16(), qlora)
    with pytest.raises(InvalidInput, match=r"x is torch.int64: pass one of bfloat16, float16"):
        attn(torch.ones(1, LENGTH, 24, dtype=torch.long))
    with pytest.raises(InvalidInput, match=r"x is on meta, the layer on cpu"):
        attn(torch.ones(1, LENGTH, 24, device="meta"))
    cache = attn.new_cache(1, LENGTH, dtype=torch.float32)
    with pytest.raises(InvalidInput, match=r"computes torch.bfloat16 .* cache is torch.float32"):
        attn(torch.ones(1, LENGTH, 24).bfloat16(), cache=cache)
    plain = quantised(layer_of().bfloat16(), LoRA)
    with pytest.raises(InvalidInput, match=r"x is torch.float32, .* are torch.bfloat16"):
        plain(torch.ones(1, LENGTH, 24))


class Protocol(nn.Module):
    """A base class that a trainer puts before the class of each module."""


def reclassed(attn: NSAttention) -> NSAttention:
    result = copy.deepcopy(attn)
    for module in result.modules():
        kind = type(module)
        module.__class__ = type(kind.__name__, (Protocol, kind), {})
    return result


@pytest.mark.parametrize("gate", ["linear", "mlp"])
@pytest.mark.parametrize("compress", ["mlp", "linear", "mean"])
def test_a_subclass_without_a_forward_of_its_own_is_plain(compress, gate):
    attn = layer_of(compress=compress, gate=gate, head_dim=8, v_head_dim=8)
    other = reclassed(attn)
    assert are_plain_linear(*other.phi_k.children())
    assert has_sigmoid(other.gate)
    assert not other._norms()
    assert (plain_linear_gate(other.gate) is not None) is (gate == "linear")
    kv = torch.randn(2, 1, LENGTH, 2, 8, dtype=torch.float64)
    pairs = [weights_of_pair(each.phi_k, each.phi_v, *kv) for each in (attn, other)]
    assert all(pair is not None for pair in pairs)  # the fused step takes both
    x = torch.randn(1, LENGTH, 24, dtype=torch.float64)
    assert torch.equal(other(x), attn(x))


@pytest.mark.parametrize("gate", ["linear", "mlp"])
@pytest.mark.parametrize("compress", ["mlp", "linear", "conv", "attn_pool"])
def test_adapters_find_the_projections_only(compress, gate):
    """They replace every nn.Linear; phi and the gate train whole."""
    modules = layer_of(compress=compress, gate=gate).named_modules()
    assert {name for name, m in modules if isinstance(m, nn.Linear)} == {"qkv", "out"}

"""Wrapped, hooked and parametrised linear layers equal plain layers of the same weights."""

import contextlib
import copy

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch.nn.utils import parametrizations, prune

from cases import boundaries, layer_of
from nsa_core.errors import InvalidInput
from nsa_core.layer.gating import LinearGate, make_gate
from nsa_core.layer.plain_linear import are_plain_linear, base_weight, stated_dtype

LENGTH = 13  # blocks of l = 8, d = 4 end at tokens 8 and 12
MEAN, MLP_GATE = {"compress": "mean"}, {"compress": "mean", "gate": "mlp"}


class LoRA(nn.Module):
    """A LoRA adapter base(x) + B A x, without an attribute ``weight``."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.a, self.b = (
            nn.Linear(base.in_features, 2, bias=False),
            nn.Linear(2, base.out_features, bias=False),
        )
        self.base = base.requires_grad_(False)
        self.to(base.weight.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


def hooked(layer):
    layer.register_forward_hook(lambda module, args, out: out * 1.5)


def pre_hooked(layer):
    layer.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))


def overridden(layer):
    layer.forward = lambda x, own=layer.forward: own(x) * 1.5


def old_weight_norm(layer):
    """The hook-based weight norm, which leaves a stale ``weight`` between calls."""
    nn.utils.weight_norm(layer)
    layer.weight_g.data.mul_(1.5)


def weight_norm(layer):
    parametrizations.weight_norm(layer).parametrizations.weight.original0.data.mul_(1.5)


def pruned(layer):
    prune.l1_unstructured(layer, "weight", 0.4)


COMMON_CHANGES = (LoRA, hooked, old_weight_norm, weight_norm, pruned)
CHANGES = (
    *COMMON_CHANGES,
    pre_hooked,
    overridden,
    parametrizations.spectral_norm,
    parametrizations.orthogonal,
)
CASES = [("phi_k.up", {}, change) for change in CHANGES]
CASES += [("phi_v.down", {}, change) for change in COMMON_CHANGES]
CASES += [("phi_k.proj", {"compress": "linear"}, change) for change in COMMON_CHANGES]
CASES += [("gate.0", MLP_GATE, change) for change in COMMON_CHANGES]
CASES += [
    ("gate.2", MLP_GATE, LoRA),
    ("phi_v.up", {}, LoRA),
    ("phi_v.proj", {"compress": "linear"}, LoRA),
]
# Without LoRA, which is refused.
CASES += [("gate", MEAN, change) for change in (*COMMON_CHANGES[1:], overridden)]
CASES += [(name, MEAN, change) for name in ("qkv", "out") for change in (LoRA, hooked, pruned)]


def changed_copy(attn, name, change):
    """A copy of ``attn`` with a changed linear layer ``name``."""
    attn = copy.deepcopy(attn)
    wrapped = change(attn.get_submodule(name))
    if wrapped is not None:
        attn.set_submodule(name, wrapped)
    return attn


def merged(plain, attn, name):
    """``plain`` with the effective weights of the layer ``name`` of ``attn``, found by calls."""
    layer, result = attn.get_submodule(name), copy.deepcopy(plain)
    target = result.get_submodule(name)
    with torch.no_grad():
        probes = torch.cat([torch.zeros(1, target.in_features), torch.eye(target.in_features)]).to(
            target.weight
        )
        out = layer(probes)
        if isinstance(layer, LinearGate):
            out = out.flatten(-2).logit()
        target.weight.copy_((out[1:] - out[0]).T)
        if target.bias is not None:
            target.bias.copy_(out[0])
    return result


def outputs_of_every_path(attn, x):
    """Outputs over x [1, S, dim]: packed, single tokens, prefill and single tokens, chunks."""
    results = {"packed": attn(x[0], boundaries(LENGTH))[None]}
    with torch.no_grad():
        for name, steps in {
            "tokens": [1] * LENGTH,
            "prefill": [9, 1, 1, 1, 1],
            "chunks": [2, 6, 5],
        }.items():
            cache = attn.new_cache(1, LENGTH)
            results[name] = torch.cat([attn(part, cache=cache) for part in x.split(steps, 1)], 1)
    return results


def check(plain, attn, name, x, affine, paths=True):
    y = attn(x)
    assert not torch.allclose(y, plain(x), rtol=1e-4)
    expected = merged(plain, attn, name)(x) if affine else y
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-9)
    for path, other in outputs_of_every_path(attn, x).items() if paths else ():
        torch.testing.assert_close(
            other, y, rtol=1e-9, atol=1e-9, msg=lambda text, path=path: f"{path}: {text}"
        )
    if affine:
        torch.testing.assert_close(
            *(torch.autograd.grad(z.sin().sum(), x)[0] for z in (y, expected))
        )


@pytest.mark.few_cases
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize(
    ("name", "options", "change"), CASES, ids=lambda v: getattr(v, "__name__", str(v))
)
def test_changed_linear_layer_equals_its_merged_weights_on_every_path(name, options, change):
    """Before and after two optimiser steps, which make cached weights stale."""
    # In training mode spectral_norm changes the weights with each call.
    plain = layer_of(**options).eval()
    attn = changed_copy(plain, name, change).eval()
    x = torch.randn(1, LENGTH, 24, dtype=torch.float64, requires_grad=True)
    # Hooks on the gate scale the gates, not the logits.
    affine = not (name == "gate" and change in (hooked, overridden))
    check(plain, attn, name, x, affine, paths=False)
    trained = {n: p for n, p in attn.get_submodule(name).named_parameters() if p.requires_grad}
    optimiser = torch.optim.SGD(trained.values(), lr=0.05)
    for _ in range(2):
        optimiser.zero_grad()
        attn(x).sin().sum().backward()
        assert all(p.grad is not None and p.grad.any() for p in trained.values())
        optimiser.step()
    check(plain, attn, name, x, affine)


@pytest.mark.few_cases("weight_norm")
@pytest.mark.parametrize("change", [LoRA, weight_norm], ids=lambda change: change.__name__)
def test_compiled_layers_call_wrapped_modules(change):
    torch._dynamo.reset()
    attn, x = (
        changed_copy(layer_of(), "phi_k.up", change),
        torch.randn(2, LENGTH, 24, dtype=torch.float64),
    )
    compiled = torch.compile(attn, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), attn(x), rtol=1e-12, atol=1e-12)


def test_adapter_around_a_linear_gate_is_refused():
    attn, x = layer_of(), torch.randn(1, LENGTH, 24, dtype=torch.float64)
    expected = attn(x)
    wrapped = changed_copy(attn, "gate", LoRA)
    for call in (wrapped, lambda x: wrapped(x, cache=wrapped.new_cache(1, LENGTH))):
        with pytest.raises(
            InvalidInput, match=r"gate: LoRA adds a\.weight, b\.weight to a LinearGate"
        ):
            call(x.detach())
    # Like the wrappers of DDP and torch.compile, this one adds no parameters.
    attn.gate = nn.Sequential(attn.gate)
    assert torch.equal(attn(x), expected)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("change", [LoRA, pruned, weight_norm], ids=lambda change: change.__name__)
def test_row_22_wrapped_layers_of_gates_compute_in_fp32(change, autocast):
    gate = make_gate("mlp", 64, 4)
    for index in (0, 2):
        gate[index] = change(gate[index]) or gate[index]
    gate, x = gate if autocast else gate.bfloat16(), torch.randn(2, 7, 64).bfloat16()
    with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
        got = gate(x)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, gate.float()(x.float()), rtol=0, atol=1e-6)


def test_gate_in_low_precision_updates_its_buffers():
    gate = make_gate("mlp", 64, 4)
    parametrizations.spectral_norm(gate[0])
    gate.bfloat16().train()
    before = gate[0].parametrizations.weight[0]._u.clone()
    gate[0].parametrizations.weight.original.data[:4] *= 5
    gate(torch.randn(2, 64).bfloat16())
    assert not torch.equal(gate[0].parametrizations.weight[0]._u, before)


@pytest.mark.parametrize("which", ["q_norm", "k_norm"])
def test_hook_on_an_identity_norm_is_called_on_every_path(which):
    plain, x = (
        layer_of(head_dim=8, v_head_dim=8, compress="mean"),
        torch.randn(1, LENGTH, 24, dtype=torch.float64),
    )
    attn = changed_copy(plain, which, hooked)
    for path, other in outputs_of_every_path(attn, x).items():
        torch.testing.assert_close(
            other, attn(x), rtol=1e-9, atol=1e-9, msg=lambda text, path=path: f"{path}: {text}"
        )
    assert not torch.allclose(attn(x), plain(x), rtol=1e-4)


HOOKS = ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook")


@pytest.mark.parametrize("kind", HOOKS)
def test_layer_with_any_hook_is_not_plain(kind):
    layer = nn.Linear(3, 2)
    assert are_plain_linear(layer)
    for register in (
        getattr(layer, f"register_{kind}"),
        getattr(nn.modules.module, f"register_module_{kind}"),
    ):
        handle = register(lambda *_: None)
        try:
            assert not are_plain_linear(layer)
        finally:
            handle.remove()
        assert are_plain_linear(layer)


def test_changed_or_biasless_layers_are_not_plain():
    layer, bare = nn.Linear(3, 2), nn.Linear(3, 2, bias=False)
    overridden(layer)
    assert not any(map(are_plain_linear, (layer, bare, LoRA(nn.Linear(3, 2)), LinearGate(3, 2))))
    assert are_plain_linear(LinearGate(3, 2), kind=LinearGate)
    assert are_plain_linear(nn.Linear(3, 2), nn.Linear(2, 2))
    assert not are_plain_linear(nn.Linear(3, 2), bare)


def test_the_weight_of_the_base_states_the_dtype():
    wrapped = LoRA(nn.Linear(30, 20).bfloat16())
    wrapped.a.float()
    for layer, dtype in (
        (wrapped, torch.bfloat16),
        (parametrizations.weight_norm(nn.Linear(3, 2)), torch.float32),
        (nn.Identity(), None),
    ):
        assert stated_dtype(base_weight(layer)) == dtype

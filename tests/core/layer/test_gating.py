"""Gates: computed in fp32, balanced and varying at initialisation."""

import pytest
import torch

from nsa_core.config import GATE_KINDS
from nsa_core.layer.gating import make_gate


def formula(kind, p, x):
    if kind == "linear":
        logits = x @ p["weight"].T + p["bias"]
    else:
        hidden = x @ p["0.weight"].T + p["0.bias"]
        logits = (hidden * torch.sigmoid(hidden)) @ p["2.weight"].T + p["2.bias"]
    return torch.stack([1 / (1 + torch.exp(-logits[..., 3 * h : 3 * h + 3])) for h in range(4)], -2)


@pytest.mark.parametrize("kind", GATE_KINDS)
def test_gates_equal_the_formula_head_major(kind):
    gate, x = make_gate(kind, 24, 4).double(), torch.randn(2, 7, 24, dtype=torch.float64)
    with torch.no_grad():
        for parameter in gate.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    got = gate(x)
    assert got.shape == (2, 7, 4, 3)
    torch.testing.assert_close(
        got, formula(kind, dict(gate.named_parameters()), x), rtol=1e-13, atol=1e-13
    )


@pytest.mark.parametrize("kind", GATE_KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_row_22_gates_are_fp32_whatever_the_layer_is(kind, dtype):
    gate, x = make_gate(kind, 64, 4).to(dtype), torch.randn(2, 7, 64).to(dtype)
    got = gate(x)
    assert got.dtype == torch.float32
    exact = make_gate(kind, 64, 4).double()
    exact.load_state_dict(gate.state_dict())
    torch.testing.assert_close(got.double(), exact(x.double()), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", GATE_KINDS)
def test_gates_are_computed_in_fp32_under_autocast(kind):
    gate, x = make_gate(kind, 64, 4), torch.randn(2, 7, 64)
    plain = gate(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = gate(x)
        assert torch.mm(x[0], x[0].T).dtype == torch.bfloat16  # autocast is still on
    assert under_autocast.dtype == torch.float32
    assert torch.equal(under_autocast, plain)


@pytest.mark.parametrize("kind", GATE_KINDS)
@pytest.mark.parametrize("dim", [16, 256, 2048])
def test_report_row_19_gates_start_balanced_and_vary(kind, dim):
    gates = make_gate(kind, dim, 16)(torch.randn(2048, dim)).detach()
    branch = gates.mean((0, 1))
    assert (branch - 0.5).abs().max() < 0.06  # no branch is preferred
    per_head = gates.std(0)
    assert per_head.median() > 0.06  # no gate is constant
    assert gates.std() < 0.25  # no gate is saturated

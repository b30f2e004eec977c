"""Gates: computed in fp32, balanced and varying at initialisation."""

import pytest
import torch

from nsa_core.config import GATE_KINDS
from nsa_core.layer import fp32_product
from nsa_core.layer.gating import make_gate, start_near_dense


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


@pytest.fixture
def on_matrix_units(monkeypatch):
    """Compute gates of bf16 tensors on the CPU in the form of a GPU."""
    monkeypatch.setattr(fp32_product, "DEVICES", ("cpu",))


def gradients(gate, x):
    leaf = x.clone().requires_grad_()
    gates = gate(leaf)
    weight = torch.linspace(-1, 1, gates.numel(), dtype=gates.dtype).view_as(gates)
    return [
        gates.detach(),
        *torch.autograd.grad((gates * weight).sum(), [leaf, *gate.parameters()]),
    ]


@pytest.mark.parametrize("kind", GATE_KINDS)
@pytest.mark.parametrize("shape", [(64,), (7, 64), (2, 7, 64)])
def test_products_on_matrix_units_lose_nothing(kind, shape, on_matrix_units):
    gate, x = make_gate(kind, 64, 4).bfloat16(), torch.randn(shape).bfloat16()
    exact = make_gate(kind, 64, 4).double()
    exact.load_state_dict(gate.state_dict())
    found = gradients(gate, x)
    expected = gradients(exact, x.double())
    assert [t.dtype for t in found] == [torch.float32] + [torch.bfloat16] * (len(found) - 1)
    torch.testing.assert_close(found[0].double(), expected[0], rtol=0, atol=1e-6)
    for got, true in zip(found[1:], expected[1:]):
        # One rounding to bf16, beside which those of the halves of a gradient do not show.
        rounded = true.bfloat16().double()
        assert (got.double() - true).norm() <= 1.01 * (rounded - true).norm() + 1e-7 * true.norm()


@pytest.mark.parametrize("kind", GATE_KINDS)
@pytest.mark.parametrize("lead", [(0,), (2, 0), (0, 5)])
def test_no_tokens_have_no_gates_on_matrix_units(kind, lead, on_matrix_units):
    gates, dx, *grads = gradients(
        make_gate(kind, 64, 4).bfloat16(), torch.ones(*lead, 64).bfloat16()
    )
    assert gates.shape == (*lead, 4, 3)
    assert dx.shape == (*lead, 64)
    assert not any(grad.any() for grad in grads)


def test_gates_on_matrix_units_differentiate_twice(on_matrix_units):
    x, weight = torch.randn(5, 8).bfloat16(), torch.randn(3, 8).bfloat16()

    def product(dtype):
        leaves = [t.to(dtype).requires_grad_() for t in (x, weight)]
        if dtype == torch.bfloat16:
            y = fp32_product.fp32_linear(*leaves, None)
        else:
            y = leaves[0] @ leaves[1].t()
        (dx,) = torch.autograd.grad(y.square().sum(), leaves[0], create_graph=True)
        return torch.autograd.grad(dx.square().sum(), leaves)

    for got, true in zip(product(torch.bfloat16), product(torch.float64)):
        torch.testing.assert_close(got.double(), true, rtol=0.03, atol=0.03 * true.abs().max())


def test_the_product_passes_opcheck():
    a, b = torch.randn(5, 8).bfloat16(), torch.randn(8, 3).bfloat16()
    arguments = a.requires_grad_(), b.requires_grad_()
    torch.library.opcheck(torch.ops.nsa_core.fp32_product.default, arguments)


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.ones(2, 3), torch.ones(4, 3)),
        (torch.ones(2, 3).half(), torch.ones(4, 3).half()),
        (torch.ones(2, 3).bfloat16(), torch.ones(4, 3)),
        (torch.ones(2, 3), torch.ones(4, 3).bfloat16()),
    ],
)
def test_other_dtypes_are_computed_in_fp32(x, weight, on_matrix_units):
    assert not fp32_product.takes_fp32_product(x, weight)


def test_transforms_keep_the_operators_of_pytorch(on_matrix_units):
    x, weight = torch.ones(2, 3).bfloat16(), torch.ones(4, 3).bfloat16()
    assert fp32_product.takes_fp32_product(x, weight)

    def takes(row):
        assert not fp32_product.takes_fp32_product(row, weight)
        return row

    torch.func.vmap(takes)(x)


@pytest.mark.slow
@pytest.mark.parametrize("kind", GATE_KINDS)
def test_compiled_gates_take_the_product(kind, on_matrix_units):
    gate, x = make_gate(kind, 64, 4).bfloat16(), torch.randn(2, 7, 64).bfloat16()
    compiled = torch.compile(gate, fullgraph=True)
    for got, expected in zip(gradients(compiled, x), gradients(gate, x), strict=True):
        torch.testing.assert_close(got, expected, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("kind", GATE_KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_gates_that_start_near_dense_are_the_same_for_every_token(kind, dtype):
    gate, x = make_gate(kind, 24, 4).to(dtype), torch.randn(2, 7, 24).to(dtype) * 100
    start_near_dense(gate)
    expected = torch.tensor([0.1, 0.8, 0.1], dtype=gate(x).dtype).expand(2, 7, 4, 3)
    torch.testing.assert_close(gate(x), expected, rtol=0, atol=2 * torch.finfo(dtype).eps)
    gate(x)[..., 0].sum().backward()
    last = gate if kind == "linear" else gate[-1]
    assert last.weight.grad.any()

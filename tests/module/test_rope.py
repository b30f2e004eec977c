"""Rotary embedding against complex multiplication."""

import pytest
import torch

from nsa_core.rope import rope_table, rotate


def complex_rope(x: torch.Tensor, positions: torch.Tensor, base: float) -> torch.Tensor:
    x = x.double()
    half = x.shape[-1] // 2
    turns = torch.tensor([base ** (-2 * i / x.shape[-1]) for i in range(half)], dtype=torch.float64)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * positions.double()[:, None, None] * turns)
    return torch.cat((turned.real, turned.imag), -1)


@pytest.mark.parametrize("width", [2, 6, 64])
@pytest.mark.parametrize("base", [10000.0, 7.0])
def test_rotate_is_a_complex_product(width, base):
    x, positions = torch.randn(2, 5, 3, width, dtype=torch.float64), torch.tensor([0, 1, 4, 100, 3])
    got = rotate(x, rope_table(positions, width, base, x.dtype))
    torch.testing.assert_close(got, complex_rope(x, positions, base), rtol=0, atol=1e-13)


def test_position_zero_changes_nothing():
    x = torch.randn(1, 3, 8, dtype=torch.bfloat16)
    assert torch.equal(rotate(x, rope_table(torch.zeros(1, dtype=torch.long), 8, 1e4, x.dtype)), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_rounded_once(dtype):
    x, positions = torch.randn(2, 40, 3, 16).to(dtype), torch.arange(40)
    got = rotate(x, rope_table(positions, 16, 1e4, dtype))
    assert got.dtype == dtype
    exact = complex_rope(x, positions, 1e4)
    # Half a unit in the last place, and what fp32 angles at position 40 may move.
    assert ((got.double() - exact).abs() <= torch.finfo(dtype).eps / 2 * exact.abs() + 2e-5).all()


def test_gradient_is_rounded_once():
    x, positions = torch.randn(50, 1, 16).bfloat16().requires_grad_(), torch.arange(50)
    do = torch.randn(50, 1, 16).bfloat16()
    rotate(x, rope_table(positions, 16, 1e4, x.dtype)).backward(do)
    exact = complex_rope(do, -positions, 1e4)  # the transpose of a rotation
    assert ((x.grad.double() - exact).abs() <= torch.finfo(torch.bfloat16).eps / 2 * exact.abs() + 2e-5).all()


def test_backward_keeps_nothing_of_x():
    x, kept = torch.randn(50, 4, 16, requires_grad=True), []
    table = rope_table(torch.arange(50), 16, 1e4, x.dtype)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        rotate(x, table)
    assert max(kept) <= table.cos.numel()


def test_angles_are_fp32_beside_low_precision_and_fp64_beside_fp64():
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        assert rope_table(torch.arange(3), 8, 1e4, dtype).cos.dtype == expected


def test_as_one_node_it_is_the_rotation_op_by_op():
    """Under torch.func the ops are PyTorch's own; eagerly there is one node with a gradient of ours."""
    x = torch.randn(2, 7, 3, 6, dtype=torch.float64, requires_grad=True)
    table = rope_table(torch.arange(7), 6, 1e4, x.dtype)
    turned = rotate(x, table)
    assert type(turned.grad_fn).__name__ == "_RotateBackward"
    by_ops, pull = torch.func.vjp(lambda y: rotate(y, table), x.detach())
    grad = torch.randn_like(turned)
    (found,) = torch.autograd.grad(turned, x, grad)
    assert torch.equal(turned, by_ops)
    torch.testing.assert_close(found, pull(grad)[0], rtol=1e-14, atol=1e-15)
    assert torch.autograd.gradgradcheck(lambda y: rotate(y, table), x)


def test_the_table_stays_one_operator_of_a_compiled_graph():
    targets = []

    def backend(graph, _):
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    def turn(x, positions):
        return rotate(x, rope_table(positions, 8, 1e4, x.dtype))

    x, positions = torch.randn(5, 3, 8), torch.arange(5)
    assert torch.equal(torch.compile(turn, backend=backend, fullgraph=True)(x, positions), turn(x, positions))
    assert "nsa_core.rope_table.default" in targets
    assert not [t for t in targets if "cos" in t or "pow" in t]
    torch.library.opcheck(torch.ops.nsa_core.rope_table.default, (positions, 8, 1e4, torch.float32))

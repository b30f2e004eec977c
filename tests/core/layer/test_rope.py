"""Rotary embedding against complex multiplication."""

import dataclasses

import pytest
import torch

from nsa_core import InvalidInput, NSAConfig, NSAttention
from nsa_core.layer import rope
from nsa_core.layer.rope import rope_table, rotate, table_for
from nsa_core.layer.split_product import rotated_heads


def complex_rope(x: torch.Tensor, positions: torch.Tensor, base: float) -> torch.Tensor:
    x = x.double()
    half = x.shape[-1] // 2
    frequencies = torch.tensor(
        [base ** (-2 * i / x.shape[-1]) for i in range(half)], dtype=torch.float64
    )
    rotated = torch.complex(x[..., :half], x[..., half:]) * torch.exp(
        1j * positions.double()[:, None, None] * frequencies
    )
    return torch.cat((rotated.real, rotated.imag), -1)


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
    # Half a unit in the last place, plus the error of fp32 angles at position 40.
    assert ((got.double() - exact).abs() <= torch.finfo(dtype).eps / 2 * exact.abs() + 2e-5).all()


def test_gradient_is_rounded_once():
    x, positions = torch.randn(50, 1, 16).bfloat16().requires_grad_(), torch.arange(50)
    do = torch.randn(50, 1, 16).bfloat16()
    rotate(x, rope_table(positions, 16, 1e4, x.dtype)).backward(do)
    exact = complex_rope(do, -positions, 1e4)  # the transpose of a rotation
    assert (
        (x.grad.double() - exact).abs() <= torch.finfo(torch.bfloat16).eps / 2 * exact.abs() + 2e-5
    ).all()


def test_backward_does_not_save_x():
    x, saved = torch.randn(50, 4, 16, requires_grad=True), []
    table = rope_table(torch.arange(50), 16, 1e4, x.dtype)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.numel()) or t, lambda t: t
    ):
        rotate(x, table)
    assert max(saved) <= table.cos.numel()


def test_angles_are_fp32_or_fp64_for_fp64():
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        assert rope_table(torch.arange(3), 8, 1e4, dtype).cos.dtype == expected


def test_rotation_node_equals_the_single_operators():
    """Under torch.func it consists of PyTorch's operators, in eager mode of one node."""
    x = torch.randn(2, 7, 3, 6, dtype=torch.float64, requires_grad=True)
    table = rope_table(torch.arange(7), 6, 1e4, x.dtype)
    rotated = rotate(x, table)
    assert type(rotated.grad_fn).__name__ == "_RotateBackward"
    by_ops, pull = torch.func.vjp(lambda y: rotate(y, table), x.detach())
    grad = torch.randn_like(rotated)
    (grad_x,) = torch.autograd.grad(rotated, x, grad)
    assert torch.equal(rotated, by_ops)
    torch.testing.assert_close(grad_x, pull(grad)[0], rtol=1e-14, atol=1e-15)
    assert torch.autograd.gradgradcheck(lambda y: rotate(y, table), x)


def test_table_is_one_operator_in_a_compiled_graph():
    targets = []

    def backend(graph, _):
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    def apply_rope(x, positions):
        return rotate(x, rope_table(positions, 8, 1e4, x.dtype))

    x, positions = torch.randn(5, 3, 8), torch.arange(5)
    assert torch.equal(
        torch.compile(apply_rope, backend=backend, fullgraph=True)(x, positions),
        apply_rope(x, positions),
    )
    assert "nsa_core.rope_table.default" in targets
    assert not [t for t in targets if "cos" in t or "pow" in t]
    for listed in (None, [1.0, 0.5, 0.25, 0.125]):
        torch.library.opcheck(
            torch.ops.nsa_core.rope_table.default, (positions, 8, 1e4, listed, torch.float32)
        )


@pytest.mark.few_cases("eager", "packed", "chunks")
@pytest.mark.parametrize("by", ["eager", "compiled", "packed", "chunks", "steps"])
def test_listed_frequencies_rotate_every_key_of_a_layer(by):
    """The powers of a base give what the base gives; other frequencies do not.

    Steps over a cache agree with the call on the whole sequence.
    """
    base = NSAConfig(
        *(32, 2, 1, 16),
        rope_base=70.0,
        compress_block_size=8,
        compress_stride=4,
        select_block_size=8,
        num_selected_blocks=3,
        window_size=7,
    )
    powers = tuple(70.0 ** (-m / 8) for m in range(8))
    x, outputs = torch.randn(1, 60, 32, dtype=torch.float64), []
    for frequencies in (None, powers, (*powers[:-1], 0.5)):
        torch.manual_seed(1)
        attn = NSAttention(dataclasses.replace(base, rope_frequencies=frequencies)).double()
        with torch.no_grad():
            whole = attn(x)
            if by in ("chunks", "steps"):
                cache = attn.new_cache(1, 60)
                parts = x.split(20 if by == "chunks" else 1, 1)
                y = torch.cat([attn(part, cache=cache) for part in parts], 1)
            elif by == "packed":
                y = attn(x[0], torch.tensor([0, 60], dtype=torch.int32))[None]
            else:
                y = (torch.compile(attn, backend="eager") if by == "compiled" else attn)(x)
        assert torch.allclose(y, whole, rtol=0, atol=1e-10)
        outputs.append(y)
    assert torch.allclose(outputs[0], outputs[1], rtol=0, atol=1e-10)
    assert (outputs[0] - outputs[2]).abs().max() > 1e-3


@pytest.mark.parametrize("wrong", [[1.0] * 8, (1.0,) * 7, (1.0,) * 7 + (float("nan"),)])
def test_config_names_wrong_frequencies(wrong):
    with pytest.raises(InvalidInput, match=r"rope_frequencies must be a tuple of .* = 8 finite"):
        NSAConfig(32, 2, 1, 16, rope_frequencies=wrong)


def test_table_cache_key():
    listed = (1.0, 0.5, 0.25, 0.125)

    def cached_table(rows=5, step=1, width=8, base=1e4, dtype=torch.float32):
        return table_for(torch.empty(1, dtype=dtype), rows, step, width, base)

    first = cached_table()
    assert cached_table() is first
    assert cached_table(dtype=torch.bfloat16) is first  # the same fp32 angles
    others = ({"rows": 6}, {"step": 2}, {"width": 6}, {"base": 7.0}, {"base": listed})
    for other in (*others, {"dtype": torch.float64}):
        key = {"rows": 5, "step": 1, "width": 8, "base": 1e4, "dtype": torch.float32} | other
        positions = torch.arange(key["rows"]) * key["step"]
        expected = rope_table(positions, key["width"], key["base"], key["dtype"])
        for actual, required in zip(cached_table(**other), expected, strict=True):
            assert actual.dtype == required.dtype
            assert torch.equal(actual, required)


@pytest.mark.parametrize("by", ["eager", "compiled"])
def test_compiled_layer_computes_one_table(by, monkeypatch):
    """Block angles are rows of the token table, because blocks start at tokens."""
    tables = []
    original = rope.rope_table
    monkeypatch.setattr(
        rope,
        "rope_table",
        lambda positions, *rest: tables.append(positions.shape[0]) or original(positions, *rest),
    )
    config = NSAConfig(
        32, 2, 1, compress_block_size=8, compress_stride=4, select_block_size=8, window_size=9
    )
    attn, x = NSAttention(config), torch.randn(1, 41, 32)
    with torch.no_grad():
        golden = attn(x)
        del tables[:]
        monkeypatch.setattr(rope, "is_eager", lambda: by == "eager")
        monkeypatch.setattr("nsa_core.layer.projection.is_eager", lambda: by == "eager")
        rope._cached_table.cache_clear()
        assert torch.equal(attn(x), golden)
    assert sorted(tables) == ([9, 41] if by == "eager" else [41])


def test_table_cached_in_inference_mode_serves_training():
    with torch._subclasses.FakeTensorMode():
        table_for(torch.empty(1), 11, 1, 8, 3.0)
    with torch.inference_mode():
        table_for(torch.empty(1), 11, 1, 8, 3.0)
    x = torch.randn(1, 11, 1, 8, requires_grad=True)
    rotate(x, table_for(x, 11, 1, 8, 3.0)).sum().backward()
    assert x.grad is not None


def test_uncached_long_table_gives_the_same_bits(monkeypatch):
    x = torch.randn(1, 11, 1, 8, requires_grad=True)
    cached = rotate(x, table_for(x, 11, 1, 8, 1e4))
    monkeypatch.setattr(rope, "MAX_CACHED_ROWS", 10)
    assert torch.equal(rotate(x, table_for(x, 11, 1, 8, 1e4)), cached)


@pytest.mark.parametrize("lead", [(2, 7), (7,)])
def test_rotated_heads_equal_separate_split_and_rotation(lead):
    heads, groups, dk, dv = 4, 2, 6, 5
    widths = [heads * dk, *[groups * dk] * 3, *[groups * dv] * 3]
    product = torch.randn(*lead, sum(widths), dtype=torch.float64, requires_grad=True)
    table = rope_table(torch.arange(7), dk, 1e4, product.dtype)
    together = rotated_heads(product, table, heads, groups, dk)
    split = [
        p.unflatten(-1, (heads if not i else groups, -1))
        for i, p in enumerate(product.split(widths, -1))
    ]
    separate = [rotate(p, table) if i in (0, 2, 3) else p for i, p in enumerate(split)]
    grads = [torch.randn_like(p) for p in separate]
    for one, other in zip(together, separate, strict=True):
        assert torch.equal(one, other)
    assert all(together[i].is_contiguous() for i in (0, 2, 3, 5, 6))
    (grad_x,), (expected,) = (
        torch.autograd.grad(list(y), product, grads) for y in (together, separate)
    )
    assert torch.equal(grad_x, expected)

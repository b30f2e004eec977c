"""The faster interpreter gives the bits of Triton's own, in kernels that use what it replaces."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from nsa_backend_triton.strict.speedups import speedups


@pytest.fixture(autouse=True)
def strictly() -> None:
    """Override the fixture of conftest.py: these tests run outside the strict interpreter."""


@triton.jit
def numbers(X, N, OUT, COUNT, ROWS: tl.constexpr, SIZE: tl.constexpr, shift, factor):
    row, column = tl.arange(0, ROWS), tl.arange(0, SIZE)
    at = row[:, None] * SIZE + column
    x, n = tl.load(X + at), tl.load(N + at)
    zeros = tl.where(n > 0, x * 0.0, x * -0.0)  # of both signs
    x = (
        (n + x) * 0.3
        + x / (x * x + 1) * 0.7
        + x
        + 4
        + tl.sum(x, 1)[:, None]
        - tl.max(x, 0)[None, :] * factor
    )
    x = tl.where((column == 1)[None, :], x * 2, x * 2.0) + (row * 1.5)[:, None]
    n = (
        (n + 4 >> 1)
        + (n.to(tl.uint32) >> 1).to(tl.int32)
        - n * 4
        + (n == 4).to(tl.int32)
        + shift * 2
        + 1
    )
    n = tl.where(n % 4 != n // 4, n, -n) | (n & 4) ^ 1
    tl.store(OUT + at, tl.where((column == 0)[None, :], zeros, x))
    tl.store(COUNT + at, n)


SHAPES = [(4, 8), (1, 8), (4, 1), (1, 1)]


def outputs(kernel, shape, dtype, *rest) -> list[torch.Tensor]:
    """Run the kernel and return its outputs as bits."""
    torch.manual_seed(0)
    rows, size = shape
    x, n = torch.randn(rows, size).to(dtype), torch.randint(-9, 9, (rows, size), dtype=torch.int32)
    out, count = torch.empty_like(x), torch.empty_like(n)
    kernel[(1,)](x, n, out, count, rows, size, *rest)
    return [out.view(torch.uint8), count]


def check(kernel, shape, dtype, *rest) -> None:
    stock = outputs(kernel, shape, dtype, *rest)
    with speedups(interpreter):
        for _ in range(2):  # the second run uses descriptions cached by the first
            for result, expected in zip(outputs(kernel, shape, dtype, *rest), stock):
                assert torch.equal(result, expected)
    for result, expected in zip(outputs(kernel, shape, dtype, *rest), stock):
        assert torch.equal(result, expected), "a replacement is still installed"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_arithmetic_of_numbers_scalars_and_broadcast_shapes_is_equal(shape, dtype) -> None:
    check(numbers, shape, dtype, 3, 0.75)


@triton.jit
def misfit(X, N, OUT, COUNT, ROWS: tl.constexpr, SIZE: tl.constexpr):
    tl.store(OUT, tl.sum(tl.arange(0, ROWS) + tl.arange(0, SIZE)))


@triton.jit
def no_number(X, N, OUT, COUNT, ROWS: tl.constexpr, SIZE: tl.constexpr):
    tl.store(OUT + 1, 0.0)
    tl.store(OUT * 1, 0.0)


@pytest.mark.parametrize(
    ("kernel", "message"), [(misfit, "incompatible dimensions"), (no_number, "IncompatibleType")]
)
def test_errors_of_triton_are_raised(kernel, message) -> None:
    with speedups(interpreter), pytest.raises(Exception, match=message):
        outputs(kernel, (4, 8), torch.float32)


def test_float_size_is_refused_after_an_equal_integer_size() -> None:
    with speedups(interpreter):
        tl.block_type(tl.float32, [4])
        with pytest.raises(TypeError, match="must have type"):
            tl.block_type(tl.float32, [4.0])


def test_types_created_before_the_block_share_its_descriptions() -> None:
    """Shapes are compared by their identity."""
    old = tl.block_type(tl.float32, [4])
    with speedups(interpreter):
        handle = interpreter.TensorHandle(torch.zeros(4).numpy(), tl.float32)
        one, other = (tl.tensor(handle, kind) for kind in (old, tl.block_type(tl.float32, [4])))
        assert one.shape is other.shape

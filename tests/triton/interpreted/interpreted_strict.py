"""The rules of the strict interpreter; each has a kernel that breaks it and one that does not."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import triton
import triton.language as tl

from nsa_backend_triton.strict.interpreter import interpreted, strict
from nsa_backend_triton.strict.memory_model import Violation


@triton.jit
def copy_rows(X, Y, n, STEP: tl.constexpr, SIZE: tl.constexpr):
    offs = tl.program_id(0) * STEP + tl.arange(0, SIZE)
    tl.store(Y + offs, tl.load(X + offs, mask=offs < n, other=0.0), mask=offs < n)


@triton.jit
def read_past(X, Y, n, SIZE: tl.constexpr):
    offs = tl.arange(0, SIZE)
    tl.store(Y + offs, tl.load(X + offs), mask=offs < n)


@triton.jit
def no_other(X, Y, n, SIZE: tl.constexpr):
    offs = tl.arange(0, SIZE)
    tl.store(Y, tl.sum(tl.load(X + offs, mask=offs < n)))


@triton.jit
def overflow(X, big):
    tl.store(X, (big * big).to(tl.float32))


@triton.jit
def dot(A, B, C, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    offs = i[:, None] * SIZE + i[None, :]
    c = tl.dot(tl.load(A + offs), tl.load(B + offs))
    tl.store(C + offs, c.to(C.dtype.element_ty))


@triton.jit
def add_atomically(X, Y):
    tl.atomic_add(Y, tl.load(X + tl.program_id(0)))


@triton.jit
def add_atomically_past(X, Y):
    tl.atomic_add(Y + 1, tl.load(X))


@triton.jit
def assert_positive(X):
    tl.device_assert(tl.load(X) > 0, "not positive")


@triton.jit
def arithmetic(A, B, C, SIZE: tl.constexpr):
    offs = tl.arange(0, SIZE)
    a, b = tl.load(A + offs), tl.load(B + offs)
    tl.store(C + offs, tl.abs(a) * b + a)
    tl.store(C + SIZE + offs, (a.to(tl.float32) / 3).to(C.dtype.element_ty))


@triton.jit
def masked_integer(X, Y, n, SIZE: tl.constexpr):
    offs = tl.arange(0, SIZE)
    tl.store(Y, tl.max(tl.load(X + offs, mask=offs < n)))


@triton.jit
def count_positive(X, Y, SIZE: tl.constexpr):
    positive = (tl.load(X + tl.arange(0, SIZE)) > 0).to(tl.int32)
    tl.store(Y + tl.arange(0, SIZE), positive + positive)


def test_conftest_makes_every_test_strict() -> None:
    with pytest.raises(Exception, match="outside every argument"):
        read_past[(1,)](torch.ones(3), torch.empty(4), 3, SIZE=4)


def test_nested_block_has_its_own_counts() -> None:
    x, y = torch.ones(8), torch.empty(8)
    with strict() as outer:
        with strict() as inner:
            copy_rows[(2,)](x, y, 8, STEP=4, SIZE=4)
        assert (inner.programs, outer.programs) == (2, 0)
        copy_rows[(1,)](x, y, 4, STEP=4, SIZE=4)
    assert (inner.programs, outer.programs) == (2, 1)


def test_launch_keeps_no_tensor_alive() -> None:
    """A reference cycle would keep one until Python collects garbage."""
    x = torch.ones(8)
    storage = weakref.ref(x.untyped_storage())
    gc.disable()
    try:
        copy_rows[(2,)](x, torch.empty(8), 8, STEP=4, SIZE=4)
        del x
        assert storage() is None
    finally:
        gc.enable()


def test_tensor_of_another_device_is_reported() -> None:
    with pytest.raises(Violation, match="expected tensors on the CPU, got one on meta"):
        copy_rows[(1,)](torch.ones(4, device="meta"), torch.empty(4), 4, STEP=4, SIZE=4)


def test_cast_comparison_is_an_integer() -> None:
    x, y = torch.tensor([3, -1, 0, 7], dtype=torch.int32), torch.empty(4, dtype=torch.int32)
    with strict():
        count_positive[(1,)](x, y, SIZE=4)
    assert y.tolist() == [2, 0, 0, 2]


def test_interpreted_is_true_in_the_interpreter() -> None:
    assert interpreted()


def test_programs_and_bytes_are_counted() -> None:
    x, y = torch.arange(10.0), torch.zeros(10)
    with strict() as counts:
        copy_rows[(3,)](x, y, 10, STEP=4, SIZE=4)
    assert torch.equal(x, y)
    assert counts.programs == 3


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        (lambda x: read_past[(1,)](x, x, 10, SIZE=16), "load outside every argument in program"),
        (
            lambda x: copy_rows[(3,)](x, torch.zeros(8), 10, STEP=4, SIZE=4),
            "store outside every argument",
        ),
        (lambda x: copy_rows[(3,)](x, torch.zeros(10), 10, STEP=3, SIZE=4), "store to one address"),
        (lambda x: overflow[(1,)](x, 70000), "int32"),
        (lambda x: copy_rows[(1, 70000)](x, x, 10, STEP=4, SIZE=4), "exceeds"),
        (lambda x: add_atomically_past[(1,)](x, torch.zeros(1)), "atomic outside every argument"),
        (lambda x: assert_positive[(1,)](x), "not positive"),
    ],
    ids=["load", "store", "race", "overflow", "grid", "atomic", "assert"],
)
def test_violation_raises(launch, message: str) -> None:
    x = torch.arange(16.0)[:10]
    guarded = torch.empty(10).copy_(x)
    with strict(), pytest.raises(Exception, match=message):
        launch(guarded)


def test_masked_float_lane_without_other_is_nan() -> None:
    y = torch.zeros(1)
    with strict():
        no_other[(1,)](torch.ones(8), y, 5, SIZE=8)
    assert y.isnan()


def test_masked_integer_lane_without_other_is_the_largest_integer() -> None:
    y = torch.zeros(1, dtype=torch.int32)
    with strict():
        masked_integer[(1,)](torch.ones(8, dtype=torch.int32), y, 5, SIZE=8)
    assert y.item() == 2**31 - 1


def test_bf16_arithmetic_rounds_each_result_to_nearest() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, generator=generator).bfloat16() for _ in range(2))
    c = torch.empty(2, 64, dtype=torch.bfloat16)
    with strict():
        arithmetic[(1,)](a, b, c, SIZE=64)
    assert torch.equal(c[0], a.abs() * b + a)
    assert torch.equal(c[1], (a.float() / 3).bfloat16())


@triton.jit
def fma_kernel(X, Y, Z, OUT):
    tl.store(OUT, tl.fma(tl.load(X), tl.load(Y), tl.load(Z)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fma_rounds_once(dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    x, y = torch.tensor([1 + eps], dtype=dtype), torch.tensor([1 - eps], dtype=dtype)
    out = torch.empty_like(x)
    fma_kernel[(1,)](x, y, -torch.ones_like(x), out)
    # The product 1 - eps^2 rounds to 1 in float32; float64 is Triton's own.
    assert out.item() == (-(eps**2) if dtype == torch.float32 else 0.0)


def test_bf16_dot_accumulates_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(16, 16, generator=generator).bfloat16() for _ in range(2))
    c = torch.empty(16, 16, dtype=torch.bfloat16)
    with strict():
        dot[(1,)](a, b, c, SIZE=16)
    assert torch.equal(c, (a.float() @ b.float()).bfloat16())


def test_seed_fixes_the_order_of_programs() -> None:
    x = torch.tensor([1e8, 1.0, -1e8, 1.0])  # a sum that depends on the order
    sums = set()
    for seed in range(8):
        y = torch.zeros(1)
        with strict(seed):
            add_atomically[(4,)](x, y)
        sums.add(y.item())
    assert len(sums) > 1


def test_launch_is_a_profiler_event() -> None:
    with torch.profiler.profile() as profile, strict():
        copy_rows[(1,)](torch.zeros(4), torch.zeros(4), 4, STEP=4, SIZE=4)
    assert "copy_rows" in {event.key for event in profile.key_averages()}

"""The verdict finds errors, passes rounding, and keeps its calibrated limits."""

from __future__ import annotations

import math

import pytest
import torch

from nsa_verify.judge.tensor import LIMITS, LSE_LIMIT, gate_rows, heads_first, judge, judge_lse
from truth_cases import normal

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
DTYPES = (BF16, FP16, FP32, FP64)


def example(
    dtype: torch.dtype, heads: int = 3, rows: int = 200, D: int = 32
) -> tuple[torch.Tensor, ...]:
    """Return golden, rounded and magnitude of rows that span nine orders of magnitude."""
    golden = normal(heads, rows, D) * torch.logspace(-6, 3, rows, dtype=FP64)[:, None]
    return golden, golden.to(dtype).double(), golden.abs() * 1.5


def test_limits_are_frozen() -> None:
    assert {d: tuple(v) for d, v in LIMITS.items()} == {
        BF16: (2, 10, 0.25),
        FP16: (2, 10, 0.25),
        FP32: (4, 32, 1.0),
        FP64: (16, 64, 4.0),
    }
    assert LSE_LIMIT == 16
    with pytest.raises(TypeError):
        LIMITS[BF16] = (3, 10, 0.25)  # type: ignore[index]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_rounding_passes_at_any_scale(dtype: torch.dtype, scale: float) -> None:
    g, r, m = (x * scale for x in example(FP32 if dtype == FP16 else dtype))
    if dtype == FP16:  # round the mantissa only, because the range of fp16 is too small
        r = torch.ldexp(
            torch.ldexp(g.frexp().mantissa, torch.tensor(11)).round(), g.frexp().exponent - 11
        )
    verdict = judge(r, g, r, m, dtype)
    assert verdict, verdict
    assert verdict.row <= 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-4, 1.0])
def test_error_in_one_small_row_is_found(dtype: torch.dtype, scale: float) -> None:
    g, r, m = (x * scale for x in example(dtype if dtype != FP16 else FP32))
    u = torch.finfo(dtype).eps / 2
    a = r.clone()
    a[1, 0] *= 1 + 200 * u
    verdict = judge(a, g, r, m, dtype)
    assert not verdict
    assert verdict.where == (1, 0)
    assert "row" in verdict.why
    assert "(1, 0)" in verdict.why


def narrow_example() -> tuple[torch.Tensor, ...]:
    """Return golden, rounded and magnitude of rows of one element, which cancels."""
    g = 2.0**-9 * normal(1, 60, 1)
    m = torch.ones_like(g)
    return g, g + 2.0**-10 * normal(1, 60, 1, seed=1), m


def attention(width: int, seed: int, reference: float) -> tuple[torch.Tensor, ...]:
    """Return output, golden and magnitude of a correct bf16 kernel for narrow heads.

    The kernel rounds exp(score - reference - largest score), as a kernel does that meets the keys
    in another order.
    """
    q, k, v = (normal(300, width, seed=10 * seed + i).bfloat16().double() for i in range(3))
    future = torch.ones(300, 300, dtype=torch.bool).triu(1)
    scores = (q @ k.T * width**-0.5).masked_fill(future, -math.inf)
    p = scores.softmax(-1)
    powers = (scores.float() - scores.float().amax(-1, keepdim=True) - reference).exp()
    o = (powers.bfloat16().float() @ v.float()) / powers.sum(-1, keepdim=True)
    return tuple(x[None] for x in (o.bfloat16().double(), p @ v, p @ v.abs()))


@pytest.mark.parametrize("width", [1, 2, 4, 13])
def test_correct_kernels_of_narrow_heads_pass(width: int) -> None:
    """Few roundings of `rounded` may be small by chance; they do not set the noise alone."""
    for seed in range(20):
        r, g, m = attention(width, seed, 0.0)
        verdict = judge(attention(width, seed, 0.37)[0], g, r, m, BF16)
        assert verdict, (seed, verdict)


def test_errors_of_narrow_rows_are_found() -> None:
    """An error of 7.5 times the noise in one row, and of 2.4 times in every row."""
    g, r, m = narrow_example()
    around = (r - g)[0, :, 0].square().unfold(0, 48, 1).mean(-1).sqrt()
    around = around[torch.arange(60).clamp(max=12)][None, :, None]
    noise = torch.maximum((r - g).abs(), around)
    noise = torch.maximum(noise, 2.0**-8 * g.abs() + (2.0**-11 + 2.0**-22) * m)
    a = r.clone()
    a[0, 30] = g[0, 30] + 7.5 * noise[0, 30]
    verdict = judge(a, g, r, m, BF16, grad=True)
    assert not verdict
    assert "row" in verdict.why
    verdict = judge(g + 2.4 * noise * normal(1, 60, 1, seed=2).sign(), g, r, m, BF16, grad=True)
    assert not verdict
    assert "row" in verdict.why


def test_a_narrow_row_without_terms_must_be_zero_beside_noisy_rows() -> None:
    g, r, m = narrow_example()
    for x in (g, r, m):
        x[0, 30] = 0
    a = r.clone()
    a[0, 30] = 1e-30
    assert judge(r, g, r, m, BF16)
    assert judge(a, g, r, m, BF16).elem == math.inf


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_verdict_equals_the_formulas(dtype: torch.dtype, grad: bool) -> None:
    """Compute the verdict in plain Python; each term of the noise is the largest in some rows."""
    u, fine = torch.finfo(dtype).eps / 2, 2.0 ** (-53 if dtype == FP64 else -24)
    limit, kappa = LIMITS[dtype].bias, 1 / 8 if grad else 0.0
    g, parts = normal(2, 6, 48), torch.tensor([0.1, 30.0], dtype=FP64)
    r = g + u * parts.repeat(3)[:, None] * normal(2, 6, 48, seed=1)
    m = g.abs() * torch.tensor([1.0, 1, 50, 50, 1, 1], dtype=FP64)[:, None]
    for size in (1e-3, 1.0):
        a = g * (1 + u) + size * u * normal(2, 6, 48, seed=2)
        row, elem, bias = 0.0, 0.0, 0.0
        for head in range(2):
            projection = norm = chance = 0.0
            for i in range(6):
                rows = [x[head, i].tolist() for x in (a, g, r, m)]
                rms_g, rms_m = (math.sqrt(sum(y * y for y in x) / 48) for x in (rows[1], rows[3]))
                rms_r = math.sqrt(sum((x - y) ** 2 for x, y in zip(rows[2], rows[1])) / 48)
                n = max(rms_r, u * rms_g + (kappa * u + 4 * fine) * rms_m)
                errors = [x - y for x, y in zip(rows[0], rows[1])]
                row = max(row, math.sqrt(sum(e * e for e in errors) / 48) / n)
                elem = max(elem, max(abs(e) for e in errors) / n)
                projection += sum(e * y for e, y in zip(errors, rows[1]))
                norm += sum(y * y for y in rows[1])
                chance += n * n * sum(y * y for y in rows[1])
            bias = max(bias, abs(projection) / (limit * u * norm + 4 * math.sqrt(chance)))
        verdict = judge(a, g, r, m, dtype, grad=grad)
        assert (verdict.row, verdict.elem, verdict.bias) == pytest.approx(
            (row, elem, bias), rel=1e-9
        )


def test_error_in_one_element_is_found_by_elem() -> None:
    g, r, m = example(BF16, D=256)
    a = r.clone()
    a[0, 7, 3] += 14 * 2**-8 * g[0, 7].square().mean().sqrt()
    verdict = judge(a, g, r, m, BF16)
    assert not verdict
    assert verdict.row < 2
    assert verdict.elem > 10
    assert "elem" in verdict.why


def test_truncation_is_found_by_bias() -> None:
    g, r, m = (
        normal(2, 4000, 32),
        normal(2, 4000, 32).bfloat16().double(),
        normal(2, 4000, 32).abs(),
    )
    truncated = (g.float().view(torch.int32) & ~0xFFFF).view(FP32).double()
    verdict = judge(truncated, g, r, m, BF16)
    assert verdict.row < 2
    assert verdict.elem < 10
    assert verdict.bias > 1
    assert not verdict


@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_is_judged_per_head(dtype: torch.dtype) -> None:
    g, r, m = normal(2, 4000, 32), normal(2, 4000, 32), normal(2, 4000, 32).abs()
    a = r.clone()
    a[1] *= 1 + 2.5 * LIMITS[dtype].bias * torch.finfo(dtype).eps / 2
    assert judge(r, g, r, m, dtype)
    assert judge(a, g, r, m, dtype).bias > 1


def test_exact_zero_is_required_where_golden_and_magnitude_are_zero() -> None:
    g = torch.zeros(1, 4, 8, dtype=FP64)
    assert judge(g, g, g, g, FP32)
    a = g.clone()
    a[0, 2, 5] = 1e-300
    verdict = judge(a, g, g, g, FP32)
    assert not verdict
    assert verdict.elem == math.inf
    assert verdict.where == (0, 2)


def test_gradients_may_cancel_by_an_eighth_of_u() -> None:
    g, m = normal(1, 50, 32) * 1e-3, torch.ones(1, 50, 32, dtype=FP64)
    a = g + 2**-8 / 8 * normal(1, 50, 32, seed=1)
    assert judge(a, g, g, m, BF16, grad=True)
    assert not judge(a, g, g, m, BF16)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_must_match_golden(bad: float) -> None:
    g, r, m = example(BF16)
    for x in (g, r, m):
        x[1, 5, 2] = bad
    assert judge(r, g, r, m, BF16)
    moved = r.clone()
    moved[1, 5, 2], moved[1, 5, 3] = 0.0, bad
    verdict = judge(moved, g, r, m, BF16)
    assert not verdict
    assert verdict.where == (1, 5, 2)
    assert "NaN or Inf" in verdict.why
    other = r.clone()
    other[1, 5, 2] = math.inf if bad != math.inf else -math.inf
    assert not judge(other, g, r, m, BF16)
    extra = example(BF16)[1]
    extra[2, 199, 31] = bad
    assert judge(extra, *example(BF16), BF16).where == (2, 199, 31)


def test_overflow_in_rounded_raises() -> None:
    g, r, m = example(BF16)
    r[0, 0, 0] = math.inf
    with pytest.raises(ValueError, match="the case is wrong, not the kernel"):
        judge(g, g, r, m, BF16)


def test_wrong_shapes_fail_and_empty_tensors_pass() -> None:
    g, r, m = example(BF16)
    assert "expected (3, 200, 32)" in judge(r[:2], g, r, m, BF16).why
    empty = torch.zeros(2, 0, 8)
    assert judge(empty, empty, empty, empty, FP32)
    assert not judge(torch.zeros(2, 0, 9), empty, empty, empty, FP32)
    assert judge_lse(empty, empty, empty, FP32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_lse_rule(dtype: torch.dtype) -> None:
    fine = 2.0**-53 if dtype == FP64 else 2.0**-24
    g, top = normal(2, 9) * 30, torch.full((2, 9), 15.0, dtype=FP64)
    g[1, :2], top[1, :2] = -math.inf, 0.0
    assert judge_lse(g, g, top, dtype)
    for off, ok in ((15 * 16 * fine, True), (18 * 16 * fine, False)):
        a = g.clone()
        a[0, 4] += off
        verdict = judge_lse(a, g, top, dtype)
        assert bool(verdict) is ok
        assert verdict.where == (0, 4)
    for wrong in (0.0, math.nan, math.inf):
        a = g.clone()
        a[1, 0] = wrong
        assert judge_lse(a, g, top, dtype).where == (1, 0)
    assert not judge_lse(g / math.log(2), g, top, dtype)
    assert not judge_lse(g[:1], g, top, dtype)


def test_heads_first_of_dense_and_packed() -> None:
    assert heads_first(torch.zeros(2, 5, 3, 7)).shape == (2, 3, 5, 7)
    assert heads_first(torch.zeros(5, 3, 7)).shape == (3, 5, 7)


@pytest.mark.parametrize(("heads", "joined"), [(1, 12), (3, 4), (7, 2), (12, 1), (16, 1)])
def test_gate_rows_hold_at_least_12_elements_and_every_token(heads: int, joined: int) -> None:
    x = torch.arange(2 * 29 * heads * 3).view(2, 29, heads, 3)
    rows = gate_rows(x)
    assert rows.shape == (2, 3, -(-29 // joined), joined * heads)
    for b in range(2):
        for c in range(3):
            assert set(rows[b, c].flatten().tolist()) == set(x[b, ..., c].flatten().tolist())
    assert rows[0, 1, 0].tolist() == x[0, :joined, :, 1].flatten().tolist()
    assert gate_rows(x[0]).shape == rows.shape[1:]
    assert gate_rows(x[:, :2]).shape == (2, 3, -(-2 // min(joined, 2)), min(joined, 2) * heads)
    assert gate_rows(x[:, :0]).numel() == 0

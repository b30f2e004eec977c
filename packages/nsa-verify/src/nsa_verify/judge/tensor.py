"""Judge a tensor by its errors in units of the rounding noise of a correct kernel.

golden     float64, computed from bit for bit the tensors that the slot received
rounded    the same formula in float32, rounded to the tested dtype only where every tensor-core
           kernel must round (P, dS, O, results); for float64, golden itself
magnitude  the golden formula with every term made positive (P @ |V| for outputs): the amount that
           can cancel
dtype      the lowest precision on the path (bf16 for bf16 q with fp32 gates), passed by the caller
           and never taken from the result

Tensors are laid out [.., heads, rows, D]. The error of a row is compared with the noise of that
row, and a bias with the noise of its head. There is no absolute tolerance: an element that is
exactly zero in golden, with a magnitude of zero, must be exactly zero.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch

_OVERFLOW = (
    "`rounded` is not finite where `golden` is: the case is wrong, not the kernel; use smaller"
    " inputs or a dtype with a wider range"
)


class Limits(NamedTuple):
    """Upper bounds of the errors of a correct kernel."""

    row: float  # rms error of a row, in units of its noise
    elem: float  # largest error of an element, in units of its row's noise
    bias: float  # systematic error |<a-g, g>| of a head beyond chance, in units of u <g, g>


# Calibrated on kernels that this project did not write, and frozen: a failing case is a finding,
# never a reason for a new limit.
LIMITS: Mapping[torch.dtype, Limits] = MappingProxyType(
    {
        torch.bfloat16: Limits(2, 10, 0.25),
        torch.float16: Limits(2, 10, 0.25),
        torch.float32: Limits(4, 32, 1.0),
        torch.float64: Limits(16, 64, 4.0),
    }
)
LSE_LIMIT = 16
MIN_ELEMENTS = 12  # the rms of fewer elements is unreliable, so narrow rows are joined
# Roundings of r that measure the noise of a row. With fewer, correct kernels exceed the limits
# where these roundings happen to be small: tests/verify/truth/test_truth_judge.py.
NOISE_ELEMENTS = 48


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The judgement of one tensor; truthy if the tensor is correct.

    Attributes:
        ok: Whether every error is within its limit.
        row: Largest row error, in units of noise.
        elem: Largest element error, in units of noise.
        bias: Largest bias of a head, as a fraction of its bound (the limit is 1).
        where: Index of the worst row, or of the first wrong element, in the judged layout. Of
            narrow rows that are judged together, the first.
        why: The violated limits and their place; empty if the tensor is correct.
    """

    ok: bool
    row: float = 0.0
    elem: float = 0.0
    bias: float = 0.0
    where: tuple[int, ...] = ()
    why: str = ""

    def __bool__(self) -> bool:
        return self.ok


def refused(why: str, where: tuple[int, ...] = ()) -> Verdict:
    """Return a failed verdict without finite errors, such as a wrong shape or a misplaced NaN."""
    return Verdict(
        False, math.inf, math.inf, math.inf, where, f"{why} at {where}" if where else why
    )


def heads_first(x: torch.Tensor) -> torch.Tensor:
    """Transpose [B, S, H, D] to [B, H, S, D], or packed [T, H, D] to [H, T, D], and back."""
    return x.transpose(-3, -2)


def gate_rows(x: torch.Tensor) -> torch.Tensor:
    """Reshape gate gradients [.., S, Hq, 3] to [.., 3, rows, elements].

    A row holds the heads of one token. Neighbouring tokens are joined until a row has at least
    MIN_ELEMENTS elements. The last row overlaps the one before it if tokens are left over.
    """
    *lead, tokens, heads, three = x.shape
    joined = min(max(tokens, 1), -(-MIN_ELEMENTS // heads))
    starts = [min(i, tokens - joined) for i in range(0, tokens, joined)]
    rows = [
        x[..., a : a + joined, :, :].movedim(-1, -3).reshape(*lead, three, joined * heads)
        for a in starts
    ]
    return torch.stack(rows, -2) if rows else x.new_zeros((*lead, three, 0, heads))


def _first(mask: torch.Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in mask.nonzero()[0])


def _same_nonfinite(a: torch.Tensor, g: torch.Tensor) -> Verdict | None:
    """Return None if NaN and Inf of ``a`` are those of golden ``g``, else a failed verdict."""
    if bool((torch.isfinite(a) & torch.isfinite(g)).all()):
        return None
    wrong = (torch.isnan(a) != torch.isnan(g)) | (
        (torch.isinf(a) | torch.isinf(g)) & ~torch.isnan(g) & (a != g)
    )
    return (
        refused("NaN or Inf that differs from the golden result", _first(wrong))
        if bool(wrong.any())
        else None
    )


def _rms(x: torch.Tensor) -> torch.Tensor:
    return x.square().mean(-1).sqrt()


def _joined(row: torch.Tensor, width: int, elements: int) -> torch.Tensor:
    """Return the rms of ``row`` [.., rows] over each row and the rows after it.

    As many rows are joined as have ``elements`` elements, ``width`` each; the last rows of a head
    share their window.
    """
    rows = row.shape[-1]
    joined = min(rows, -(-elements // width))
    if joined == 1:
        return row
    starts = torch.arange(rows).clamp(max=rows - joined)
    return _rms(row.unfold(-1, joined, 1))[..., starts]


def _over(x: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    """Divide ``x`` by ``unit``. Where the unit is 0, the result is inf for x > 0, else 0."""
    return torch.where(unit > 0, x / unit, torch.where(x > 0, torch.inf, 0.0))


def _fine(dtype: torch.dtype) -> float:
    return 2.0**-53 if dtype == torch.float64 else 2.0**-24


def judge(
    actual: torch.Tensor,  # [.., heads, rows, D], all four
    golden: torch.Tensor,
    rounded: torch.Tensor,
    magnitude: torch.Tensor,
    dtype: torch.dtype,
    *,
    grad: bool = False,
    score_noise: torch.Tensor | None = None,  # [.., heads, rows, D or 1]
) -> Verdict:
    """Judge ``actual`` by its row, element and bias errors.

    With a, g, r, m for actual, golden, rounded, magnitude, and u = eps / 2 of ``dtype``::

        n    = max(rms(r - g), e, u rms(g) + (kappa u + 4 * 2^-24) rms(m))    noise of a row
        row  = max over rows of rms(a - g) / n
        elem = max over elements of |a - g| / n
        bias = |<a - g, g>| / (lim u <g, g> + 4 sqrt(sum over rows of n^2 |g_row|^2))    per head

    kappa is 1/8 for gradients and 0 for outputs; 2^-24 becomes 2^-53 in float64. NaN and Inf must
    be in the same places as in ``golden``, and an error in a row of zero noise is infinite. If a
    row has fewer than 12 elements, ``row`` is the rms of its quotient and those of the rows after
    it, as many as have 12 elements together. If a row has fewer than 48 elements, e is rms(r - g)
    over the row and as many rows after it as have 48 together, at most u rms(m), else 0: few
    roundings of r may be small by chance.

    With ``score_noise`` x, n^2 grows by rms(x)^2. In the bias of rows with x > 0, n^2 grows by
    D (rms(x)^2 + c^2) with c = (kappa u + 4 * 2^-24) rms(m): an error of P or dS multiplies all D
    elements of a row of v, k, q or dO, so the error may be parallel to the row of golden.

    Args:
        actual: Result of the kernel, [.., heads, rows, D].
        golden: Truth in float64, same shape.
        rounded: The formula in float32 with the unavoidable roundings, same shape.
        magnitude: The golden formula with positive terms, same shape.
        dtype: Lowest precision on the path; selects u and the limits in :data:`LIMITS`.
        grad: Whether ``actual`` is a gradient.
        score_noise: Noise of scores above 16 from :mod:`nsa_verify.reference.score_noise`, same
            shape or one element per row; None if there are none.

    Returns:
        The verdict. A wrong shape is a failed verdict.

    Raises:
        ValueError: ``rounded`` is not finite where ``golden`` is: the case cannot be judged in this
            dtype.
    """
    limits, fine = LIMITS[dtype], _fine(dtype)
    if actual.shape != golden.shape:
        return refused(f"shape {tuple(actual.shape)}, expected {tuple(golden.shape)}")
    if not actual.numel():
        return Verdict(True)
    a, g, r, m = (x.detach().to("cpu", torch.float64) for x in (actual, golden, rounded, magnitude))
    nonfinite = ~torch.isfinite(g)
    if not bool((torch.isfinite(r) | nonfinite).all()):
        raise ValueError(_OVERFLOW)
    misplaced = _same_nonfinite(a, g)
    if misplaced is not None:
        return misplaced
    if bool(nonfinite.any()):
        a, g, r, m = (x.masked_fill(nonfinite, 0.0) for x in (a, g, r, m))
    u, kappa = torch.finfo(dtype).eps / 2, 1 / 8 if grad else 0.0
    cancelling = (kappa * u + 4 * fine) * _rms(m)
    measured, width = _rms(r - g), g.shape[-1]
    # The terms of the row itself are the limit: a row may be far smaller than those beside it.
    around = torch.minimum(_joined(measured, width, NOISE_ELEMENTS), u * _rms(m))
    noise = torch.maximum(torch.maximum(measured, around), u * _rms(g) + cancelling)
    variance = noise.square()
    if score_noise is not None:
        further = score_noise.detach().to("cpu", torch.float64).square().mean(-1)
        noise = (variance + further).sqrt()
        parallel = torch.where(further > 0, further + cancelling.square(), 0.0)
        variance = variance + g.shape[-1] * parallel
    row = _joined(_over(_rms(a - g), noise), width, MIN_ELEMENTS)
    elem = _over((a - g).abs(), noise[..., None].expand_as(g))
    # Scaled to 1, because the squares of small gradients underflow.
    unit = torch.nan_to_num(g / g.abs().amax((-1, -2), keepdim=True))
    projection = ((a - g) * unit).sum((-1, -2)).abs()
    chance = 4 * (variance * unit.square().sum(-1)).sum(-1).sqrt()
    bias = _over(projection, limits.bias * u * (g * unit).sum((-1, -2)) + chance)
    worst = torch.maximum(row / limits.row, elem.amax(-1) / limits.elem)
    where = tuple(int(i) for i in torch.unravel_index(worst.argmax(), worst.shape))
    return _verdict(
        row.max().item(), elem.max().item(), bias.max().item(), where, limits._replace(bias=1)
    )


def _verdict(
    row: float, elem: float, bias: float, where: tuple[int, ...], limits: Limits
) -> Verdict:
    errors = zip(Limits._fields, (row, elem, bias), limits)
    broken = [
        f"{name} {value:.3g} > {limit:g}" for name, value, limit in errors if not value <= limit
    ]
    why = ", ".join(broken) + f" at {where}" if broken else ""
    return Verdict(not broken, row, elem, bias, where, why)


def judge_lse(
    actual: torch.Tensor,  # [.., heads, rows], all three
    golden: torch.Tensor,
    top: torch.Tensor,  # the row's largest |score|, 0 where no key is visible
    dtype: torch.dtype,
) -> Verdict:
    """Judge a log-sum-exp: |lse - g| <= 16 * 2^-24 * (1 + max |score|), with 2^-53 in float64.

    The result must be -inf where ``golden`` is.

    Args:
        actual: Result of the kernel, [.., heads, rows].
        golden: Truth in float64, same shape.
        top: Largest |score| of each row, 0 where no key is visible, same shape.
        dtype: Lowest precision on the path.

    Returns:
        The verdict. Its ``elem`` is the largest error in units of 2^-24 * (1 + max |score|).
    """
    if actual.shape != golden.shape:
        return refused(f"shape {tuple(actual.shape)}, expected {tuple(golden.shape)}")
    if not actual.numel():
        return Verdict(True)
    a, g, t = (x.detach().to("cpu", torch.float64) for x in (actual, golden, top))
    misplaced = _same_nonfinite(a, g)
    if misplaced is not None:
        return misplaced
    nonfinite = ~torch.isfinite(g)
    units = (a - g).masked_fill(nonfinite, 0.0).abs() / (
        _fine(dtype) * (1 + t.masked_fill(nonfinite, 0.0))
    )
    worst, where = (
        units.max().item(),
        tuple(int(i) for i in torch.unravel_index(units.argmax(), units.shape)),
    )
    why = "" if worst <= LSE_LIMIT else f"lse {worst:.3g} > {LSE_LIMIT} at {where}"
    return Verdict(not why, elem=worst, where=where, why=why)

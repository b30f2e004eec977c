"""Is this tensor right? Errors are measured in units of the rounding noise that any correct kernel
makes.

golden      float64, from bit for bit the tensors the slot received
rounded     the same formula in float32, rounded to the tested dtype only where every tensor-core
            kernel must round
            (P, dS, O, results); for float64 golden itself
magnitude   the golden formula with every term made positive (P @ |V| for outputs): what cancels,
            and how much
dtype       the lowest precision on the path (bf16 q with fp32 gates: bf16), never read off the
            result

Tensors are laid out [.., heads, rows, D]: a row's error is held against that row's noise, a bias
against its head's. There is no absolute tolerance: what golden says is exactly zero must be exactly
zero.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch

_CAUSE = "`rounded` is not finite where golden is: the case is wrong, not the kernel"


class Limits(NamedTuple):
    """The most a right kernel may show."""

    row: float  # rms error of a row, in units of its noise
    elem: float  # largest error of an element, in units of its row's noise
    bias: float  # systematic error of a head: |<a-g, g>| over this many u <g, g>, chance apart


# Calibrated on kernels nobody here wrote, and frozen: a case that fails is a finding, never a
# reason for a new limit.
LIMITS: Mapping[torch.dtype, Limits] = MappingProxyType(
    {
        torch.bfloat16: Limits(2, 10, 0.25),
        torch.float16: Limits(2, 10, 0.25),
        torch.float32: Limits(4, 32, 1.0),
        torch.float64: Limits(16, 64, 4.0),
    }
)
LSE_LIMIT = 16


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The judgement of one tensor; true where it is right.

    Attributes:
        row, elem, bias: the worst found; ``bias`` is a share of its allowance, so its limit is 1.
        where: index of the worst row, or of the first element at fault, in the judged layout.
        why: what is wrong and where; empty where nothing is.
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
    """A verdict of "wrong" that no number expresses."""
    return Verdict(
        False, math.inf, math.inf, math.inf, where, f"{why} at {where}" if where else why
    )


def heads_first(x: torch.Tensor) -> torch.Tensor:
    """[B, S, H, D] to [B, H, S, D], or packed [T, H, D] to [H, T, D]; its own inverse."""
    return x.transpose(-3, -2)


def gate_rows(x: torch.Tensor) -> torch.Tensor:
    """Gate gradients [.., S, Hq, 3] as [.., 3, rows, elements]: a row is a token, its elements the
    heads.

    Few heads make a row's rms a matter of luck, so neighbouring tokens are joined until a row has
    12 elements; the last row reaches back to fill up.
    """
    *lead, tokens, heads, three = x.shape
    joined = min(max(tokens, 1), -(-12 // heads))
    starts = [min(i, tokens - joined) for i in range(0, tokens, joined)]
    rows = [
        x[..., a : a + joined, :, :].movedim(-1, -3).reshape(*lead, three, joined * heads)
        for a in starts
    ]
    return torch.stack(rows, -2) if rows else x.new_zeros((*lead, three, 0, heads))


def _first(mask: torch.Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in mask.nonzero()[0])


def _same_nonfinite(a: torch.Tensor, g: torch.Tensor) -> Verdict | None:
    """NaN and Inf sit exactly where golden's sit, or the verdict that says where not."""
    wrong = (torch.isnan(a) != torch.isnan(g)) | (
        (torch.isinf(a) | torch.isinf(g)) & ~torch.isnan(g) & (a != g)
    )
    return (
        refused("NaN or Inf in other places than the golden result", _first(wrong))
        if bool(wrong.any())
        else None
    )


def _rms(x: torch.Tensor) -> torch.Tensor:
    return x.square().mean(-1).sqrt()


def _over(x: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    """x / unit; where the unit is 0 nothing may differ, and anything that does counts as
    infinite.
    """
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
) -> Verdict:
    """Judge ``actual`` by row, element and bias.

    noise of a row: n = max(rms(r - g), u rms(g) + (kappa u + 4 * 2^-24) rms(m)), u = eps / 2 of
    ``dtype``, kappa 1/8 for gradients and 0 for outputs. row = max rms(a - g) / n, elem = max |a -
    g| / n, bias = |<a - g, g>| per head over lim * u <g, g> + 4 sqrt(sum over rows n^2 |g_row|^2).

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
    odd = ~torch.isfinite(g)
    if not bool(torch.isfinite(r[~odd]).all()):
        raise ValueError(_CAUSE)
    misplaced = _same_nonfinite(a, g)
    if misplaced is not None:
        return misplaced
    a, g, r, m = (x.masked_fill(odd, 0.0) for x in (a, g, r, m))
    u, kappa = torch.finfo(dtype).eps / 2, 1 / 8 if grad else 0.0
    noise = torch.maximum(_rms(r - g), u * _rms(g) + (kappa * u + 4 * fine) * _rms(m))
    row = _over(_rms(a - g), noise)
    elem = _over((a - g).abs(), noise[..., None].expand_as(g))
    slant = ((a - g) * g).sum((-1, -2)).abs()
    chance = 4 * (noise.square() * g.square().sum(-1)).sum(-1).sqrt()
    bias = _over(slant, limits.bias * u * g.square().sum((-1, -2)) + chance)
    worst = torch.maximum(row / limits.row, elem.amax(-1) / limits.elem)
    where = tuple(int(i) for i in torch.unravel_index(worst.argmax(), worst.shape))
    return _verdict(
        row.max().item(), elem.max().item(), bias.max().item(), where, limits._replace(bias=1)
    )


def _verdict(
    row: float, elem: float, bias: float, where: tuple[int, ...], limits: Limits
) -> Verdict:
    found = zip(Limits._fields, (row, elem, bias), limits)
    bad = [f"{name} {value:.3g} > {limit:g}" for name, value, limit in found if not value <= limit]
    return Verdict(not bad, row, elem, bias, where, ", ".join(bad) + f" at {where}" if bad else "")


def judge_lse(
    actual: torch.Tensor,  # [.., heads, rows], all three
    golden: torch.Tensor,
    top: torch.Tensor,  # the row's largest |score|, 0 where no key is visible
    dtype: torch.dtype,
) -> Verdict:
    """Judge a log-sum-exp: |lse - g| <= 16 * 2^-24 * (1 + max |score|), 2^-53 in float64; -inf
    where golden is.

    ``elem`` of the verdict is the worst error in units of 2^-24 * (1 + max |score|).
    """
    if actual.shape != golden.shape:
        return refused(f"shape {tuple(actual.shape)}, expected {tuple(golden.shape)}")
    if not actual.numel():
        return Verdict(True)
    a, g, t = (x.detach().to("cpu", torch.float64) for x in (actual, golden, top))
    misplaced = _same_nonfinite(a, g)
    if misplaced is not None:
        return misplaced
    odd = ~torch.isfinite(g)
    units = (a - g).masked_fill(odd, 0.0).abs() / (_fine(dtype) * (1 + t.masked_fill(odd, 0.0)))
    worst, where = (
        units.max().item(),
        tuple(int(i) for i in torch.unravel_index(units.argmax(), units.shape)),
    )
    why = "" if worst <= LSE_LIMIT else f"lse {worst:.3g} > {LSE_LIMIT} at {where}"
    return Verdict(not why, elem=worst, where=where, why=why)

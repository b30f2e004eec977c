"""The noise of large scores: how the rounding of scores and of o reaches the results.

A score s of float32 products has an absolute error of some |s| 2^-24, and the error of s is the
relative error of exp(s). The verdict's own noise allows for that in calls whose scores stay below
16. For calls with larger scores, this module propagates errors of P to the results, to first
order::

    size_t = max over visible j of max(|s_tj|, |scale| sqrt(sum_d (q_td k_jd)^2))
    weight = sqrt(max(0, 1 - (16 / max over t of size_t)^2)) sqrt(max(1, Dk / 64))
    E_tj   = weight (4 * 2^-24 size_t P_tj + 2^-126)                         error of P
    F_tj   = E_tj |dP_tj - delta_t| + P_tj sum_i E_ti |dP_ti - delta_t|      error of dS
    o_t    : sum_j E_tj rms(v_j - o_t)
    dv_j   : sum_t E_tj |dO_t| + sum_t 2^-126
    D_t    = weight u sqrt(sum_d (dO_td o_td)^2)                             error of delta
    dq_t   : |scale| sqrt((sum_j F_tj |k_j|)^2 + (D_t sum_j P_tj k_j)^2) + sum_j 2^-126
    dk_j   : |scale| sqrt((sum_t F_tj |q_t|)^2 + sum_t (D_t P_tj q_t)^2) + sum_t 2^-126

- The second part of size_t is the error of products that cancel: the score is small, but its
  partial sums are not.
- The error of a sum of Dk products grows with sqrt(Dk). For 64 products in sequence its standard
  deviation is about 2 * 2^-24 size_t.
- Independent errors add as squares, and the verdict's own noise contains those of scores up to 16.
  So the weight is 0 for a call whose scores stay below 16.
- 4 * 2^-24 is the error that the rule for the LSE allows, 16 * 2^-24 |s|, divided by the row limit
  of float32.
- delta_t = dO_t . o_t is computed from o, which is stored in the tested dtype with an error of at
  most u |o_td|. If one key has nearly all the weight, dS cancels to the error of delta: one sum of
  Dv roundings decides a whole row of dq, and two correct kernels have different ones.
- exp flushes to 0 below 2^-126. So does an atomic addition in float32, which adds the parts of a
  gradient: each visible pair may lose 2^-126.

In float64 the constants are 2^-53 and 2^-500; the squares in the verdict underflow below that.
"""

from __future__ import annotations

import math

import torch

COVERED = 16.0  # largest score whose rounding the noise of the verdict contains already


def score_sizes(
    s: torch.Tensor,  # [R, L], 0 where not visible
    q: torch.Tensor,  # [R, Dk]
    k: torch.Tensor,  # [L, Dk]
    mask: torch.Tensor,  # bool [R, L]
    scale: float,
) -> torch.Tensor:
    """Return the size of the scores of each row [R]."""
    squares = (q.square() @ k.square().T).masked_fill(~mask, 0.0).amax(-1)
    return torch.maximum(s.abs().amax(-1), abs(scale) * squares.sqrt())


def weight(largest_size: float, width: int) -> float:
    """Return the weight of the noise in a call with this largest size and width Dk."""
    further = 1 - (COVERED / largest_size) ** 2 if largest_size > COVERED else 0.0
    return math.sqrt(further * max(1.0, width / 64))


def score_noise(
    p: torch.Tensor,  # float64 [R, L]
    sizes: torch.Tensor,  # [R]
    mask: torch.Tensor,  # bool [R, L]
    q: torch.Tensor,  # [R, Dk]
    k: torch.Tensor,  # [L, Dk]
    v: torch.Tensor,  # [L, Dv]
    do: torch.Tensor | None,  # [R, Dv]
    scale: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, ...]:
    """Return the noise of o [R, 1], and with ``do`` of dq [R, Dk], dk [L, Dk] and dv [L, Dv].

    The weight is a factor of all of them, which the caller applies. ``dtype`` is the tested dtype,
    which decides the precision of the scores and of o.
    """
    fine, flushed = (2.0**-53, 2.0**-500) if dtype == torch.float64 else (2.0**-24, 2.0**-126)
    error = 4 * fine * sizes[:, None] * p + flushed * mask.to(p.dtype)
    o = p @ v
    # |v_j - o_t|^2 without a tensor [R, L, Dv]
    squares = v.square().sum(-1) - 2 * (o @ v.T) + o.square().sum(-1, keepdim=True)
    deviation = (squares.clamp(min=0) / v.shape[-1]).sqrt()
    o_noise = (error * deviation).sum(-1, keepdim=True)
    if do is None:
        return (o_noise,)
    ds_error = error * (do @ v.T - (do * o).sum(-1, keepdim=True)).abs()
    ds_error = ds_error + p * ds_error.sum(-1, keepdim=True)
    # All keys of a row share the error of its delta; those of different rows are independent.
    delta_error = torch.finfo(dtype).eps / 2 * (do * o).square().sum(-1, keepdim=True).sqrt()
    dq_by_delta = delta_error * (p @ k)
    dk_by_delta = ((delta_error * p).square().T @ q.square()).sqrt()
    lost = flushed * mask.to(p.dtype)
    lost_q, lost_k = lost.sum(1, keepdim=True), lost.sum(0)[:, None]
    return (
        o_noise,
        abs(scale) * torch.hypot(ds_error @ k.abs(), dq_by_delta) + lost_q,
        abs(scale) * torch.hypot(ds_error.T @ q.abs(), dk_by_delta) + lost_k,
        error.T @ do.abs() + lost_k,
    )

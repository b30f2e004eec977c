"""Attention calls with operands as FlashAttention-2 needs them: heads padded to one width that is a
multiple of 8, aligned rows, a positive scale, and boundaries of packed documents in range.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn.functional import pad

from nsa_backend_fa2 import providers
from nsa_backend_fa2.providers import Attention

MAX_WIDTH = 256
MAX_BATCH = 65535  # sequences of one call: an axis of the kernels' grid
_ALIGN = 16  # bytes that the kernels load at once


def safe_boundaries(
    cu_seqlens: Tensor,  # int32 [documents + 1]
    total: int,
) -> Tensor:
    """The boundaries, clamped to [0, total] and made not to decrease: the kernels compute addresses
    from them.

    nsa_core reads boundaries only where that needs no synchronisation, so malformed ones can reach
    this point on CUDA.
    """
    return cu_seqlens.clamp(0, total).cummax(0).values


def width_of(head_dim: int, v_head_dim: int) -> int:
    """Head width of the library call that serves q, k of ``head_dim`` and v of ``v_head_dim``."""
    return -(-max(head_dim, v_head_dim) // 8) * 8


def fit(x: Tensor, width: int) -> Tensor:
    """``x`` with zeros up to ``width`` in the last axis; untouched where that is its width and its
    rows are aligned.
    """
    if x.shape[-1] != width:
        return pad(x, (0, width - x.shape[-1]))
    whole = _ALIGN // x.element_size()
    strides = [step for size, step in zip(x.shape[:-1], x.stride()[:-1]) if size > 1]
    if (
        x.stride(-1) == 1
        and x.data_ptr() % _ALIGN == 0
        and not any(step % whole for step in strides)
    ):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def positive(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """q and scale with the scale's sign, or its zero, moved into q: the kernels scale after masking
    with -inf.
    """
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (q * 0, 1.0)


def _too_many(q: Tensor, attention: Attention) -> bool:
    if attention.packed is None:
        return q.shape[0] > MAX_BATCH
    count = attention.packed.cu_q.shape[0] - 1
    if count > MAX_BATCH:
        raise RuntimeError(
            f"{count} documents exceed the {MAX_BATCH} of one call of FlashAttention-2; pack fewer"
        )
    return False


def attend(
    q: Tensor,  # [B, Sq, H, Dk], packed [T, H, Dk]
    k: Tensor,  # [B, Sk, G, Dk]
    v: Tensor,  # [B, Sk, G, Dv]
    attention: Attention,
) -> tuple[Tensor, Tensor]:
    """o [..., Dv], a slice where the head was padded, and lse; every row must see a key, or its lse
    is NaN.
    """
    if _too_many(q, attention):
        parts = [
            attend(a, b, c, attention) for a, b, c in zip(*(x.split(MAX_BATCH) for x in (q, k, v)))
        ]
        return torch.cat([o for o, _ in parts]), torch.cat([lse for _, lse in parts])
    width = width_of(q.shape[-1], v.shape[-1])
    signed, scale = positive(q, attention.scale)
    o, lse = providers.serving().forward(
        fit(signed, width),
        fit(k, width),
        fit(v, width),
        dataclasses.replace(attention, scale=scale),
    )
    # The library marks a row whose sum is NaN like a row without keys, by +inf.
    lse.masked_fill_(lse == torch.inf, torch.nan)
    return o[..., : v.shape[-1]], lse


def attend_backward(
    do: Tensor,  # [B, Sq, H, Dv], packed [T, H, Dv]
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    attention: Attention,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in the shapes of q, k, v."""
    if _too_many(q, attention):
        shares = zip(*(x.split(MAX_BATCH) for x in (do, q, k, v, o, lse)))
        dqs, dks, dvs = zip(
            *(attend_backward(a, b, c, d, e, f, attention) for a, b, c, d, e, f in shares)
        )
        return torch.cat(dqs), torch.cat(dks), torch.cat(dvs)
    width = width_of(q.shape[-1], v.shape[-1])
    signed, scale = positive(q, attention.scale)
    fit_do, fit_q, fit_k, fit_v, fit_o = (fit(x, width) for x in (do, signed, k, v, o))
    dq, dk, dv = providers.serving().backward(
        fit_do,
        fit_q,
        fit_k,
        fit_v,
        fit_o,
        lse.contiguous(),
        dataclasses.replace(attention, scale=scale),
    )
    dq = dq[..., : q.shape[-1]]
    if attention.scale <= 0:
        dq = -dq if attention.scale < 0 else dq * 0
    return dq, dk[..., : k.shape[-1]], dv[..., : v.shape[-1]]

"""Attention calls with operands in the form that FlashAttention-2 requires.

Heads are padded to one width that is a multiple of 8, rows are aligned, the scale is positive, and
the boundaries of packed documents are in range.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from nsa_backend_fa2 import flash4, providers
from nsa_backend_fa2.providers import Attention, Gradients, Provider
from nsa_core import flash
from nsa_core.flash import MAX_BATCH

MAX_WIDTH = 256


def safe_boundaries(
    cu_seqlens: Tensor,  # int32 [documents + 1]
    total: int,
) -> Tensor:
    """Return boundaries that lie in [0, total] and do not decrease.

    The kernels compute addresses from the boundaries. nsa_core checks them only where that needs no
    synchronisation, so that malformed ones can reach this function on CUDA.
    """
    return cu_seqlens.clamp(0, total).cummax(0).values


def pad_rows(
    x: Tensor,  # [..., rows, G, D]
    before: int,
    total: int,
) -> Tensor:  # [..., total, G, D]
    """Return ``x`` with ``before`` rows of zeros before it and zeros after it, ``total`` in all."""
    after = total - before - x.shape[-3]
    return pad(x, (0, 0, 0, 0, before, after)) if before or after else x


def width_of(head_dim: int, v_head_dim: int) -> int:
    """Return the head width of the library call for these widths of q, k and of v."""
    return -(-max(head_dim, v_head_dim) // 8) * 8


def fit(x: Tensor, width: int) -> Tensor:
    """Return ``x`` padded with zeros to ``width``, with aligned rows; uncopied if it has both."""
    return flash.aligned(flash.padded(x, width))


def _exceeds_max_batch(q: Tensor, attention: Attention) -> bool:
    """Return whether a batch must be split into several calls.

    Raises:
        RuntimeError: A packed call has too many documents, which cannot be split.
    """
    if attention.packed is None:
        return q.shape[0] > MAX_BATCH
    count = attention.packed.cu_q.shape[0] - 1
    if count > MAX_BATCH:
        raise RuntimeError(
            f"{count} documents exceed the {MAX_BATCH} of one call of FlashAttention-2: pack fewer"
            " documents per call"
        )
    return False


def _provider_of(q: Tensor, attention: Attention) -> Provider:
    """Return the provider of a call with the fitted ``q``."""
    return flash4.provider_of(q, attention) or providers.active_provider()


def attend(
    q: Tensor,  # [B, Sq, H, Dk], packed [T, H, Dk]
    k: Tensor,  # [B, Sk, G, Dk]
    v: Tensor,  # [B, Sk, G, Dv]
    attention: Attention,
    out: Tensor | None = None,  # [B, Sq, H, Dv]
) -> tuple[Tensor, Tensor]:
    """Return o [..., Dv] and lse.

    If the provider can write to ``out``, o is ``out``. If the heads are padded, o is a slice of a
    wider tensor. A row that sees no key has lse = NaN.
    """
    if _exceeds_max_batch(q, attention):
        batches = zip(*(x.split(MAX_BATCH) for x in (q, k, v)))
        parts = [attend(q_, k_, v_, attention) for q_, k_, v_ in batches]
        return torch.cat([o for o, _ in parts]), torch.cat([lse for _, lse in parts])
    width = width_of(q.shape[-1], v.shape[-1])
    signed_q, scale = flash.with_positive_scale(q, attention.scale)
    fit_q = fit(signed_q, width)
    o, lse = _provider_of(fit_q, attention).forward(
        fit_q,
        fit(k, width),
        fit(v, width),
        dataclasses.replace(attention, scale=scale),
        out if out is not None and out.shape[-1] == width else None,
    )
    is_dense = attention.packed is None
    if is_dense and flash.may_split_keys(q, q.shape[0] * q.shape[2], q.shape[1]):
        mark_nan_rows(o, lse)
    # The library returns +inf for a row whose sum is NaN, as for a row without keys.
    lse.masked_fill_(lse == torch.inf, torch.nan)
    return o if o is out else o[..., : v.shape[-1]], lse


def mark_nan_rows(
    o: Tensor,  # [B, S, H, D]
    lse: Tensor,  # [B, H, S]
) -> None:
    """Set the LSE to NaN in each row whose output is NaN.

    The library leaves a split of the keys whose sum is NaN out of the LSE, so that it is the
    finite LSE of the other splits. Such a row of o is NaN in every column.
    """
    lse.masked_fill_(o[..., 0].isnan().transpose(1, 2), torch.nan)


def attend_backward(
    tensors: Sequence[Tensor],  # do [B, Sq, H, Dv], packed [T, H, Dv]; q, k, v, o, lse
    attention: Attention,
    out: Tensor | None = None,  # [B, Sq, H, Dk]
) -> Gradients:
    """Return dq, dk and dv, shaped like q, k and v; dq is ``out`` if it can be written in place."""
    do, q, k, v, o, lse = tensors
    if _exceeds_max_batch(q, attention):
        batches = zip(*(x.split(MAX_BATCH) for x in tensors))
        dqs, dks, dvs = zip(*(attend_backward(batch, attention) for batch in batches))
        return torch.cat(dqs), torch.cat(dks), torch.cat(dvs)
    width = width_of(q.shape[-1], v.shape[-1])
    signed_q, scale = flash.with_positive_scale(q, attention.scale)
    fitted = [fit(x, width) for x in (do, signed_q, k, v, o)]
    dq, dk, dv = _provider_of(fitted[1], attention).backward(
        [*fitted, lse.contiguous()],
        dataclasses.replace(attention, scale=scale),
        out if out is not None and out.shape[-1] == width else None,
    )
    dq = flash.with_sign_of_scale(dq if dq is out else dq[..., : q.shape[-1]], attention.scale)
    return dq, dk[..., : k.shape[-1]], dv[..., : v.shape[-1]]

"""Attention of a tile of queries over a tile of keys, and its gradient.

Scores and statistics are fp32 (fp64 for fp64):

    s  = scale * q k^T
    p  = exp(s - lse)
    o  = p v
    dv = p^T do
    ds = p * (do v^T - rowsum(do * o))
    dq = scale * ds k
    dk = scale * ds^T q

A tile has R query rows of H heads each, over L keys that the heads share: q [..., R, H, Dk],
k [..., L, Dk], v [..., L, Dv]. ``hidden`` (bool, broadcast against [..., R, H, L]) marks the keys
that a query must not see. A hidden key contributes exactly zero, whatever finite values k and v
hold. A row without a visible key has o = 0, lse = -inf and zero gradients.

Products take bf16 and fp16 operands only on CUDA, whose tensor cores return fp32. On other devices,
operands are converted to fp32 first.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from nsa_backend_sdpa.device import device_type
from nsa_core.dtypes import stats_dtype

# Limit of one tile of scores, in bytes, which bounds the extra memory of every slot. On the CPU, a
# tile fits into the cache of a core; on CUDA, it fills a GPU.
SCORE_BYTES = {"cpu": 4 * 2**20, "cuda": 64 * 2**20}
NARROW_DEVICES = {"cuda"}  # devices on which products take bf16/fp16 operands and return fp32
MAX_KEYS = 4096  # keys of one tile; an online softmax merges several tiles


def score_bytes(tensor: Tensor) -> int:
    """Return the limit of one tile of scores on the device of ``tensor``, in bytes."""
    return SCORE_BYTES.get(device_type(tensor), SCORE_BYTES["cuda"])


def operand_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype to which ``tensor`` is converted for a product."""
    return tensor.dtype if device_type(tensor) in NARROW_DEVICES else stats_dtype(tensor.dtype)


def contiguous_as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x`` contiguous in ``dtype``, with at most one copy.

    ``to`` alone keeps the strides of a tensor that has the dtype already.
    """
    return x.to(dtype, memory_format=torch.contiguous_format).contiguous()


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a [N, M, K] times b [N, K, L], accumulated in fp32 (fp64 for fp64), as [N, M, L]."""
    stats = stats_dtype(a.dtype)
    return torch.bmm(a, b) if a.dtype == stats else torch.bmm(a, b, out_dtype=stats)


_tf32_lock = threading.Lock()
_tf32_users = 0


def _tf32() -> tuple[object, str, object, object]:
    """Return PyTorch's TF32 setting: its object, its attribute, its TF32 value, its IEEE value."""
    if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        return torch.backends.cuda.matmul, "fp32_precision", "tf32", "ieee"
    return torch.backends.cuda.matmul, "allow_tf32", True, False


@contextlib.contextmanager
def ieee_products(tensor: Tensor) -> Iterator[None]:
    """Turn TF32 off for fp32 products on CUDA; the caller may have turned it on for other layers.

    The setting belongs to the process, so that it also affects the products of other threads inside
    this context.
    """
    global _tf32_users
    settings, name, tf32, ieee = _tf32()
    if tensor.dtype != torch.float32 or tensor.device.type != "cuda":
        yield
        return
    with _tf32_lock:
        must_restore = _tf32_users > 0 or getattr(settings, name) == tf32
        if must_restore:
            setattr(settings, name, ieee)
            _tf32_users += 1
    try:
        yield
    finally:
        if must_restore:
            with _tf32_lock:
                _tf32_users -= 1
                if not _tf32_users:
                    setattr(settings, name, tf32)


def _scores(
    q: Tensor,  # [..., R, H, Dk]
    k: Tensor,  # [..., L, Dk]
    scale: float,
) -> Tensor:  # [..., R, H, L]
    """Return the scaled scores."""
    *lead, rows, heads, width = q.shape
    flat = product(
        q.reshape(-1, rows * heads, width), k.reshape(-1, k.shape[-2], width).transpose(1, 2)
    )
    return flat.mul_(scale).view(*lead, rows, heads, k.shape[-2])


def _as_matrices(tile: Tensor) -> Tensor:
    """Return [..., R, H, X] as [N, R*H, X], for batched products."""
    return tile.reshape(-1, tile.shape[-3] * tile.shape[-2], tile.shape[-1])


def attend(
    q: Tensor,  # [..., R, H, Dk]
    k: Tensor,  # [..., L, Dk]
    v: Tensor,  # [..., L, Dv]
    hidden: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return o [..., R, H, Dv] and lse [..., R, H] of one tile, in the statistics' dtype."""
    p = _scores(q, k, scale).masked_fill_(hidden, -torch.inf)
    row_max = p.amax(-1, keepdim=True)
    row_max.masked_fill_(row_max == -torch.inf, 0)  # rows without a visible key: exp(-inf - 0) = 0
    p.sub_(row_max).exp_()
    row_sum = p.sum(-1, keepdim=True)
    lse = row_sum.log().add_(row_max).squeeze(-1)
    o = product(_as_matrices(p.to(v.dtype)), v.reshape(-1, v.shape[-2], v.shape[-1])).view(
        *p.shape[:-1], v.shape[-1]
    )
    return o.div_(row_sum.masked_fill_(row_sum == 0, 1)), lse


def merge(
    merged: tuple[Tensor, Tensor] | None, partial: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp over the keys of both arguments; None stands for no keys.

    The function changes ``merged`` in place.
    """
    if merged is None:
        return partial
    lse = torch.logaddexp(merged[1], partial[1])
    base = lse.masked_fill(lse == -torch.inf, 0)
    o = merged[0].mul_((merged[1] - base).exp_().unsqueeze(-1))
    return o.addcmul_(partial[0], (partial[1] - base).exp_().unsqueeze(-1)), lse


def attend_backward(
    do: Tensor,  # [..., R, H, Dv]
    delta: Tensor,  # [..., R, H] rowsum(do * o)
    q: Tensor,  # [..., R, H, Dk]
    k: Tensor,  # [..., L, Dk]
    v: Tensor,  # [..., L, Dv]
    lse: Tensor,  # [..., R, H] over all keys of the rows, not only those of the tile
    hidden: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq [..., R, H, Dk], dk [..., L, Dk] and dv [..., L, Dv] of one tile.

    They are in the statistics' dtype.
    """
    # Mask after the exponential: if the lse of a row is -inf or NaN, the hidden entries are NaN.
    p = _scores(q, k, scale).sub_(lse.unsqueeze(-1)).exp_().masked_fill_(hidden, 0)
    flat_do, flat_q = _as_matrices(do), _as_matrices(q)
    flat_k, flat_v = k.reshape(-1, *k.shape[-2:]), v.reshape(-1, *v.shape[-2:])
    dv = product(_as_matrices(p.to(v.dtype)).transpose(1, 2), flat_do)
    ds = product(flat_do, flat_v.transpose(1, 2)).view(p.shape)
    ds = ds.sub_(delta.unsqueeze(-1)).mul_(p).masked_fill_(hidden, 0)
    del p
    ds_operand = _as_matrices(ds.to(k.dtype))
    del ds
    dq = product(ds_operand, flat_k).mul_(scale)
    dk = product(ds_operand.transpose(1, 2), flat_q).mul_(scale)
    return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)

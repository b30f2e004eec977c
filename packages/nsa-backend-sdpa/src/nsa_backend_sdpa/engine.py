"""Attention of a tile of queries over a tile of keys, and its gradient, with fp32 (fp64) scores and
statistics.

    s = scale * q k^T        p = exp(s - lse)        o = p v
    dv = p^T do              ds = p * (do v^T - rowsum(do * o))        dq = scale * ds k
    dk = scale * ds^T q

A tile is R query rows with H heads each over L keys those heads share: q [..., R, H, Dk], k [...,
L, Dk], v [..., L, Dv]. ``hidden`` (bool, broadcast against [..., R, H, L]) marks the keys that a
query must not see: each contributes exactly zero whatever finite value k and v hold there. A row
without a visible key gives o = 0, lse = -inf and zero gradients.

Operands are bf16/fp16 only on CUDA, whose matrix units return fp32; elsewhere they are widened
first.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from nsa_backend_sdpa.device import device_type

# Bytes of one tile of scores, which bound the extra memory of every slot: a core's cache, or enough
# to fill a GPU.
SCORE_BYTES = {"cpu": 4 * 2**20, "cuda": 64 * 2**20}
NARROW_DEVICES = {"cuda"}  # where products take bf16/fp16 operands and return fp32
MAX_KEYS = 4096  # in one product; more are accumulated with running statistics


def stats_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def score_bytes(tensor: Tensor) -> int:
    """The bound on one tile of scores, in bytes."""
    return SCORE_BYTES.get(device_type(tensor), SCORE_BYTES["cuda"])


def operand_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which ``tensor`` enters a product."""
    return tensor.dtype if device_type(tensor) in NARROW_DEVICES else stats_dtype(tensor.dtype)


def packed_as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` contiguous in ``dtype``, by one copy at most (`to` leaves the strides of what has the
    dtype already).
    """
    return x.to(dtype, memory_format=torch.contiguous_format).contiguous()


def product(a: Tensor, b: Tensor) -> Tensor:
    """a [N, M, K] times b [N, K, L] -> [N, M, L] in the statistics' dtype, accumulated there."""
    stats = stats_dtype(a.dtype)
    return torch.bmm(a, b) if a.dtype == stats else torch.bmm(a, b, out_dtype=stats)


_tf32_lock = threading.Lock()
_tf32_users = 0


def _tf32() -> tuple[object, str, object, object]:
    """Where PyTorch keeps the setting, its name, and its values for TF32 and for IEEE products."""
    if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        return torch.backends.cuda.matmul, "fp32_precision", "tf32", "ieee"
    return torch.backends.cuda.matmul, "allow_tf32", True, False


@contextlib.contextmanager
def ieee_products(tensor: Tensor) -> Iterator[None]:
    """Keep fp32 products on CUDA from being rounded to TF32, which the caller may have allowed for
    other layers.

    The setting is the process's: while it is held here, another thread's products are exact too.
    """
    global _tf32_users
    where, name, tf32, ieee = _tf32()
    if tensor.dtype != torch.float32 or tensor.device.type != "cuda":
        yield
        return
    with _tf32_lock:
        held = _tf32_users > 0 or getattr(where, name) == tf32
        if held:
            setattr(where, name, ieee)
            _tf32_users += 1
    try:
        yield
    finally:
        if held:
            with _tf32_lock:
                _tf32_users -= 1
                if not _tf32_users:
                    setattr(where, name, tf32)


def _scores(
    q: Tensor,  # [..., R, H, Dk]
    k: Tensor,  # [..., L, Dk]
    scale: float,
) -> Tensor:  # [..., R, H, L]
    *lead, rows, heads, width = q.shape
    flat = product(
        q.reshape(-1, rows * heads, width), k.reshape(-1, k.shape[-2], width).transpose(1, 2)
    )
    return flat.mul_(scale).view(*lead, rows, heads, k.shape[-2])


def _rows(tile: Tensor) -> Tensor:
    """[..., R, H, X] -> [N, R*H, X]."""
    return tile.reshape(-1, tile.shape[-3] * tile.shape[-2], tile.shape[-1])


def attend(
    q: Tensor,  # [..., R, H, Dk]
    k: Tensor,  # [..., L, Dk]
    v: Tensor,  # [..., L, Dv]
    hidden: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Output [..., R, H, Dv] and lse [..., R, H] of one tile, both in the statistics' dtype."""
    p = _scores(q, k, scale).masked_fill_(hidden, -torch.inf)
    top = p.amax(-1, keepdim=True)
    top.masked_fill_(top == -torch.inf, 0)  # a row that sees nothing: exp(-inf - 0) = 0
    p.sub_(top).exp_()
    total = p.sum(-1, keepdim=True)
    lse = total.log().add_(top).squeeze(-1)
    o = product(_rows(p.to(v.dtype)), v.reshape(-1, v.shape[-2], v.shape[-1])).view(
        *p.shape[:-1], v.shape[-1]
    )
    return o.div_(total.masked_fill_(total == 0, 1)), lse


def merge(total: tuple[Tensor, Tensor] | None, new: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Output and lse over the keys of both; None holds no key."""
    if total is None:
        return new
    lse = torch.logaddexp(total[1], new[1])
    base = lse.masked_fill(lse == -torch.inf, 0)
    o = total[0].mul_((total[1] - base).exp_().unsqueeze(-1))
    return o.addcmul_(new[0], (new[1] - base).exp_().unsqueeze(-1)), lse


def attend_backward(
    do: Tensor,  # [..., R, H, Dv]
    delta: Tensor,  # [..., R, H] rowsum(do * o)
    q: Tensor,  # [..., R, H, Dk]
    k: Tensor,  # [..., L, Dk]
    v: Tensor,  # [..., L, Dv]
    lse: Tensor,  # [..., R, H] over all keys of the rows, not only these
    hidden: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq [..., R, H, Dk], dk [..., L, Dk], dv [..., L, Dv] of one tile, in the statistics'
    dtype.
    """
    # After the exponential, because a row whose lse is -inf or NaN would make NaN of what is hidden
    # from it.
    p = _scores(q, k, scale).sub_(lse.unsqueeze(-1)).exp_().masked_fill_(hidden, 0)
    flat_do, flat_q = _rows(do), _rows(q)
    flat_k, flat_v = k.reshape(-1, *k.shape[-2:]), v.reshape(-1, *v.shape[-2:])
    dv = product(_rows(p.to(v.dtype)).transpose(1, 2), flat_do)
    ds = product(flat_do, flat_v.transpose(1, 2)).view(p.shape)
    ds = ds.sub_(delta.unsqueeze(-1)).mul_(p).masked_fill_(hidden, 0)
    del p
    ds_operand = _rows(ds.to(k.dtype))
    del ds
    dq = product(ds_operand, flat_k).mul_(scale)
    dk = product(ds_operand.transpose(1, 2), flat_q).mul_(scale)
    return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)

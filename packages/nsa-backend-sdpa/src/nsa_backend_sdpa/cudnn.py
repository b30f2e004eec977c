"""The compressed branch on cuDNN's attention, without a copy of q: residues as a batch axis over
shared keys.

Token l-1 + i*d + r sees compressed tokens 0 .. i, whatever the residue r. So the tokens of one
residue are as many queries as keys under an ordinary causal mask, and a strided view of q: [d, Hq,
I, D] with strides (Hq*D, D, d*Hq*D, 1). Where l-1 + i*d + r ends before the last key, a residue has
one row less: two calls at most, of the residues with all rows and of the others. k and v are shared
over the residues through stride 0; their gradients come per residue and are summed in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_backend_sdpa import device
from nsa_backend_sdpa.engine import stats_dtype
from nsa_core.contract import SlotCall
from nsa_core.layout import BlockGeometry

LEAST_TOKENS = 1024  # below, launches cost more than the copies that this saves
MOST_SEQUENCES = 8  # a call each
# on sm_80 cuDNN's kernels are no faster than FlashAttention-2, which the other route calls
OLDEST = (
    9,
    0,
)
_WIDTHS = ((128, 128), (192, 128))  # largest (Dk, Dv) pairs
_ops = torch.ops.aten


def takes(
    dtype: torch.dtype,
    device_type: str,
    capability: tuple[int, int] | None,
    widths: tuple[int, int],
    tokens: int,
    sequences: int,
    scale: float,
    deterministic: bool,
) -> bool:
    """Whether this file serves a dense call; metadata only."""
    fits = any(widths[0] <= d_k and widths[1] <= d_v for d_k, d_v in _WIDTHS) and not any(
        w % 8 for w in widths
    )
    return (
        device_type == "cuda"
        and torch.backends.cudnn.is_available()
        and capability is not None
        and capability >= OLDEST
        and dtype in (torch.bfloat16, torch.float16)
        and fits
        and tokens >= LEAST_TOKENS
        and sequences <= MOST_SEQUENCES
        and scale > 0
        and not deterministic  # its backward adds dq in no fixed order
    )


def serves(q: Tensor, v: Tensor, call: SlotCall) -> bool:
    """Whether this file serves q [B, S, Hq, Dk] over v [B, n_c, G, Dv]; alike for forward and
    backward.
    """
    return takes(
        q.dtype,
        device.device_type(q),
        device.capability(q),
        (q.shape[-1], v.shape[-1]),
        q.shape[1],
        q.shape[0],
        call.scale,
        call.deterministic,
    )


def parts(tokens: int, geometry: BlockGeometry) -> list[tuple[slice, int]]:
    """(residues, rows of each) of the one or two calls for a sequence; a residue is counted from
    token l-1.
    """
    stride, seen = geometry.compress_stride, tokens - (geometry.compress_block_size - 1)
    rows, more = divmod(seen, stride)
    both = [(slice(0, more), rows + 1), (slice(more, stride), rows)]
    return [(part, count) for part, count in both if part.stop > part.start and count]


def _residues(x: Tensor, residues: slice, rows: int, call: SlotCall) -> Tensor:
    """[S, H, D] -> [residues, H, rows, D], a view."""
    stride, first = (
        call.geometry.compress_stride,
        call.geometry.compress_block_size - 1 + residues.start,
    )
    token, head, element = x.stride()
    shape = (residues.stop - residues.start, x.shape[1], rows, x.shape[2])
    return x.as_strided(
        shape, (token, head, stride * token, element), x.storage_offset() + first * token
    )


def _keys(x: Tensor, residues: slice, rows: int) -> Tensor:
    """[n_c, G, D] -> [residues, G, rows, D], one for all residues."""
    return x[:rows].transpose(0, 1).expand(residues.stop - residues.start, -1, -1, -1)


def forward(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, call: SlotCall) -> None:
    """Fill o [B, S, Hq, Dv] and lse [B, Hq, S]."""
    skip = call.geometry.compress_block_size - 1
    o[:, :skip] = 0
    lse[:, :, :skip] = -torch.inf
    for one in zip(q, k, v, o, lse.transpose(1, 2).unsqueeze(-1)):
        for residues, rows in parts(q.shape[1], call.geometry):
            _forward(one, residues, rows, call)


def _forward(one: tuple[Tensor, ...], residues: slice, rows: int, call: SlotCall) -> None:
    q, k, v, o, lse = one
    queries, keys, values = (
        _residues(q, residues, rows, call),
        _keys(k, residues, rows),
        _keys(v, residues, rows),
    )
    assert queries.shape[2] == keys.shape[2], (
        "is_causal aligns top-left: only for as many queries as keys"
    )
    result = _ops._scaled_dot_product_cudnn_attention(
        queries, keys, values, None, True, 0.0, True, False, scale=call.scale
    )
    _residues(o, residues, rows, call).copy_(result[0])
    _residues(lse, residues, rows, call).copy_(result[1].view(queries.shape[:3]).unsqueeze(-1))


def backward(tensors: list[Tensor], grads: list[Tensor], call: SlotCall) -> None:
    """Fill dq, dk, dv from do, q, k, v, o [B, S, ...] and lse [B, Hq, S]."""
    do, q, k, v, o, lse = tensors
    grads[0][:, : call.geometry.compress_block_size - 1] = 0
    for b in range(q.shape[0]):
        sums = [
            torch.zeros(x.shape[1:], dtype=stats_dtype(x.dtype), device=x.device) for x in (k, v)
        ]
        one = (do[b], q[b], k[b], v[b], o[b], lse[b].t().unsqueeze(-1), grads[0][b])
        for residues, rows in parts(q.shape[1], call.geometry):
            _backward(one, sums, residues, rows, call)
        for grad, total in zip(grads[1:], sums):
            grad[b] = total


def _backward(
    one: tuple[Tensor, ...], sums: list[Tensor], residues: slice, rows: int, call: SlotCall
) -> None:
    do, q, k, v, o, lse, dq = one
    queries, keys, values = (
        _residues(q, residues, rows, call),
        _keys(k, residues, rows),
        _keys(v, residues, rows),
    )
    assert queries.shape[2] == keys.shape[2], (
        "is_causal aligns top-left: only for as many queries as keys"
    )
    # of the dropout, which there is not
    state = torch.zeros((), dtype=torch.int64, device=q.device)
    result = _ops._scaled_dot_product_cudnn_attention_backward(
        _residues(do, residues, rows, call),
        queries,
        keys,
        values,
        _residues(o, residues, rows, call),
        _residues(lse, residues, rows, call).contiguous(),
        state,
        state,
        None,
        None,
        None,
        rows,
        rows,
        0.0,
        True,
        scale=call.scale,
    )
    _residues(dq, residues, rows, call).copy_(result[0])
    for total, grad in zip(sums, result[1:]):
        total[:rows] += grad.sum(0, dtype=total.dtype).transpose(0, 1)

"""The compressed branch on cuDNN's attention, without a copy of q: the residues of the fold
(nsa_core.fold) as a batch axis over shared keys.

Where the last run has fewer than d tokens, the residues without a token there have one row less:
two calls at most, of the residues with all rows and of the others. k and v are shared over the
residues through stride 0; their gradients come per residue and are summed in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_backend_sdpa import device
from nsa_backend_sdpa.engine import stats_dtype
from nsa_core.contract import SlotCall
from nsa_core.fold import Residues
from nsa_core.layout import BlockGeometry

LEAST_TOKENS = 1024  # below, launches cost more than the copies that this saves
MOST_SEQUENCES = 8  # a call each
# On sm_80 cuDNN's kernels are no faster than FlashAttention-2, which the other route calls.
OLDEST = (9, 0)
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


def _parts(tokens: int, geometry: BlockGeometry) -> list[Residues]:
    """The residues of the one or two calls for a sequence, as many rows as keys in each."""
    stride, first = geometry.compress_stride, geometry.compress_block_size - 1
    runs, longer = divmod(tokens - first, stride)
    both = [
        Residues(first, longer, runs + 1, runs + 1, stride),
        Residues(first + longer, stride - longer, runs, runs, stride),
    ]
    return [part for part in both if part.residues and part.runs]


def _queries(x: Tensor, part: Residues) -> Tensor:
    """[S, H, D] -> [residues, H, rows, D], a view."""
    return part.queries(x).transpose(1, 2)


def _keys(x: Tensor, part: Residues) -> Tensor:
    """[n_c, G, D] -> [residues, G, rows, D], one for all residues."""
    return part.shared(x).transpose(1, 2)


def forward(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, call: SlotCall) -> None:
    """Fill o [B, S, Hq, Dv] and lse [B, Hq, S]."""
    skip = call.geometry.compress_block_size - 1
    o[:, :skip] = 0
    lse[:, :, :skip] = -torch.inf
    for sequence in zip(q, k, v, o, lse.transpose(1, 2).unsqueeze(-1)):
        for part in _parts(q.shape[1], call.geometry):
            _forward(sequence, part, call.scale)


def _forward(sequence: tuple[Tensor, ...], part: Residues, scale: float) -> None:
    q, k, v, o, lse = sequence
    queries, keys, values = _queries(q, part), _keys(k, part), _keys(v, part)
    assert queries.shape[2] == keys.shape[2], (
        "is_causal aligns top-left: only for as many queries as keys"
    )
    result = _ops._scaled_dot_product_cudnn_attention(
        queries, keys, values, None, True, 0.0, True, False, scale=scale
    )
    _queries(o, part).copy_(result[0])
    _queries(lse, part).copy_(result[1].view(queries.shape[:3]).unsqueeze(-1))


def backward(tensors: list[Tensor], grads: list[Tensor], call: SlotCall) -> None:
    """Fill dq, dk, dv from do, q, k, v, o [B, S, ...] and lse [B, Hq, S]."""
    do, q, k, v, o, lse = tensors
    grads[0][:, : call.geometry.compress_block_size - 1] = 0
    for b in range(q.shape[0]):
        sums = [
            torch.zeros(x.shape[1:], dtype=stats_dtype(x.dtype), device=x.device) for x in (k, v)
        ]
        sequence = (do[b], q[b], k[b], v[b], o[b], lse[b].t().unsqueeze(-1), grads[0][b])
        for part in _parts(q.shape[1], call.geometry):
            _backward(sequence, sums, part, call.scale)
        for grad, total in zip(grads[1:], sums):
            grad[b] = total


def _backward(
    sequence: tuple[Tensor, ...], sums: list[Tensor], part: Residues, scale: float
) -> None:
    do, q, k, v, o, lse, dq = sequence
    queries, keys, values = _queries(q, part), _keys(k, part), _keys(v, part)
    assert queries.shape[2] == keys.shape[2], (
        "is_causal aligns top-left: only for as many queries as keys"
    )
    # state of the dropout's generator, which is not used
    state = torch.zeros((), dtype=torch.int64, device=q.device)
    result = _ops._scaled_dot_product_cudnn_attention_backward(
        _queries(do, part),
        queries,
        keys,
        values,
        _queries(o, part),
        _queries(lse, part).contiguous(),
        state,
        state,
        None,
        None,
        None,
        part.runs,
        part.keys,
        0.0,
        True,
        scale=scale,
    )
    _queries(dq, part).copy_(result[0])
    for total, grad in zip(sums, result[1:]):
        total[: part.keys] += grad.sum(0, dtype=total.dtype).transpose(0, 1)

"""The slot cmp on cuDNN's attention, without a copy of q.

The residues of the fold (nsa_core.fold) become a batch axis over shared keys. If the last run has
fewer than d tokens, the residues without a token in it have one row less. A sequence then takes two
calls, one for the residues with all rows and one for the others.

k and v are expanded over the residues with stride 0. cuDNN returns their gradients per residue, and
this module sums them in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_backend_sdpa import device
from nsa_core.contract import SlotCall
from nsa_core.dtypes import stats_dtype
from nsa_core.flash import aligned
from nsa_core.fold import Residues
from nsa_core.layout import BlockGeometry

MIN_TOKENS = 1024  # in shorter sequences, launches take longer than the copies that this saves
MAX_SEQUENCES = 8  # each sequence takes a call of its own
# On sm_80, cuDNN is no faster than FlashAttention-2, which aten.py calls.
MIN_CAPABILITY = (9, 0)
_MAX_WIDTHS = ((128, 128), (192, 128))  # largest supported pairs (Dk, Dv)
_ops = torch.ops.aten


def supports(
    dtype: torch.dtype,
    device_type: str,
    capability: tuple[int, int] | None,
    widths: tuple[int, int],
    tokens: int,
    sequences: int,
    scale: float,
    deterministic: bool,
) -> bool:
    """Return whether cuDNN runs a dense call, from its metadata.

    Args:
        dtype: dtype of q, k and v.
        device_type: Type of their device, such as "cuda".
        capability: Compute capability of the CUDA device, else None.
        widths: (Dk, Dv).
        tokens: Tokens per sequence.
        sequences: Number of sequences.
        scale: Scale of the scores.
        deterministic: Whether the call requires bitwise-identical results in every run.
    """
    width_fits = any(widths[0] <= d_k and widths[1] <= d_v for d_k, d_v in _MAX_WIDTHS) and not any(
        w % 8 for w in widths
    )
    return (
        device_type == "cuda"
        and torch.backends.cudnn.is_available()
        and capability is not None
        and capability >= MIN_CAPABILITY
        and dtype in (torch.bfloat16, torch.float16)
        and width_fits
        and tokens >= MIN_TOKENS
        and sequences <= MAX_SEQUENCES
        and scale > 0
        and not deterministic  # cuDNN's backward adds to dq in no fixed order
    )


def supports_call(q: Tensor, v: Tensor, call: SlotCall) -> bool:
    """Return whether cuDNN runs a call with q [B, S, Hq, Dk] and v [B, n_c, G, Dv].

    Forward and backward of a call get the same result.
    """
    return supports(
        q.dtype,
        device.device_type(q),
        device.capability(q),
        (q.shape[-1], v.shape[-1]),
        q.shape[1],
        q.shape[0],
        call.scale,
        call.deterministic,
    )


def _residue_sets(tokens: int, geometry: BlockGeometry) -> list[Residues]:
    """Return the residues of each call for a sequence: one or two calls, with equal row counts."""
    stride, first = geometry.compress_stride, geometry.compress_block_size - 1
    runs, longer = divmod(tokens - first, stride)  # `longer` residues have a token in the last run
    residue_sets = [
        Residues(first, longer, runs + 1, runs + 1, stride),
        Residues(first + longer, stride - longer, runs, runs, stride),
    ]
    return [part for part in residue_sets if part.residues and part.runs]


def _queries(x: Tensor, part: Residues) -> Tensor:
    """Return [S, H, D] as a view [residues, H, rows, D]."""
    return part.queries(x).transpose(1, 2)


def _keys(x: Tensor, part: Residues) -> Tensor:
    """Return [n_c, G, D] as a view [residues, G, rows, D] with stride 0 over the residues."""
    return part.shared(x).transpose(1, 2)


def forward(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, call: SlotCall) -> None:
    """Fill o [B, S, Hq, Dv] and lse [B, Hq, S]."""
    blank = call.geometry.compress_block_size - 1  # the first l - 1 tokens see no key
    o[:, :blank] = 0
    lse[:, :, :blank] = -torch.inf
    q, k, v = (aligned(x) for x in (q, k, v))
    for sequence in zip(q, k, v, o, lse.transpose(1, 2).unsqueeze(-1)):
        for part in _residue_sets(q.shape[1], call.geometry):
            _forward(sequence, part, call.scale)


def _forward(sequence: tuple[Tensor, ...], part: Residues, scale: float) -> None:
    """Fill o and lse at the tokens of ``part``, for one sequence (q, k, v, o, lse)."""
    q, k, v, o, lse = sequence
    queries, keys, values = _queries(q, part), _keys(k, part), _keys(v, part)
    assert queries.shape[2] == keys.shape[2], (
        "is_causal aligns top-left: it requires as many queries as keys"
    )
    result = _ops._scaled_dot_product_cudnn_attention(
        queries, keys, values, None, True, 0.0, True, False, scale=scale
    )
    _queries(o, part).copy_(result[0])
    _queries(lse, part).copy_(result[1].view(queries.shape[:3]).unsqueeze(-1))


def backward(tensors: list[Tensor], grads: list[Tensor], call: SlotCall) -> None:
    """Fill ``grads``, which are dq, dk and dv.

    Args:
        tensors: do, q, k, v and o [B, S, ...], and lse [B, Hq, S].
        grads: dq, dk and dv, shaped like q, k and v.
        call: The slot call.
    """
    *rows, lse = tensors
    do, q, k, v, o = (aligned(x) for x in rows)
    grads[0][:, : call.geometry.compress_block_size - 1] = 0
    for b in range(q.shape[0]):
        sums = [
            torch.zeros(x.shape[1:], dtype=stats_dtype(x.dtype), device=x.device) for x in (k, v)
        ]
        sequence = (do[b], q[b], k[b], v[b], o[b], lse[b].t().unsqueeze(-1), grads[0][b])
        for part in _residue_sets(q.shape[1], call.geometry):
            _backward(sequence, sums, part, call.scale)
        for grad, total in zip(grads[1:], sums):
            grad[b] = total


def _backward(
    sequence: tuple[Tensor, ...], sums: list[Tensor], part: Residues, scale: float
) -> None:
    """Fill dq at the tokens of ``part``, and add dk and dv to ``sums``, for one sequence."""
    do, q, k, v, o, lse, dq = sequence
    queries, keys, values = _queries(q, part), _keys(k, part), _keys(v, part)
    assert queries.shape[2] == keys.shape[2], (
        "is_causal aligns top-left: it requires as many queries as keys"
    )
    # The state of the random generator for dropout, unused because dropout is 0.
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

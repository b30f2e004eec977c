"""The slot cmp for one sequence without copies of q: residues as a batch axis over shared keys.

q, o and do are views [d residues, runs, Hq, D] (see nsa_core.fold). They attend causally to k and
v, which all residues share through stride 0. The tokens of an incomplete last run see all keys, and
take a second, small call without a mask. So do those of an incomplete first run, for the keys up to
their own; only queries that begin inside a sequence have one. Only o and dq are copied into their
rows, unless FlashAttention-4 writes there. dk and dv are computed per residue and summed in fp32.
The backward of a long sequence takes several calls, because the libraries add up dq in fp32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from nsa_backend_fa2.padding import attend, attend_backward, fit, width_of
from nsa_backend_fa2.providers import Attention
from nsa_core.contract import SlotCall
from nsa_core.fold import Residues, partial_fold

MAX_FP32_DQ = 1 << 28  # bytes per call of the backward


def _parts(length: int, call: SlotCall) -> Iterator[tuple[Residues, Attention]]:
    """Yield the complete runs with a causal mask, and the incomplete runs without a mask.

    Queries that begin inside a run have an incomplete first one. The complete runs have more keys
    than queries if runs precede them; the causal mask is aligned bottom-right.
    """
    stride = call.geometry.compress_stride
    blank, before, _, lead = partial_fold(call.first_query, length, call.geometry)
    causal = Attention(call.scale, deterministic=call.deterministic)
    unmasked = dataclasses.replace(causal, causal=False)
    head = min(-lead % stride, length - blank)
    if head:
        yield Residues(blank, 1, head, before + 1, 1), unmasked
        before += 1
    complete, remainder = divmod(length - blank - head, stride)
    if complete:
        yield Residues(blank + head, stride, complete, before + complete, stride), causal
    if remainder:
        yield Residues(length - remainder, 1, remainder, before + complete + 1, 1), unmasked


def _backward_parts(
    length: int, call: SlotCall, columns: int
) -> Iterator[tuple[Residues, Attention]]:
    """Yield the parts, divided so that fp32 dq with ``columns`` takes at most MAX_FP32_DQ."""
    for part, attention in _parts(length, call):
        count = max(1, MAX_FP32_DQ // (4 * columns * part.runs))
        for j in range(0, part.residues, count):
            residues = min(count, part.residues - j)
            yield part._replace(first=part.first + j, residues=residues), attention


def _blank(q: Tensor, call: SlotCall) -> int:
    """Return the number of rows before the first that sees a key."""
    return partial_fold(call.first_query, q.shape[1], call.geometry).blank


def _lse_view(
    lse: Tensor,  # [1, Hq, S]
    part: Residues,
) -> Tensor:  # [residues, Hq, runs], a view
    return part.queries(lse[0].t().unsqueeze(-1)).squeeze(-1).transpose(1, 2)


def forward(
    q: Tensor,  # [1, S, Hq, Dk]
    k_cmp: Tensor,  # [1, I, G, Dk]
    v_cmp: Tensor,  # [1, I, G, Dv]
    call: SlotCall,
) -> tuple[Tensor, Tensor]:
    """Return o [1, S, Hq, Dv] and lse [1, Hq, S]."""
    _, length, heads, _ = q.shape
    blank, width = _blank(q, call), width_of(q.shape[-1], v_cmp.shape[-1])
    o = q.new_empty((1, length, heads, v_cmp.shape[-1]))
    lse = torch.empty((1, heads, length), dtype=torch.float32, device=q.device)
    o[:, :blank] = 0
    lse[:, :, :blank] = -torch.inf
    # Pad before the expansion over residues; afterwards, padding would copy once per residue.
    keys, values = fit(k_cmp, width), fit(v_cmp, width)
    for part, attention in _parts(length, call):
        rows = part.queries(o[0])
        part_o, part_lse = attend(
            part.queries(q[0]), part.shared(keys[0]), part.shared(values[0]), attention, rows
        )
        if part_o is not rows:
            rows.copy_(part_o[..., : o.shape[-1]])
        _lse_view(lse, part).copy_(part_lse)
    return o, lse


def backward(
    do: Tensor,  # [1, S, Hq, Dv]
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    o: Tensor,
    lse: Tensor,
    call: SlotCall,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk_cmp and dv_cmp, shaped like q, k_cmp and v_cmp."""
    length, width = q.shape[1], width_of(q.shape[-1], v_cmp.shape[-1])
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dq[:, : _blank(q, call)] = 0
    sums = [torch.zeros(x.shape[1:], dtype=torch.float32, device=q.device) for x in (k_cmp, v_cmp)]
    keys, values = fit(k_cmp, width), fit(v_cmp, width)
    for part, attention in _backward_parts(length, call, q.shape[2] * width):
        rows = part.queries(dq[0])
        shared = part.shared(keys[0]), part.shared(values[0])
        part_do, part_q, part_o = (part.queries(x[0]) for x in (do, q, o))
        tensors = [part_do, part_q, *shared, part_o, _lse_view(lse, part)]
        grads = attend_backward(tensors, attention, rows)
        if grads[0] is not rows:
            rows.copy_(grads[0])
        for total, grad in zip(sums, grads[1:]):
            total[: part.keys] += grad[..., : total.shape[-1]].sum(0, dtype=torch.float32)
        del grads, grad  # before the next call
    dk, dv = (total.to(q.dtype).unsqueeze(0) for total in sums)
    return dq, dk, dv

"""The slot cmp as one causal attention call per document (see nsa_core.fold).

The d residues of a run are folded into the head axis: d * h heads share the keys of a group, and
there are as many query rows as keys. If cuDNN supports the call, it reads the residues as views,
without a copy.

Packed documents run one by one, which requires their lengths on the host. On CUDA, this takes one
synchronisation per cu_seqlens tensor, whatever the number of layers. During CUDA graph capture, the
call raises Unsupported.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from nsa_backend_sdpa import aten, cudnn
from nsa_backend_sdpa.engine import ieee_products, stats_dtype
from nsa_core.contract import SlotCall
from nsa_core.fold import fold, unfold
from nsa_core.packing import host_boundaries


def _documents(call: SlotCall) -> Iterator[tuple[slice, slice]]:
    """Yield the token rows and compressed rows of each document that has a compressed token."""
    assert call.cu_seqlens is not None
    first_cmp = 0  # first compressed row of the document
    for start, end in itertools.pairwise(host_boundaries(call.cu_seqlens)):
        count = call.geometry.num_compressed(end - start)
        if count:
            yield slice(start, end), slice(first_cmp, first_cmp + count)
        first_cmp += count


def _fold(
    x: Tensor,  # [B, S, Hq, D]
    groups: int,
    call: SlotCall,
) -> Tensor:  # [B*G, d*h, I, D]
    """Fold the rows of ``x`` into runs, with the residues and the heads of a group in one axis."""
    runs = fold(x, groups, call.geometry, group_major=True)  # [B, I, G, d, h, D]
    return runs.permute(0, 2, 3, 4, 1, 5).flatten(2, 3).flatten(0, 1)


def _unfold(
    folded: Tensor,  # [B*G, d*h, I, D]
    out: Tensor,  # [B, S, Hq, D]
    call: SlotCall,
    blank: float = 0.0,
) -> None:
    """Copy folded rows back into ``out``, and set rows that see no key to ``blank``."""
    runs = folded.unflatten(0, (out.shape[0], -1)).unflatten(2, (call.geometry.compress_stride, -1))
    unfold(runs.permute(0, 4, 1, 2, 3, 5), out.shape[1], call.geometry, blank=blank, out=out)


def _keys(x: Tensor) -> Tensor:
    """Return [B, n_c, G, D] as [B*G, n_c, D]."""
    return x.transpose(1, 2).flatten(0, 1)


def _lse_rows(lse: Tensor) -> Tensor:
    """Return lse [B, Hq, S] as a view [B, S, Hq, 1], which has the layout of q."""
    return lse.transpose(1, 2).unsqueeze(-1)


def _forward_dense(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, call: SlotCall) -> None:
    """Store the output and log-sum-exp of sequences of one length into ``o`` and ``lse``."""
    if cudnn.supports_call(q, v, call):
        cudnn.forward(q, k, v, o, lse, call)
        return
    folded_o, folded_lse = aten.causal(_fold(q, k.shape[2], call), _keys(k), _keys(v), call.scale)
    _unfold(folded_o, o, call)
    _unfold(folded_lse.unsqueeze(-1), _lse_rows(lse), call, -torch.inf)


def forward(
    q: Tensor,  # [B, S, Hq, Dk], packed [T, Hq, Dk]
    k_cmp: Tensor,  # [B, n_c, G, Dk], packed [T // d, G, Dk]
    v_cmp: Tensor,  # [B, n_c, G, Dv]
    *,
    call: SlotCall,
) -> tuple[Tensor, Tensor]:
    """Return o [B, S, Hq, Dv] and lse [B, Hq, S] (packed [T, Hq, Dv] and [Hq, T])."""
    *lead, heads, _ = q.shape
    o = q.new_empty((*lead, heads, v_cmp.shape[-1]))
    lse = q.new_empty((*lead[:-1], heads, lead[-1]), dtype=stats_dtype(q.dtype))
    with torch.profiler.record_function("nsa_sdpa.cmp"), ieee_products(q):
        if call.cu_seqlens is None:
            _forward_dense(q, k_cmp, v_cmp, o, lse, call)
            return o, lse
        o.zero_()
        lse.fill_(-torch.inf)
        for t, c in _documents(call):
            _forward_dense(
                q[None, t], k_cmp[None, c], v_cmp[None, c], o[None, t], lse[None, :, t], call
            )
    return o, lse


def _backward_dense(tensors: list[Tensor], grads: list[Tensor], call: SlotCall) -> None:
    """Store dq, dk and dv of sequences of one length into ``grads``."""
    do, q, k, v, o, lse = tensors
    if cudnn.supports_call(q, v, call):
        cudnn.backward(tensors, grads, call)
        return
    groups = k.shape[2]
    folded_lse = _fold(_lse_rows(lse), groups, call).squeeze(-1)
    dq, dk, dv = aten.causal_backward(
        _fold(do, groups, call),
        _fold(q, groups, call),
        _keys(k),
        _keys(v),
        _fold(o, groups, call),
        folded_lse,
        call.scale,
        call.deterministic,
    )
    _unfold(dq, grads[0], call)
    for grad, folded in zip(grads[1:], (dk, dv)):
        grad.copy_(folded.unflatten(0, (-1, groups)).transpose(1, 2))


def backward(
    do: Tensor,  # [B, S, Hq, Dv]
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    o: Tensor,
    lse: Tensor,
    *,
    call: SlotCall,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk_cmp and dv_cmp, shaped like q, k_cmp and v_cmp.

    Rows of k_cmp and v_cmp that belong to no document have zero gradients.
    """
    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k_cmp, v_cmp)]
    tensors = [do, q, k_cmp, v_cmp, o]
    with torch.profiler.record_function("nsa_sdpa.cmp_backward"), ieee_products(q):
        if call.cu_seqlens is None:
            _backward_dense([*tensors, lse], grads, call)
        else:
            for grad in grads:
                grad.zero_()
            for t, c in _documents(call):
                part = [x[None, rows] for x, rows in zip(tensors, (t, t, c, c, t))]
                targets = [x[None, rows] for x, rows in zip(grads, (t, c, c))]
                _backward_dense([*part, lse[None, :, t]], targets, call)
    return grads[0], grads[1], grads[2]

"""The compressed branch as one plain causal call per document (nsa_core.fold).

The d residues of a run are folded into the head axis: d*h heads share the keys of a group, and
there are as many rows as keys. cuDNN, where it serves a call, reads the residues where they lie.

Packed documents are called one by one, which needs their lengths on the host: one synchronisation
on CUDA for each cu_seqlens, whatever the number of layers. Under CUDA graph capture the call raises
Unsupported.
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
    """Token rows and compressed rows of every document that has a compressed token."""
    assert call.cu_seqlens is not None
    first_cmp = 0
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
    runs = fold(x, groups, call.geometry, group_major=True)  # [B, I, G, d, h, D]
    return runs.permute(0, 2, 3, 4, 1, 5).flatten(2, 3).flatten(0, 1)


def _unfold(
    folded: Tensor,  # [B*G, d*h, I, D]
    out: Tensor,  # [B, S, Hq, D]
    call: SlotCall,
    blank: float = 0.0,
) -> None:
    """Store the runs into the rows of ``out``, and ``blank`` into those that see no key."""
    runs = folded.unflatten(0, (out.shape[0], -1)).unflatten(2, (call.geometry.compress_stride, -1))
    unfold(runs.permute(0, 4, 1, 2, 3, 5), out.shape[1], call.geometry, blank=blank, out=out)


def _keys(x: Tensor) -> Tensor:
    """[B, n_c, G, D] -> [B*G, n_c, D]."""
    return x.transpose(1, 2).flatten(0, 1)


def _rows(lse: Tensor) -> Tensor:
    """[B, Hq, S] -> [B, S, Hq, 1], a view: rows of width 1."""
    return lse.transpose(1, 2).unsqueeze(-1)


def _forward_dense(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, call: SlotCall) -> None:
    if cudnn.serves(q, v, call):
        cudnn.forward(q, k, v, o, lse, call)
        return
    folded_o, folded_lse = aten.causal(_fold(q, k.shape[2], call), _keys(k), _keys(v), call.scale)
    _unfold(folded_o, o, call)
    _unfold(folded_lse.unsqueeze(-1), _rows(lse), call, -torch.inf)


def forward(
    q: Tensor,  # [B, S, Hq, Dk], packed [T, Hq, Dk]
    k_cmp: Tensor,  # [B, n_c, G, Dk], packed [T // d, G, Dk]
    v_cmp: Tensor,  # [B, n_c, G, Dv]
    *,
    call: SlotCall,
) -> tuple[Tensor, Tensor]:
    """o [B, S, Hq, Dv] and lse [B, Hq, S] (packed [T, Hq, Dv] and [Hq, T])."""
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
    do, q, k, v, o, lse = tensors
    if cudnn.serves(q, v, call):
        cudnn.backward(tensors, grads, call)
        return
    groups = k.shape[2]
    folded_lse = _fold(_rows(lse), groups, call).squeeze(-1)
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
    """dq, dk_cmp, dv_cmp in the shapes of q, k_cmp, v_cmp; rows of k_cmp that belong to no document
    get zero.
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

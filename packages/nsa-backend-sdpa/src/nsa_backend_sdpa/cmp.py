"""The compressed branch as one plain causal call per document (docs/semantics.md, "the fold").

Token t sees compressed tokens 0 .. floor((t+1-l)/d). Without its first l-1 tokens, a document's
queries come in runs
of d that see the same keys: run r sees compressed tokens 0..r. Folding the run into the head axis
gives as many rows
as keys, and an ordinary causal mask:
[S - (l-1) padded to I*d, G, h, D] -> [G, h*d heads, I rows, D].

Packed documents are called one by one, which needs their lengths on the host: one synchronisation
on CUDA for each cu_seqlens, whatever the number of layers, and none while a graph is captured,
which is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from nsa_backend_sdpa import aten, cudnn
from nsa_backend_sdpa.engine import ieee_products, stats_dtype
from nsa_core.contract import SlotCall
from nsa_core.packing import host_boundaries


def _documents(x: Tensor, call: SlotCall) -> Iterator[tuple[slice, slice]]:
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
    stride, skip = call.geometry.compress_stride, call.geometry.compress_block_size - 1
    batch, length, heads, width = x.shape
    runs, per_group = call.geometry.num_compressed(length), heads // groups
    folded = x.new_empty((batch, groups, runs * stride, per_group, width))
    folded[:, :, : length - skip] = x[:, skip:].unflatten(2, (groups, per_group)).transpose(1, 2)
    folded[:, :, length - skip :] = 0
    return folded.view(batch * groups, runs, stride * per_group, width).transpose(1, 2)


def _unfold(
    folded: Tensor,  # [B*G, d*h, I, D]
    out: Tensor,  # [B, S, Hq, D]
    call: SlotCall,
) -> None:
    """Store rows l-1 .. S-1 of ``out``; the rows before them see nothing and become zero."""
    skip, stride = call.geometry.compress_block_size - 1, call.geometry.compress_stride
    batch, length, heads, _ = out.shape
    groups = folded.shape[0] // batch
    rows = folded.transpose(1, 2).unflatten(2, (stride, heads // groups)).flatten(1, 2)
    rows = rows.unflatten(0, (batch, groups))[:, :, : length - skip].transpose(1, 2)
    out[:, :skip] = 0
    out[:, skip:].unflatten(2, (groups, heads // groups)).copy_(rows)


def _keys(x: Tensor) -> Tensor:
    """[B, n_c, G, D] -> [B*G, n_c, D]."""
    return x.transpose(1, 2).flatten(0, 1)


def _forward_dense(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, call: SlotCall) -> None:
    if cudnn.serves(q, v, call):
        cudnn.forward(q, k, v, o, lse, call)
        return
    folded_o, folded_lse = aten.causal(_fold(q, k.shape[2], call), _keys(k), _keys(v), call.scale)
    _unfold(folded_o, o, call)
    _unfold(folded_lse.unsqueeze(-1), lse.transpose(1, 2).unsqueeze(-1), call)
    lse[:, :, : call.geometry.compress_block_size - 1] = -torch.inf


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
        for t, c in _documents(q, call):
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
    folded_lse = _fold(lse.transpose(1, 2).unsqueeze(-1), groups, call).squeeze(-1)
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
            for t, c in _documents(q, call):
                part = [x[None, rows] for x, rows in zip(tensors, (t, t, c, c, t))]
                targets = [x[None, rows] for x, rows in zip(grads, (t, c, c))]
                _backward_dense([*part, lse[None, :, t]], targets, call)
    return grads[0], grads[1], grads[2]

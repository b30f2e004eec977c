"""The slot cmp as one causal attention call per document (see nsa_core.fold).

The d residues of a run are folded into the head axis: d * h heads share the keys of a group, and
there are as many query rows as keys. If cuDNN supports the call, it reads the residues as views,
without a copy.

Queries that begin inside a document have fewer rows than keys, and run on aten.py: cuDNN's causal
mask would be aligned at its start. Keys that no query sees are cut off first.

Packed documents run one by one, which requires their lengths on the host. On CUDA, this takes one
synchronisation per cu_seqlens tensor, whatever the number of layers. During CUDA graph capture, the
call raises Unsupported.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_backend_sdpa import aten, cudnn
from nsa_backend_sdpa.engine import ieee_products
from nsa_core.contract import SlotCall
from nsa_core.dtypes import stats_dtype
from nsa_core.fold import fold, unfold
from nsa_core.packing import host_boundaries


class _Piece(NamedTuple):
    """The given queries of a document, of which at least one sees a key.

    Attributes:
        rows: their rows in q.
        keys: rows of the compressed tokens that they see.
        call: the call for this document alone.
    """

    rows: slice
    keys: slice
    call: SlotCall


def _pieces(q: Tensor, call: SlotCall) -> Iterator[_Piece]:
    """Yield the queries of each packed document, or of the sequences of a batch together."""
    first, last = call.first_query, call.first_query + q.shape[-3]
    bounds = (0, last) if call.cu_seqlens is None else host_boundaries(call.cu_seqlens)
    first_cmp = 0  # first compressed row of the document
    for start, end in itertools.pairwise(bounds):
        begin, stop = max(start, first), min(end, last)
        count = call.geometry.num_compressed(stop - start)
        if count and begin < stop:
            position = begin - start
            part = call if position == first else dataclasses.replace(call, first_query=position)
            rows = slice(begin - first, stop - first)
            yield _Piece(rows, slice(first_cmp, first_cmp + count), part)
        first_cmp += count  # the last document may be cut, but none follows it


def _batched(x: Tensor, call: SlotCall) -> Tensor:
    """Return packed rows [T, ..] as a batch [1, T, ..]."""
    return x if call.cu_seqlens is None else x[None]


def _fills_results(q: Tensor, keys: Tensor, call: SlotCall) -> bool:
    """Return whether the pieces have every row of the results: every key of a batch is seen."""
    seen = call.geometry.num_compressed(call.first_query + q.shape[-3])
    return call.cu_seqlens is None and 0 < seen == keys.shape[-3]


def _fold(
    x: Tensor,  # [B, S, Hq, D]
    groups: int,
    call: SlotCall,
) -> Tensor:  # [B*G, d*h, I, D]
    """Fold the rows of ``x`` into runs, with the residues and the heads of a group in one axis."""
    # [B, I, G, d, h, D]
    runs = fold(x, groups, call.geometry, first_query=call.first_query, group_major=True)
    return runs.permute(0, 2, 3, 4, 1, 5).flatten(2, 3).flatten(0, 1)


def _unfold(
    folded: Tensor,  # [B*G, d*h, I, D]
    out: Tensor,  # [B, S, Hq, D]
    call: SlotCall,
    blank: float = 0.0,
) -> None:
    """Copy folded rows back into ``out``, and set rows that see no key to ``blank``."""
    runs = folded.unflatten(0, (out.shape[0], -1)).unflatten(2, (call.geometry.compress_stride, -1))
    unfold(
        runs.permute(0, 4, 1, 2, 3, 5),
        out.shape[1],
        call.geometry,
        first_query=call.first_query,
        blank=blank,
        out=out,
    )


def _keys(x: Tensor) -> Tensor:
    """Return [B, n_c, G, D] as [B*G, n_c, D]."""
    return x.transpose(1, 2).flatten(0, 1)


def _lse_rows(lse: Tensor) -> Tensor:
    """Return lse [B, Hq, S] as a view [B, S, Hq, 1], which has the layout of q."""
    return lse.transpose(1, 2).unsqueeze(-1)


def _forward_dense(tensors: list[Tensor], call: SlotCall) -> None:
    """Store o and lse of sequences of one length into the last two of q, k, v, o and lse."""
    q, k, v, o, lse = tensors
    if not call.first_query and cudnn.supports_call(q, v, call):
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
        if not _fills_results(q, k_cmp, call):
            o.zero_()
            lse.fill_(-torch.inf)
        tensors = [_batched(x, call) for x in (q, k_cmp, v_cmp, o, lse)]
        for t, c, part in _pieces(q, call):
            pieces = [x[:, rows] for x, rows in zip(tensors, (t, c, c, t))]
            _forward_dense([*pieces, tensors[4][:, :, t]], part)
    return o, lse


def _backward_dense(tensors: list[Tensor], grads: list[Tensor], call: SlotCall) -> None:
    """Store dq, dk and dv of sequences of one length into ``grads``."""
    do, q, k, v, o, lse = tensors
    if not call.first_query and cudnn.supports_call(q, v, call):
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
    tensors = [_batched(x, call) for x in (do, q, k_cmp, v_cmp, o)]
    with torch.profiler.record_function("nsa_sdpa.cmp_backward"), ieee_products(q):
        if not _fills_results(q, k_cmp, call):
            for grad in grads:
                grad.zero_()
        for t, c, part in _pieces(q, call):
            inputs = [x[:, rows] for x, rows in zip(tensors, (t, t, c, c, t))]
            targets = [_batched(x, call)[:, rows] for x, rows in zip(grads, (t, c, c))]
            _backward_dense([*inputs, _batched(lse, call)[:, :, t]], targets, part)
    return grads[0], grads[1], grads[2]

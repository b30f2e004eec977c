"""The slot cmp as one causal attention call over the runs of queries (see nsa_core.fold).

Whole sequences have as many runs as keys. Queries that begin inside a sequence have more keys than
runs, and the library aligns the causal mask bottom-right.

For a batch, the query rows are copied into the fold. A single sequence is read through strided
views, without a copy (fold_strided.py). Packed documents are gathered on the device and take one
varlen call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nsa_backend_fa2 import fold_strided
from nsa_backend_fa2.padding import attend, attend_backward, pad_rows, safe_boundaries
from nsa_backend_fa2.providers import Attention, Packed
from nsa_core.contract import SlotCall
from nsa_core.fold import PackedFold, fold, partial_fold, unfold


def forward(
    q: Tensor,  # [B, S, Hq, Dk], packed [T, Hq, Dk]
    k_cmp: Tensor,  # [B, n_c, G, Dk], packed [T // d, G, Dk]
    v_cmp: Tensor,  # [B, n_c, G, Dv]
    *,
    call: SlotCall,
) -> tuple[Tensor, Tensor]:
    """Return o [B, S, Hq, Dv] and lse [B, Hq, S] (packed [T, Hq, Dv] and [Hq, T]).

    Rows that see no key have o = 0 and lse = -inf.
    """
    if call.cu_seqlens is not None:
        return _forward_packed(q, k_cmp, v_cmp, call)
    if q.shape[0] == 1:
        return fold_strided.forward(q, k_cmp, v_cmp, call)
    return forward_folded(q, k_cmp, v_cmp, call)


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
    if call.cu_seqlens is not None:
        return _backward_packed(do, q, k_cmp, v_cmp, o, lse, call)
    if q.shape[0] == 1:
        return fold_strided.backward(do, q, k_cmp, v_cmp, o, lse, call)
    return backward_folded(do, q, k_cmp, v_cmp, o, lse, call)


def forward_folded(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, call: SlotCall
) -> tuple[Tensor, Tensor]:
    """Run :func:`forward` for any batch size, with copies of q and o."""
    (_, length, heads, _), geometry, first = q.shape, call.geometry, call.first_query
    keys = partial_fold(first, length, geometry).stop
    if keys == 0:
        return _blank(q, v_cmp, q.shape[:1], heads, length)
    folded_q = fold(q, k_cmp.shape[2], geometry, first_query=first)  # [B, I, G, d, h, Dk]
    axes = folded_q.shape[2:5]
    o, lse = attend(folded_q.flatten(2, 4), k_cmp[:, :keys], v_cmp[:, :keys], _attention(call))
    folded_lse = lse.transpose(1, 2).unflatten(2, axes).unsqueeze(-1)
    rows_lse = unfold(folded_lse, length, geometry, blank=-torch.inf, first_query=first)
    rows_o = unfold(o.unflatten(2, axes), length, geometry, first_query=first)
    return rows_o, rows_lse.squeeze(-1).transpose(1, 2)


def backward_folded(
    do: Tensor, q: Tensor, k_cmp: Tensor, v_cmp: Tensor, o: Tensor, lse: Tensor, call: SlotCall
) -> tuple[Tensor, Tensor, Tensor]:
    """Run :func:`backward` for any batch size, with copies of do, q, o and dq."""
    length, (key_rows, groups), geometry = q.shape[1], k_cmp.shape[1:3], call.geometry
    keys = partial_fold(call.first_query, length, geometry).stop
    if keys == 0:
        return torch.zeros_like(q), torch.zeros_like(k_cmp), torch.zeros_like(v_cmp)
    folded_do, folded_q, folded_o, folded_lse = (
        fold(x, groups, geometry, first_query=call.first_query)
        for x in (do, q, o, lse.transpose(1, 2).unsqueeze(-1))
    )
    axes = folded_q.shape[2:5]
    dq, dk, dv = attend_backward(
        folded_do.flatten(2, 4),
        folded_q.flatten(2, 4),
        k_cmp[:, :keys],
        v_cmp[:, :keys],
        folded_o.flatten(2, 4),
        folded_lse.flatten(2).transpose(1, 2),
        _attention(call),
    )
    rows_dq = unfold(dq.unflatten(2, axes), length, geometry, first_query=call.first_query)
    return rows_dq, pad_rows(dk, 0, key_rows), pad_rows(dv, 0, key_rows)


def _blank(q: Tensor, v_cmp: Tensor, batch: Sequence[int], *lse: int) -> tuple[Tensor, Tensor]:
    """Return o and lse [*batch, *lse] of rows that see no key."""
    o = q.new_zeros((*q.shape[:-1], v_cmp.shape[-1]))
    return o, torch.full((*batch, *lse), -torch.inf, dtype=torch.float32, device=q.device)


def _attention(call: SlotCall, packed: Packed | None = None) -> Attention:
    return Attention(call.scale, packed=packed, deterministic=call.deterministic)


def _max_keys(call: SlotCall, total: int) -> int:
    """Return an upper bound of the compressed tokens of a document that the queries see."""
    return call.geometry.num_compressed(min(call.max_seqlen, call.first_query + total))


def _packed_fold(call: SlotCall, total: int, max_keys: int) -> tuple[PackedFold, Attention]:
    """Return the fold of the packed documents, and the attention over its runs."""
    assert call.cu_seqlens is not None
    geometry, first = call.geometry, call.first_query
    # Documents end at the last query, so that the causal mask is aligned bottom-right.
    bounds = safe_boundaries(call.cu_seqlens, first + total)
    runs = PackedFold.of(bounds, total, geometry, first)
    max_runs = min(max_keys, PackedFold.max_runs(total, geometry, first)) if first else max_keys
    return runs, _attention(call, Packed(runs.cu, runs.cu_keys, max_runs, max_keys))


def _forward_packed(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, call: SlotCall
) -> tuple[Tensor, Tensor]:
    total, heads, _ = q.shape
    max_keys = _max_keys(call, total)
    if max_keys == 0:  # FlashAttention-2 divides by the number of keys
        return _blank(q, v_cmp, (), heads, total)
    runs, attention = _packed_fold(call, total, max_keys)
    folded_q = runs.fold(q, k_cmp.shape[1])  # [R, G, d, h, Dk]
    axes = folded_q.shape[1:4]
    o, lse = attend(folded_q.flatten(1, 3), k_cmp, v_cmp, attention)
    folded_lse = lse.t().unflatten(1, axes).unsqueeze(-1)
    return (
        runs.unfold(o.unflatten(1, axes)),
        runs.unfold(folded_lse, blank=-torch.inf).squeeze(-1).t(),
    )


def _backward_packed(
    do: Tensor, q: Tensor, k_cmp: Tensor, v_cmp: Tensor, o: Tensor, lse: Tensor, call: SlotCall
) -> tuple[Tensor, Tensor, Tensor]:
    total, groups = q.shape[0], k_cmp.shape[1]
    max_keys = _max_keys(call, total)
    if max_keys == 0:
        return torch.zeros_like(q), torch.zeros_like(k_cmp), torch.zeros_like(v_cmp)
    runs, attention = _packed_fold(call, total, max_keys)
    folded_lse = runs.fold(lse.t().unsqueeze(-1), groups)
    # A log-sum-exp of +inf gives the rows that stand for no token probabilities of 0.
    folded_lse.masked_fill_(runs.empty[:, None, :, None, None], torch.inf)
    folded_do, folded_q, folded_o = (runs.fold(x, groups) for x in (do, q, o))
    axes = folded_q.shape[1:4]
    dq, dk, dv = attend_backward(
        folded_do.flatten(1, 3),
        folded_q.flatten(1, 3),
        k_cmp,
        v_cmp,
        folded_o.flatten(1, 3),
        folded_lse.flatten(1).t(),
        attention,
    )
    tail = runs.is_tail(len(k_cmp))[:, None, None]
    return runs.unfold(dq.unflatten(1, axes)), dk.masked_fill(tail, 0), dv.masked_fill(tail, 0)

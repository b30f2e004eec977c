"""The slot cmp as one causal attention call over the runs of queries (see nsa_core.fold).

Whole sequences have as many runs as keys. Queries that begin inside a sequence have more keys than
runs, and the library aligns the causal mask bottom-right.

For a batch, the query rows are copied into the fold. A single sequence is read through strided
views, without a copy (fold_strided.py). Packed documents are gathered on the device and take one
varlen call.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_backend_fa2 import fold_strided
from nsa_backend_fa2.padding import attend, attend_backward, pad_rows, safe_boundaries
from nsa_backend_fa2.providers import Attention, Gradients, Packed
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
    if call.cu_seqlens is None and q.shape[0] == 1:
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
) -> Gradients:
    """Return dq, dk_cmp and dv_cmp, shaped like q, k_cmp and v_cmp.

    Rows of k_cmp and v_cmp that belong to no document have zero gradients.
    """
    if call.cu_seqlens is None and q.shape[0] == 1:
        return fold_strided.backward(do, q, k_cmp, v_cmp, o, lse, call)
    return backward_folded(do, q, k_cmp, v_cmp, o, lse, call)


class _Runs(NamedTuple):
    """The fold of the queries of a call, and the attention over their runs.

    Attributes:
        fold: Copies rows [..., Hq, D] into runs [..., G, d, h, D].
        unfold: Copies runs back into rows; takes the value ``blank`` of rows that see no key.
        keys: Number of compressed rows that the call passes.
        attention: The options of the call.
        packed: The fold of packed documents; None for a batch.
    """

    fold: Callable[[Tensor], Tensor]
    unfold: Callable[..., Tensor]
    keys: int
    attention: Attention
    packed: PackedFold | None


def _runs(q: Tensor, k_cmp: Tensor, call: SlotCall) -> _Runs | None:
    """Return the runs of a call.

    None if no query sees a key, because the library divides by the number of keys. A batch passes
    the keys that its queries see. Packed documents pass all rows of k_cmp.
    """
    length, (rows, groups, _) = q.shape[-3], k_cmp.shape[-3:]
    geometry, first = call.geometry, call.first_query
    attention = Attention(call.scale, deterministic=call.deterministic)
    if call.cu_seqlens is None:
        keys = partial_fold(first, length, geometry).stop
        places: dict[str, Any] = {"geometry": geometry, "first_query": first}
        copy_in = functools.partial(fold, groups=groups, **places)
        copy_out = functools.partial(unfold, length=length, **places)
        return _Runs(copy_in, copy_out, keys, attention, None) if keys else None
    # An upper bound of the compressed tokens of a document that the queries see.
    max_keys = geometry.num_compressed(min(call.max_seqlen, first + length))
    if not max_keys:
        return None
    # Documents end at the last query, so that the causal mask is aligned bottom-right.
    bounds = safe_boundaries(call.cu_seqlens, first + length)
    runs = PackedFold.of(bounds, length, geometry, first)
    max_runs = min(max_keys, PackedFold.max_runs(length, geometry, first)) if first else max_keys
    packed = Packed(runs.cu, runs.cu_keys, max_runs, max_keys)
    attention = dataclasses.replace(attention, packed=packed)
    return _Runs(functools.partial(runs.fold, groups=groups), runs.unfold, rows, attention, runs)


def forward_folded(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, call: SlotCall
) -> tuple[Tensor, Tensor]:
    """Run :func:`forward` for packed documents and any batch size, with copies of q and o."""
    runs = _runs(q, k_cmp, call)
    if runs is None:
        *lead, length, heads, _ = q.shape
        lse = torch.full((*lead, heads, length), -torch.inf, dtype=torch.float32, device=q.device)
        return q.new_zeros((*q.shape[:-1], v_cmp.shape[-1])), lse
    folded_q = runs.fold(q)
    axes, keys = folded_q.shape[-4:-1], slice(runs.keys)
    k, v = k_cmp[..., keys, :, :], v_cmp[..., keys, :, :]
    o, lse = attend(folded_q.flatten(-4, -2), k, v, runs.attention)
    folded_lse = lse.transpose(-1, -2).unflatten(-1, axes).unsqueeze(-1)
    rows_lse = runs.unfold(folded_lse, blank=-torch.inf)
    rows_o = runs.unfold(o.unflatten(-2, axes))
    return rows_o, rows_lse.squeeze(-1).transpose(-1, -2)


def backward_folded(
    do: Tensor, q: Tensor, k_cmp: Tensor, v_cmp: Tensor, o: Tensor, lse: Tensor, call: SlotCall
) -> Gradients:
    """Run :func:`backward` for packed documents and any batch size, with copies of rows."""
    runs = _runs(q, k_cmp, call)
    if runs is None:
        return torch.zeros_like(q), torch.zeros_like(k_cmp), torch.zeros_like(v_cmp)
    key_rows, keys = k_cmp.shape[-3], slice(runs.keys)
    folded_lse = runs.fold(lse.transpose(-1, -2).unsqueeze(-1))
    if runs.packed is not None:
        # A log-sum-exp of +inf gives the entries that stand for no token probabilities of 0.
        folded_lse.masked_fill_(runs.packed.empty[:, None, :, None, None], torch.inf)
    folded_do, folded_q, folded_o = (runs.fold(x) for x in (do, q, o))
    axes = folded_q.shape[-4:-1]
    tensors = [
        folded_do.flatten(-4, -2),
        folded_q.flatten(-4, -2),
        k_cmp[..., keys, :, :],
        v_cmp[..., keys, :, :],
        folded_o.flatten(-4, -2),
        folded_lse.flatten(-4).transpose(-1, -2),
    ]
    dq, dk, dv = attend_backward(tensors, runs.attention)
    rows_dq = runs.unfold(dq.unflatten(-2, axes))
    if runs.packed is None:
        return rows_dq, pad_rows(dk, 0, key_rows), pad_rows(dv, 0, key_rows)
    tail = runs.packed.is_tail(key_rows)[:, None, None]
    return rows_dq, dk.masked_fill(tail, 0), dv.masked_fill(tail, 0)

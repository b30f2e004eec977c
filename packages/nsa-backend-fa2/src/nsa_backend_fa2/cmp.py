"""The compressed branch: the fold, and one causal call of as many rows as keys.

A batch is folded by copying q (fold.py); one sequence is read where it lies (residues.py); packed
documents are gathered on the device and served by one varlen call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_backend_fa2 import residues
from nsa_backend_fa2.fold import PackedFold, fold, unfold
from nsa_backend_fa2.operands import attend, attend_backward
from nsa_backend_fa2.packed import documents
from nsa_backend_fa2.providers import Attention, Packed
from nsa_core.contract import SlotCall


def forward(
    q: Tensor,  # [B, S, Hq, Dk], packed [T, Hq, Dk]
    k_cmp: Tensor,  # [B, n_c, G, Dk], packed [T // d, G, Dk]
    v_cmp: Tensor,  # [B, n_c, G, Dv]
    *,
    call: SlotCall,
) -> tuple[Tensor, Tensor]:
    """o [B, S, Hq, Dv] and lse [B, Hq, S] (packed [T, Hq, Dv] and [Hq, T]); 0 and -inf where no key
    is visible.
    """
    if call.cu_seqlens is not None:
        return _forward_packed(q, k_cmp, v_cmp, call)
    if q.shape[0] == 1:
        return residues.forward(q, k_cmp, v_cmp, call)
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
    """dq, dk_cmp, dv_cmp in the shapes of q, k_cmp, v_cmp; zero for the rows of k_cmp that belong
    to no document.
    """
    if call.cu_seqlens is not None:
        return _backward_packed(do, q, k_cmp, v_cmp, o, lse, call)
    if q.shape[0] == 1:
        return residues.backward(do, q, k_cmp, v_cmp, o, lse, call)
    return backward_folded(do, q, k_cmp, v_cmp, o, lse, call)


def forward_folded(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, call: SlotCall
) -> tuple[Tensor, Tensor]:
    """:func:`forward` of any batch, by copies of q and o."""
    length, groups, geometry = q.shape[1], k_cmp.shape[2], call.geometry
    o, lse = attend(fold(q, groups, geometry), k_cmp, v_cmp, _attention(call))
    # lse [B, G*d*h, I] takes the way of an o of width 1.
    spread = unfold(lse.transpose(1, 2).unsqueeze(-1), length, groups, geometry, -torch.inf)
    return unfold(o, length, groups, geometry), spread.squeeze(-1).transpose(1, 2)


def backward_folded(
    do: Tensor, q: Tensor, k_cmp: Tensor, v_cmp: Tensor, o: Tensor, lse: Tensor, call: SlotCall
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`backward` of any batch, by copies of do, q, o and dq."""
    length, groups, geometry = q.shape[1], k_cmp.shape[2], call.geometry
    folded_do, folded_q, folded_o = (fold(x, groups, geometry) for x in (do, q, o))
    folded_lse = (
        fold(lse.transpose(1, 2).unsqueeze(-1), groups, geometry).squeeze(-1).transpose(1, 2)
    )
    dq, dk, dv = attend_backward(
        folded_do, folded_q, k_cmp, v_cmp, folded_o, folded_lse, _attention(call)
    )
    return unfold(dq, length, groups, geometry), dk, dv


def _attention(call: SlotCall, packed: Packed | None = None) -> Attention:
    return Attention(call.scale, packed=packed, deterministic=call.deterministic)


def _longest(call: SlotCall, total: int) -> int:
    """Rows of the longest document, 0 when even a document of all ``total`` tokens has no
    compressed token.
    """
    return call.geometry.num_compressed(min(call.max_seqlen, total))


def _forward_packed(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, call: SlotCall
) -> tuple[Tensor, Tensor]:
    total, heads, _ = q.shape
    longest, groups = _longest(call, total), k_cmp.shape[1]
    if longest == 0:  # the kernels divide by the number of keys
        o = q.new_zeros((total, heads, v_cmp.shape[-1]))
        return o, torch.full((heads, total), -torch.inf, dtype=torch.float32, device=q.device)
    assert call.cu_seqlens is not None
    places = PackedFold.of(documents(call.cu_seqlens, total), total, call.geometry)
    packed = Packed(places.cu, places.cu, longest, longest)
    o, lse = attend(places.fold(q, groups), k_cmp, v_cmp, _attention(call, packed))
    return places.unfold(o, groups), places.unfold(
        lse.t().unsqueeze(-1), groups, -torch.inf
    ).squeeze(-1).t()


def _backward_packed(
    do: Tensor, q: Tensor, k_cmp: Tensor, v_cmp: Tensor, o: Tensor, lse: Tensor, call: SlotCall
) -> tuple[Tensor, Tensor, Tensor]:
    total, groups = q.shape[0], k_cmp.shape[1]
    longest = _longest(call, total)
    if longest == 0:
        return torch.zeros_like(q), torch.zeros_like(k_cmp), torch.zeros_like(v_cmp)
    assert call.cu_seqlens is not None
    places = PackedFold.of(documents(call.cu_seqlens, total), total, call.geometry)
    packed = Packed(places.cu, places.cu, longest, longest)
    folded_lse = places.fold(lse.t().unsqueeze(-1), groups)
    # +inf: a place that has no token weighs nothing.
    folded_lse.unflatten(1, (groups, call.geometry.compress_stride, -1)).masked_fill_(
        places.empty[:, None, :, None, None], torch.inf
    )
    folded_do, folded_q, folded_o = (places.fold(x, groups) for x in (do, q, o))
    dq, dk, dv = attend_backward(
        folded_do,
        folded_q,
        k_cmp,
        v_cmp,
        folded_o,
        folded_lse.squeeze(-1).t(),
        _attention(call, packed),
    )
    tail = places.is_tail()[:, None, None]
    return places.unfold(dq, groups), dk.masked_fill(tail, 0), dv.masked_fill(tail, 0)

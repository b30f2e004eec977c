"""The sliding window as one call on the full keys and values: causal, window (w-1, 0), aligned
bottom-right.
"""

from __future__ import annotations

from torch import Tensor

from nsa_backend_fa2.padding import attend, attend_backward, safe_boundaries
from nsa_backend_fa2.providers import Attention, Packed
from nsa_core.contract import SlotCall


def _attention(q: Tensor, call: SlotCall) -> Attention:
    packed = None
    if call.cu_seqlens is not None:
        bounds, longest = (
            safe_boundaries(call.cu_seqlens, q.shape[0]),
            min(call.max_seqlen, q.shape[0]),
        )
        packed = Packed(bounds, bounds, longest, longest)
    return Attention(
        call.scale,
        window=call.geometry.window_size,
        packed=packed,
        deterministic=call.deterministic,
    )


def forward(
    q: Tensor,  # [B, S, Hq, Dk], packed [T, Hq, Dk]
    k: Tensor,  # [B, S, G, Dk]
    v: Tensor,  # [B, S, G, Dv]
    *,
    call: SlotCall,
) -> tuple[Tensor, Tensor]:
    """o [B, S, Hq, Dv] and lse [B, Hq, S] (packed [T, Hq, Dv] and [Hq, T])."""
    return attend(q, k, v, _attention(q, call))


def backward(
    do: Tensor,  # [B, S, Hq, Dv]
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    *,
    call: SlotCall,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in the shapes of q, k, v."""
    return attend_backward(do, q, k, v, o, lse, _attention(q, call))

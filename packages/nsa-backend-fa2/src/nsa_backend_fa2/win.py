"""The slot win as one call over all keys and values: causal, with the window (w - 1, 0)."""

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
    """Return o [B, S, Hq, Dv] and lse [B, Hq, S] (packed [T, Hq, Dv] and [Hq, T])."""
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
    """Return dq, dk and dv, shaped like q, k and v."""
    return attend_backward(do, q, k, v, o, lse, _attention(q, call))

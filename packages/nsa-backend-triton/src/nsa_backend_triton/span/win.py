"""Slot win: attention over the sliding window; token t sees the keys t - w + 1 .. t."""

from __future__ import annotations

from torch import Tensor

from nsa_backend_triton.host.sequences import Sequences
from nsa_backend_triton.span import backward as span_backward
from nsa_backend_triton.span import forward as span_forward
from nsa_core.contract import SlotCall


def _span(call: SlotCall) -> tuple[int, int, int]:
    """Return COMPRESS_BLOCK, STRIDE, WINDOW of the span kernels."""
    return 1, 1, call.geometry.window_size


def forward(
    q: Tensor,  # [B, S, Hq, Dk], packed [T, Hq, Dk]
    k: Tensor,  # [B, S, G, Dk]
    v: Tensor,  # [B, S, G, Dv]
    *,
    call: SlotCall,
) -> tuple[Tensor, Tensor]:
    """Return o [B, S, Hq, Dv] and lse [B, Hq, S] (packed [T, Hq, Dv] and [Hq, T])."""
    return span_forward.forward(q, k, v, Sequences.of(q, k, call), _span(call), call.scale)


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
    """Return dq, dk, dv in the shapes of q, k, v."""
    return span_backward.backward(
        do, q, k, v, o, lse, Sequences.of(q, k, call), _span(call), call.scale
    )

"""Slot cmp: attention over compressed tokens (Eq. 7); token t sees i where i*d + l - 1 <= t."""

from __future__ import annotations

from torch import Tensor

from nsa_backend_triton.host.sequences import Sequences
from nsa_backend_triton.span import backward as span_backward
from nsa_backend_triton.span import forward as span_forward
from nsa_core.contract import SlotCall


def _span(call: SlotCall) -> tuple[int, int, int]:
    """Return COMPRESS_BLOCK, STRIDE, WINDOW of the span kernels."""
    return call.geometry.compress_block_size, call.geometry.compress_stride, 0


def forward(
    q: Tensor,  # [B, S, Hq, Dk], packed [T, Hq, Dk]
    k_cmp: Tensor,  # [B, n_c, G, Dk], packed [T // d, G, Dk]
    v_cmp: Tensor,  # [B, n_c, G, Dv]
    *,
    call: SlotCall,
) -> tuple[Tensor, Tensor]:
    """Return o [B, S, Hq, Dv] and lse [B, Hq, S] (packed [T, Hq, Dv] and [Hq, T])."""
    seqs = Sequences.of(q, k_cmp, call, compressed=True)
    return span_forward.forward(q, k_cmp, v_cmp, seqs, _span(call), call.scale)


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
    """Return dq, dk_cmp, dv_cmp in the shapes of q, k_cmp, v_cmp.

    Gradients are zero in packed rows that belong to no document.
    """
    seqs = Sequences.of(q, k_cmp, call, compressed=True)
    return span_backward.backward(do, q, k_cmp, v_cmp, o, lse, seqs, _span(call), call.scale)

"""The slot win as one call: causal, with the window (w - 1, 0).

Whole sequences take all keys and values; queries that begin inside a sequence take those from the
first window on up to the last query.
"""

from __future__ import annotations

from torch import Tensor

from nsa_backend_fa2.padding import attend, attend_backward, pad_rows, safe_boundaries
from nsa_backend_fa2.providers import Attention, Packed
from nsa_core.contract import SlotCall


def _visible(q: Tensor, call: SlotCall) -> tuple[slice, Attention]:
    """Return the rows of k and v that queries see, and the options of the call over these rows.

    The last row is that of the last query, because the library aligns windows bottom-right.
    """
    window, rows = call.geometry.window_size, q.shape[-3]
    first, stop = max(0, call.first_query - window + 1), call.first_query + rows
    packed = None
    if call.cu_seqlens is not None:
        cu_q = cu_k = safe_boundaries(call.cu_seqlens, stop)
        if call.first_query:
            # Documents that end before the first query have keys but no row of q. The library
            # writes zeros to the gradients of these keys.
            cu_q, cu_k = ((cu_q - row).clamp(min=0) for row in (call.first_query, first))
        longest = min(call.max_seqlen, stop - first)
        packed = Packed(cu_q, cu_k, min(longest, rows), longest)
    attention = Attention(
        call.scale, window=window, packed=packed, deterministic=call.deterministic
    )
    return slice(first, stop), attention


def forward(
    q: Tensor,  # [B, S, Hq, Dk], packed [T, Hq, Dk]
    k: Tensor,  # [B, S, G, Dk]
    v: Tensor,  # [B, S, G, Dv]
    *,
    call: SlotCall,
) -> tuple[Tensor, Tensor]:
    """Return o [B, S, Hq, Dv] and lse [B, Hq, S] (packed [T, Hq, Dv] and [Hq, T])."""
    keys, attention = _visible(q, call)
    return attend(q, k[..., keys, :, :], v[..., keys, :, :], attention)


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
    keys, attention = _visible(q, call)
    tensors = [do, q, k[..., keys, :, :], v[..., keys, :, :], o, lse]
    dq, dk, dv = attend_backward(tensors, attention)
    return dq, pad_rows(dk, keys.start, k.shape[-3]), pad_rows(dv, keys.start, k.shape[-3])

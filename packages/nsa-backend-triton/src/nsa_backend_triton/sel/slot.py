"""The slot ``sel``: attention of each group of heads over the blocks selected for it."""

from __future__ import annotations

from torch import Tensor

from nsa_backend_triton.sel import backward as sel_backward
from nsa_backend_triton.sel import forward as sel_forward
from nsa_core.contract import SlotCall


def forward(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, *, call: SlotCall
) -> tuple[Tensor, Tensor]:
    """Return o [B, S, Hq, Dv] and lse [B, Hq, S] (packed [T, Hq, Dv] and [Hq, T])."""
    return sel_forward.forward(q, k, v, blocks, call=call)


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    o: Tensor,
    lse: Tensor,
    *,
    call: SlotCall,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv in the shapes and dtypes of q, k and v."""
    return sel_backward.backward(do, q, k, v, blocks, o, lse, call=call)

"""The slot combine: o = g_cmp * o_cmp + g_sel * o_sel + g_win * o_win (Eq. 5).

The sum is computed in fp32 (fp64 for fp64) and rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_core.contract import SlotCall


def forward(
    gates: Tensor,  # [..., Hq, 3] fp32 (fp64)
    o_cmp: Tensor,  # [..., Hq, Dv]
    o_sel: Tensor,
    o_win: Tensor,
    *,
    call: SlotCall,
) -> Tensor:
    """Return the gated sum [..., Hq, Dv]."""
    with torch.profiler.record_function("nsa_sdpa.combine"):
        g_cmp, g_sel, g_win = gates.unsqueeze(-2).unbind(-1)
        total = g_cmp * o_cmp
        total.addcmul_(g_sel, o_sel.to(gates.dtype))
        total.addcmul_(g_win, o_win.to(gates.dtype))
        return total.to(o_cmp.dtype).contiguous()


def backward(
    do: Tensor,  # [..., Hq, Dv]
    gates: Tensor,
    o_cmp: Tensor,
    o_sel: Tensor,
    o_win: Tensor,
    *,
    call: SlotCall,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dgates in the dtype of the gates, and do_cmp, do_sel and do_win, each rounded once."""
    with torch.profiler.record_function("nsa_sdpa.combine_backward"):
        dgates = torch.empty(gates.shape, dtype=gates.dtype, device=gates.device)
        wide = do.to(gates.dtype)
        for branch, o in enumerate((o_cmp, o_sel, o_win)):
            torch.sum(wide * o, -1, out=dgates[..., branch])
        do_cmp, do_sel, do_win = (
            (wide * gate).to(do.dtype) for gate in gates.unsqueeze(-2).unbind(-1)
        )
        return dgates, do_cmp.contiguous(), do_sel.contiguous(), do_win.contiguous()

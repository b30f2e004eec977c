"""The tensors that a request stands for, without data: what dry runs are made on."""

from __future__ import annotations

import torch

from nsa_core.contract import Request, SlotCall


def inputs(request: Request, device: str = "meta") -> tuple[torch.Tensor, list[torch.Tensor], SlotCall]:
    """(do, the slot's tensors, the call) of ``request``, uninitialised; packed: ``batch`` documents."""
    geometry, length, batch = request.geometry, request.seq_len or 0, request.batch or 1
    dtype = getattr(torch, request.dtype)
    stats = torch.float64 if dtype == torch.float64 else torch.float32
    lead = [length] if request.varlen else [batch, length]
    keys = [geometry.max_compressed(length)] if request.varlen else [batch, geometry.num_compressed(length)]

    def tensor(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=kind, device=device)

    hq, g, dk, dv = request.n_heads, request.n_kv_heads, request.head_dim, request.v_head_dim
    q, do, lse = tensor(*lead, hq, dk), tensor(*lead, hq, dv), tensor(*lead[:-1], hq, length, kind=stats)
    k_cmp, v_cmp, k, v = tensor(*keys, g, dk), tensor(*keys, g, dv), tensor(*lead, g, dk), tensor(*lead, g, dv)
    given = {
        "cmp": [q, k_cmp, v_cmp],
        "select": [q, k_cmp, lse],
        "sel": [q, k, v, tensor(*lead, g, geometry.num_selected_blocks, kind=torch.int32)],
        "win": [q, k, v],
        "combine": [tensor(*lead, hq, 3, kind=stats), do, do, do],
    }[request.slot]
    cu = tensor(batch + 1, kind=torch.int32) if request.varlen else None
    return do, given, SlotCall(geometry, 0.125, cu, length, request.deterministic)

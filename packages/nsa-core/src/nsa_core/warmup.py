"""Every slot of a plan run once on tensors of zeros, so that what compiles at a first call has compiled."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from nsa_core.contract import Request, SlotSpec
from nsa_core.ops import DIFFERENTIABLE, INPUTS, Kernel, stats_dtype
from nsa_core.validate import SLOT_AXES


def warm(
    kernels: Mapping[str, Kernel], requests: Mapping[str, Request], specs: Mapping[str, SlotSpec], device: torch.device
) -> None:
    """Run each slot of ``kernels`` on ``device``, backward too where its request asks for gradients."""
    for slot, kernel in kernels.items():
        request = requests[slot]
        # Several sequences, the compressed tokens of each at least one.
        length = max(specs[slot].warmup_tokens, 2 * request.geometry.compress_block_size)
        tensors = _zeros(request, length, device)
        asked = [t for n, t in tensors.items() if request.needs_grad and n in DIFFERENTIABLE[slot]]
        for tensor in asked:
            tensor.requires_grad_()
        bounds = [0, length // 2, length]
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device) if request.varlen else None
        with torch.set_grad_enabled(bool(asked)):
            result = kernel(*tensors.values(), cu_seqlens=cu_seqlens, max_seqlen=length)
        if asked:
            o = result if isinstance(result, torch.Tensor) else result[0]
            torch.autograd.grad(o, asked, torch.zeros_like(o))


def _zeros(request: Request, length: int, device: torch.device) -> dict[str, torch.Tensor]:
    """The slot's tensors by the contract's names: one sequence, or documents of ``length`` tokens in all."""
    geometry = request.geometry
    dtype: torch.dtype = getattr(torch, request.dtype)
    rows = geometry.max_compressed(length) if request.varlen else geometry.num_compressed(length)
    sizes: dict[str | int, int] = {
        "B": 1, "S": length, "Hq": request.n_heads, "G": request.n_kv_heads, "Dk": request.head_dim,
        "Dv": request.v_head_dim, "C": rows, "n": geometry.num_selected_blocks,
    }  # fmt: skip
    kinds = {"blocks": torch.int32, "lse": stats_dtype(dtype), "gates": stats_dtype(dtype)}
    made = {}
    for name in INPUTS[request.slot]:
        axes = [a for a in SLOT_AXES[request.slot][name] if not (request.varlen and a == "B")]
        shape = [sizes.get(axis, axis if isinstance(axis, int) else 0) for axis in axes]
        made[name] = torch.zeros(shape, dtype=kinds.get(name, dtype), device=device)
    return made

"""Tensors without data for a request, as inputs of dry runs."""

from __future__ import annotations

import dataclasses
import importlib
from types import ModuleType

import torch

from nsa_backend_triton.core.backward import Tensors
from nsa_backend_triton.plugin import MODULES
from nsa_core.contract import DecodeCall, Request, SlotCall


def slot_module(slot: str) -> ModuleType:
    """Return the module that holds ``slot``'s forward and backward."""
    return importlib.import_module(f"nsa_backend_triton.{MODULES[slot]}")


def inputs(
    request: Request, device: str = "meta"
) -> tuple[torch.Tensor, list[torch.Tensor], SlotCall]:
    """Return (do, the slot's tensors, the call) of ``request``, uninitialised.

    A packed request has ``batch`` documents. The queries of a partial one begin after as many
    tokens as they are themselves.
    """
    geometry, length, batch = request.geometry, request.seq_len or 0, request.batch or 1
    dtype = getattr(torch, request.dtype)
    stats = torch.float64 if dtype == torch.float64 else torch.float32
    first_query = length if request.partial else 0
    total = first_query + length
    lead = [length] if request.varlen else [batch, length]
    tokens = [*lead[:-1], total]
    keys = (
        [geometry.max_compressed(total)]
        if request.varlen
        else [batch, geometry.num_compressed(total)]
    )

    def tensor(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=kind, device=device)

    hq, g, dk, dv = request.n_heads, request.n_kv_heads, request.head_dim, request.v_head_dim
    q, do, lse = (
        tensor(*lead, hq, dk),
        tensor(*lead, hq, dv),
        tensor(*lead[:-1], hq, length, kind=stats),
    )
    k_cmp, v_cmp, k, v = (
        tensor(*keys, g, dk),
        tensor(*keys, g, dv),
        tensor(*tokens, g, dk),
        tensor(*tokens, g, dv),
    )
    tensors = {
        "cmp": [q, k_cmp, v_cmp],
        "select": [q, k_cmp, lse],
        "sel": [q, k, v, tensor(*lead, g, geometry.num_selected_blocks, kind=torch.int32)],
        "win": [q, k, v],
        "combine": [tensor(*lead, hq, 3, kind=stats), do, do, do],
    }[request.slot]
    cu = tensor(batch + 1, kind=torch.int32) if request.varlen else None
    call = SlotCall(geometry, 0.125, cu, total, request.deterministic, first_query)
    return do, tensors, call


def core_inputs(
    request: Request, device: str = "meta"
) -> tuple[torch.Tensor, Tensors, list[torch.Tensor], SlotCall]:
    """Return do, the tensors, the outputs and the call of the fused backward, as of :func:`inputs`.

    The three outputs are one tensor.
    """
    do, (q, *k_cmp), call = inputs(dataclasses.replace(request, slot="cmp"), device)
    (_, *k_sel, blocks), (_, *k_win), (_, _, lse), (gates, *outputs) = (
        inputs(dataclasses.replace(request, slot=slot), device)[1]
        for slot in ("sel", "win", "select", "combine")
    )
    tensors = Tensors._make((q, *k_cmp, *k_sel, *k_win, gates, blocks, lse, lse, lse))
    return do, tensors, outputs, call


def step_inputs(
    request: Request, rows: int = 1, device: str = "meta"
) -> tuple[dict[str, torch.Tensor], DecodeCall]:
    """Return a decode step's tensors by the contract's names, uninitialised, and the call.

    ``rows`` is the number of new tokens per sequence and ``request.seq_len`` the capacity of the
    cache. Each sequence has its own pages and a ring of w + rows - 1 tokens.
    """
    geometry, batch, longest = request.geometry, request.batch or 1, request.seq_len or 0
    page = (
        request.page_size
        or max(1, geometry.num_select_blocks(longest)) * geometry.select_block_size
    )
    pages, ring = -(-longest // page), geometry.window_size + rows - 1
    dtype = getattr(torch, request.dtype)
    stats = torch.float64 if dtype == torch.float64 else torch.float32

    def tensor(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=kind, device=device)

    hq, g, widths = (
        request.n_heads,
        request.n_kv_heads,
        {"k": request.head_dim, "v": request.v_head_dim},
    )
    stores = {
        "cmp": (batch * pages, page // geometry.compress_stride),
        "sel": (batch * pages, page),
        "win": (batch, ring),
    }
    tensors = {
        "q": tensor(batch, rows, hq, request.head_dim),
        "gates": tensor(batch, rows, hq, 3, kind=stats),
    }
    tensors |= {
        f"{x}_{name}": tensor(*shape, g, widths[x]) for name, shape in stores.items() for x in "kv"
    }
    tensors["lse"] = tensor(batch, hq, rows, kind=stats)
    tensors["blocks"] = tensor(batch, rows, g, geometry.num_selected_blocks, kind=torch.int32)
    starts, lengths = tensor(batch, kind=torch.int32), tensor(batch, kind=torch.int32)
    return tensors, DecodeCall(
        geometry, 0.125, starts, lengths, tensor(batch, pages, kind=torch.int32), longest
    )


STEP_INPUTS = {
    "cmp": ("q", "k_cmp", "v_cmp"),
    "select": ("q", "k_cmp", "lse"),
    "sel": ("q", "k_sel", "v_sel", "blocks"),
    "win": ("q", "k_win", "v_win"),
    "step": ("q", "gates", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win"),
}

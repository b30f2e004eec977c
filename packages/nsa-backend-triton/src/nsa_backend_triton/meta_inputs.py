"""Tensors without data for a request, as inputs of dry runs."""

from __future__ import annotations

import dataclasses
import importlib
from types import ModuleType

import torch

from nsa_backend_triton.core.backward import Tensors
from nsa_backend_triton.plugin import MODULES
from nsa_core.contract import BlockTables, DecodeCall, PageScales, Request, SlotCall
from nsa_core.dryrun import slot_inputs


def slot_module(slot: str) -> ModuleType:
    """Return the module that holds ``slot``'s forward and backward."""
    return importlib.import_module(f"nsa_backend_triton.{MODULES[slot]}")


def core_inputs(
    request: Request,
) -> tuple[torch.Tensor, Tensors, list[torch.Tensor], SlotCall]:
    """Return do, the tensors, the outputs and the call of the fused backward, as of slot_inputs.

    The three outputs are one tensor.
    """
    do, (q, *k_cmp), call = slot_inputs(dataclasses.replace(request, slot="cmp"))
    (_, *k_sel, blocks), (_, *k_win), (_, _, lse), (gates, *outputs) = (
        slot_inputs(dataclasses.replace(request, slot=slot))[1]
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
    kv_dtype = getattr(torch, request.kv_dtype or request.dtype)

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
        f"{x}_{name}": tensor(*shape, g, widths[x], kind=kv_dtype)
        for name, shape in stores.items()
        for x in "kv"
    }
    tensors["lse"] = tensor(batch, hq, rows, kind=stats)
    tensors["blocks"] = tensor(batch, rows, g, geometry.num_selected_blocks, kind=torch.int32)
    starts, lengths = tensor(batch, kind=torch.int32), tensor(batch, kind=torch.int32)
    table, rings = (tensor(batch, n, kind=torch.int32) for n in (pages, 1))
    tables, scales = BlockTables(table, table, rings, rings), None
    if request.kv_dtype is not None:
        each = (tensor(count, g, 2, kind=torch.float32) for count, _ in stores.values())
        scales = PageScales(*each)
    call = DecodeCall(geometry, 0.125, starts, lengths, tables, longest, scales=scales)
    return tensors, call


STEP_INPUTS = {
    "cmp": ("q", "k_cmp", "v_cmp"),
    "select": ("q", "k_cmp", "lse"),
    "sel": ("q", "k_sel", "v_sel", "blocks"),
    "win": ("q", "k_win", "v_win"),
    "step": ("q", "gates", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win"),
}

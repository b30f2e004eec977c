"""Peak memory told by formula (fault row 47), held against what the host code allocates, on tensors without data.

Kernels are recorded instead of run, so this needs no GPU; tests/gpu measures the same on one.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch

from nsa_core import BlockGeometry, Request
from nsa_core.contract import SlotCall
from test_sdpa_memory import Peak

pytest.importorskip("triton")
offline = importlib.import_module("nsa_backend_triton.offline")
workspace = importlib.import_module("nsa_backend_triton.workspace")

SLOTS = ("combine",)


def make_request(slot: str, seq_len: int, **fields: Any) -> Request:
    given = {"n_heads": 12, "n_kv_heads": 2, "head_dim": 64, "v_head_dim": 64, "dtype": "bfloat16", "batch": 1}
    given |= {"geometry": BlockGeometry(), "needs_grad": True, "device": "cuda", "capability": (9, 0)}
    return Request(slot=slot, seq_len=seq_len, **{**given, **fields})


def slot_inputs(request: Request) -> tuple[torch.Tensor, list[torch.Tensor], SlotCall]:
    """(do, the slot's inputs, the call), all on the meta device."""
    geometry, length, batch = request.geometry, request.seq_len, request.batch
    dtype = getattr(torch, request.dtype)
    stats = torch.float64 if dtype == torch.float64 else torch.float32
    lead = [length] if request.varlen else [batch, length]
    keys = [geometry.max_compressed(length)] if request.varlen else [batch, geometry.num_compressed(length)]

    def tensor(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=kind, device="meta")

    hq, g, dk, dv = request.n_heads, request.n_kv_heads, request.head_dim, request.v_head_dim
    q, do, lse = tensor(*lead, hq, dk), tensor(*lead, hq, dv), tensor(*lead[:-1], hq, length, kind=stats)
    k_cmp, v_cmp, k, v = tensor(*keys, g, dk), tensor(*keys, g, dv), tensor(*lead, g, dk), tensor(*lead, g, dv)
    inputs = {
        "cmp": [q, k_cmp, v_cmp],
        "select": [q, k_cmp, lse],
        "sel": [q, k, v, tensor(*lead, g, geometry.num_selected_blocks, kind=torch.int32)],
        "win": [q, k, v],
        "combine": [tensor(*lead, hq, 3, kind=stats), do, do, do],
    }[request.slot]
    cu = torch.empty(batch + 1, dtype=torch.int32, device="meta") if request.varlen else None
    return do, inputs, SlotCall(geometry, 0.125, cu, length, request.deterministic)


def allocated(request: Request) -> int:
    do, inputs, call = slot_inputs(request)
    module = importlib.import_module(f"nsa_backend_triton.{request.slot}")
    with offline.recording(90) as launches, Peak() as peak:
        out = module.forward(*inputs, call=call)
        saved = out if request.slot in ("cmp", "sel", "win") else ()
        if request.needs_grad and request.slot != "select":
            held = module.backward(do, *inputs, *saved, call=call)
            del held
    assert launches
    return peak.peak


SHAPES = {
    "reports": {},
    "fp32": {"dtype": "float32"},
    "forward": {"needs_grad": False},
    "h=1": {"n_heads": 4, "n_kv_heads": 4},
    "h=16 wide": {"n_heads": 32, "head_dim": 192, "v_head_dim": 128, "seq_len": 2048},
    "batch": {"batch": 3, "seq_len": 1000},
    "packed": {"batch": 7, "varlen": True},
    "deterministic": {"deterministic": True},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("slot", SLOTS)
def test_row_47_workspace_is_what_is_allocated(slot: str, shape: str) -> None:
    fields = dict(SHAPES[shape])
    request = make_request(slot, fields.pop("seq_len", 5000), **fields)
    told, real = getattr(workspace, slot)(request), allocated(request)
    assert abs(told - real) <= 0.05 * real, f"told {told}, allocated {real}, ratio {told / real:.3f}"


@pytest.mark.parametrize("slot", SLOTS)
def test_memory_grows_at_most_as_s(slot: str) -> None:
    points = [(math.log(s), math.log(getattr(workspace, slot)(make_request(slot, s)))) for s in (2048, 65536)]
    slope = (points[1][1] - points[0][1]) / (points[1][0] - points[0][0])
    assert slope <= 1.01, slope


LENGTHS = (1, 31, 32, 127, 1000, 1024, 4097, 8192, 65536, 1 << 20)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("slot", SLOTS)
def test_row_29_one_binary_per_kernel_over_ten_lengths(slot: str, packed: bool) -> None:
    module = importlib.import_module(f"nsa_backend_triton.{slot}")
    for shape in ({}, {"n_heads": 64, "n_kv_heads": 4, "head_dim": 192, "v_head_dim": 128}):
        per_length = {}
        for length in LENGTHS:
            do, inputs, call = slot_inputs(make_request(slot, length, varlen=packed, **shape))
            if not inputs[1].numel():
                continue  # no compressed token: the core makes no call
            with offline.recording(90) as launches:
                out = module.forward(*inputs, call=call)
                if slot != "select":
                    module.backward(do, *inputs, *(out if slot != "combine" else ()), call=call)
            per_length[length] = {made.binary for made in launches}
        assert all(per_length.values())
        assert len(per_length) >= 5
        for length, binaries in per_length.items():
            assert binaries == per_length[LENGTHS[-1]], f"{length} tokens: {sorted(binaries, key=str)}"

"""Slot functions that each break the contract in one way; tests put them into a registry."""

from __future__ import annotations

from typing import Any

import torch

from nsa_backend_sdpa import win as healthy
from nsa_core.contract import API_VERSION, BackendSpec, Reason, Request, SlotSpec


def probe(request: Request) -> list[Reason]:
    return []


def raises(*tensors: torch.Tensor, call: Any) -> Any:
    raise IndexError("tile 7 of 5")


def out_of_memory(*tensors: torch.Tensor, call: Any) -> Any:
    raise torch.OutOfMemoryError("planted")


def wrong_shape(*tensors: torch.Tensor, call: Any) -> Any:
    o, lse = healthy.forward(*tensors, call=call)
    return o[..., :-1].contiguous(), lse


def wrong_dtype(*tensors: torch.Tensor, call: Any) -> Any:
    o, lse = healthy.forward(*tensors, call=call)
    return o.double(), lse


def too_few(*tensors: torch.Tensor, call: Any) -> Any:
    return healthy.forward(*tensors, call=call)[0]


def mutates(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, call: Any) -> Any:
    result = healthy.forward(q, k, v, call=call)
    k.mul_(1.0001)
    return result


def leaves_nan(*tensors: torch.Tensor, call: Any) -> Any:
    o, lse = healthy.forward(*tensors, call=call)
    o[..., -1] = torch.nan
    return o, lse


def backward(*tensors: torch.Tensor, call: Any) -> Any:
    return healthy.backward(*tensors, call=call)


def spec(fault: str) -> BackendSpec:
    """Return a backend whose forward of win is the function ``fault`` of this module."""
    slot = SlotSpec(f"misbehaving:{fault}", "misbehaving:backward")
    return BackendSpec(f"toy-{fault}", API_VERSION, {"win": slot}, "misbehaving:probe")

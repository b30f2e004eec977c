"""A window in plain PyTorch that takes queries that begin inside a sequence."""

from __future__ import annotations

from typing import Any

import torch

from nsa_core.contract import BackendSpec, Reason, Request, SlotCall, SlotSpec

asked: list[Request] = []


def probe(request: Request) -> list[Reason]:
    asked.append(request)
    return []


def _visible(rows: int, keys: int, call: SlotCall) -> torch.Tensor:
    """Return which keys each row sees, bool [rows, keys]."""
    query = call.first_query + torch.arange(rows)[:, None]
    key = torch.arange(keys)
    seen = (key <= query) & (key > query - call.geometry.window_size)
    if call.cu_seqlens is None:
        return seen
    ends = call.cu_seqlens[1:].long()
    document = torch.searchsorted(ends, query, right=True)
    return seen & (document == torch.searchsorted(ends, key, right=True))


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: SlotCall) -> Any:
    split = q.unflatten(-2, (k.shape[-2], -1))  # [.., S, G, h, Dk]
    scores = torch.einsum("...sghd,...tgd->...ghst", split, k) * call.scale
    scores = scores.masked_fill(~_visible(q.shape[-3], k.shape[-3], call), -torch.inf)
    o = torch.einsum("...ghst,...tgd->...sghd", scores.softmax(-1), v)
    return o.flatten(-3, -2), scores.logsumexp(-1).flatten(-3, -2)


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, call: SlotCall) -> Any:
    return _attend(q, k, v, call)


def backward(do: torch.Tensor, *tensors: torch.Tensor, call: SlotCall) -> Any:
    q, k, v = tensors[:3]
    return torch.func.vjp(lambda *x: _attend(*x, call)[0], q, k, v)[1](do)


def spec(version: tuple[int, int] = (1, 1), partial: bool = True) -> BackendSpec:
    """Return the backend, with or without the declaration of partial calls."""
    slot = SlotSpec("partial_toy:forward", "partial_toy:backward", partial=partial)
    return BackendSpec("partial-toy", version, {"win": slot}, "partial_toy:probe", 500)

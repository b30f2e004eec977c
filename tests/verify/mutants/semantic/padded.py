"""Partial calls by padding: a backend without them runs the whole call, and its rows are cut out.

This needs nothing of a backend but whole calls, so it is healthy whatever the backend itself does
with queries inside a sequence. The rows before and behind the queries are zero.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from nsa_core.contract import BackendSpec, SlotCall, import_named
from nsa_core.torch_ops.schema import INPUTS

SLOTS = ("cmp", "select", "sel", "win")
_QUERY_AXIS = {"q": -3, "do": -3, "o": -3, "blocks": -3, "lse": -1}
_RESULTS = {"forward": ("o", "lse"), "backward": ("dq", "dk", "dv")}


def names_of(slot: str, phase: str) -> list[str]:
    """Return the names of the tensors that a slot function receives."""
    names = list(INPUTS[slot])
    if phase == "backward":
        return ["do", *names, *([] if slot == "combine" else ["o", "lse"])]
    return names


def key_axis(slot: str, tensors: Mapping[str, torch.Tensor], call: SlotCall) -> int:
    """Return the number of tokens on the axis of the keys."""
    if call.cu_seqlens is not None:
        return int(call.cu_seqlens[-1])
    if slot in ("sel", "win"):
        return tensors["k"].shape[-3]
    end, rows = call.first_query + tensors["q"].shape[-3], tensors["k_cmp"].shape[-3]
    geometry = call.geometry
    last = (rows - 1) * geometry.compress_stride + geometry.compress_block_size
    return max(end, last if rows else 0)


def is_partial(slot: str, phase: str, tensors: Mapping[str, torch.Tensor], call: Any) -> bool:
    """Return whether q holds only some rows of its sequences."""
    if phase == "decode" or slot not in SLOTS:
        return False
    return bool(call.first_query) or key_axis(slot, tensors, call) != tensors["q"].shape[-3]


def padded(slot: str, phase: str, healthy: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``healthy``, a slot function of whole calls, with partial calls by padding."""
    outputs = ("blocks",) if slot == "select" else _RESULTS[phase]

    def function(*tensors: torch.Tensor, call: SlotCall) -> Any:
        x = dict(zip(names_of(slot, phase), tensors))
        if not is_partial(slot, phase, x, call):
            return healthy(*tensors, call=call)
        first, rows, total = call.first_query, x["q"].shape[-3], key_axis(slot, x, call)
        for name in x.keys() & _QUERY_AXIS.keys():
            axis = _QUERY_AXIS[name]
            shape = list(x[name].shape)
            shape[axis] = total
            whole = x[name].new_zeros(shape)
            whole.narrow(axis, first, rows).copy_(x[name])
            x[name] = whole
        longest = max(call.max_seqlen, 0 if call.cu_seqlens is not None else total)
        whole_call = dataclasses.replace(call, first_query=0, max_seqlen=longest)
        results = healthy(*x.values(), call=whole_call)
        results = [results] if isinstance(results, torch.Tensor) else list(results)
        cut = [
            result.narrow(-1 if name == "lse" else -3, first, rows).contiguous()
            if name not in ("dk", "dv")
            else result
            for name, result in zip(outputs, results)
        ]
        return cut[0] if len(cut) == 1 else tuple(cut)

    return function


def padded_spec(spec: BackendSpec, module: Any) -> BackendSpec:
    """Return ``spec`` with partial calls by padding; ``module`` receives the functions."""
    slots = dict(spec.slots)
    for slot in SLOTS:
        paths = {}
        for phase in ("forward", "backward"):
            if path := getattr(slots[slot], phase):
                name = f"padded_{slot}_{phase}"
                setattr(module, name, padded(slot, phase, import_named(path)))
                paths[phase] = f"{module.__name__}:{name}"
        slots[slot] = dataclasses.replace(slots[slot], partial=True, **paths)
    return dataclasses.replace(spec, slots=slots)

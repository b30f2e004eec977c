"""Functions of a backend with one fault each, around those of sdpa."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from nsa_backend_sdpa import cmp, combine, sel, select, win
from nsa_backend_sdpa.plugin import nsa_register_backends
from nsa_core.contract import SlotCall
from nsa_core.plan.registry import Registry
from nsa_verify.problems.combination import Combination

_MODULES = {"cmp": cmp, "select": select, "sel": sel, "win": win, "combine": combine}
# (slot, its inputs by position, call) -> the faulty inputs and call
Change = Callable[[str, list[torch.Tensor], SlotCall], SlotCall]
# The inputs of each slot; a backward has do before them.
_INPUTS = {
    "cmp": ("q", "k", "v"),
    "select": ("q", "k", "lse"),
    "sel": ("q", "k", "v", "blocks"),
    "win": ("q", "k", "v"),
    "combine": ("gates", "o_cmp", "o_sel", "o_win"),
}


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault of one slot.

    Attributes:
        name: What the slot does wrong.
        slot: The slot.
        inputs: Changes the tensors in place of the list, and returns the call to use.
        outputs: Changes the results of the forward.
        grads: Changes the results of the backward; it also receives the inputs.
    """

    name: str
    slot: str
    inputs: Callable[[dict[str, torch.Tensor], SlotCall], SlotCall] = lambda tensors, call: call
    outputs: Callable[[list[torch.Tensor], dict[str, torch.Tensor]], None] = lambda out, x: None
    grads: Callable[[list[torch.Tensor], dict[str, torch.Tensor]], None] = lambda out, x: None

    def combination(self) -> Combination:
        """Return a combination that runs this fault in its slot and sdpa in the others."""
        backend = "planted_" + "".join(c if c.isalnum() else "_" for c in self.name)
        spec = nsa_register_backends()
        own = dataclasses.replace(
            spec.slots[self.slot],
            forward=f"generated_faults:{backend}_forward",
            backward=f"generated_faults:{backend}_backward" if self.slot != "select" else None,
        )
        globals()[f"{backend}_forward"] = self._forward
        globals()[f"{backend}_backward"] = self._backward
        planted = dataclasses.replace(spec, name=backend, slots={self.slot: own})
        registry = Registry(()).with_backend(spec).with_backend(planted)
        return Combination({self.slot: backend}, "cpu", registry)

    def _forward(self, *tensors: torch.Tensor, call: SlotCall) -> Any:
        named = dict(zip(_INPUTS[self.slot], tensors, strict=True))
        call = self.inputs(named, call)
        result = _MODULES[self.slot].forward(*named.values(), call=call)
        results = [result] if isinstance(result, torch.Tensor) else list(result)
        self.outputs(results, named)
        return results[0] if isinstance(result, torch.Tensor) else tuple(results)

    def _backward(self, do: torch.Tensor, *tensors: torch.Tensor, call: SlotCall) -> Any:
        names = _INPUTS[self.slot]
        named = dict(zip(names, tensors)) | {"do": do}
        original = dict(named)
        call = self.inputs(named, call)
        do = named.pop("do")
        rest = tensors[len(names) :]
        grads = list(_MODULES[self.slot].backward(do, *named.values(), *rest, call=call))
        self.grads(grads, original)
        return tuple(grads)


def _scale(change: Callable[[float, int], float]) -> Callable[..., SlotCall]:
    def changed(tensors: dict[str, torch.Tensor], call: SlotCall) -> SlotCall:
        return dataclasses.replace(call, scale=change(call.scale, tensors["q"].shape[-1]))

    return changed


def _drop_entries(tensors: dict[str, torch.Tensor], call: SlotCall) -> SlotCall:
    tensors["blocks"] = tensors["blocks"][..., :16].contiguous()
    return call


def _drop_selected(results: list[torch.Tensor], inputs: dict[str, torch.Tensor]) -> None:
    results[0] = results[0].clone()
    results[0][..., 16:] = -1


def _other_heads(tensors: dict[str, torch.Tensor], call: SlotCall) -> SlotCall:
    for name in set(tensors) & {"k", "v"}:
        tensors[name] = tensors[name].clone()
        tensors[name][..., 4:, :] = tensors[name][..., 3:4, :]
    return call


def _other_entry(tensors: dict[str, torch.Tensor], call: SlotCall) -> SlotCall:
    if tensors["k"].dim() == 4:
        tensors["k"] = tensors["k"].clone()
        tensors["k"][4:] = tensors["k"][3:4]
    return call


def _fp16_error(results: list[torch.Tensor], inputs: dict[str, torch.Tensor]) -> None:
    if results[0].dtype == torch.float16:
        results[0] = results[0] * 1.02


def _fp16_gradient_error(results: list[torch.Tensor], inputs: dict[str, torch.Tensor]) -> None:
    if results[1].dtype == torch.float16:
        results[1] = results[1] * 1.02


def _geometry(**changes: Callable[[int], int]) -> Callable[..., SlotCall]:
    def changed(tensors: dict[str, torch.Tensor], call: SlotCall) -> SlotCall:
        fields = {name: change(getattr(call.geometry, name)) for name, change in changes.items()}
        return dataclasses.replace(call, geometry=dataclasses.replace(call.geometry, **fields))

    return changed


def _truncate_blocks(tensors: dict[str, torch.Tensor], call: SlotCall) -> SlotCall:
    tensors["blocks"] = tensors["blocks"].to(torch.int32)
    return call


def _clamp_gates(tensors: dict[str, torch.Tensor], call: SlotCall) -> SlotCall:
    tensors["gates"] = tensors["gates"].clamp(0, 1)
    return call


def _as_contiguous(name: str) -> Callable[..., SlotCall]:
    def changed(tensors: dict[str, torch.Tensor], call: SlotCall) -> SlotCall:
        x = tensors.get(name)
        if x is not None and x.untyped_storage().nbytes() >= x.numel() * x.element_size():
            strides = torch.empty(x.shape, device="meta").stride()
            tensors[name] = x.as_strided(x.shape, strides, 0).clone()
        return call

    return changed


def _sum_over_expanded(results: list[torch.Tensor], inputs: dict[str, torch.Tensor]) -> None:
    for axis in range(inputs["k"].dim()):
        if inputs["k"].stride(axis) == 0 and inputs["k"].shape[axis] > 1:
            results[1] = results[1].sum(axis, keepdim=True).expand_as(results[1]).contiguous()


def _with_five_heads(results: list[torch.Tensor], inputs: dict[str, torch.Tensor]) -> None:
    """Results of groups of five query heads are wrong."""
    if inputs["q"].shape[-2] == 5 * inputs["k"].shape[-2]:
        wrong = results[0] - 1 if results[0].dtype == torch.int32 else results[0] * 1.05
        results[0] = wrong.clamp(min=-1) if results[0].dtype == torch.int32 else wrong


def _with_10_to_16_heads(results: list[torch.Tensor], inputs: dict[str, torch.Tensor]) -> None:
    """Gradients of keys are wrong for these group sizes."""
    if 10 <= inputs["q"].shape[-2] // inputs["k"].shape[-2] <= 16:
        results[1] = results[1] * 0.9


def _only_low_blocks(results: list[torch.Tensor], inputs: dict[str, torch.Tensor]) -> None:
    results[0] = torch.where(results[0] < 128, results[0], -1)


def _run_takes_a_token(tensors: dict[str, torch.Tensor], call: SlotCall) -> SlotCall:
    """The first of several empty documents takes the last token of the document before them."""
    if call.cu_seqlens is None:
        return call
    bounds = call.cu_seqlens.tolist()
    for i in range(1, len(bounds) - 2):
        if bounds[i - 1] < bounds[i] == bounds[i + 1] == bounds[i + 2]:
            bounds[i] -= 1
    return dataclasses.replace(call, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))


def _finite_nan(results: list[torch.Tensor], inputs: dict[str, torch.Tensor]) -> None:
    results[0] = results[0].nan_to_num()


def _spread_nan(results: list[torch.Tensor], inputs: dict[str, torch.Tensor]) -> None:
    if bool(results[0].isnan().any()):
        results[0] = results[0].clone()
        results[0].view(-1)[0] = torch.nan


BRANCHES = ("cmp", "sel", "win")
FAULTS = (
    *(
        Fault(f"{slot} ignores a given scale", slot, _scale(lambda scale, width: width**-0.5))
        for slot in (*BRANCHES, "select")
    ),
    *(
        Fault(f"{slot} takes a negative scale as positive", slot, _scale(lambda s, width: abs(s)))
        for slot in (*BRANCHES, "select")
    ),
    Fault("sel drops blocks from the 17th on", "sel", _drop_entries),
    Fault("select drops blocks from the 17th on", "select", outputs=_drop_selected),
    *(
        Fault(f"{slot} reads another kv head from the fifth on", slot, _other_heads)
        for slot in (*BRANCHES, "select")
    ),
    *(
        Fault(f"{slot} reads batch entry 3 from the fifth on", slot, _other_entry)
        for slot in (*BRANCHES, "select")
    ),
    *(
        Fault(f"{slot} has an error in fp16 only", slot, outputs=_fp16_error)
        for slot in (*BRANCHES, "combine")
    ),
    *(
        Fault(f"{slot} has a gradient error in fp16 only", slot, grads=_fp16_gradient_error)
        for slot in (*BRANCHES, "combine")
    ),
    Fault(
        "win ignores windows beyond 512",
        "win",
        _geometry(window_size=lambda w: w if w <= 512 else 1 << 30),
    ),
    Fault("win caps windows at 512", "win", _geometry(window_size=lambda w: min(w, 512))),
    Fault("select ignores init_blocks", "select", _geometry(init_blocks=lambda n: min(n, 1))),
    Fault("select ignores local_blocks", "select", _geometry(local_blocks=lambda n: min(n, 2))),
    Fault("sel truncates int64 blocks", "sel", _truncate_blocks),
    Fault("combine clamps gates", "combine", _clamp_gates),
    *(
        Fault(f"{slot} reads dO as contiguous", slot, _as_contiguous("do"))
        for slot in (*BRANCHES, "combine")
    ),
    *(Fault(f"{slot} reads v as contiguous", slot, _as_contiguous("v")) for slot in BRANCHES),
    *(
        Fault(f"{slot} sums gradients of expanded keys", slot, grads=_sum_over_expanded)
        for slot in BRANCHES
    ),
    *(
        Fault(f"{slot} is wrong with five query heads a group", slot, outputs=_with_five_heads)
        for slot in (*BRANCHES, "select")
    ),
    *(
        Fault(f"{slot} has a wrong dk in groups of 10 to 16", slot, grads=_with_10_to_16_heads)
        for slot in BRANCHES
    ),
    Fault("select drops blocks from the 128th on", "select", outputs=_only_low_blocks),
    *(
        Fault(f"{slot} gives a token to a run of empty documents", slot, _run_takes_a_token)
        for slot in ("sel", "win")
    ),
    *(Fault(f"{slot} replaces NaN", slot, outputs=_finite_nan) for slot in BRANCHES),
    *(Fault(f"{slot} spreads NaN", slot, outputs=_spread_nan) for slot in BRANCHES),
)

"""Schemas: the arguments and results of slot operators, and the definition of an operator."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from nsa_core.contract import SLOTS, SlotCall
from nsa_core.dtypes import stats_dtype
from nsa_core.layout import BlockGeometry
from nsa_core.torch_ops.backend_call import TensorSpec
from nsa_core.torch_ops.tensor_checks import CALLS, TensorOrMetadata

INPUTS = {slot: tuple(CALLS[slot]) for slot in SLOTS}
DIFFERENTIABLE = {
    slot: tuple(n for n in names if n not in ("blocks", "lse")) for slot, names in INPUTS.items()
}
DIFFERENTIABLE["select"] = ()  # the selected block indices have no gradient
TAIL = (
    "Tensor? cu_seqlens, SymInt max_seqlen, float scale, int[] geometry, bool deterministic,"
    " SymInt? first_query"
)


class Tail(NamedTuple):
    """The arguments TAIL of an operator, after its tensors.

    Attributes:
        cu_seqlens: int32 [documents + 1], for packed calls.
        max_seqlen: Length of the longest sequence, or an upper bound.
        scale: Softmax scale.
        geometry: The block sizes, as BlockGeometry.as_ints() gives them.
        deterministic: Whether every run must give the same bits.
        first_query: Position of row 0 of q; None: the call has whole sequences.
    """

    cu_seqlens: torch.Tensor | None
    max_seqlen: int
    scale: float
    geometry: Sequence[int]
    deterministic: bool
    first_query: int | None

    def call(self) -> SlotCall:
        """Return the arguments as backends take them.

        Every call of a backend passes here, inside the operator: a graph that was captured or
        exported with contiguous boundaries may run with others, and replays may find new values in
        them.
        """
        return SlotCall(
            BlockGeometry.from_ints(self.geometry),
            self.scale,
            None if self.cu_seqlens is None else self.cu_seqlens.contiguous(),
            self.max_seqlen,
            self.deterministic,
            self.first_query or 0,
        )


def output_specs(
    slot: str, tensors: Sequence[TensorOrMetadata], n_selected: int
) -> list[TensorSpec]:
    """Return the (shape, dtype) of each output of ``slot`` for the inputs ``tensors``."""
    if slot == "combine":
        return [(tuple(tensors[1].shape), tensors[1].dtype)]
    q = tensors[0]
    *lead, heads, _ = q.shape
    if slot == "select":
        return [((*lead, tensors[1].shape[-2], n_selected), torch.int32)]
    lse = (*lead[:-1], heads, lead[-1])
    return [((*lead, heads, tensors[2].shape[-1]), q.dtype), (lse, stats_dtype(q.dtype))]


def is_empty(slot: str, tensors: Sequence[TensorOrMetadata]) -> bool:
    """Return whether the call computes nothing: no queries, no compressed tokens, or n = 0."""
    no_keys = (slot == "cmp" and tensors[1].shape[-3] == 0) or (
        slot == "sel" and tensors[3].shape[-1] == 0
    )
    return 0 in tensors[0].shape or no_keys


def operator_namespace(backend: str) -> str:
    """Return the namespace of a backend's operators, ``nsa_<backend>``."""
    return "nsa_" + re.sub(r"[^0-9a-zA-Z_]", "_", backend)


def define(
    lib: torch.library.Library,
    schema: str,
    function: Callable[..., Any],
    fake: Callable[..., Any],
) -> Any:
    """Define an operator in ``lib``; return its overload.

    Args:
        lib: The library.
        schema: "name(arguments) -> results".
        function: Its implementation.
        fake: Its shape inference.
    """
    name = schema[: schema.index("(")]
    lib.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    lib.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{lib.ns}::{name}", fake, lib=lib)
    return getattr(getattr(torch.ops, lib.ns), name).default


def tensors_schema(names: Iterable[str]) -> str:
    """Return the arguments ``names`` of a schema, all tensors."""
    return ", ".join(f"Tensor {name}" for name in names)


def results_schema(count: int) -> str:
    """Return the results of a schema, ``count`` tensors."""
    return "Tensor" if count == 1 else "(" + ", ".join(["Tensor"] * count) + ")"

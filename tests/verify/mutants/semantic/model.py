"""A semantic mutant, the view of a slot call that its fault receives, and its registration."""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch

from nsa_core.contract import SLOTS, BackendSpec, SlotSpec, import_named
from nsa_core.plan.registry import discover
from nsa_verify.problems.combination import Combination
from semantic.padded import is_partial, names_of, padded_spec

HEALTHY = "sdpa"
# Faults that raised: (name, error). The tests demand that there are none.
RAISED: list[tuple[str, Exception]] = []
FUNCTIONS = ModuleType("semantic_mutant_functions")
sys.modules[FUNCTIONS.__name__] = FUNCTIONS


class Piece(NamedTuple):
    """One sequence of a dense call, or one document of a packed call.

    Attributes:
        index: Its number in the batch, or among the documents.
        rows: Index of its tokens in q, o and the other tensors with one row per token.
        keys: Index of its keys: tokens for sel and win, compressed tokens for cmp and select.
        length: Number of its tokens.
        lse_rows: Index of its columns in lse.
    """

    index: int
    rows: Any
    keys: Any
    length: int
    lse_rows: Any


@dataclasses.dataclass(frozen=True)
class View:
    """One call of a slot function.

    Attributes:
        slot: The slot.
        phase: "forward", "backward" or "decode".
        tensors: Its inputs by name; the backward's also hold do, o and lse.
        call: A SlotCall or a DecodeCall.
        function: The healthy function.
    """

    slot: str
    phase: str
    tensors: dict[str, torch.Tensor]
    call: Any
    function: Callable[..., Any]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def run(self, *, geometry: dict[str, int] | None = None, **changes: Any) -> list[torch.Tensor]:
        """Run the healthy function, with other tensors, geometry fields or fields of the call."""
        fields = {name: value for name, value in changes.items() if name not in self.tensors}
        if geometry:
            fields["geometry"] = dataclasses.replace(self.call.geometry, **geometry)
        call = dataclasses.replace(self.call, **fields) if fields else self.call
        tensors = [changes.get(name, tensor) for name, tensor in self.tensors.items()]
        results = self.function(*tensors, call=call)
        return [results] if isinstance(results, torch.Tensor) else list(results)

    @property
    def partial(self) -> bool:
        """Whether q holds only some rows of its sequences."""
        return is_partial(self.slot, self.phase, self.tensors, self.call)

    # sizes
    @property
    def first(self) -> torch.Tensor:
        """The tensor whose shape has the tokens: q, or o_cmp of combine."""
        return self.tensors["o_cmp" if self.slot == "combine" else "q"]

    @property
    def dtype(self) -> torch.dtype:
        return self.first.dtype

    @property
    def packed(self) -> bool:
        return self.phase != "decode" and self.first.dim() == 3

    @property
    def batch(self) -> int:
        """B of a dense or a decode call, 1 of a packed call."""
        return 1 if self.packed else self.first.shape[0]

    @property
    def tokens(self) -> int:
        """S, or T if packed, or m of a decode call."""
        return self.first.shape[-3]

    @property
    def heads(self) -> int:
        return self.first.shape[-2]

    @property
    def key_name(self) -> str:
        return "k_cmp" if self.slot in ("cmp", "select") else "k"

    @property
    def value_name(self) -> str:
        return "v_cmp" if self.slot == "cmp" else "v"

    @property
    def branch(self) -> str:
        """The branch whose block table a decode call reads."""
        return "cmp" if self.slot == "select" else self.slot

    @property
    def groups(self) -> int:
        return self.tensors[self.key_name].shape[-2]

    @property
    def per_group(self) -> int:
        """h, the query heads of a group."""
        return self.heads // self.groups

    @property
    def dk(self) -> int:
        return self.tensors["q"].shape[-1]

    @property
    def dv(self) -> int:
        name = "o_cmp" if self.slot == "combine" else self.value_name
        return self.tensors[name].shape[-1]

    @property
    def geometry(self) -> Any:
        return self.call.geometry

    @property
    def size(self) -> int:
        """l, tokens of a compression block."""
        return int(self.geometry.compress_block_size)

    @property
    def stride(self) -> int:
        """d, tokens between two compression blocks."""
        return int(self.geometry.compress_stride)

    @property
    def block(self) -> int:
        """l', tokens of a selection block."""
        return int(self.geometry.select_block_size)

    @property
    def n(self) -> int:
        return int(self.geometry.num_selected_blocks)

    @property
    def window(self) -> int:
        return int(self.geometry.window_size)

    @property
    def scale(self) -> float:
        return float(self.call.scale)

    @property
    def default_scale(self) -> float:
        return float(self.dk**-0.5)

    @property
    def boundaries(self) -> list[int]:
        """The values of cu_seqlens of a packed call."""
        values: list[int] = self.call.cu_seqlens.tolist()
        return values

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence or document; of a decode call, after the step."""
        if self.phase == "decode":
            return [int(x) for x in self.call.lengths.tolist()]
        if self.packed:
            return [b - a for a, b in zip(self.boundaries, self.boundaries[1:])]
        return [self.tokens] * self.batch

    # decode
    @property
    def starts(self) -> list[int]:
        """Tokens of each sequence before the step."""
        return [int(x) for x in self.call.starts.tolist()]

    @property
    def new_rows(self) -> int:
        """The most tokens that the step adds to a sequence."""
        return max(b - a for a, b in zip(self.starts, self.lengths))

    @property
    def page_size(self) -> int:
        """Tokens of a page of the cache."""
        rows = self[self.key_name].shape[1]
        return rows * self.stride if self.slot in ("cmp", "select") else rows

    def pieces(self) -> Iterator[Piece]:
        """Yield the sequences or documents of a forward or backward call."""
        compressed = self.slot in ("cmp", "select")
        first_key = 0
        for index, length in enumerate(self.lengths):
            count = self.geometry.num_compressed(length) if compressed else length
            if not self.packed:
                yield Piece(index, index, (index, slice(0, count)), length, index)
                continue
            start = self.boundaries[index]
            rows = slice(start, start + length)
            keys = slice(first_key, first_key + count) if compressed else rows
            first_key += count
            yield Piece(index, rows, keys, length, (slice(None), rows))


Fault = Callable[[View], list[torch.Tensor]]
Condition = Callable[[View], bool]


@dataclasses.dataclass(frozen=True)
class SemanticMutant:
    """One fault of a slot function.

    Attributes:
        name: Slot, phase and description.
        slot: The slot.
        phase: "forward", "backward" or "decode".
        fault: Computes the results of a call with the fault.
        when: Whether the fault can change a call's results; elsewhere the healthy function runs.
        partial: Whether the fault is one of partial calls, and not one of whole calls.
    """

    name: str
    slot: str
    phase: str
    fault: Fault
    when: Condition
    partial: bool = False

    def acts(self, view: View) -> bool:
        """Return whether the fault can change the results of the call of ``view``."""
        return self.partial == view.partial and self.when(view)

    @property
    def backend(self) -> str:
        """The name under which the mutant is registered; a backend's name is short."""
        digest = hashlib.sha256(self.name.encode()).hexdigest()[:12]
        return f"mutant_{self.slot}_{self.phase}_{digest}"


def mutant(slot: str, phase: str, text: str, fault: Fault, when: Condition | None = None) -> Any:
    """Return the mutant of ``slot`` and ``phase`` that ``text`` describes."""
    return SemanticMutant(f"{slot} {phase}: {text}", slot, phase, fault, when or (lambda c: True))


def mutants(
    phases: dict[str, str], text: str, fault: Fault, when: Condition | None = None
) -> Iterator[Any]:
    """Yield the mutant that ``text`` describes for each slot and its ``phases``."""
    for slot, names in phases.items():
        for phase in names.split():
            yield mutant(slot, phase, text, fault, when)


def partial_mutant(slot: str, phase: str, text: str, fault: Fault, when: Condition) -> Any:
    """Return the mutant of partial calls that ``text`` describes."""
    one = mutant(slot, phase, f"partial: {text}", fault, when)
    return dataclasses.replace(one, partial=True)


def healthy_spec() -> BackendSpec:
    """Return the spec of the healthy backend, without promises about memory and event names.

    Its partial calls are padded whole calls.
    """
    spec = discover().get(HEALTHY).spec
    assert spec is not None
    slots = {
        slot: dataclasses.replace(s, workspace=None, evidence=()) for slot, s in spec.slots.items()
    }
    spec = dataclasses.replace(spec, name="padded", slots=slots, priority=0, rank=None)
    return padded_spec(spec, FUNCTIONS)


def healthy_combination() -> Combination:
    """Return the combination that runs the healthy backend in every slot."""
    spec = healthy_spec()
    return Combination(dict.fromkeys(SLOTS, spec.name), registry=discover().with_backend(spec))


def view_of(
    slot: str, phase: str, healthy: Any, tensors: tuple[torch.Tensor, ...], call: Any
) -> View:
    """Return the view of one call of ``healthy``."""
    return View(slot, phase, dict(zip(names_of(slot, phase), tensors)), call, healthy)


def wrapped(one: SemanticMutant, healthy: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``healthy`` with the fault of a mutant."""

    def function(*tensors: torch.Tensor, call: Any) -> Any:
        view = view_of(one.slot, one.phase, healthy, tensors, call)
        if not one.acts(view):
            return healthy(*tensors, call=call)
        try:
            results = one.fault(view)
        except Exception as error:
            RAISED.append((one.name, error))  # a fault computes wrong numbers, it does not raise
            raise
        return results[0] if len(results) == 1 else tuple(results)

    return function


def faulty_spec(one: SemanticMutant) -> BackendSpec:
    """Return the spec of a backend that has the mutant's fault in one function."""
    spec = healthy_spec()
    slot = spec.slots[one.slot]
    path = getattr(slot, one.phase)
    setattr(FUNCTIONS, one.backend, wrapped(one, import_named(path)))
    faulty: SlotSpec = dataclasses.replace(
        slot, **{one.phase: f"{FUNCTIONS.__name__}:{one.backend}"}
    )
    return dataclasses.replace(spec, name=one.backend, slots={**spec.slots, one.slot: faulty})

"""GeneratedCase: one slot call, described by values that fit on a line and come back from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import ClassVar

from nsa_core.contract import SLOTS
from nsa_verify.cases import Case
from nsa_verify.generated.line import Line, below

LAYOUTS = ("plain", "transposed", "gaps", "offset", "expanded", "strided")
BLOCKS = ("sorted", "sorted64", "messy", "messy64", "none")
SCORES = ("normal", "tiny", "zero", "large")
VALUES = ("normal", "small", "outlier", "steep")
GATES = ("sigmoid", "negative", "above1", "zero")
POISONS = ("none", "nan_q", "nan_k", "nan_v", "inf_v", "nan_do")


@dataclasses.dataclass(frozen=True)
class GeneratedCase(Line):
    """One call of one slot, forward and backward.

    Attributes:
        slot: The slot.
        tokens: Tokens of each sequence of a dense case.
        batch: Sequences of a dense case.
        documents: Lengths of the packed documents; empty in a dense case.
        layout: Memory layout of the inputs, one of LAYOUTS.
        do_layout: Memory layout of the gradient of o.
        blocks: Kind of the blocks that sel receives, one of BLOCKS.
        scores: Size of the scores, one of SCORES.
        values: Kind of the values, one of VALUES.
        gates: Kind of the gates, one of GATES.
        poison: The NaN or Inf that a second run receives, one of POISONS.
    """

    FIRST: ClassVar[str] = "slot"
    CHOICES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "slot": SLOTS,
        "layout": LAYOUTS,
        "do_layout": LAYOUTS,
        "blocks": BLOCKS,
        "scores": SCORES,
        "values": VALUES,
        "gates": GATES,
        "poison": POISONS,
    }
    FROM_ZERO: ClassVar[tuple[str, ...]] = ("tokens", "batch")
    LISTS: ClassVar[tuple[str, ...]] = ("documents",)

    slot: str
    tokens: int = 8
    batch: int = 1
    documents: tuple[int, ...] = ()
    layout: str = "plain"
    do_layout: str = "plain"
    blocks: str = "sorted"
    scores: str = "normal"
    values: str = "normal"
    gates: str = "sigmoid"
    poison: str = "none"

    @property
    def packed(self) -> bool:
        """Whether the tensors are packed documents."""
        return bool(self.documents)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Length of each document, or of each sequence of the batch."""
        return self.documents or (self.tokens,) * self.batch

    @property
    def rows(self) -> int:
        """Query rows times kv heads: the work of the oracle."""
        return sum(self.lengths) * self.groups

    def as_case(self) -> Case:
        """Return a case with the name, the configuration and the lengths of this one."""
        lengths = self.documents or (self.tokens,)
        batch = 1 if self.packed else self.batch
        return Case(self.text(), self.config, lengths, batch=batch, packed=self.packed)

    def simpler(self) -> Iterator[GeneratedCase]:
        """Yield simpler neighbours, those that save most first. They may be invalid."""
        length = () if self.packed else ("tokens", "batch")
        if self.packed:
            yield dataclasses.replace(self, documents=(), tokens=max(self.documents), batch=1)
            for index, document in enumerate(self.documents):
                before, after = self.documents[:index], self.documents[index + 1 :]
                if before or after:
                    yield dataclasses.replace(self, documents=(*before, *after))
                for smaller in below(document, 0):
                    yield dataclasses.replace(self, documents=(*before, smaller, *after))
        without = ("documents", "tokens", "n", "w", *(("batch",) if self.packed else ()))
        yield from self.with_defaults(("batch", "groups", "h"), without)
        yield from self.with_smaller(*length, "groups", "h", "n", "w", "dk", "dv")

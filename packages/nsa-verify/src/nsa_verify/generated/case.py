"""GeneratedCase: one slot call, described by values that fit on a line and come back from it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import ClassVar

from nsa_core.contract import SLOTS
from nsa_core.errors import InvalidInput
from nsa_verify.generated.line import Line, below
from nsa_verify.problems.cases import Case

LAYOUTS = ("plain", "transposed", "gaps", "offset", "expanded", "strided")
BLOCKS = ("sorted", "sorted64", "messy", "messy64", "messy16", "messy8", "none", "selected")
SCORES = ("normal", "tiny", "zero", "large")
VALUES = ("normal", "small", "outlier", "steep")
GATES = ("sigmoid", "negative", "above1", "zero")
POISONS = ("none", "nan_q", "nan_k", "nan_v", "inf_v", "nan_do")
METADATA = ("dense", "strided")
RECOMPUTE = ("off", "on")
PARTIAL_CHECK = "partial queries"  # the check of cases of a slot with first_query
# The inputs that have a gradient, of each slot and of the functions that consist of slots.
_OF_QKV = ("q", "k", "v")
GRADIENTS: Mapping[str, tuple[str, ...]] = {
    "cmp": ("q", "k_cmp", "v_cmp"),
    "select": (),
    "sel": _OF_QKV,
    "win": _OF_QKV,
    "combine": ("gates", "o_cmp", "o_sel", "o_win"),
    "core": ("q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "gates"),
    "block_attention": _OF_QKV,
}


@dataclasses.dataclass(frozen=True)
class GeneratedCase(Line):
    """One call of one slot, forward and backward.

    Attributes:
        slot: The slot; "core" for nsa_attention, which runs all slots, and "block_attention" for
            the function of this name, which runs sel.
        tokens: Tokens of each sequence of a dense case.
        batch: Sequences of a dense case.
        documents: Lengths of the packed documents; empty in a dense case.
        first_query: Position of row 0 of q on the axis of the keys, for queries that begin inside a
            sequence; None: q holds every row of that axis.
        queries: Rows of q from ``first_query`` on; None: all of them. The keys behind the last
            query are extra keys, which no query sees.
        layout: Memory layout of the inputs, one of LAYOUTS.
        do_layout: Memory layout of the gradient of o.
        blocks: Kind of the blocks that sel receives, one of BLOCKS; "selected", in core only: those
            that select returns.
        metadata: "strided": cu_seqlens is a column of a table, and so is each list of blocks.
        scores: Size of the scores, one of SCORES.
        values: Kind of the values, one of VALUES.
        gates: Kind of the gates, one of GATES.
        poison: The NaN or Inf that a second run receives, one of POISONS.
        frozen: Inputs that need no gradient in a second run.
        recompute: The argument of core in that run, "on" or "off".
    """

    FIRST: ClassVar[str] = "slot"
    CHOICES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "slot": tuple(GRADIENTS),
        "layout": LAYOUTS,
        "do_layout": LAYOUTS,
        "blocks": BLOCKS,
        "scores": SCORES,
        "values": VALUES,
        "gates": GATES,
        "poison": POISONS,
        "metadata": METADATA,
        "recompute": RECOMPUTE,
    }
    FROM_ZERO: ClassVar[tuple[str, ...]] = ("tokens", "batch", "first_query", "queries")
    LISTS: ClassVar[tuple[str, ...]] = ("documents",)
    NAMES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "frozen": tuple(dict.fromkeys(itertools.chain(*GRADIENTS.values())))
    }

    slot: str
    tokens: int = 8
    batch: int = 1
    documents: tuple[int, ...] = ()
    first_query: int | None = None
    queries: int | None = None
    layout: str = "plain"
    do_layout: str = "plain"
    blocks: str = "sorted"
    scores: str = "normal"
    values: str = "normal"
    gates: str = "sigmoid"
    poison: str = "none"
    metadata: str = "dense"
    frozen: tuple[str, ...] = ()
    recompute: str = "off"

    @property
    def kernel(self) -> str:
        """The slot whose inputs and results those of the call are; core has no such slot."""
        return "sel" if self.slot == "block_attention" else self.slot

    @property
    def packed(self) -> bool:
        """Whether the tensors are packed documents."""
        return bool(self.documents)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Length of each document, or of each sequence of the batch."""
        return self.documents or (self.tokens,) * self.batch

    @property
    def check_name(self) -> str:
        """Name of the check that runs the case."""
        whole = self.first_query is None or self.slot not in SLOTS
        return f"generated {self.slot}" if whole else PARTIAL_CHECK

    @property
    def axis(self) -> int:
        """Length of the axis of the keys: of each dense sequence, or of all documents together."""
        return sum(self.documents) if self.packed else self.tokens

    @property
    def query_rows(self) -> tuple[int, int]:
        """The rows of the axis of the keys that q holds, as (first row, row behind the last)."""
        first = self.first_query or 0
        return first, self.axis if self.queries is None else first + self.queries

    @property
    def query_spans(self) -> list[tuple[int, int, int]]:
        """The rows of q of each document or sequence.

        Each is (first row, row behind the last, position of the first row in the document).
        """
        first, end = self.query_rows
        if not self.packed:
            return [(0, end - first, first)] * self.batch
        spans, start = [], 0
        for length in self.documents:
            begin, stop = max(first, start), min(end, start + length)
            spans.append((begin - first, max(stop, begin) - first, begin - start))
            start += length
        return spans

    @property
    def rows(self) -> int:
        """Query rows times kv heads: the work of the oracle."""
        return sum(end - begin for begin, end, _ in self.query_spans) * self.groups

    def check(self) -> None:
        """Raise InvalidInput if the sizes do not fit together."""
        super().check()
        if self.first_query is None and self.queries is not None:
            raise InvalidInput(
                f"case: queries={self.queries} needs first_query, such as first_query=0"
            )
        if self.first_query is not None and self.slot in ("combine", "core"):
            raise InvalidInput(
                f"case: {self.slot} takes whole sequences; leave first_query out, or choose another"
                " slot"
            )
        self._check_choices()
        first, end = self.query_rows
        if not 0 <= first <= end <= self.axis:
            raise InvalidInput(
                f"case: the queries {first} .. {end} must lie in the {self.axis} rows of keys;"
                " change first_query and queries, or tokens and documents"
            )

    def _check_choices(self) -> None:
        """Raise InvalidInput if a field has a value that the slot does not take."""
        wrong = []
        names = GRADIENTS[self.slot]
        if set(self.frozen) - set(names) or (names and not set(names) - set(self.frozen)):
            wrong.append(
                f"frozen must name some but not all of {', '.join(names) or 'no inputs'}, got"
                f" {'+'.join(self.frozen)}"
            )
        for field, value, slot in (
            ("recompute", "on", "core"),
            ("blocks", "selected", "core"),
            ("blocks", "messy8", "block_attention"),
            ("blocks", "messy16", "block_attention"),
        ):
            if getattr(self, field) == value and self.slot != slot:
                wrong.append(f"{field}={value} needs slot={slot}, got slot={self.slot}")
        if wrong:
            raise InvalidInput("case: " + "; ".join(wrong))

    def as_case(self) -> Case:
        """Return a case with the name, the configuration and the lengths of this one."""
        lengths = self.documents or (self.tokens,)
        batch = 1 if self.packed else self.batch
        return Case(self.text(), self.config, lengths, batch=batch, packed=self.packed)

    def simpler(self) -> Iterator[GeneratedCase]:
        """Yield simpler neighbours, those that save most first. They may be invalid."""
        if self.first_query is not None:
            yield dataclasses.replace(self, first_query=None, queries=None)
            yield from self._simpler_cuts()
        length = () if self.packed else ("tokens", "batch")
        if self.packed:
            yield dataclasses.replace(self, documents=(), tokens=max(self.documents), batch=1)
            for index, document in enumerate(self.documents):
                before, after = self.documents[:index], self.documents[index + 1 :]
                if before or after:
                    yield dataclasses.replace(self, documents=(*before, *after))
                for smaller in below(document, 0):
                    yield dataclasses.replace(self, documents=(*before, smaller, *after))
        for name in self.frozen if len(self.frozen) > 1 else ():
            yield dataclasses.replace(self, frozen=tuple(x for x in self.frozen if x != name))
        fixed = ("documents", "tokens", "n", "w", "first_query", "queries")
        without = (*fixed, *(("batch",) if self.packed else ()))
        yield from self.with_defaults(("batch", "groups", "h"), without)
        yield from self.with_smaller(*length, "groups", "h", "n", "w", "dk", "dv")

    def _simpler_cuts(self) -> Iterator[GeneratedCase]:
        """Yield neighbours with fewer queries, fewer keys, or fewer documents around them."""
        first, end = self.query_rows
        for queries in below(end - first, 0):
            yield dataclasses.replace(self, queries=queries)
        if not self.packed:
            if end < self.tokens:
                yield dataclasses.replace(self, tokens=end, queries=end - first)
            for smaller in below(first, 0):
                tokens = self.tokens - first + smaller
                yield dataclasses.replace(self, first_query=smaller, tokens=tokens)
            return
        for smaller in below(first, 0):
            yield dataclasses.replace(self, first_query=smaller)
        start = 0
        for index, length in enumerate(self.documents):
            others = (*self.documents[:index], *self.documents[index + 1 :])
            start += length
            if start <= first and length and others:  # a document before the queries
                yield dataclasses.replace(self, documents=others, first_query=first - length)

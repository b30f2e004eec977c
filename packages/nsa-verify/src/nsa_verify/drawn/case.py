"""SlotCase: one call of a slot, or of a function that consists of slots, forward and backward."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import ClassVar

from nsa_core.contract import SLOTS
from nsa_verify.drawn.line import Drawn, below, integer, integers, one_of, some_of, switch

LAYOUTS = ("plain", "transposed", "gaps", "offset", "expanded", "strided")
BLOCKS = ("sorted", "sorted64", "messy", "messy64", "messy16", "messy8", "none", "selected")
SCORES = ("normal", "tiny", "zero", "large")
VALUES = ("normal", "small", "outlier", "steep")
GATES = ("sigmoid", "negative", "above1", "zero")
POISONS = ("none", "nan_q", "nan_k", "nan_v", "inf_v", "nan_do")
METADATA = ("dense", "strided")
# The limit of 0.1 % on exchanged sets of blocks is for thousands of sets with random scores. In
# generated cases, which have fewer, this number passes if the regret is within its limit.
EXCHANGES = 1
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
# The tensors that may have a NaN or Inf, if not q, k, v and do; combine has it in o_win.
_POISONED: Mapping[str, tuple[str, ...]] = {"select": ("q", "k"), "combine": ("v",), "core": ()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotCase(Drawn):
    """One call of one slot, forward and backward.

    The kind is the slot; "core" for nsa_attention, which runs all slots, and "block_attention" for
    the function of this name, which runs sel.

    Attributes:
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
        recompute: The argument of core in that run.
    """

    FIXED: ClassVar[tuple[str, ...]] = (
        *("documents", "tokens"),
        *("n", "w", "first_query", "queries"),
    )
    FIRST: ClassVar[tuple[str, ...]] = ("batch", "groups", "h")
    SMALLER: ClassVar[tuple[str, ...]] = (
        *("tokens", "batch", "groups", "h", "n", "w", "dk", "dv"),
    )

    tokens: int = integer(8, 0)
    batch: int = integer(1, 0)
    documents: tuple[int, ...] = integers()
    first_query: int | None = integer(None, 0)
    queries: int | None = integer(None, 0)
    layout: str = one_of("plain", LAYOUTS)
    do_layout: str = one_of("plain", LAYOUTS)
    blocks: str = one_of("sorted", BLOCKS)
    scores: str = one_of("normal", SCORES)
    values: str = one_of("normal", VALUES)
    gates: str = one_of("sigmoid", GATES)
    poison: str = one_of("none", POISONS)
    metadata: str = one_of("dense", METADATA)
    frozen: tuple[str, ...] = some_of(tuple(dict.fromkeys(itertools.chain(*GRADIENTS.values()))))
    recompute: bool = switch()

    @property
    def slot(self) -> str:
        """The kind."""
        return self.kind

    @property
    def kernel(self) -> str:
        """The slot whose inputs and results those of the call are; core has no such slot."""
        return "sel" if self.kind == "block_attention" else self.kind

    @property
    def packed(self) -> bool:
        """Whether the tensors are packed documents."""
        return bool(self.documents)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Length of each document, or of each sequence of the batch."""
        return self.documents or (self.tokens,) * self.batch

    @property
    def partial(self) -> bool:
        """Whether q holds only some rows."""
        return self.first_query is not None

    @property
    def check_name(self) -> str:
        """Name of the check that runs the case."""
        return PARTIAL_CHECK if self.partial and self.kind in SLOTS else f"generated {self.kind}"

    @property
    def lengths_of_case(self) -> tuple[tuple[int, ...], int, bool]:
        """Lengths, batch and ``packed`` of its Case."""
        return self.documents or (self.tokens,), 1 if self.packed else self.batch, self.packed

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

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each value that does not fit the others."""
        yield from super().problems()
        if self.packed and (self.tokens, self.batch) != (8, 1):
            yield "documents are packed; leave tokens and batch out"
        if not self.partial and self.queries is not None:
            yield f"queries={self.queries} needs first_query, such as first_query=0"
        if self.partial and self.kind in ("combine", "core"):
            yield f"{self.kind} takes whole sequences; leave first_query out, or take another slot"
        names = GRADIENTS[self.kind]
        if set(self.frozen) - set(names) or (names and not set(names) - set(self.frozen)):
            yield (
                f"frozen must name some but not all of {', '.join(names) or 'no inputs'}, got"
                f" {','.join(self.frozen)}"
            )
        if self.recompute and self.kind != "core":
            yield f"recompute=on needs core, got {self.kind}"
        needed = {"selected": "core", "messy8": "block_attention", "messy16": "block_attention"}
        if needed.get(self.blocks, self.kind) != self.kind:
            yield f"blocks={self.blocks} needs {needed[self.blocks]}, got {self.kind}"
        poisoned = _POISONED.get(self.kind, (*_OF_QKV, "do"))
        if self.poison != "none" and self.poison.partition("_")[2] not in poisoned:
            tensors = ", ".join(poisoned) or "no tensor"
            yield f"poison={self.poison}: a NaN or Inf of {self.kind} may be in {tensors}"
        first, end = self.query_rows
        if not 0 <= first <= end <= self.axis:
            yield (
                f"the queries {first} .. {end} must lie in the {self.axis} rows of keys; change"
                " first_query and queries, or tokens and documents"
            )

    def shorter(self) -> Iterator[SlotCase]:
        """Yield neighbours with fewer queries, documents or frozen inputs."""
        if self.partial:
            yield self.replace(first_query=None, queries=None)
            yield from self._shorter_cuts()
        if self.packed:
            yield self.replace(documents=(), tokens=max(self.documents), batch=1)
        for index, document in enumerate(self.documents):
            before, after = self.documents[:index], self.documents[index + 1 :]
            if before or after:
                yield self.replace(documents=(*before, *after))
            for smaller in below(document, 0):
                yield self.replace(documents=(*before, smaller, *after))
        for name in self.frozen if len(self.frozen) > 1 else ():
            yield self.replace(frozen=tuple(x for x in self.frozen if x != name))

    def _shorter_cuts(self) -> Iterator[SlotCase]:
        """Yield neighbours with fewer queries, fewer keys, or fewer documents around them."""
        first, end = self.query_rows
        for queries in below(end - first, 0):
            yield self.replace(queries=queries)
        if not self.packed:
            if end < self.tokens:
                yield self.replace(tokens=end, queries=end - first)
            for smaller in below(first, 0):
                tokens = self.tokens - first + smaller
                yield self.replace(first_query=smaller, tokens=tokens)
            return
        for smaller in below(first, 0):
            yield self.replace(first_query=smaller)
        start = 0
        for index, length in enumerate(self.documents):
            others = (*self.documents[:index], *self.documents[index + 1 :])
            start += length
            if start <= first and length and others:  # a document before the queries
                yield self.replace(documents=others, first_query=first - length)

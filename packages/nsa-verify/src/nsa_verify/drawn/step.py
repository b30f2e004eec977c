"""DecodeStep and BlockStep: one step of all decode forms, or of block_attention_decode."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, TypeVar

from nsa_verify.drawn.case import EXCHANGES, METADATA
from nsa_verify.drawn.line import Drawn, below, integer, integers, one_of

if TYPE_CHECKING:
    from nsa_verify.problems.steps import Step

SHARP = 100.0  # factor on q
STARTS = ("given", "default")
INDICES = ("int32", "int64", "int16")
_Step = TypeVar("_Step", bound="Sequences")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequences(Drawn):
    """The sequences of a step.

    Attributes:
        lengths: Tokens of each sequence after the step.
        new: New tokens of each sequence.
        rows: Rows of each sequence; those beyond the new tokens are padding.
        page_size: Tokens of a page; 0 for one page per sequence.
        metadata: "strided": the positions, the blocks and the block table have gaps between their
            entries, or are transposed.
    """

    FIXED: ClassVar[tuple[str, ...]] = ("lengths", "new", "rows", "n", "w")
    SMALLER: ClassVar[tuple[str, ...]] = ("groups", "h", "rows", "n", "w", "dk", "dv")

    lengths: tuple[int, ...] = integers(8)
    new: tuple[int, ...] = integers(1)
    rows: int = integer(1)
    page_size: int = integer(0, 0)
    metadata: str = one_of("dense", METADATA)

    @property
    def lengths_of_case(self) -> tuple[tuple[int, ...], int, bool]:
        """The tokens of all sequences together, as one sequence."""
        return (sum(self.lengths),), 1, False

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each value that does not fit the others."""
        yield from super().problems()
        if not max(self.lengths):
            yield f"one of lengths must be at least 1, got {_joined(self.lengths)}"
        if len(self.new) != len(self.lengths) or any(
            new > min(length, self.rows) for length, new in zip(self.lengths, self.new)
        ):
            yield (
                f"new must have one entry per sequence, at most its length and rows={self.rows},"
                f" got new={_joined(self.new)} with lengths={_joined(self.lengths)}"
            )

    def simpler(self: _Step) -> Iterator[_Step]:
        """Yield simpler neighbours; none has more new tokens than rows."""
        for step in super().simpler():
            yield step.replace(new=tuple(min(new, step.rows) for new in step.new))

    def shorter(self: _Step) -> Iterator[_Step]:
        """Yield neighbours with fewer sequences, shorter ones, or fewer new tokens."""
        count = len(self.lengths)
        for size in sorted({count // 2, 1} - {0, count}, reverse=True):
            for start in range(0, count, size):
                rest = [i for i in range(count) if not start <= i < start + size]
                lengths, counts = (tuple(x[i] for i in rest) for x in (self.lengths, self.new))
                yield self.replace(lengths=lengths, new=counts)
        for index, (length, new) in enumerate(zip(self.lengths, self.new)):
            for fewer in below(length, 0):
                lengths = _with_entry(self.lengths, index, fewer)
                bounded = _with_entry(self.new, index, min(new, fewer))
                yield self.replace(lengths=lengths, new=bounded)
        for index, new in enumerate(self.new):
            for fewer in below(new, 0):
                yield self.replace(new=_with_entry(self.new, index, fewer))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeStep(Sequences):
    """One step of all decode forms of the plan of a layer.

    Attributes:
        spare: Rows of the ring of win beyond the required ones.
        gates: "unit", from 0 to 1, or "wide", from -2 to 3.
        scores: "normal" or "large".
        order: Order of the blocks that sel receives: "ascending", as select returns them, or
            "messy", descending with -1 and duplicates.
    """

    kind: str = dataclasses.field(default="decode", kw_only=False)
    spare: int = integer(0, 0)
    gates: str = one_of("unit", ("unit", "wide"))
    scores: str = one_of("normal", ("normal", "large"))
    order: str = one_of("ascending", ("ascending", "messy"))

    @property
    def check_name(self) -> str:
        """Name of the check that runs the step."""
        return "generated steps"

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each value that does not fit the others."""
        yield from super().problems()
        if self.page_size % self.block:
            yield f"page_size must be a multiple of block={self.block}, got {self.page_size}"

    def step(self) -> Step:
        """Return the step for the checks of decode forms."""
        from nsa_verify.problems.cases import Case
        from nsa_verify.problems.steps import Step

        sharpness = SHARP if self.scores == "large" else 1.0
        return Step(
            Case(str(self), self.config, (), sharpness=sharpness, seed=self.seed),
            self.lengths,
            self.new,
            self.rows,
            self.page_size or None,
            self.spare,
            self.gates == "wide",
            strided=self.metadata == "strided",
            exchanges=EXCHANGES,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockStep(Sequences):
    """One step of block_attention_decode, which takes any ``page_size``.

    Attributes:
        starts: The argument of the function; "default": it is left out, so every sequence has as
            many new tokens as it has rows or tokens.
        index: Dtype of the blocks.
    """

    kind: str = dataclasses.field(default="block_attention_decode", kw_only=False)
    starts: str = one_of("given", STARTS)
    index: str = one_of("int32", INDICES)

    @property
    def slot(self) -> str:
        """The slot whose decode form runs."""
        return "sel"

    @property
    def check_name(self) -> str:
        """Name of the check that runs the step."""
        return "block attention decode"

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each value that does not fit the others."""
        yield from super().problems()
        whole = tuple(min(length, self.rows) for length in self.lengths)
        if self.starts == "default" and self.new != whole:
            yield (
                f"starts=default needs new={_joined(whole)}, the rows or the length of each"
                f" sequence, got new={_joined(self.new)}"
            )


def _with_entry(numbers: tuple[int, ...], index: int, number: int) -> tuple[int, ...]:
    return (*numbers[:index], number, *numbers[index + 1 :])


def _joined(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))

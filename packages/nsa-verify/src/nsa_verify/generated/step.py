"""GeneratedStep: one decode step, described by values that fit on a line and come back from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import ClassVar

from nsa_core.errors import InvalidInput
from nsa_verify.generated.case import METADATA
from nsa_verify.generated.line import Line, below
from nsa_verify.problems.cases import Case
from nsa_verify.problems.steps import Step

SHARP = 100.0  # factor on q
GATES = ("unit", "wide")
SCORES = ("normal", "large")
ORDERS = ("ascending", "messy")
FORMS = ("slots", "block_attention")
STARTS = ("given", "default")
INDICES = ("int32", "int64", "int16")


@dataclasses.dataclass(frozen=True)
class GeneratedStep(Line):
    """One step of all decode forms, or of block_attention_decode.

    Attributes:
        phase: Always "decode".
        lengths: Tokens of each sequence after the step.
        new: New tokens of each sequence.
        rows: Rows of each sequence; those beyond the new tokens are padding.
        page: Tokens of a page; 0 for one page per sequence.
        spare: Rows of the ring of win beyond the required ones.
        gates: "unit", from 0 to 1, or "wide", from -2 to 3.
        scores: "normal" or "large".
        order: Order of the blocks that sel receives: "ascending", as select returns them, or
            "messy", descending with -1 and duplicates.
        metadata: "strided": the positions, the blocks and the block table have gaps between their
            entries, or are transposed.
        form: "slots", the forms of the plan of a layer; or "block_attention", the function
            block_attention_decode, which takes any ``page``, and of the fields above only the
            sizes, ``scale`` and ``metadata``.
        starts: The argument of block_attention_decode; "default": it is left out, so every sequence
            has as many new tokens as it has rows or tokens.
        index: Dtype of the blocks of block_attention_decode.
    """

    FIRST: ClassVar[str] = "phase"
    CHOICES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "phase": ("decode",),
        "gates": GATES,
        "scores": SCORES,
        "order": ORDERS,
        "metadata": METADATA,
        "form": FORMS,
        "starts": STARTS,
        "index": INDICES,
    }
    FROM_ZERO: ClassVar[tuple[str, ...]] = ("page", "spare")
    LISTS: ClassVar[tuple[str, ...]] = ("lengths", "new")

    phase: str = "decode"
    lengths: tuple[int, ...] = (8,)
    new: tuple[int, ...] = (1,)
    rows: int = 1
    page: int = 0
    spare: int = 0
    gates: str = "unit"
    scores: str = "normal"
    order: str = "ascending"
    metadata: str = "dense"
    form: str = "slots"
    starts: str = "given"
    index: str = "int32"

    def check(self) -> None:
        """Raise InvalidInput if the sizes do not fit together."""
        super().check()
        wrong = []
        if not max(self.lengths):
            wrong.append(f"one of lengths must be at least 1, got {self.lengths}")
        if len(self.new) != len(self.lengths) or any(
            new > min(length, self.rows) for length, new in zip(self.lengths, self.new)
        ):
            wrong.append(
                f"new must have one entry per sequence, at most its length and rows={self.rows},"
                f" got new={_joined(self.new)} with lengths={_joined(self.lengths)}"
            )
        of_slots = self.form == "slots"
        if of_slots and (self.starts, self.index) != ("given", "int32"):
            wrong.append(
                f"starts={self.starts} and index={self.index} need form=block_attention, whose step"
                " has no other form"
            )
        whole = tuple(min(length, self.rows) for length in self.lengths)
        if self.starts == "default" and self.new != whole:
            wrong.append(
                f"starts=default needs new={_joined(whole)}, the rows or the length of each"
                f" sequence, got new={_joined(self.new)}"
            )
        if of_slots and self.page % self.block:
            wrong.append(f"page must be a multiple of block={self.block}, got {self.page}")
        if wrong:
            raise InvalidInput("case: " + "; ".join(wrong))

    def step(self) -> Step:
        """Return the step for the checks of decode forms."""
        sharpness = SHARP if self.scores == "large" else 1.0
        case = Case(self.text(), self.config, (), sharpness=sharpness, seed=self.seed)
        wide = self.gates == "wide"
        return Step(
            case,
            self.lengths,
            self.new,
            self.rows,
            self.page or None,
            self.spare,
            wide,
            strided=self.metadata == "strided",
        )

    def simpler(self) -> Iterator[GeneratedStep]:
        """Yield simpler neighbours, those that save most first. They may be invalid."""
        count = len(self.lengths)
        for size in sorted({count // 2, 1} - {0, count}, reverse=True):
            for start in range(0, count, size):
                yield self._with_sequences(
                    [i for i in range(count) if not start <= i < start + size]
                )
        for index, length in enumerate(self.lengths):
            for shorter in below(length, 0):
                yield self._with_length(index, shorter)
        for index, new in enumerate(self.new):
            for fewer in below(new, 0):
                changed = (*self.new[:index], fewer, *self.new[index + 1 :])
                yield dataclasses.replace(self, new=changed)
        yield from self.with_defaults(("groups", "h"), ("lengths", "new", "rows", "n", "w"))
        for fewer_rows in self.with_smaller("groups", "h", "rows", "n", "w", "dk", "dv"):
            bounded = tuple(min(count, fewer_rows.rows) for count in self.new)
            yield dataclasses.replace(fewer_rows, new=bounded)

    def _with_sequences(self, indices: list[int]) -> GeneratedStep:
        lengths, new = (tuple(x[i] for i in indices) for x in (self.lengths, self.new))
        return dataclasses.replace(self, lengths=lengths, new=new)

    def _with_length(self, index: int, length: int) -> GeneratedStep:
        lengths, new = list(self.lengths), list(self.new)
        lengths[index], new[index] = length, min(new[index], length)
        return dataclasses.replace(self, lengths=tuple(lengths), new=tuple(new))


def _joined(numbers: tuple[int, ...]) -> str:
    return "+".join(map(str, numbers))

"""GeneratedStep: one decode step, described by values that fit on a line and come back from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import ClassVar

from nsa_core.errors import InvalidInput
from nsa_verify.cases import Case
from nsa_verify.checks.decode_parity import Step
from nsa_verify.generated.line import Line, below

SHARP = 100.0  # factor on q
GATES = ("unit", "wide")
SCORES = ("normal", "large")
ORDERS = ("ascending", "messy")


@dataclasses.dataclass(frozen=True)
class GeneratedStep(Line):
    """One step of all decode forms.

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
    """

    FIRST: ClassVar[str] = "phase"
    CHOICES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "phase": ("decode",),
        "gates": GATES,
        "scores": SCORES,
        "order": ORDERS,
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
        if self.page % self.block:
            wrong.append(f"page must be a multiple of block={self.block}, got {self.page}")
        if wrong:
            raise InvalidInput("case: " + "; ".join(wrong))

    def step(self) -> Step:
        """Return the step for the checks of decode forms."""
        sharpness = SHARP if self.scores == "large" else 1.0
        case = Case(self.text(), self.config, (), sharpness=sharpness, seed=self.seed)
        wide = self.gates == "wide"
        return Step(case, self.lengths, self.new, self.rows, self.page or None, self.spare, wide)

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
        yield from self.with_smaller("groups", "h", "rows", "n", "w", "dk", "dv")

    def _with_sequences(self, indices: list[int]) -> GeneratedStep:
        lengths, new = (tuple(x[i] for i in indices) for x in (self.lengths, self.new))
        return dataclasses.replace(self, lengths=lengths, new=new)

    def _with_length(self, index: int, length: int) -> GeneratedStep:
        lengths, new = list(self.lengths), list(self.new)
        lengths[index], new[index] = length, min(new[index], length)
        return dataclasses.replace(self, lengths=tuple(lengths), new=tuple(new))


def _joined(numbers: tuple[int, ...]) -> str:
    return "+".join(map(str, numbers))

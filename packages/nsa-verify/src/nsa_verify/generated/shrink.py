"""Shrink a failing generated case or step to a small one that still fails."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import torch

from nsa_core.errors import InvalidInput
from nsa_verify.checks.calls import EVERY, Call
from nsa_verify.generated.line import Line
from nsa_verify.isolation import gpu_context
from nsa_verify.problems.cases import Case
from nsa_verify.problems.combination import Combination
from nsa_verify.problems.findings import Finding

SECONDS = 4.0  # for all failing cases of one slot, or all failing steps

_Line = TypeVar("_Line", bound=Line)


@dataclasses.dataclass
class ShrinkBudget:
    """The time left for shrinking, in seconds."""

    seconds: float = SECONDS


@dataclasses.dataclass(frozen=True)
class OnGenerated(Generic[_Line]):
    """Adapter that runs a generated case or step as a check of a case.

    Attributes:
        generated: The generated case or step.
        judge: Judges a generated case or step on a combination.
        budget: Time for shrinking that the cases of a slot, or all steps, share.
        calls: The functions that the check may call.
    """

    generated: _Line
    judge: Callable[[Combination, _Line], list[Finding]]
    budget: ShrinkBudget
    calls: frozenset[Call] = EVERY

    def __call__(
        self, combination: Combination, case: Case, dtype: torch.dtype
    ) -> Iterator[Finding]:
        """Judge the case; a failing case is shrunk first. ``case`` and ``dtype`` are its own.

        On a GPU that is unusable in this process, every smaller case would fail too.
        """
        findings = self.judge(combination, self.generated)
        slots = _failed_slots(findings)
        if slots and self.budget.seconds > 0 and not gpu_context.gpu_error():
            started = time.perf_counter()

            def still_fails(smaller: _Line) -> bool:
                # A failure of another slot would be another fault.
                return bool(slots & _failed_slots(self.judge(combination, smaller)))

            smallest = shrink(self.generated, still_fails, self.budget.seconds)
            self.budget.seconds -= time.perf_counter() - started
            findings = self.judge(combination, smallest)
        yield from findings


def _failed_slots(findings: list[Finding]) -> set[str]:
    return {finding.slot for finding in findings if finding.ok is False}


def shrink(case: _Line, fails: Callable[[_Line], bool], seconds: float = SECONDS) -> _Line:
    """Return a case that fails, and of which no simpler neighbour that was tried fails.

    Greedy: it takes the first simpler neighbour that fails and starts again.

    Args:
        case: A case, or a step, that fails.
        fails: Returns whether a case fails. A case that is invalid counts as passing.
        seconds: Time limit; the best case until then is returned.
    """
    deadline = time.perf_counter() + seconds
    tried = {case}
    improved = True
    while improved:
        improved = False
        for candidate in case.simpler():
            if time.perf_counter() > deadline:
                return case
            if candidate in tried:
                continue
            tried.add(candidate)
            with contextlib.suppress(InvalidInput):
                candidate.check()
                if fails(candidate):
                    case, improved = candidate, True
                    break
    return case

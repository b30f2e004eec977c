"""Shrink a failing case, step or history to a small one that still fails."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable

from nsa_core.errors import InvalidInput
from nsa_verify.drawn.line import AnyDrawn


@dataclasses.dataclass
class ShrinkBudget:
    """The time left for shrinking, in seconds: for all failing cases of a kind."""

    seconds: float = 4.0


def shrink(drawn: AnyDrawn, fails: Callable[[AnyDrawn], bool], budget: ShrinkBudget) -> AnyDrawn:
    """Return one that fails, and of which no simpler neighbour that was tried fails.

    Greedy: it takes the first simpler neighbour that fails and starts again.

    Args:
        drawn: A case, a step or a history that fails.
        fails: Returns whether one fails. One that is invalid counts as passing.
        budget: Time limit; the best one until then is returned. The time is taken from it.
    """
    started = time.perf_counter()
    tried = {drawn}
    improved = True
    while improved:
        improved = False
        for candidate in drawn.simpler():
            if time.perf_counter() - started > budget.seconds:
                break
            if candidate in tried:
                continue
            tried.add(candidate)
            with contextlib.suppress(InvalidInput):
                candidate.check()
                if fails(candidate):
                    drawn, improved = candidate, True
                    break
    budget.seconds -= time.perf_counter() - started
    return drawn

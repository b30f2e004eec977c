"""Shrink a failing generated case to a small one that still fails."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

from nsa_core.errors import InvalidInput
from nsa_verify.generated.case import GeneratedCase

SECONDS = 4.0  # for all failing cases of one slot


@dataclasses.dataclass
class ShrinkBudget:
    """The time left for shrinking, in seconds."""

    seconds: float = SECONDS


def shrink(
    case: GeneratedCase, fails: Callable[[GeneratedCase], bool], seconds: float = SECONDS
) -> GeneratedCase:
    """Return a case that fails, and of which no simpler neighbour that was tried fails.

    Greedy: it takes the first simpler neighbour that fails and starts again.

    Args:
        case: A case that fails.
        fails: Returns whether a case fails. A case that is invalid counts as passing.
        seconds: Time limit; the best case until then is returned.
    """
    deadline = time.perf_counter() + seconds
    tried = {case}
    improved = True
    while improved:
        improved = False
        for candidate in _simpler(case):
            if time.perf_counter() > deadline:
                return case
            if candidate in tried:
                continue
            tried.add(candidate)
            with contextlib.suppress(InvalidInput):
                candidate.validate()
                if fails(candidate):
                    case, improved = candidate, True
                    break
    return case


_CUT = ("first_query", "queries")
_FIRST = ("tokens", "batch", "documents", "groups", "h", "n")  # the size of the case


def _simpler(case: GeneratedCase) -> Iterator[GeneratedCase]:
    """Yield simpler neighbours of ``case``, those that save most first."""
    if case.first_query is not None:
        yield dataclasses.replace(case, first_query=None, queries=None)
        yield from _simpler_cuts(case)
    if case.packed:
        yield dataclasses.replace(case, documents=(), tokens=max(case.documents), batch=1)
        for index, length in enumerate(case.documents):
            others = case.documents[:index], case.documents[index + 1 :]
            if len(case.documents) > 1:
                yield dataclasses.replace(case, documents=(*others[0], *others[1]))
            for smaller in _below(length, 0):
                yield dataclasses.replace(case, documents=(*others[0], smaller, *others[1]))
    names = [*_FIRST, *(f.name for f in dataclasses.fields(case) if f.name not in _FIRST)]
    defaults = {f.name: f.default for f in dataclasses.fields(case)}
    for name in names:
        value, default = getattr(case, name), defaults[name]
        if name in (*_CUT, "slot", "seed", "documents") or value == default:
            continue
        if case.packed and name in ("tokens", "batch"):
            continue
        if name not in ("tokens", "n", "w"):
            yield _with(case, name, default)
    for name in ("tokens", "batch", "groups", "h", "n", "w", "dk", "dv"):
        if case.packed and name in ("tokens", "batch"):
            continue
        for smaller in _below(getattr(case, name), 1):
            yield _with(case, name, smaller)


def _simpler_cuts(case: GeneratedCase) -> Iterator[GeneratedCase]:
    """Yield neighbours with fewer queries, fewer keys, or fewer documents around the queries."""
    first, end = case.query_rows
    for queries in _below(end - first, 0):
        yield dataclasses.replace(case, queries=queries)
    if not case.packed:
        if end < case.tokens:
            yield dataclasses.replace(case, tokens=end, queries=end - first)
        for smaller in _below(first, 0):
            tokens = case.tokens - first + smaller
            yield dataclasses.replace(case, first_query=smaller, tokens=tokens)
        return
    for smaller in _below(first, 0):
        yield dataclasses.replace(case, first_query=smaller)
    start = 0
    for index, length in enumerate(case.documents):
        others = (*case.documents[:index], *case.documents[index + 1 :])
        start += length
        if start <= first and length and others:  # a document before the queries
            yield dataclasses.replace(case, documents=others, first_query=first - length)


def _with(case: GeneratedCase, name: str, value: Any) -> GeneratedCase:
    return dataclasses.replace(case, **{name: value})


def _below(value: int, least: int) -> list[int]:
    """Return smaller values, the smallest first."""
    return sorted({least, value // 2, value - 1} & set(range(least, value)))

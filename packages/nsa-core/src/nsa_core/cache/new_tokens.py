"""Which rows of a step are tokens, as the host and the device know it."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nsa_core.errors import InvalidInput

if TYPE_CHECKING:
    from nsa_core.cache.cache import NSACache

New = Sequence[int] | torch.Tensor | None


def integers(given: object, times: int = 1) -> list[int] | None:
    """``given``, integers or one of them ``times`` over, as a list; None where it is something
    else.
    """
    values: Any = given.tolist() if isinstance(given, torch.Tensor) else given
    try:
        found = list(values) if isinstance(values, Iterable) else [values] * times
        return (
            None if any(isinstance(n, bool) for n in found) else [operator.index(n) for n in found]
        )
    except TypeError:
        return None


class Arrival(NamedTuple):
    """How many of a step's rows are tokens."""

    rows: int
    # of each sequence, as the host knows it; None: not asked, a graph is captured
    counts: list[int] | None
    new: torch.Tensor | None  # int32 [B] on the device; None: all rows
    exact: bool  # counts are right, and not only bounds

    def piece(self, first: int, size: int) -> Arrival:
        """Rows ``first`` .. ``first + size - 1``."""
        if size >= self.rows:
            return self
        rows = min(size, self.rows - first)
        counts = (
            None if self.counts is None else [min(max(n - first, 0), rows) for n in self.counts]
        )
        return Arrival(
            rows,
            counts,
            None if self.new is None else (self.new - first).clamp(0, rows),
            self.exact,
        )


def arrival_of(cache: NSACache, rows: int, new: New, capturing: bool) -> Arrival:
    """``new`` of a step of ``rows`` rows.

    Raises:
        InvalidInput: it is not one number from 0 to ``rows`` for each sequence; or not on the
            device, in a graph.
    """
    if new is None:
        return Arrival(rows, None if capturing else [rows] * cache.batch, None, True)
    on_device = (
        isinstance(new, torch.Tensor) and new.device == cache.device and cache.device.type != "cpu"
    )
    if isinstance(new, torch.Tensor) and (on_device or capturing):
        if (
            new.shape != (cache.batch,)
            or new.dtype not in (torch.int32, torch.int64)
            or new.device != cache.device
        ):
            said = f"{list(new.shape)} {new.dtype} on {new.device}"
            raise InvalidInput(f"new must be int32 [{cache.batch}] on {cache.device}, got {said}")
        counts = None if capturing else [rows] * cache.batch
        return Arrival(rows, counts, new.clamp(0, rows).to(torch.int32), False)
    if capturing:
        raise InvalidInput(
            "new must be a tensor on the device while a graph is captured: a list would be its"
            " constant"
        )
    counts = integers(new)
    if counts is None or len(counts) != cache.batch:
        raise InvalidInput(f"new must be {cache.batch} integers, got {new!r}")
    if not all(0 <= n <= rows for n in counts):
        raise InvalidInput(f"new must be from 0 to the {rows} rows of x, got {counts}")
    if min(counts) == rows:
        return Arrival(rows, counts, None, True)
    return Arrival(
        rows,
        counts,
        torch.tensor(counts, dtype=torch.int32).to(cache.device, non_blocking=True),
        True,
    )

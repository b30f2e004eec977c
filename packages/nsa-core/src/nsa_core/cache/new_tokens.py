"""The number of tokens that each sequence gets in a step, as the host and the device know it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from nsa_core.cache.sizes import integers
from nsa_core.errors import InvalidInput

if TYPE_CHECKING:
    from nsa_core.cache.state import CacheState

New = Sequence[int] | torch.Tensor | None  # the argument ``new`` of NSAttention.forward


class NewTokens(NamedTuple):
    """How many of a step's rows are tokens; the rows past them are padding.

    Attributes:
        rows: rows of the step, padding included.
        counts: tokens of each sequence as the host knows them; None in a captured graph.
        on_device: tokens of each sequence, int32 [B]; None: every row is a token.
        exact: ``counts`` are the numbers of tokens, not only upper bounds.
    """

    rows: int
    counts: list[int] | None
    on_device: torch.Tensor | None
    exact: bool

    def part(self, first: int, size: int) -> NewTokens:
        """Those of the rows ``first`` .. ``first + size - 1``."""
        if size >= self.rows:
            return self
        rows, counts, on_device = min(size, self.rows - first), self.counts, self.on_device
        if counts is not None:
            counts = [min(max(n - first, 0), rows) for n in counts]
        if on_device is not None:
            on_device = (on_device - first).clamp(0, rows)
        return NewTokens(rows, counts, on_device, self.exact)


def new_tokens(cache: CacheState, rows: int, new: New, in_graph: bool) -> NewTokens:
    """The argument ``new`` of a step of ``rows`` rows.

    Raises:
        InvalidInput: ``new`` is not one number from 0 to ``rows`` per sequence; or a graph is
            captured and it is not on the device.
    """
    if new is None:
        return NewTokens(rows, None if in_graph else [rows] * cache.batch, None, True)
    on_device = (
        isinstance(new, torch.Tensor) and new.device == cache.device and cache.device.type != "cpu"
    )
    if isinstance(new, torch.Tensor) and (on_device or in_graph):
        return _of_device(cache, rows, new, in_graph)
    if in_graph:
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
        return NewTokens(rows, counts, None, True)
    copied = torch.tensor(counts, dtype=torch.int32).to(cache.device, non_blocking=True)
    return NewTokens(rows, counts, copied, True)


def _of_device(cache: CacheState, rows: int, new: torch.Tensor, in_graph: bool) -> NewTokens:
    """The host does not read ``new``: it counts every row as a token, which is an upper bound."""
    fits = new.shape == (cache.batch,) and new.dtype in (torch.int32, torch.int64)
    if not fits or new.device != cache.device:
        received = f"{list(new.shape)} {new.dtype} on {new.device}"
        raise InvalidInput(f"new must be int32 [{cache.batch}] on {cache.device}, got {received}")
    counts = None if in_graph else [rows] * cache.batch
    return NewTokens(rows, counts, new.clamp(0, rows).to(torch.int32), False)

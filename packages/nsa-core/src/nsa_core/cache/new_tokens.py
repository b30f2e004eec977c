"""The number of new tokens of each sequence in a step, on the host and on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from nsa_core.cache.sizes import integers
from nsa_core.errors import InvalidInput
from nsa_core.limits import shown

if TYPE_CHECKING:
    from nsa_core.cache.state import CacheState

New = Sequence[int] | torch.Tensor | None  # the argument ``new`` of NSAttention.forward


class NewTokens(NamedTuple):
    """The number of rows of a step that are tokens. The rows after them are padding.

    Attributes:
        rows: number of rows of the step, padding included.
        counts: number of tokens of each sequence as known on the host; None in a captured graph.
        on_device: number of tokens of each sequence, int32 [B]; None if every row is a token.
        exact: whether ``counts`` are exact, not only upper bounds.
    """

    rows: int
    counts: list[int] | None
    on_device: torch.Tensor | None
    exact: bool

    def part(self, first: int, size: int) -> NewTokens:
        """Return the new tokens among the rows ``first`` .. ``first + size - 1``."""
        if size >= self.rows:
            return self
        rows, counts, on_device = min(size, self.rows - first), self.counts, self.on_device
        if counts is not None:
            counts = [min(max(n - first, 0), rows) for n in counts]
        if on_device is not None:
            on_device = (on_device - first).clamp(0, rows)
        return NewTokens(rows, counts, on_device, self.exact)


def new_tokens(cache: CacheState, rows: int, new: New, in_graph: bool) -> NewTokens:
    """Interpret the argument ``new`` of a step of ``rows`` rows.

    Raises:
        InvalidInput: ``new`` is not one integer from 0 to ``rows`` per sequence; or a CUDA graph is
            being captured and ``new`` is not on the device.
    """
    if new is None:
        return NewTokens(rows, None if in_graph else [rows] * cache.batch, None, True)
    on_device = (
        isinstance(new, torch.Tensor) and new.device == cache.device and cache.device.type != "cpu"
    )
    if isinstance(new, torch.Tensor) and (on_device or in_graph):
        return _from_device(cache, rows, new, in_graph)
    if in_graph:
        raise InvalidInput(
            "new must be a tensor on the device while a CUDA graph is captured: a list would become"
            " a constant of the graph"
        )
    counts = integers(new)
    if counts is None or len(counts) != cache.batch:
        raise InvalidInput(
            f"new must be {cache.batch} integers, one per sequence, got {shown(new)}"
        )
    if not all(0 <= n <= rows for n in counts):
        raise InvalidInput(f"new must be from 0 to the {rows} rows of x, got {shown(counts)}")
    if min(counts) == rows:
        return NewTokens(rows, counts, None, True)
    device_counts = torch.tensor(counts, dtype=torch.int32).to(cache.device, non_blocking=True)
    return NewTokens(rows, counts, device_counts, True)


def _from_device(cache: CacheState, rows: int, new: torch.Tensor, in_graph: bool) -> NewTokens:
    """Use ``new`` without reading it: on the host every row counts as a token, an upper bound."""
    fits = new.shape == (cache.batch,) and new.dtype in (torch.int32, torch.int64)
    if not fits or new.device != cache.device:
        received = f"{list(new.shape)} {new.dtype} on {new.device}"
        raise InvalidInput(f"new must be int32 [{cache.batch}] on {cache.device}, got {received}")
    counts = None if in_graph else [rows] * cache.batch
    return NewTokens(rows, counts, new.clamp(0, rows).to(torch.int32), False)

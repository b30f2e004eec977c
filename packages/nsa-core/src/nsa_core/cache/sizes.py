"""The sizes of a cache, and integers as callers pass them."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from nsa_core.errors import InvalidInput


class CacheSizes(NamedTuple):
    """The sizes that NSAttention.new_cache takes; see there."""

    batch: int
    max_len: int
    page_size: int | None = None
    num_pages: int | None = None
    max_rollback: int = 0
    max_step: int = 64

    def check(self) -> None:
        """Refuse sizes that are out of range.

        Raises:
            InvalidInput: a size is no integer or too small; the message names every one.
        """
        wrong = []
        for name, value in self._asdict().items():
            least = int(name != "max_rollback")
            if value is None and name in ("page_size", "num_pages"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                wrong.append(f"{name} must be an integer >= {least}, got {value!r}")
        if self.num_pages is not None and self.page_size is None:
            wrong.append(f"num_pages {self.num_pages} goes with page_size, which is None")
        if wrong:
            raise InvalidInput("; ".join(wrong))


def integers(argument: object, repeat: int = 1) -> list[int] | None:
    """``argument`` as a list of integers; None if it is neither an integer nor several of them.

    Args:
        argument: an integer, an iterable of integers or an integer tensor; a tensor on a GPU
            synchronises.
        repeat: length of the list that a single integer becomes.
    """
    values: Any = argument.tolist() if isinstance(argument, torch.Tensor) else argument
    try:
        items = list(values) if isinstance(values, Iterable) else [values] * repeat
        if any(isinstance(item, bool) for item in items):
            return None
        return [operator.index(item) for item in items]
    except TypeError:
        return None

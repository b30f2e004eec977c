"""The sizes of a cache, and conversion of arguments to integers."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from nsa_core.errors import InvalidInput
from nsa_core.limits import integer_problems, too_large


class CacheSizes(NamedTuple):
    """The sizes of a cache; see NSAttention.new_cache."""

    batch: int
    max_len: int
    page_size: int | None = None
    num_pages: int | None = None
    max_rollback: int = 0
    max_step: int = 64

    def check(self) -> None:
        """Check that all sizes are valid.

        Raises:
            InvalidInput: a size is invalid; the message names every invalid size and its value.
        """
        problems: list[str] = []
        for name, value in self._asdict().items():
            optional = name in ("page_size", "num_pages")
            minimum = int(name != "max_rollback")
            problems += integer_problems(name, value, minimum, optional=optional)
        if self.num_pages is not None and self.page_size is None:
            problems.append(f"num_pages {self.num_pages} needs page_size, which is None")
        if problems:
            raise InvalidInput("; ".join(problems))
        of_pages = self.page_size is not None and self.num_pages is not None
        names = ("num_pages", "page_size") if of_pages else ("batch", "max_len")
        rows = getattr(self, names[0]) * getattr(self, names[1])
        if problems := too_large(" * ".join(names), rows):
            raise InvalidInput(problems[0])


def integers(argument: object, repeat: int = 1) -> list[int] | None:
    """Return ``argument`` as a list of integers; None if it is neither one nor several integers.

    Args:
        argument: an integer, an iterable of integers or an integer tensor. A GPU tensor
            synchronises.
        repeat: length of the list for a single integer.
    """
    values: Any = argument.tolist() if isinstance(argument, torch.Tensor) else argument
    try:
        items = list(values) if isinstance(values, Iterable) else [values] * repeat
        if any(isinstance(item, bool) for item in items):
            return None
        return [operator.index(item) for item in items]
    except TypeError:
        return None

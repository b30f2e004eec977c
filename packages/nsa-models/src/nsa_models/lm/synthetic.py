"""Synthetic tasks with a known best loss: uniform random tokens and associative recall.

Row i depends only on the seed and i, so a position is one integer and no row is repeated. Lane j of
n has the rows j, j + n, j + 2n and so on.
"""

from __future__ import annotations

import abc
import copy
from collections.abc import Mapping
from typing import Any

import torch

from nsa_core.errors import InvalidInput
from nsa_core.limits import check_integers
from nsa_models.lm.corpus import combine_seeds
from nsa_models.lm.data import Row
from nsa_models.lm.model import IGNORED


class NumberedRows(abc.ABC):
    """Rows that depend on their numbers alone.

    Args:
        length: Tokens of a row.
    """

    packed = False

    def __init__(self, length: int) -> None:
        self.length, self._row, self._stride = length, 0, 1

    def __next__(self) -> Row:
        number = self._row
        self._row += self._stride
        return self.row(number)

    @abc.abstractmethod
    def row(self, number: int) -> Row:
        """Return the row with this number, counted from 0."""

    def lane(self, number: int, count: int) -> NumberedRows:
        """Return the rows of a lane; see :meth:`nsa_models.lm.data.TextRows.lane`."""
        rows = copy.copy(self)
        rows._row, rows._stride = number, count
        return rows

    def state_dict(self) -> dict[str, int]:
        """Return the number of the next row."""
        return {"row": self._row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a row."""
        self._row = int(state["row"])


class SyntheticRows(NumberedRows):
    """Rows generated from their numbers; held-out rows use a different seed.

    Raises:
        InvalidInput: A number is out of range.
    """

    def __init__(
        self, vocab_size: int, length: int, *, seed: int = 0, held_out: bool = False
    ) -> None:
        check_integers({"vocab_size": vocab_size, "length": length})
        super().__init__(length)
        self.vocab_size, self._seed, self._held_out = vocab_size, seed, held_out

    def row(self, number: int) -> Row:
        """Return the row with this number."""
        seed = combine_seeds(type(self).__name__, self._seed, self._held_out, number)
        tokens, targets = self.make(torch.Generator().manual_seed(seed))
        return Row(tokens.tolist(), targets.tolist(), [self.length])

    @abc.abstractmethod
    def make(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and targets, both int64 [length]."""


class UniformRows(SyntheticRows):
    """Uniform, independent tokens; a loss below ln(vocab_size) proves that targets leak."""

    def make(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Return random tokens, each with its successor as the target."""
        tokens = torch.randint(self.vocab_size, (self.length + 1,), generator=generator)
        return tokens[:-1], tokens[1:]


class RecallRows(SyntheticRows):
    """Associative recall: length/4 (key, value) pairs, then every key again, in a new order.

    The target of each repeated key is its value; nothing else is a target. Keys come from the lower
    half of the vocabulary and are distinct within a row; values come from the upper half.

    Raises:
        InvalidInput: ``length`` is not a multiple of 4, or there are fewer keys than pairs.
    """

    def __init__(
        self, vocab_size: int, length: int, *, seed: int = 0, held_out: bool = False
    ) -> None:
        super().__init__(vocab_size, length, seed=seed, held_out=held_out)
        if length < 4 or length % 4:
            raise InvalidInput(f"length must be a multiple of 4 for recall, got {length}")
        if length // 4 > vocab_size // 2:
            raise InvalidInput(
                f"vocab_size must be at least {length // 2} for rows of {length} tokens, which have"
                f" {length // 4} pairs, got {vocab_size}"
            )

    def make(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Return pairs and queries as tokens, and the values of the queries as targets."""
        pairs, half = self.length // 4, self.vocab_size // 2
        keys = torch.randperm(half, generator=generator)[:pairs]
        values = torch.randint(half, self.vocab_size, (pairs,), generator=generator)
        order = torch.randperm(pairs, generator=generator)
        key_values, queries = torch.stack((keys, values), 1), torch.stack((keys, values), 1)[order]
        tokens = torch.cat((key_values, queries)).flatten()
        targets = torch.full_like(tokens, IGNORED)
        targets[2 * pairs :: 2] = queries[:, 1]
        return tokens, targets

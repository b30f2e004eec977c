"""Tasks whose best loss is known: uniform random tokens, which nothing can predict, and associative
recall.

Row i of a task is a function of the seed and i alone, so a position is one integer and no row comes
twice.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

import torch

from nsa_core.errors import InvalidInput
from nsa_models.lm.corpus import mixed
from nsa_models.lm.data import Row
from nsa_models.lm.model import IGNORED


class SyntheticRows(abc.ABC):
    """Rows made of a counter; ``held_out`` ones come from a seed of their own."""

    packed = False

    def __init__(
        self, vocab_size: int, length: int, *, seed: int = 0, held_out: bool = False
    ) -> None:
        self.vocab_size, self.length = vocab_size, length
        self._seed, self._held_out, self._row = seed, held_out, 0

    def __next__(self) -> Row:
        seed = mixed(type(self).__name__, self._seed, self._held_out, self._row)
        self._row += 1
        tokens, targets = self.make(torch.Generator().manual_seed(seed))
        return Row(tokens.tolist(), targets.tolist(), [self.length])

    def state_dict(self) -> dict[str, int]:
        """The number of the next row."""
        return {"row": self._row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a row."""
        self._row = int(state["row"])

    @abc.abstractmethod
    def make(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and targets, int64 [length] both."""


class UniformRows(SyntheticRows):
    """Every token uniform and independent: a model that gets below ln(vocab_size) sees what it must
    not see.
    """

    def make(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`SyntheticRows`."""
        made = torch.randint(self.vocab_size, (self.length + 1,), generator=generator)
        return made[:-1], made[1:]


class RecallRows(SyntheticRows):
    """length/4 pairs of a key and a value, then every key again in another order, to be answered by
    its value.

    Keys are the lower half of the vocabulary, all different in a row; values the upper half. Only
    answers are targets.

    Raises:
        InvalidInput: ``length`` is no multiple of 4, or there are fewer keys than pairs.
    """

    def __init__(
        self, vocab_size: int, length: int, *, seed: int = 0, held_out: bool = False
    ) -> None:
        super().__init__(vocab_size, length, seed=seed, held_out=held_out)
        if length < 4 or length % 4:
            raise InvalidInput(f"length must be a multiple of 4 for recall, got {length}")
        if length // 4 > vocab_size // 2:
            raise InvalidInput(
                f"vocab_size must be at least {length // 2} for {length // 4} pairs, got"
                f" {vocab_size}"
            )

    def make(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`SyntheticRows`."""
        pairs, half = self.length // 4, self.vocab_size // 2
        keys = torch.randperm(half, generator=generator)[:pairs]
        values = torch.randint(half, self.vocab_size, (pairs,), generator=generator)
        order = torch.randperm(pairs, generator=generator)
        shown, asked = torch.stack((keys, values), 1), torch.stack((keys, values), 1)[order]
        tokens = torch.cat((shown, asked)).flatten()
        targets = torch.full_like(tokens, IGNORED)
        targets[2 * pairs :: 2] = asked[:, 1]
        return tokens, targets

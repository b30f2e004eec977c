"""The leak sentinel: detect attention to future tokens by training on random tokens.

On uniform random tokens, new at every step, no causal model can reach a loss below ln V.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import NamedTuple

import torch

from nsa_models.lm.config import LMConfig
from nsa_models.lm.model import LanguageModel
from nsa_models.lm.parallel import World
from nsa_models.lm.recipe import Recipe
from nsa_models.lm.task import DataSpec, open_data
from nsa_models.lm.trainer import Trainer

LIMIT = 0.02  # nats


class Sentinel(NamedTuple):
    """The result of one sentinel run."""

    loss: float  # mean over the last steps, in nats
    floor: float  # ln V

    @property
    def passed(self) -> bool:
        """Return whether |loss - ln V| <= LIMIT: the model neither leaks nor diverges."""
        return abs(self.loss - self.floor) <= LIMIT


def leak_sentinel(
    config: LMConfig,
    length: int,
    backends: str | Mapping[str, str] | None = None,
    *,
    recipe: Recipe | None = None,
    last: int = 100,
    device: str = "cpu",
) -> Sentinel:
    """Train a model on uniform tokens and return the mean loss of its last steps.

    Leaks appear at the ends of blocks, windows and rows, so test several lengths: w, 2w and 4w.

    Args:
        config: The model.
        length: Tokens per row.
        backends: As in :class:`nsa_core.NSAttention`.
        recipe: Training options; None for 500 steps of 8 rows.
        last: Number of last steps in the mean.
        device: "cpu", "cuda" or "cuda:N".
    """
    recipe = recipe or Recipe(steps=500, batch=8, learning_rate=3e-3, warmup=20, weight_decay=0.0)
    torch.manual_seed(recipe.seed)
    data = open_data(DataSpec("uniform", length, vocab_size=config.vocab_size, held_out_rows=1))
    model = LanguageModel(config, backends)
    trainer = Trainer(model, data, recipe, World(torch.device(device)))
    losses = [trainer.step().read()[0] for _ in range(recipe.steps)]
    return Sentinel(statistics.fmean(losses[-last:]), math.log(config.vocab_size))

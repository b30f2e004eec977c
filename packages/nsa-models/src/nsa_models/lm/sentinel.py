"""The leak sentinel: on uniform tokens, fresh at every step, no model gets below ln V unless it
sees them.
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
    """Of one run."""

    loss: float  # mean over the last steps
    floor: float  # ln V

    @property
    def quiet(self) -> bool:
        """No leak shows, and training has not gone astray: |loss - ln V| <= LIMIT."""
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
    """Train a model of ``config`` on uniform tokens and look at the mean loss of its ``last``
    steps.

    One length tells little: leaks show where blocks, windows and rows end, so try w, 2w and 4w.
    """
    recipe = recipe or Recipe(steps=500, batch=8, learning_rate=3e-3, warmup=20, weight_decay=0.0)
    torch.manual_seed(recipe.seed)
    data = open_data(DataSpec("uniform", length, vocab_size=config.vocab_size, held_out_rows=1))
    model = LanguageModel(config, backends)
    trainer = Trainer(model, data, recipe, World(torch.device(device)))
    losses = [trainer.step().read()[0] for _ in range(recipe.steps)]
    return Sentinel(statistics.fmean(losses[-last:]), math.log(config.vocab_size))

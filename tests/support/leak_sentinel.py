"""The leak sentinel: detect attention to future tokens by training on random tokens.

On uniform random tokens, new at every step, no causal model can reach a loss below ln V.
"""

from __future__ import annotations

import math
import statistics

import torch

from nsa_models.lm.config import LMConfig
from nsa_models.lm.model import LanguageModel
from nsa_models.lm.parallel import World
from nsa_models.lm.recipe import Recipe
from nsa_models.lm.task import DataSpec, open_data
from nsa_models.lm.trainer import Trainer

LIMIT = 0.02  # nats; a larger distance from ln V is a leak, or a model that diverges
RECIPE = Recipe(steps=500, batch=8, learning_rate=3e-3, warmup=20, weight_decay=0.0)


def excess(
    config: LMConfig, length: int, recipe: Recipe = RECIPE, last: int = 100, device: str = "cpu"
) -> float:
    """Train a model on uniform tokens; return the mean loss of the last steps minus ln V, in nats.

    Leaks appear at the ends of blocks, windows and rows, so test several lengths: w, 2w and 4w.
    """
    torch.manual_seed(recipe.seed)
    data = open_data(DataSpec("uniform", length, vocab_size=config.vocab_size, held_out_rows=1))
    trainer = Trainer(LanguageModel(config), data, recipe, World(torch.device(device)))
    losses = [trainer.step().read()[0] for _ in range(recipe.steps)]
    return statistics.fmean(losses[-last:]) - math.log(config.vocab_size)

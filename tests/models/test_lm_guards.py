"""Properties proven by training: no leak of future tokens, and a learnable task is learned."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import leak_sentinel
from nsa_core import NSAConfig
from nsa_core.layer import projection
from nsa_core.plan.default_plan import default_plan
from nsa_models.lm.config import LMConfig
from nsa_models.lm.model import LanguageModel
from nsa_models.lm.parallel import World
from nsa_models.lm.recipe import Recipe
from nsa_models.lm.task import DataSpec, open_data
from nsa_models.lm.trainer import Trainer

WINDOW, VOCAB = 16, 32
LAYER = NSAConfig(
    dim=32,
    n_heads=2,
    n_kv_heads=1,
    head_dim=16,
    compress_block_size=4,
    compress_stride=2,
    select_block_size=4,
    num_selected_blocks=4,
    window_size=WINDOW,
)
MODEL = LMConfig(LAYER, 1, VOCAB, 32)


def leaking(visible):
    """Return a cmp slot with the given visibility ``visible(t, i)`` of compressed tokens."""

    def cmp(q, k_cmp, v_cmp, **packing):
        t, i = torch.arange(q.shape[1])[:, None], torch.arange(k_cmp.shape[1])
        scores = torch.einsum("bthd,bid->bhti", q, k_cmp[:, :, 0]) * LAYER.softmax_scale
        scores = scores.masked_fill(~visible(t, i), -torch.inf)
        seen = visible(t, i).any(-1)
        p = scores.softmax(-1).masked_fill(~seen[:, None], 0.0)
        return torch.einsum("bhti,bid->bthd", p, v_cmp[:, :, 0]), scores.logsumexp(-1).detach()

    return cmp


def end(i):
    return i * LAYER.compress_stride + LAYER.compress_block_size - 1


LEAKS = {
    "none": lambda t, i: end(i) <= t,
    "off by one": lambda t, i: end(i) <= t + 1,
    "softmax over all compressed tokens": lambda t, i: (end(i) > t) | (end(i) <= t),
}


@pytest.mark.slow
@pytest.mark.parametrize("length", [WINDOW, 2 * WINDOW, 4 * WINDOW])
def test_training_on_random_tokens_shows_no_leak(length):
    assert abs(leak_sentinel.excess(MODEL, length)) <= leak_sentinel.LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("leak", LEAKS)
def test_the_sentinel_detects_a_planted_leak(leak, monkeypatch):
    monkeypatch.setattr(
        projection,
        "default_plan",
        lambda *arguments: dataclasses.replace(default_plan(*arguments), cmp=leaking(LEAKS[leak])),
    )
    recipe = dataclasses.replace(leak_sentinel.RECIPE, steps=200)
    excess = leak_sentinel.excess(MODEL, 2 * WINDOW, recipe, last=50)
    if leak == "none":  # the replaced slot itself does not leak
        assert abs(excess) <= leak_sentinel.LIMIT
    else:
        assert excess < -2 * leak_sentinel.LIMIT


@pytest.mark.slow
def test_associative_recall_is_learned():
    layer = dataclasses.replace(
        LAYER, dim=64, n_heads=4, n_kv_heads=2, select_block_size=8, window_size=8
    )
    data = open_data(DataSpec("recall", 64, vocab_size=32, held_out_rows=32))
    recipe = Recipe(steps=300, batch=32, learning_rate=3e-3, warmup=50, weight_decay=0.0)
    torch.manual_seed(0)
    trainer = Trainer(
        LanguageModel(LMConfig(layer, 2, 32, 128)), data, recipe, World(torch.device("cpu"))
    )
    for _ in range(recipe.steps):
        trainer.step()
    assert trainer.accuracy() > 0.99

"""Trainings that run on every rank of a process group, or on one process without a group."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nsa_models.lm import checkpoint, parallel
from nsa_models.lm.config import LMConfig
from nsa_models.lm.corpus import Corpus
from nsa_models.lm.data import TextRows
from nsa_models.lm.model import LanguageModel
from nsa_models.lm.parallel import World
from nsa_models.lm.recipe import Recipe
from nsa_models.lm.task import Data, DataSpec, open_data
from nsa_models.lm.tokens import ByteTokenizer
from nsa_models.lm.trainer import Trainer
from small_layer import LAYER

LENGTH = 33  # a part of one row does not divide over two ranks


def text() -> Data:
    """Return rows of packed documents, some of which end and begin inside a rank's tokens."""
    corpus = Corpus([f"document {n}: " + "wörd " * n if n else "x" for n in range(40)], "words")
    rows = TextRows(corpus, ByteTokenizer(), LENGTH, share=0.2)
    held_out = TextRows(corpus, ByteTokenizer(), LENGTH, share=0.2, held_out=True, epochs=1)
    spec = DataSpec("words", LENGTH)
    return Data(spec, rows, list(itertools.islice(held_out, 3)), 256, ByteTokenizer())


def task() -> Data:
    """Return rows without documents, of a length that does not divide over two ranks."""
    return open_data(DataSpec("uniform", LENGTH, vocab_size=32, held_out_rows=3))


def trainer_of(
    rank: int,
    world: int,
    resume: str | None = None,
    data: str = "text",
    groups: int = 2,
    **recipe: Any,
) -> Trainer:
    """Return a trainer of this rank.

    Args:
        rank: this rank.
        world: number of ranks.
        resume: folder of the checkpoint from which it goes on.
        data: "text" or "task".
        groups: number of key/value heads; 2 ranks divide the tokens of 3 in mode sequence.
        recipe: fields of the recipe.
    """
    torch.manual_seed(0)
    rows = text() if data == "text" else task()
    layer = dataclasses.replace(LAYER, n_heads=2 * groups, n_kv_heads=groups)
    config = LMConfig(layer, 2, rows.vocab_size, mlp_dim=32)
    options = {"steps": 4, "batch": 4, "accumulate": 2, "warmup": 9, "clip": 0.5, **recipe}
    saved = None if resume is None else checkpoint.read(resume)
    model, where = LanguageModel(config), World(torch.device("cpu"), rank, world)
    return Trainer(model, rows, Recipe(**options), where, saved)


def losses(
    rank: int, world: int, *, steps: int = 2, save: str | None = None, **options: Any
) -> list[list[float]]:
    """Return [loss, gradient norm] of each step, and last the held-out loss and accuracy."""
    trainer = trainer_of(rank, world, **options)
    assert trainer.plan() is not None
    results = []
    for _ in range(steps):
        loss, _, norm = trainer.step().read()
        results.append([loss, norm])
    if save is not None:
        pathlib.Path(save).mkdir(exist_ok=True)
        trainer.save(pathlib.Path(save, checkpoint.FILE))
    return [*results, [trainer.held_out_loss(), trainer.accuracy()]]


def same_after_a_save(rank: int, world: int, *, folder: str, copy: str, **options: Any) -> bool:
    """Resume, save without a step, and return whether all tensors and facts have the same bits."""
    losses(rank, world, steps=0, resume=folder, save=copy, **options)
    before, after = checkpoint.read(folder), checkpoint.read(copy)
    expected, tensors = before.tensors, after.tensors
    assert before.facts["position"] == after.facts["position"]
    assert before.facts["step"] == after.facts["step"] > 0
    return tensors.keys() == expected.keys() and all(
        torch.equal(tensors[name], expected[name]) for name in expected
    )


def alone_in_a_group(rank: int, world: int, *, timeout_s: float) -> list[tuple[float, str]]:
    """Return the seconds and the error of rank 0 that waits alone in the groups of a grid."""
    usual, parallel.TIMEOUT = parallel.TIMEOUT, timedelta(seconds=timeout_s)
    try:
        own = World(torch.device("cpu"), rank, world)
        grids = {"cp": own.arranged(world, 1), "tp": own.arranged(1, world)}
    finally:
        parallel.TIMEOUT = usual
    groups = []
    for dimension, grid in grids.items():
        assert (grid.ranks_of(dimension), grid.place_in(dimension)) == (world, rank)
        assert grid.mesh is not None
        groups.append(grid.mesh[dimension].get_group())
        together = torch.ones(1)
        dist.all_reduce(together, group=groups[-1])
        assert together.item() == world
    results = []
    for group in groups if rank == 0 else ():
        started = time.monotonic()
        with pytest.raises(RuntimeError) as error:
            dist.all_reduce(torch.ones(1), group=group)
        results.append((time.monotonic() - started, str(error.value)))
    dist.barrier()  # in a group with another timeout: rank 1 does not end before
    return results

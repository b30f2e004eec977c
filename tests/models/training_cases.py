"""Trainings that run on every rank of a process group, or on one process without a group."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import shutil
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from killed_writes import Killed, killed_at
from nsa_models.lm import parallel, saving
from nsa_models.lm.config import LMConfig
from nsa_models.lm.corpus import Corpus
from nsa_models.lm.data import TextRows
from nsa_models.lm.model import LanguageModel
from nsa_models.lm.model_folder import open_folder
from nsa_models.lm.parallel import World
from nsa_models.lm.recipe import Recipe
from nsa_models.lm.run_folder import INDEX
from nsa_models.lm.task import Data, DataSpec, open_data
from nsa_models.lm.tokens import ByteTokenizer
from nsa_models.lm.trainer import Trainer
from small_layer import LAYER

LENGTH = 33  # a part of one row does not divide over two ranks
Value = TypeVar("Value")


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
    resume: str | pathlib.Path | None = None,
    start: str | pathlib.Path | None = None,
    data: str = "text",
    groups: int = 2,
    **recipe: Any,
) -> Trainer:
    """Return a trainer of this rank.

    Args:
        rank: this rank.
        world: number of ranks.
        resume: folder of the run with which it goes on; FSDP begins with a model without memory.
        start: folder of the model with whose weights it begins.
        data: "text" or "task".
        groups: number of key/value heads; 2 ranks divide the tokens of 3 in mode sequence.
        recipe: fields of the recipe.
    """
    torch.manual_seed(99 if resume else 0)  # a resumed run has neither the weights nor the state
    rows = text() if data == "text" else task()
    layer = dataclasses.replace(LAYER, n_heads=2 * groups, n_kv_heads=groups)
    config = LMConfig(layer, 2, rows.vocab_size, mlp_dim=32)
    options = {"steps": 4, "batch": 4, "accumulate": 2, "warmup": 9, "clip": 0.5, **recipe}
    source = start if resume is None else resume
    saved = None if source is None else open_folder(source, rank, world)
    is_sharded = world > 1 and options.get("parallel") == "fsdp"
    with torch.device("meta" if saved is not None and is_sharded else "cpu"):
        model = LanguageModel(config if saved is None else saved.config)
    where = World(torch.device("cpu"), rank, world)
    return Trainer(model, rows, Recipe(**options), where, saved, resume is not None)


def tensors_of(folder: str | pathlib.Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a run: weights, moments and random states."""
    opened = open_folder(folder)
    files = {**opened.files, **opened._optimizer_files}
    with opened._reader(files) as read:
        return {name: read(name) for name in files}


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Return whether two runs have the same tensors, bit by bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


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
        trainer.save(pathlib.Path(save))
    return [*results, [trainer.held_out_loss(), trainer.accuracy()]]


def same_after_a_save(rank: int, world: int, *, folder: str, copy: str, **options: Any) -> bool:
    """Resume, save without a step, and return whether all tensors and positions are the same."""
    losses(rank, world, steps=0, resume=folder, save=copy, **options)
    before, after = (open_folder(path).training for path in (folder, copy))
    assert before is not None
    assert after is not None
    assert after.processes == world
    assert (before.position, before.tokens) == (after.position, after.tokens)
    assert before.step == after.step > 0
    return are_equal(
        *(
            {name: t for name, t in tensors_of(path).items() if not name.startswith("random.")}
            for path in (folder, copy)
        )
    )


def shares(rank: int, world: int, *, folder: str, **options: Any) -> list[float]:
    """Resume and save again; return this rank's part of the parameters and of the written bytes."""
    trainer = trainer_of(rank, world, resume=folder, **options)
    whole = sum(p.nbytes for p in open_folder(folder).model().parameters())
    local = (getattr(p, "_local_tensor", p) for p in trainer.model.parameters())
    held, written = sum(tensor.nbytes for tensor in local), []
    write = saving._write_tensors

    def recorded(file: pathlib.Path, tensors: dict[str, torch.Tensor], step: int) -> None:
        written.append(sum(t.nbytes for n, t in tensors.items() if not n.startswith("random.")))
        write(file, tensors, step)

    with mock.patch.object(saving, "_write_tensors", recorded):
        trainer.save(pathlib.Path(folder))
    return [held / whole, sum(written) / (3 * whole)]  # written with both moments


def restored_random_state(rank: int, world: int, *, folder: str) -> bool:
    """Save with a random state of this rank alone, and return whether a resume restores it."""
    trainer = trainer_of(rank, world)
    trainer.step()
    torch.manual_seed(100 + rank)
    state = torch.get_rng_state()
    trainer.save(pathlib.Path(folder))
    trainer.world.collect(None)  # the first process has replaced the index
    trainer_of(rank, world, resume=folder)
    return torch.equal(torch.get_rng_state(), state)


class _Mortal(World):
    """Processes that die together in the next collective after one of them was killed."""

    dead: Callable[[], bool] = lambda: False

    def collect(self, value: Value) -> list[Value]:
        answers = super().collect((_Mortal.dead(), value))
        if any(is_dead for is_dead, _ in answers):
            raise Killed
        return [own for _, own in answers]


def killed_saves(rank: int, world: int, *, folder: str, is_first: bool) -> list[int]:
    """Kill each rank before each effect of a save, and resume on all ranks.

    Args:
        rank: this rank.
        world: number of ranks.
        folder: an empty folder.
        is_first: whether the folder has no run yet.

    Returns:
        The number of kills, and how many of them left the new run.
    """
    options = {"parallel": "fsdp", "accumulate": 1}
    trainer, out = trainer_of(rank, world, **options), pathlib.Path(folder, "run")
    together = trainer.world
    saved: list[dict[str, torch.Tensor]] = []
    for step in (1, 2):
        trainer.step()
        path = pathlib.Path(folder, str(step))
        path.mkdir(exist_ok=True)
        trainer.save(path)
        together.collect(None)
        saved.append(tensors_of(path))
    trainer.world = _Mortal(together.device, rank, world)
    kills = new = 0
    for victim in range(world):
        number, is_killed = 0, True
        while is_killed:
            if rank == 0:
                shutil.rmtree(out, ignore_errors=True)
                out.mkdir() if is_first else shutil.copytree(pathlib.Path(folder, "1"), out)
            together.collect(None)
            informed = False
            with killed_at(number if rank == victim else None) as effects:
                _Mortal.dead = lambda effects=effects: effects.dead
                try:
                    trainer.save(out)
                except Killed:
                    informed = not effects.dead
                    raise
                finally:
                    if not informed:
                        is_killed = any(dead for dead, _ in together.collect((effects.dead, 0)))
            has_run = (out / INDEX).exists()
            assert has_run or is_first
            step = 0
            if has_run:
                training = open_folder(out).training
                assert training is not None
                step = training.step
                assert step in ((2,) if is_first else (1, 2))
                assert are_equal(tensors_of(out), saved[step - 1])
                again = trainer_of(rank, world, resume=out, **options)
                together.collect(None)  # all have read the run
                again.step()
                again.save(out)
                if rank == 0:  # it has removed the old files
                    assert len(list(out.glob("model-*"))) == world
                    assert len(list(out.glob("optimizer/*"))) == world
            kills, new, number = kills + is_killed, new + (is_killed and step == 2), number + 1
    return [kills, new]


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

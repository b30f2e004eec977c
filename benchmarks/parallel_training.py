"""Compare training on several GPUs with training on one: the losses, or the time of a step.

    python benchmarks/parallel_training.py loss --gpus 2 --json loss.json
    python benchmarks/parallel_training.py speed --gpus 2 --json speed.json
    python benchmarks/parallel_training.py loss --gpus 2 --quick --device cpu  # in seconds

``loss`` trains a model of 4 layers on packed text, in bf16, on one GPU and divided over all of
them, from the same weights and on the same rows. Correct runs round differently, and training
amplifies the difference. Controls on one GPU show by how much: the run repeated, three runs with
each weight moved to a neighbouring fp32 number at random, and the run that accumulates the
gradients of the rows.

``speed`` times the steps (forward, backward, optimizer) of m7c_125m on one row of 256k random
tokens with activation checkpointing, on one GPU and on all of them.

``--kv-heads`` sets the key/value heads. If the number of GPUs divides them, context parallelism
runs in mode heads; else it runs in mode sequence, and there is no tensor parallelism.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from train_cells import Repeated, Row, median

from nsa_bench.environment import machine
from nsa_core.errors import InvalidInput
from nsa_core.parallel.context import DividedSequence
from nsa_core.util.atomic_files import write_atomic
from nsa_models.lm.config import LMConfig, size
from nsa_models.lm.model import LanguageModel
from nsa_models.lm.parallel import World, join
from nsa_models.lm.recipe import Recipe
from nsa_models.lm.task import Data, DataSpec, open_data
from nsa_models.lm.trainer import Trainer

SECTIONS = ("loss", "speed")
BASELINE = "one GPU"
WARM_UP = 2  # steps


@dataclasses.dataclass(frozen=True)
class Run:
    """A training run.

    Attributes:
        name: The name of its row.
        options: Fields of the recipe that differ from the section's.
        moved: Seed with which every weight is first moved to a neighbouring number; 0: not moved.
    """

    name: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    moved: int = 0


@dataclasses.dataclass(frozen=True)
class Problem:
    """The training of a section.

    Attributes:
        model: The sizes of the model.
        data: The rows.
        recipe: The training options on one GPU.
        steps: Number of steps of a loss run, or of timed steps.
    """

    model: LMConfig
    data: DataSpec
    recipe: Recipe
    steps: int


def problem(section: str, quick: bool, kv_heads: int | None) -> Problem:
    """Return the training of a section; ``quick``: that of a tiny model in fp32.

    Raises:
        InvalidInput: ``kv_heads`` does not divide the query heads.
    """
    precision = "float32" if quick else "bfloat16"
    model = size("tiny") if quick else size("m7c_125m")
    if kv_heads is not None:
        model = dataclasses.replace(
            model, layer=dataclasses.replace(model.layer, n_kv_heads=kv_heads)
        )
    if section == "loss":
        model = dataclasses.replace(model, n_layers=2 if quick else 4)
        steps = 6 if quick else 100
        recipe = Recipe(
            steps=steps, batch=2, learning_rate=3e-4, warmup=steps // 10, precision=precision
        )
        text = DataSpec("python-docs", 128 if quick else 8192, held_out_rows=1)
        return Problem(model, text, recipe, steps)
    recipe = Recipe(batch=1, learning_rate=1e-4, precision=precision, recompute=True)
    row = DataSpec("uniform", 128 if quick else 2**18, vocab_size=256, held_out_rows=1)
    return Problem(model, row, recipe, 2 if quick else 5)


def runs_on_one_gpu(batch: int) -> tuple[Run, ...]:
    """Return the run that the others are compared with, and its controls."""
    return (
        Run(BASELINE),
        *(Run(f"one GPU, weights moved by one rounding, {seed}", moved=seed) for seed in (1, 2, 3)),
        Run("one GPU, repeated"),
        Run("one GPU, gradients of rows accumulated", {"accumulate": batch}),
    )


def divided_runs(gpus: int, tensor_parallel: bool) -> tuple[Run, ...]:
    """Return the runs on all GPUs."""
    context = {"context_parallel": gpus}
    runs = (
        Run("context parallel", context),
        Run("context parallel, FSDP2", context | {"parallel": "fsdp"}),
        Run("tensor parallel", {"tensor_parallel": gpus}),
    )
    return runs if tensor_parallel else runs[:2]


@torch.no_grad()
def move_weights(model: torch.nn.Module, seed: int) -> None:
    """Move every weight up or down to the next number of its dtype, at random."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        up = torch.rand(parameter.shape, generator=generator) < 0.5
        towards = torch.where(up, math.inf, -math.inf).to(parameter)
        parameter.copy_(torch.nextafter(parameter, towards))


class Bench:
    """Runs the trainings of a section on the processes of a world, and saves their rows."""

    def __init__(
        self, section: str, problem: Problem, world: World, file: Path | None, limit_s: float
    ) -> None:
        self.section, self.problem, self.world, self.file = section, problem, world, file
        self._alone = World(world.device)
        self._deadline = time.monotonic() + limit_s
        self._data: Data | None = None
        self.document: Row = {
            "kind": "nsa-parallel-training",
            "schema_version": 1,
            "machine": machine(str(world.device)),
            "torch": torch.__version__,
            "gpus": world.size,
            "model": dataclasses.asdict(problem.model),
            "recipe": dataclasses.asdict(problem.recipe),
            "data": dataclasses.asdict(problem.data),
            "rows": [],
        }

    def losses(self) -> None:
        """Train each run and record its losses beside those of the first one."""
        world = self.world
        alone = runs_on_one_gpu(self.problem.recipe.batch)
        # Every process trains some of them, with no other process.
        own = {
            number: self._losses_of(run, self._alone)
            for number, run in enumerate(alone)
            if number % world.size == world.rank
        }
        rows = {number: row for part in world.collect(own) for number, row in part.items()}
        baseline = rows[0]["losses"]
        for number, run in enumerate(alone):
            self._record(run, 1, _compared(baseline, rows[number]))
        for run in self._divided_runs():
            row = self._together(lambda run=run: self._losses_of(run, world))
            self._record(run, world.size, _compared(baseline, row))

    def speeds(self) -> None:
        """Time the steps of the run on one GPU, then of the runs on all of them."""
        row: Row = {}
        if self.world.rank == 0:
            try:
                row = self._speed_of(Run(BASELINE), self._alone)
            except torch.OutOfMemoryError:
                row = {"reason": "out of memory"}
        row = self.world.collect(row)[0]  # the other GPUs are idle until now
        self._record(Run(BASELINE), 1, row)
        for run in self._divided_runs():
            row = self._together(lambda run=run: self._speed_of(run, self.world))
            self._record(run, self.world.size, row)

    def _divided_runs(self) -> tuple[Run, ...]:
        gpus, groups = self.world.size, self.problem.model.layer.n_kv_heads
        if gpus == 1:
            return ()
        return divided_runs(gpus, self.section == "loss" and groups % gpus == 0)

    def _together(self, measure: Callable[[], Row]) -> Row:
        """Measure on all processes, or give the reason why none of them does."""
        (late,) = self.world.sum_on_host(time.monotonic() > self._deadline)
        return {"reason": "not begun: time limit"} if late else measure()

    def _trainer(self, run: Run, world: World) -> Trainer:
        gc.collect()
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(world.device)
        recipe = dataclasses.replace(self.problem.recipe, **run.options)
        torch.manual_seed(recipe.seed)
        if self._data is None:
            self._data = open_data(self.problem.data)
            if self.section == "speed":
                # Create the row in advance, because a list of 256k tokens is slow to make.
                self._data.rows = Repeated(self._data.rows, 1)  # type: ignore[assignment]
        model = LanguageModel(self.problem.model)
        if run.moved:
            move_weights(model, run.moved)
        return Trainer(model, self._data, recipe, world)

    def _losses_of(self, run: Run, world: World) -> Row:
        trainer = self._trainer(run, world)
        losses = [trainer.step().read()[0] for _ in range(self.problem.steps)]
        if not all(map(math.isfinite, losses)):
            raise InvalidInput(f"{run.name}: the losses must be finite, got {losses}")
        return {**_division(trainer), "losses": losses}

    def _speed_of(self, run: Run, world: World) -> Row:
        trainer = self._trainer(run, world)
        times = _step_times(trainer, self.problem.steps)
        tokens = trainer.recipe.batch * trainer.data.rows.length
        every = world.collect((times, trainer.memory()))
        slowest = [max(of_step) for of_step in zip(*(times for times, _ in every))]
        return {
            "step_ms": round(median(slowest) * 1e3, 3),
            "steps_ms": [round(seconds * 1e3, 3) for seconds in slowest],
            "tokens_per_s": round(tokens / median(slowest)),
            "peak_gib": round(max(peak for _, peak in every) / 2**30, 3),
            **_division(trainer),
        }

    def _record(self, run: Run, gpus: int, row: Row) -> None:
        """Print and save a row; the first process does so."""
        row = {"section": self.section, "run": run.name, "gpus": gpus, **row}
        self.document["rows"].append(row)
        if self.world.rank:
            return
        shown = {k: v for k, v in row.items() if not isinstance(v, list)}
        print("  ".join(f"{k}={v}" for k, v in shown.items()), flush=True)
        if self.file is not None:
            write_atomic(self.file, json.dumps(self.document, indent=1) + "\n", force=True)


def _division(trainer: Trainer) -> Row:
    """Return how context parallelism divides the layers; nothing without it."""
    layer: Any = trainer.model.blocks[0].attn
    if not isinstance(layer.parallel, DividedSequence):
        return {}
    return {"mode": layer.parallel.mode, "layout": layer.parallel.rank.layout}


def _compared(baseline: list[float], row: Row) -> Row:
    """Return a row with the differences of its losses from those of the baseline."""
    if "losses" not in row:
        return row
    differences = [abs(a - b) for a, b in zip(row["losses"], baseline)]
    largest = max(differences)
    return {
        "largest_difference": largest,
        "at_step": differences.index(largest) + 1,
        "mean_difference": sum(differences) / len(differences),
        "last_loss": row["losses"][-1],
        **row,
    }


def _step_times(trainer: Trainer, count: int) -> list[float]:
    """Return the seconds between the ends of successive steps.

    As in the training loop, each step is queued before the previous one is awaited.
    """
    for _ in range(WARM_UP):
        pending = trainer.step()
    ends = []
    for _ in range(count + 1):
        following = trainer.step()
        pending.read()
        ends.append(time.perf_counter())
        pending = following
    pending.read()
    return [end - start for start, end in itertools.pairwise(ends)]


def main() -> None:
    """Run a section on all GPUs; print and save its rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("section", choices=SECTIONS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--gpus", type=int, default=1, help="number of processes to start, each with a GPU"
    )
    parser.add_argument("--kv-heads", type=int, help="key/value heads (default: 2)")
    parser.add_argument("--quick", action="store_true", help="a tiny model, in seconds")
    parser.add_argument(
        "--time-limit", type=float, default=540.0, help="seconds after which no division starts"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    try:
        training = problem(options.section, options.quick, options.kv_heads)
    except InvalidInput as error:
        parser.error(f"--kv-heads: {error}")
    if options.gpus > 1 and not dist.is_torchelastic_launched():
        start = ["-m", "torch.distributed.run", "--standalone"]
        start += ["--nproc-per-node", str(options.gpus)]
        os.execv(sys.executable, [sys.executable, *start, *sys.argv])
    world = join(options.device)
    bench = Bench(options.section, training, world, options.json, options.time_limit)
    try:
        bench.losses() if options.section == "loss" else bench.speeds()
    finally:
        world.close()


if __name__ == "__main__":
    main()

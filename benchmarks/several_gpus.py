"""Check what only several GPUs show: divided layers, training steps, and saved runs.

    python benchmarks/several_gpus.py --json several_gpus.json           # on all GPUs, 2 or 4
    python benchmarks/several_gpus.py --device cpu --gpus 2              # over gloo

Run it before a release, on two and on four GPUs. It takes at most three minutes. The exit code is 1
if a check fails.

``division`` judges a layer on all GPUs against one process, as scaling.py does before it times one.
``train`` trains a small model in fp32 under each kind of parallelism, and compares the loss and the
gradient norm of three steps, and the gradient of every parameter of the first, with one GPU.
``resume`` continues from the run saved after the first step on one GPU, and from there on all.

All blocks are selected, so a correct run differs from that of one GPU by the order of its sums
only. The limit is therefore measured: two controls on one GPU start from weights that are each
moved to a neighbouring fp32 number, at random. Every weight then has an error of one rounding, and
so has, in other places, each sum that a division splits. A number may differ from that of one GPU
by MARGIN times the larger difference of the controls, and by FLOOR roundings of its own if they
happen to agree. A lost row or a sum counted twice differs by thousands of roundings.
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import itertools
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parallel_training import move_weights
from safetensors.torch import load_file
from scaling import JUDGED, MODES, Division, Referee, layer_config

from nsa_bench.environment import machine
from nsa_core.config import NSAConfig
from nsa_core.parallel.context import DividedSequence
from nsa_core.parallel.layouts import LAYOUTS
from nsa_core.util.atomic_files import write_atomic
from nsa_models.lm.config import LMConfig
from nsa_models.lm.model import LanguageModel
from nsa_models.lm.model_folder import open_folder
from nsa_models.lm.parallel import World, join
from nsa_models.lm.recipe import Recipe
from nsa_models.lm.run_folder import OPTIMIZER
from nsa_models.lm.task import DataSpec, open_data
from nsa_models.lm.trainer import Trainer

STEPS = 3
SHOWN = 6  # failures of a check that are printed
MARGIN = 16.0
FLOOR = (
    64 * 2.0**-24
)  # relative; thousands of terms in another order differ by some dozen roundings
Numbers = dict[str, torch.Tensor]  # losses and gradient norms by step, gradients by parameter


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of parallelism.

    Attributes:
        kv_heads: Key/value heads of its model. The number of GPUs divides four of them but not
            three, and so decides between the modes of context parallelism.
        mode: The expected mode of context parallelism; empty without it.
        options: Its fields of the recipe.
    """

    kv_heads: int
    mode: str
    options: Mapping[str, Any]


def kinds(gpus: int) -> dict[str, Kind]:
    """Return the kinds of parallelism by name."""
    context = {"context_parallel": gpus}
    return {
        "DDP": Kind(4, "", {"parallel": "ddp"}),
        "FSDP2": Kind(4, "", {"parallel": "fsdp"}),
        "tensor parallel": Kind(4, "", {"tensor_parallel": gpus}),
        "context parallel, heads": Kind(4, "heads", context),
        "context parallel, sequence": Kind(3, "sequence", context),
        "context parallel, sequence, FSDP2": Kind(3, "sequence", context | {"parallel": "fsdp"}),
    }


@dataclasses.dataclass(frozen=True)
class Expected:
    """The numbers of one GPU, and of its controls."""

    one: Numbers
    controls: list[Numbers]


class Report:
    """The results of all checks; the first process prints and keeps them.

    Args:
        world: The processes.
        file: The result file; None for none.
    """

    def __init__(self, world: World, file: Path | None) -> None:
        self._world, self._file = world, file
        self.document: dict[str, Any] = {
            "kind": "nsa-several-gpus",
            "schema_version": 1,
            "machine": machine(str(world.device)),
            "torch": torch.__version__,
            "gpus": world.size,
            "complete": False,
            "passed": False,
            "checks": [],
        }

    def check(self, name: str, run: Callable[[], list[str]]) -> None:
        """Run a check on all processes.

        Args:
            name: Its name.
            run: Returns what is wrong; only the result of the first process counts.

        Raises:
            SystemExit: ``run`` raised an error. The other processes may wait for this one, so it
                ends, and torchrun ends them.
        """
        started = time.perf_counter()
        try:
            failures = run()
        except Exception as error:  # noqa: BLE001  (collectives and kernels may raise anything)
            traceback.print_exc()
            self._add(name, started, [f"rank {self._world.rank}: {type(error).__name__}: {error}"])
            raise SystemExit(1) from None
        self._add(name, started, failures)

    def _add(self, name: str, started: float, failures: list[str]) -> None:
        seconds = round(time.perf_counter() - started, 1)
        checks = self.document["checks"]
        checks.append({"check": name, "seconds": seconds, "failures": failures})
        if self._world.rank == 0:
            print(f"{'FAIL' if failures else 'PASS'}  {seconds:6.1f} s  {name}", flush=True)
            more = [f"and {len(failures) - SHOWN} more"] if len(failures) > SHOWN else []
            for line in [*failures[:SHOWN], *more]:
                print(f"      {line}", flush=True)
        self._write()

    def finish(self) -> int:
        """Complete the result file and return the exit code."""
        failed = [each["check"] for each in self.document["checks"] if each["failures"]]
        self.document |= {"complete": True, "passed": not failed}
        if self._world.rank == 0:
            count = len(self.document["checks"])
            print(f"{count - len(failed)} of {count} checks passed", flush=True)
        self._write()
        return int(bool(failed) and self._world.rank == 0)  # torchrun ends all if one has another

    def _write(self) -> None:
        if self._file is not None and self._world.rank == 0:
            write_atomic(self._file, json.dumps(self.document, indent=1) + "\n", force=True)


def judge_divisions(world: World, report: Report) -> None:
    """Judge a layer in both dtypes, modes and layouts."""
    if world.device.type == "cuda":
        config = layer_config("64/4/128")
    else:
        config = layer_config(f"{2 * world.size}/{world.size}/16", (8, 4, 16, 4, 16))
    grid = world.arranged(world.size, 1)
    for dtype in JUDGED:
        referee = Referee(config, getattr(torch, dtype), grid)
        for mode, layout in itertools.product(MODES, LAYOUTS):
            division = Division(world.size, mode, layout)
            report.check(
                f"division {mode}, {layout}, {dtype}", lambda r=referee, d=division: r.judge(d)
            )


class Training:
    """Trainings of one model, on one GPU and on all.

    Args:
        world: All processes.
        folder: A folder for saved runs that all processes see.
    """

    def __init__(self, world: World, folder: Path) -> None:
        self.world, self._folder = world, folder
        cuda = world.device.type == "cuda"
        self._sizes: dict[str, Any] = {
            "dim": 128,
            "head_dim": 32 if cuda else 16,
            "window_size": 128 if cuda else 24,
            "num_selected_blocks": 8,
        }
        small = {"compress_block_size": 8, "compress_stride": 4, "select_block_size": 16}
        self._sizes |= {} if cuda else small
        self._group = 16 if cuda else 2  # query heads per key/value head
        self._data = open_data(DataSpec("python-docs", 512 if cuda else 128, held_out_rows=1))

    def trainer(
        self, kind: Kind, world: World, saved: Path | None = None, moved: int = 0
    ) -> Trainer:
        """Return the trainer of a kind on a world; ``moved``: seed with which weights are moved."""
        options = kind.options if world.size > 1 else {}
        recipe = Recipe(steps=10, batch=4, learning_rate=1e-3, warmup=0, **options)
        heads = {"n_heads": self._group * kind.kv_heads, "n_kv_heads": kind.kv_heads}
        torch.manual_seed(0)
        layer = NSAConfig(**self._sizes, **heads)
        model = LanguageModel(LMConfig(layer, 2, self._data.vocab_size))
        if moved:
            move_weights(model, moved)
        folder = saved and open_folder(saved)
        return Trainer(model, self._data, recipe, world, folder, resume=saved is not None)

    def alone(self, heads: Sequence[int]) -> dict[int, Expected]:
        """Train models on one GPU each; return their numbers by key/value heads."""
        own, world = {}, World(self.world.device)
        for number, kv_heads in enumerate(heads):
            if number % self.world.size == self.world.rank:
                kind = Kind(kv_heads, "", {})
                one, *controls = (
                    self._numbers(kind, world, f"one-{kv_heads}", moved) for moved in (0, 1, 2)
                )
                own[kv_heads] = Expected(one, controls)
        parts = self.world.collect(own)
        return {kv_heads: numbers for part in parts for kv_heads, numbers in part.items()}

    def together(self, name: str, kind: Kind) -> Numbers:
        """Train on all GPUs; return the numbers; the first process has those of gradients too."""
        return self._numbers(kind, self.world, name)

    def resumed(self, name: str, kind: Kind) -> Numbers:
        """Train the second step on one GPU and the third on all; return their numbers."""
        # Every process does this, on its own GPU: they load a run together.
        trainer = self.trainer(kind, World(self.world.device), self._folder / name)
        numbers = steps(trainer, 1)
        if self.world.rank == 0:
            self._save(trainer, f"{name}-1")
        self.world.collect(None)  # the others wait for the file
        return numbers | steps(self.trainer(kind, self.world, self._folder / f"{name}-1"), 1)

    def _numbers(self, kind: Kind, world: World, name: str, moved: int = 0) -> Numbers:
        trainer = self.trainer(kind, world, moved=moved)
        parallel = getattr(trainer.model.blocks[0].attn, "parallel", None)
        mode = parallel.mode if isinstance(parallel, DividedSequence) else ""
        if mode != (kind.mode if world.size > 1 else ""):
            raise ValueError(f"the layers are divided in mode {mode!r}, expected {kind.mode!r}")
        numbers = steps(trainer, 1)
        self._save(trainer, name)
        numbers |= steps(trainer, STEPS - 1)
        if world.rank == 0:
            for file in (self._folder / name / OPTIMIZER).iterdir():
                moments = load_file(file)
                numbers |= {key: moments[key] for key in moments if key.startswith("exp_avg.")}
        return numbers

    def _save(self, trainer: Trainer, name: str) -> None:
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        trainer.save(folder)


def steps(trainer: Trainer, count: int) -> Numbers:
    """Train some steps; return their losses and gradient norms."""
    numbers: Numbers = {}
    for _ in range(count):
        loss, _, norm = trainer.step().read()
        for name, value in (("loss", loss), ("gradient norm", norm)):
            numbers[f"{name} of step {trainer.step_number}"] = torch.tensor(value).double()
    return numbers


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference, relative to that of the expected tensor."""
    if actual.shape != expected.shape:
        return float("inf")
    gap, size = (actual.double() - expected.double()).norm(), expected.double().norm()
    return float(gap / size) if size else float("inf") * bool(gap)


def compare(actual: Numbers, expected: Expected) -> list[str]:
    """Return which numbers differ from those of one GPU by more than the limit."""
    failures, one = [], expected.one
    for name, value in actual.items():
        own = max(difference(control[name], one[name]) for control in expected.controls)
        limit, gap = max(FLOOR, MARGIN * own), difference(value, one[name])
        if not gap <= limit:
            failures.append(f"{name} differs by {gap:.2e}, more than {limit:.2e}")
    return failures


def train(world: World, report: Report, folder: Path) -> None:
    """Check training and resuming under each kind of parallelism."""
    training = Training(world, folder)
    every = kinds(world.size)
    expected: dict[int, Expected] = {}

    def train_alone() -> list[str]:
        expected.update(training.alone(sorted({kind.kv_heads for kind in every.values()})))
        return []

    report.check("train one GPU", train_alone)
    for name, kind in every.items():
        right = expected[kind.kv_heads]
        report.check(
            f"train {name}", lambda n=name, k=kind, e=right: compare(training.together(n, k), e)
        )
        report.check(
            f"resume {name}: {world.size}, 1, {world.size}",
            lambda n=name, k=kind, e=right: compare(training.resumed(n, k), e),
        )


def shared_folder(world: World) -> Iterator[Path]:
    """Yield a folder that all processes see, and remove it."""
    with tempfile.TemporaryDirectory() as own:
        yield Path(world.collect(own)[0])
        world.collect(None)  # the others are done with it


def main() -> None:
    """Run all checks on all GPUs; print and save the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if cuda else "cpu")
    parser.add_argument("--gpus", type=int, choices=(2, 4), help="default: all that are visible")
    parser.add_argument(
        "--time-limit",
        type=float,
        default=170.0,
        help="seconds after which a process that still runs prints where it is and fails",
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not dist.is_torchelastic_launched():
        gpus = options.gpus or (torch.cuda.device_count() if options.device == "cuda" else 2)
        if gpus not in (2, 4):
            parser.error(f"needs 2 or 4 GPUs, got {gpus}: give --gpus 2 or --gpus 4")
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
        os.execv(sys.executable, [sys.executable, *start, *sys.argv])
    faulthandler.dump_traceback_later(options.time_limit, exit=True)
    torch.set_num_threads(1)
    world = join(options.device)
    report = Report(world, options.json)
    for folder in shared_folder(world):
        judge_divisions(world, report)
        train(world, report, folder)
    world.close()
    raise SystemExit(report.finish())


if __name__ == "__main__":
    main()

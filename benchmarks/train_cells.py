"""What benchmarks/train.py measures, and how a cell of it runs: guarded, timed, printed and written
at once.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from nsa_bench.environment import machine
from nsa_bench.roofline import measure_peaks
from nsa_core.util.atomic_files import write_atomic
from nsa_core.util.text import describe_error
from nsa_models.lm.config import LMConfig, size
from nsa_models.lm.model import LanguageModel
from nsa_models.lm.parallel import World
from nsa_models.lm.recipe import Recipe
from nsa_models.lm.task import DataSpec, open_data
from nsa_models.lm.trainer import Trainer

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is measured."""

    model: LMConfig
    device: str
    precision: str = "bfloat16"
    modes: tuple[str, ...] = ("compile", "compile+graph", "eager")
    # Those with a target first: a time limit cuts from the end. The rest locate the crossover.
    shapes: tuple[tuple[int, int], ...] = (
        (2048, 1),
        (2048, 8),
        (16384, 1),
        (65536, 1),
        (2048, 2),
        (2048, 16),
        (32768, 1),
        (8192, 1),
        (4096, 1),
    )
    seconds: float = 2.0  # of steps in a cell
    batches: tuple[int, ...] = (16, 32, 48, 64, 96, 128, 192, 256)
    batch_length: int = 2048
    lengths: tuple[int, ...] = (2048, 4096, 8192, 16384, 32768, 65536)
    stalls: tuple[tuple[int, int], ...] = ((512, 2), (2048, 1), (2048, 2))
    stall_steps: int = 200
    layers: tuple[int, ...] = (1, 2, 4, 12)
    layer_length: int = 256
    toy: tuple[int, int] = (128, 8)


def quick(device: str) -> Plan:
    """Every section, small."""
    tiny = size("tiny", n_layers=1)
    return Plan(
        tiny,
        device,
        "float32",
        ("eager",),
        ((64, 1), (128, 1)),
        0.02,
        (1, 2),
        64,
        (64, 128),
        ((64, 1),),
        4,
        (1, 2),
        32,
        (32, 2),
    )


class Bench:
    """Runs cells and keeps their rows."""

    def __init__(self, plan: Plan, file: Path | None, limit_s: float) -> None:
        self.plan, self.file, self.until = plan, file, time.monotonic() + limit_s
        self.cuda = plan.device.startswith("cuda")
        self.peak = measure_peaks(plan.device, getattr(torch, plan.precision)).flops_per_s
        self.document: Row = {
            "kind": "nsa-train-bench",
            "schema_version": 1,
            "machine": machine(plan.device),
            "torch": torch.__version__,
            "model": plan.model.to_dict(),
            "precision": plan.precision,
            "matrix_flops_per_s": self.peak,
            "rows": [],
        }

    def cell(self, section: str, facts: Row, measure: Callable[[], Row]) -> Row:
        """The row of one measurement, with the reason where there is none; printed and written at
        once.
        """
        row: Row = {"section": section, **facts}
        if time.monotonic() > self.until:
            row["reason"] = "not begun: time limit"
        else:
            started = time.monotonic()
            try:
                row |= measure()
            except (
                RuntimeError,
                ValueError,
                NotImplementedError,
            ) as error:  # out of memory is a RuntimeError
                row["reason"] = describe_error(error)[:400]
            row["cell_s"] = round(time.monotonic() - started, 1)
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
        print(
            section + "  " + "  ".join(f"{k}={v}" for k, v in row.items() if k != "section"),
            flush=True,
        )
        self.document["rows"].append(row)
        self.write()
        return row

    def write(self) -> None:
        """The file as far as it is."""
        if self.file is not None:
            write_atomic(self.file, json.dumps(self.document, indent=1) + "\n", force=True)

    def sync(self) -> None:
        """Wait for the device."""
        if self.cuda:
            torch.cuda.synchronize()

    def trainer(self, config: LMConfig, length: int, batch: int, mode: str = "eager") -> Trainer:
        """A trainer on uniform tokens."""
        torch.manual_seed(0)
        recipe = Recipe(
            steps=10**6,
            batch=batch,
            warmup=100,
            learning_rate=1e-4,
            precision=self.plan.precision,
            compile=mode.startswith("compile"),
            graph=mode.endswith("graph"),
        )
        data = open_data(DataSpec("uniform", length, vocab_size=config.vocab_size, held_out_rows=1))
        # Rows made beforehand: the bench is of the step, and Python's lists are slow at 64k tokens.
        data.rows = Repeated(data.rows, 4)  # type: ignore[assignment]
        return Trainer(LanguageModel(config), data, recipe, World(torch.device(self.plan.device)))

    def times(self, trainer: Trainer, at_least: int = 5, at_most: int = 10**6) -> Iterator[float]:
        """Seconds from the end of each step to that of the next, as the training loop runs them,
        for plan.seconds.

        A step is given to the device before the one before it is waited for.
        """
        self.sync()
        waiting, last = trainer.step(), 0.0
        until, count = time.monotonic() + self.plan.seconds, 0
        while count < at_least or (time.monotonic() < until and count < at_most):
            following = trainer.step()
            waiting.read()
            now = time.perf_counter()
            if last:  # the first has nothing before it to be measured from
                yield now - last
                count += 1
            waiting, last = following, now
        self.sync()


class Repeated:
    """The same few rows over and over."""

    packed = False

    def __init__(self, rows: Any, count: int) -> None:
        self.length, self._rows, self._next = rows.length, [next(rows) for _ in range(count)], 0

    def __next__(self) -> Any:
        self._next += 1
        return self._rows[self._next % len(self._rows)]

    def state_dict(self) -> Row:
        """Where the next row is; all that a trainer asks of rows that never fail."""
        return {"next": self._next}


def median(values: list[float]) -> float:
    """The middle one."""
    return sorted(values)[len(values) // 2]

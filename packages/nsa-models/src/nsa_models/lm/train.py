"""The training loop: steps, held-out loss, log, checkpoints, and an end on Ctrl-C or SIGTERM that
loses nothing.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nsa_bench.environment import device_name
from nsa_bench.roofline import measure_peaks
from nsa_core.errors import InvalidInput, NSAError
from nsa_core.util.interruption import exit_code, held
from nsa_models.lm import checkpoint, log
from nsa_models.lm.flops import row_flops
from nsa_models.lm.trainer import Measured, Trainer


@dataclasses.dataclass(frozen=True)
class Progress:
    """A step that is done, as numbers; what a line of the log holds."""

    step: int
    loss: float  # mean nats per target of the step
    learning_rate: float
    grad_norm: float  # before clipping
    tokens: int  # of all steps so far
    tokens_per_s: float
    matrix_share: (
        float  # counted operations over the device's measured matrix rate, all devices together
    )
    memory_bytes: int
    held_out_loss: float | None = None
    selected_mass: list[float] | None = None  # per layer
    selected_keys: list[float] | None = None

    def record(self) -> dict[str, Any]:
        """For the log: fields that are None are left out."""
        return {
            name: value for name, value in dataclasses.asdict(self).items() if value is not None
        }


Report = Callable[[Progress], None]


class NotFinite(NSAError):
    """The loss or a gradient is NaN or infinite; the message names the step."""


def train(trainer: Trainer, out: Path, report: Report | None = None) -> list[Progress]:
    """Train to the last step of the recipe; write ``out``/log.jsonl, and
    ``out``/checkpoint.safetensors at its intervals and at the end. The folder must exist.

    Ctrl-C (SIGINT) ends the step, saves and raises KeyboardInterrupt; a second one ends at once.
    SIGTERM, as a cluster sends it, ends the step, saves and raises SystemExit(143).

    Returns:
        What was reported, a record for each step of this call; the first may be step 0, the
        held-out loss before any.

    Raises:
        InvalidInput, OSError: a document cannot be read; one process alone saves the steps before
            it first.
        NotFinite: the loss or the norm of the gradients is not finite; the last checkpoint is as it
            was.
    """
    return _Run(trainer, out, report).go()


class _Run:
    def __init__(self, trainer: Trainer, out: Path, report: Report | None) -> None:
        self.trainer, self.report, self.file = trainer, report, out / checkpoint.FILE
        recipe, world = trainer.recipe, trainer.world
        dtype = getattr(torch, recipe.precision)
        self._peak = measure_peaks(world.device.type, dtype).flops_per_s * world.size
        self._flops_per_token = (
            row_flops(trainer.model, trainer.data.rows.length) / trainer.data.rows.length
        )
        facts = {
            "model": trainer.model.config.to_dict(),
            "train": dataclasses.asdict(recipe),
            "data": dataclasses.asdict(trainer.data.spec),
            "device": device_name(world.device),
            "processes": world.size,
            "matrix_flops_per_s": self._peak,
            "flops_per_token": self._flops_per_token,
        }
        self._log = log.Log(out / log.FILE, facts, trainer.step_number) if world.rank == 0 else None
        self._seen: list[Progress] = []
        self._settled_at = time.perf_counter()

    def go(self) -> list[Progress]:
        """See :func:`train`."""
        trainer, recipe = self.trainer, self.trainer.recipe
        waiting: Measured | None = None
        try:
            with held() as asked:
                if trainer.step_number == 0:
                    self._before()
                while trainer.step_number < recipe.steps:
                    try:
                        done = trainer.step(stopping=asked.came)
                    except (InvalidInput, OSError):
                        self._rescue(waiting)
                        raise
                    # A GPU is given this step before the one before it is read: it is never left
                    # waiting.
                    stop = waiting is not None and self._settle(waiting)
                    waiting = done
                    at_end = trainer.step_number == recipe.steps
                    evaluating = at_end or trainer.step_number % recipe.eval_every == 0
                    saving = at_end or trainer.step_number % recipe.save_every == 0
                    alone = trainer.world.size == 1 and asked.came
                    if evaluating or saving or stop or alone or trainer.world.device.type != "cuda":
                        stop |= self._settle(waiting, evaluating)
                        waiting = None
                    if saving or stop or alone:
                        trainer.save(self.file)
                    if stop or alone:
                        raise (
                            SystemExit(exit_code(asked.name))
                            if asked.name == "SIGTERM"
                            else KeyboardInterrupt
                        )
        finally:
            if self._log is not None:
                self._log.close()
        return self._seen

    def _rescue(self, waiting: Measured | None) -> None:
        """Keep the steps before one whose documents cannot be read."""
        if waiting is not None:
            self._settle(waiting)
        # Of several processes others may have read theirs, and a save waits for all.
        if self.trainer.world.size == 1 and self.trainer.step_number:
            self.trainer.save(self.file)

    def _before(self) -> None:
        found = self._evaluated()
        started = Progress(0, math.nan, 0.0, math.nan, 0, 0.0, 0.0, self.trainer.memory(), **found)
        self._tell(started, {"step": 0, **found})
        self._settled_at = time.perf_counter()

    def _evaluated(self) -> dict[str, Any]:
        found: dict[str, Any] = {"held_out_loss": self.trainer.held_out_loss()}
        if (mass := self.trainer.selected_mass()) is not None:
            found |= {
                "selected_mass": [m.selected for m in mass],
                "selected_keys": [m.keys for m in mass],
            }
        return found

    def _settle(self, done: Measured, evaluating: bool = False) -> bool:
        """Read a step's numbers, log and report them; whether some process was asked to stop."""
        loss, stopping, norm = done.read()
        now = time.perf_counter()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NotFinite(
                f"step {done.step}: the loss is {loss:g} and the norm of the gradients {norm:g};"
                f" {self.file.name} is as it was. A lower learning rate or a longer warm-up may"
                " help; NSAttention(check=True) finds the layer"
            )
        recipe, data = self.trainer.recipe, self.trainer.data
        per_step = recipe.batch * data.rows.length
        speed = per_step / max(now - self._settled_at, 1e-9)
        progress = Progress(
            done.step,
            loss,
            done.learning_rate,
            norm,
            done.step * per_step,
            speed,
            speed * self._flops_per_token / self._peak,
            self.trainer.memory(),
            **(self._evaluated() if evaluating else {}),
        )
        self._tell(progress, progress.record())
        self._settled_at = time.perf_counter() if evaluating else now
        return bool(stopping)

    def _tell(self, progress: Progress, record: dict[str, Any]) -> None:
        self._seen.append(progress)
        if self._log is not None:
            self._log.write(record)
        if self.report is not None and self.trainer.world.rank == 0:
            self.report(progress)

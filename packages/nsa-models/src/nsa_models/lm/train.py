"""The training loop: steps, held-out loss, log and checkpoints.

Ctrl-C, SIGTERM and SIGHUP end it without losing a finished step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nsa_bench.environment import device_name
from nsa_bench.roofline import measure_peaks
from nsa_core.errors import InvalidInput, NSAError
from nsa_core.util.atomic_files import NotWritten
from nsa_core.util.interruption import deferred_signals
from nsa_models.lm import checkpoint, log
from nsa_models.lm.flops import matrix_share, row_flops
from nsa_models.lm.lanes import Unreadable
from nsa_models.lm.trainer import StepResult, Trainer


@dataclasses.dataclass(frozen=True)
class Progress:
    """The numbers of a finished step, as a line of the log stores them."""

    step: int
    loss: float  # mean nats per target of the step
    learning_rate: float
    grad_norm: float  # before clipping
    tokens: int  # trained on so far
    tokens_per_s: float  # from the time of the step on the device, without evaluation and saving
    # Counted operations per second over the measured matrix rate of all devices together. None: the
    # measurement failed, or the step is step 0.
    matrix_share: float | None
    memory_bytes: int
    held_out_loss: float | None = None
    selected_mass: list[float] | None = None  # per layer
    selected_keys: list[float] | None = None

    def record(self) -> dict[str, Any]:
        """Return the record for the log, without fields that are None."""
        return {
            name: value for name, value in dataclasses.asdict(self).items() if value is not None
        }


Report = Callable[[Progress], None]


class NotFinite(NSAError):
    """The loss or a gradient is NaN or infinite; the message names the step."""


def train(trainer: Trainer, out: Path, report: Report | None = None) -> list[Progress]:
    """Train up to the last step of the recipe.

    Ctrl-C (SIGINT), SIGTERM, which clusters send, and SIGHUP finish the current step, save it and
    raise KeyboardInterrupt with the name of the signal; a second signal ends at once.

    Args:
        trainer: The trainer, new or resumed.
        out: An existing folder, for log.jsonl and checkpoint.safetensors. The checkpoint is written
            every ``save_every`` steps and at the end.
        report: Called with each finished step.

    Returns:
        The progress of each step of this call. A new run begins with step 0, the held-out loss
        before training.

    Raises:
        InvalidInput, OSError: A document cannot be read. The steps before it are saved first.
        NotWritten: The log or the checkpoint cannot be written. A run on one process first saves
            its steps to ``trainer.rescued``, in the temporary folder.
        NotFinite: The loss or the gradient norm is not finite; the last checkpoint is unchanged.
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
        self._progress: list[Progress] = []

    def go(self) -> list[Progress]:
        """Run the loop; see :func:`train`."""
        trainer, recipe = self.trainer, self.trainer.recipe
        pending: StepResult | None = None
        try:
            with deferred_signals() as interruption:
                if trainer.step_number == 0:
                    self._evaluate_before_training()
                while trainer.step_number < recipe.steps:
                    try:
                        result = trainer.step(stopping=interruption.received)
                    except (InvalidInput, OSError) as error:
                        together = trainer.world.size == 1 or isinstance(error, Unreadable)
                        self._save_previous_steps(pending, together)
                        raise
                    # On a GPU this step is queued before the previous result is read, so the GPU
                    # never waits for the host.
                    stop = pending is not None and self._finish_step(pending)
                    pending = result
                    at_end = trainer.step_number == recipe.steps
                    evaluating = at_end or trainer.step_number % recipe.eval_every == 0
                    saving = at_end or trainer.step_number % recipe.save_every == 0
                    stop_alone = trainer.world.size == 1 and interruption.received
                    if (
                        evaluating
                        or saving
                        or stop
                        or stop_alone
                        or trainer.world.device.type != "cuda"
                    ):
                        stop |= self._finish_step(pending, evaluating)
                        pending = None
                    if saving or stop or stop_alone:
                        trainer.save(self.file)
                    if stop or stop_alone:
                        raise KeyboardInterrupt(interruption.name)
        except NotWritten:
            if trainer.rescued is None and trainer.saved_step != trainer.step_number:
                with contextlib.suppress(NotWritten):
                    self._save_previous_steps(None, trainer.world.size == 1)
            raise
        finally:
            if self._log is not None:
                self._log.close()
        return self._progress

    def _save_previous_steps(self, pending: StepResult | None, together: bool) -> None:
        """Save the steps before one whose documents cannot be read or whose log is not written.

        Args:
            pending: The last step, if its numbers are not read yet.
            together: Whether all processes do this, because a save needs all.
        """
        if pending is not None:
            self._finish_step(pending)
        if together and self.trainer.step_number:
            self.trainer.save(self.file)

    def _evaluate_before_training(self) -> None:
        evaluation = self._evaluate()
        progress = Progress(
            0, math.nan, 0.0, math.nan, 0, 0.0, None, self.trainer.memory(), **evaluation
        )
        self._record(progress, {"step": 0, **evaluation})

    def _evaluate(self) -> dict[str, Any]:
        evaluation: dict[str, Any] = {"held_out_loss": self.trainer.held_out_loss()}
        if (mass := self.trainer.selected_mass()) is not None:
            evaluation |= {
                "selected_mass": [m.selected for m in mass],
                "selected_keys": [m.keys for m in mass],
            }
        return evaluation

    def _finish_step(self, result: StepResult, evaluating: bool = False) -> bool:
        """Read, log and report a step's numbers; return whether any process was told to stop."""
        loss, stopping, norm = result.read()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NotFinite(
                f"step {result.step}: the loss is {loss:g} and the gradient norm is {norm:g};"
                f" {self.file.name} is unchanged. Try a lower learning rate or a longer warm-up;"
                " NSAttention(check=True) finds the layer"
            )
        recipe, data = self.trainer.recipe, self.trainer.data
        per_step = recipe.batch * data.rows.length
        speed = per_step / result.seconds()
        progress = Progress(
            result.step,
            loss,
            result.learning_rate,
            norm,
            result.step * per_step,
            speed,
            matrix_share(speed * self._flops_per_token, self._peak),
            self.trainer.memory(),
            **(self._evaluate() if evaluating else {}),
        )
        self._record(progress, progress.record())
        return bool(stopping)

    def _record(self, progress: Progress, record: dict[str, Any]) -> None:
        self._progress.append(progress)
        if self._log is not None:
            self._log.write(record)
        if self.report is not None and self.trainer.world.rank == 0:
            self.report(progress)

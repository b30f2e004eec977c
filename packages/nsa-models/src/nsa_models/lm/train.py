"""The training loop: steps, held-out loss, log and saves.

An end that leaves the parameters readable loses no complete step: a signal, or an error outside the
update of the parameters.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nsa_bench.environment import device_name
from nsa_bench.roofline import measure_peaks
from nsa_core.errors import NSAError
from nsa_core.util.interruption import Interruption, deferred_signals
from nsa_models.lm import log
from nsa_models.lm.flops import matrix_share, row_flops
from nsa_models.lm.parallel import Meeting
from nsa_models.lm.trainer import NotSaved, StepResult, Trainer


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
    selected_mass: list[float] | None = None  # per layer with NSA
    selected_keys: list[float] | None = None
    random_mass: list[float] | None = None

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
    raise KeyboardInterrupt with the name of the signal; a second signal ends at once. After any
    other error, the last complete step is saved before the error is raised, unless the error came
    during the update of the parameters or they cannot be read any more; ``trainer.saved_step`` is
    the step of the last save. Several processes save together, if all of them end within 30 s.

    Args:
        trainer: The trainer, new or resumed.
        out: An existing folder for the model folder of the run and log.jsonl. The run is saved
            every ``save_every`` steps and at the end.
        report: Called with each finished step.

    Returns:
        The progress of each step of this call. A new run begins with step 0, the held-out loss
        before training.

    Raises:
        InvalidInput, OSError: A document cannot be read.
        NotWritten: The log or the run cannot be written. If it is the run, ``trainer.rescued`` is a
            folder with the last step, in the temporary folder.
        NotFinite: The loss or the gradient norm is not finite; the last save is unchanged.
    """
    return _Run(trainer, out, report).go()


class _Run:
    def __init__(self, trainer: Trainer, out: Path, report: Report | None) -> None:
        self.trainer, self.report, self.out = trainer, report, out
        self._meeting = Meeting(trainer.world)
        recipe, world = trainer.recipe, trainer.world
        dtype = getattr(torch, recipe.precision)
        self._peak = measure_peaks(world.device.type, dtype).flops_per_s * world.size
        self._flops_per_token = (
            row_flops(trainer.model, trainer.data.rows.length) / trainer.data.rows.length
        )
        facts = {
            "model": dataclasses.asdict(trainer.model.config),
            "train": dataclasses.asdict(recipe),
            "data": dataclasses.asdict(trainer.data.spec),
            "device": device_name(world.device),
            "processes": world.size,
            "matrix_flops_per_s": self._peak,
            "flops_per_token": self._flops_per_token,
        }
        is_new = trainer.step_number == 0 and trainer.saved_step is None  # a save may be of step 0
        step = None if is_new else trainer.step_number
        self._log = log.Log(out / log.FILE, facts, step) if world.rank == 0 else None
        self._progress: list[Progress] = []
        self._pending: StepResult | None = None  # the last step, if its numbers are not read yet

    def go(self) -> list[Progress]:
        """Run the loop; see :func:`train`."""
        try:
            with deferred_signals() as interruption:
                try:
                    self._loop(interruption)
                except BaseException as error:
                    self._save_after(error)
                    raise
        finally:
            if self._log is not None:
                self._log.close()
        return self._progress

    def _loop(self, interruption: Interruption) -> None:
        trainer, recipe, world = self.trainer, self.trainer.recipe, self.trainer.world
        if trainer.step_number == 0:
            self._evaluate_before_training()
        while trainer.step_number < recipe.steps:
            result = trainer.step(stopping=interruption.received)
            # On a GPU this step is queued before the previous result is read, so the GPU never
            # waits for the host.
            stop = self._pending is not None and self._finish_step()
            self._pending = result
            at_end = trainer.step_number == recipe.steps
            evaluating = at_end or trainer.step_number % recipe.eval_every == 0
            saving = at_end or trainer.step_number % recipe.save_every == 0
            stop_alone = world.size == 1 and interruption.received
            if evaluating or saving or stop or stop_alone or world.device.type != "cuda":
                stop |= self._finish_step(evaluating)
            stop |= stop_alone
            if saving or stop:
                trainer.save(self.out)
            if stop:
                # All processes know by the same step that one of them received a signal.
                raise KeyboardInterrupt(next(filter(None, world.collect(interruption.name))))

    def _save_after(self, error: BaseException) -> None:
        """Save the last complete step after an error, if the parameters can be read.

        Args:
            error: The error that ended the loop.
        """
        trainer = self.trainer
        is_saved = trainer.saved_step == trainer.step_number or trainer.step_number == 0
        # A second signal ends at once. A save that failed has been tried elsewhere.
        if isinstance(error, (KeyboardInterrupt, NotFinite, NotSaved)):
            return
        traceback.clear_frames(error.__traceback__)  # they hold activations of the step
        # Errors of a lost device or group, or of a full memory: the last save stays, and the caller
        # gets the first error.
        with contextlib.suppress(Exception):
            ready = trainer.undo_unfinished_step()
            if self._meeting.all_at(trainer.step_number if ready else -1) and not is_saved:
                if self._pending is not None:
                    self._finish_step()  # raises if the parameters are not finite
                trainer.save(self.out)

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
                "random_mass": [m.random for m in mass],
            }
        return evaluation

    def _finish_step(self, evaluating: bool = False) -> bool:
        """Read, log and report the pending step; return whether any process was told to stop."""
        result = self._pending
        assert result is not None  # the caller knows
        loss, stopping, norm = result.read()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NotFinite(
                f"step {result.step}: the loss is {loss:g} and the gradient norm is {norm:g}."
                " Try a lower learning rate or a longer warm-up; NSAttention(check=True) finds"
                " the layer"
            )
        recipe, data = self.trainer.recipe, self.trainer.data
        per_step = recipe.batch * data.rows.length
        speed = per_step / result.seconds()
        evaluation = self._evaluate() if evaluating else {}
        self._pending = None
        progress = Progress(
            result.step,
            loss,
            result.learning_rate,
            norm,
            result.step * per_step,
            speed,
            matrix_share(speed * self._flops_per_token, self._peak),
            self.trainer.memory(),
            **evaluation,
        )
        self._record(progress, progress.record())
        return bool(stopping)

    def _record(self, progress: Progress, record: dict[str, Any]) -> None:
        self._progress.append(progress)
        if self._log is not None:
            self._log.write(record)
        if self.report is not None and self.trainer.world.rank == 0:
            self.report(progress)

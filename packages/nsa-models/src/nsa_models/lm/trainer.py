"""Trainer: one step, the held-out loss, and saves of the complete training state."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from nsa_core.errors import InvalidInput
from nsa_core.layer.module import NSAttention
from nsa_core.parallel.context import DividedSequence
from nsa_core.plan.default_plan import default_plan, planned_length
from nsa_core.plan.options import usable_device
from nsa_core.plan.plan import Plan
from nsa_core.util.atomic_files import NotWritten
from nsa_models.lm import config_json
from nsa_models.lm.data import Batch, Row, batch_of
from nsa_models.lm.graph import GraphedWork
from nsa_models.lm.lanes import Lanes
from nsa_models.lm.mass import Mass, selected_mass
from nsa_models.lm.model import LanguageModel
from nsa_models.lm.model_folder import ModelFolder, Training
from nsa_models.lm.parallel import Replica, World
from nsa_models.lm.recipe import Recipe, check_graph
from nsa_models.lm.saving import save_run, text_files
from nsa_models.lm.task import Data


class NotSaved(NotWritten):
    """A run could not be saved; ``Trainer.rescued`` says where it was saved instead."""


class Stopwatch:
    """The time of a step on its device: CUDA events on a GPU, the host's clock elsewhere.

    On a GPU the host runs ahead, so its clock would time the queue. The event at the start is
    passed when the previous step has ended, or at once if the GPU waits for the host. So the time
    holds the waits of this step, for its rows for example, and nothing of other steps.

    Args:
        device: Device of the step.
    """

    def __init__(self, device: torch.device) -> None:
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._seconds = -time.perf_counter()
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._events = start, end
            start.record()

    def stop(self) -> None:
        """Mark the end of the step, which the device may not have reached yet."""
        if self._events is not None:
            self._events[1].record()
        self._seconds += time.perf_counter()

    def seconds(self) -> float:
        """Wait for the end of the step, and return its time."""
        if self._events is None:
            return self._seconds
        start, end = self._events
        end.synchronize()
        milliseconds: float = start.elapsed_time(end)
        return milliseconds / 1e3


@dataclasses.dataclass(frozen=True)
class StepResult:
    """The numbers of a step. Its methods wait for the end of this step, but not for later steps."""

    step: int
    # [mean loss, number of processes told to stop, gradient norm before clipping], on the host
    values: torch.Tensor
    learning_rate: float
    stopwatch: Stopwatch

    @classmethod
    def of(
        cls, step: int, values: torch.Tensor, learning_rate: float, stopwatch: Stopwatch
    ) -> StepResult:
        """Stop the watch, and start copying the values of a step that may still be running."""
        if values.device.type == "cuda":
            # A copy issued at read time would be queued behind later steps.
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            values = host.copy_(values, non_blocking=True)
        stopwatch.stop()
        return cls(step, values, learning_rate, stopwatch)

    def seconds(self) -> float:
        """Return the time of the step on its device."""
        return self.stopwatch.seconds()

    def read(self) -> list[float]:
        """Return the values."""
        self.stopwatch.seconds()  # the copy of the values ends before the step does
        numbers: list[float] = self.values.tolist()
        return numbers


class Trainer:
    """A model, its optimizer and its data at one step of a recipe.

    Args:
        model: The model; it is moved to the world's device. With ``folder`` it may be on the meta
            device: then each process allocates its own part only.
        data: Training and held-out rows.
        recipe: The training options.
        world: The processes.
        folder: A folder whose weights the model gets; None keeps those of ``model``.
        resume: Whether to continue the training of ``folder`` too: its optimizer, its step and its
            position in the data.

    Raises:
        InvalidInput: Rows do not divide over processes, the model does not divide as the recipe
            says, transformers has no model with these sizes, or a CUDA graph is not possible.
        BackendUnavailable: The device does not exist.

    Example:
        >>> data = open_data(DataSpec("uniform", 256))
        >>> model = LanguageModel(size("tiny", vocab_size=data.vocab_size))
        >>> trainer = Trainer(model, data, Recipe(), World(torch.device("cpu")))
        >>> loss = trainer.step().read()[0]
    """

    def __init__(
        self,
        model: LanguageModel,
        data: Data,
        recipe: Recipe,
        world: World,
        folder: ModelFolder | None = None,
        resume: bool = False,
    ) -> None:
        check_graph(recipe.graph, world.size, world.device.type)
        usable_device(world.device)
        recipe.check_divisible(model.config, data.rows.length)
        if folder is not None and resume:
            # The old index would not match a new text if a kill came between the two.
            self._files = folder.texts()
        else:
            self._files = _files(model, data, folder)
        # Read before the first step, because files may change meanwhile.
        self._corpus = data.fingerprint if world.rank == 0 else {}
        world = world.arranged(recipe.context_parallel, recipe.tensor_parallel)
        self.lanes = Lanes(data.rows, recipe, world)
        self.data, self.recipe, self.world = data, recipe, world
        is_meta = next(model.parameters()).is_meta
        self.model = model if is_meta else model.to(world.device)
        self.model.recompute = recipe.recompute
        self.replica = Replica(self.model, world, recipe.parallel, recipe.compile)
        if is_meta:
            self.model.to_empty(device=world.device)
        if folder is not None:
            folder.load_weights(self.model, self.replica.heads)
        self.optimizer = recipe.optimizer(self.model)
        self.step_number = self.tokens = 0
        self.saved_step: int | None = None  # the step of the last save
        self.rescued: Path | None = None  # a folder with this step, in the temporary folder
        self._phase = "complete"  # then "computing" and "updating" the parameters
        self._graphed_work = (
            GraphedWork(self._forward_backward, list(self.model.parameters()))
            if recipe.graph
            else None
        )
        # A tensor, because a CUDA graph would capture a Python number as a constant.
        self._scale = torch.ones((), device=world.device)
        if folder is not None and resume:
            self._resume(folder)

    def _resume(self, folder: ModelFolder) -> None:
        training = folder.training
        if training is None:
            raise InvalidInput(
                f"{folder.path} has no training to resume, only a model; start a run from it with"
                " --checkpoint"
            )
        folder.load_optimizer(self.model, self.optimizer, self.replica.heads)
        folder.load_random_state(self.world.rank, self.world.size)
        self.lanes.load_state(training.position)
        self.step_number, self.tokens = training.step, training.tokens
        self.saved_step = self.step_number

    def plan(self) -> Plan | None:
        """Return the plan of the training steps; None for dense attention.

        Raises:
            Unsupported, BackendUnavailable, InvalidInput: As :func:`nsa_core.resolve`.
        """
        layers = (module for module in self.model.modules() if isinstance(module, NSAttention))
        if (attn := next(layers, None)) is None:
            return None
        dtype, packed = getattr(torch, self.recipe.precision), self.data.rows.packed
        length = planned_length(self.data.rows.length, packed)
        config, partial = attn.config, False
        if isinstance(attn.parallel, DividedSequence):
            config, partial = attn.parallel.share, attn.parallel.mode == "sequence"
        return default_plan(
            config, self.world.device, dtype, packed, True, attn.backends, length, partial
        )

    def step(self, stopping: bool = False) -> StepResult:
        """Update the parameters once, from the next ``recipe.batch`` rows.

        Args:
            stopping: Whether this process was told to stop; the result counts such processes.

        Raises:
            InvalidInput, OSError: A document cannot be read. All processes raise this together.

        After an error, :meth:`undo_unfinished_step` returns to the last complete step.
        """
        recipe, world = self.recipe, self.world
        stopwatch = Stopwatch(world.device)
        self._phase = "computing"
        parts, counted = self.lanes.step()
        # Gradients are averaged over processes, so scale by their number to get the sum.
        self._scale.fill_(world.averaged / max(1, counted))
        rate = recipe.rate(self.step_number)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if self._graphed_work is None:
            self.optimizer.zero_grad()
        total = torch.zeros((), device=world.device)
        for number, part in enumerate(parts):
            with self.replica.gradient_sync(last=number == len(parts) - 1):
                batch = self._batch_of(part)
                total += (
                    self._forward_backward(batch)
                    if self._graphed_work is None
                    else self._graphed_work(batch, add=number > 0)
                )
        norm = self.replica.clip_gradients(recipe.clip)
        self._phase = "updating"
        self.optimizer.step()
        self.step_number += 1
        self.tokens += recipe.batch * self.data.rows.length
        self._phase = "complete"
        # Tensor parallel ranks have the same loss.
        mean = total / (max(1, counted) * world.ranks_of("tp"))
        sums = torch.stack((mean, torch.full_like(mean, float(stopping))))
        values = torch.cat((world.total(sums), norm.reshape(1)))
        return StepResult.of(self.step_number, values, rate, stopwatch)

    def _batch_of(self, rows: Sequence[Row]) -> Batch:
        """Return this process's tokens of rows, on its device."""
        world = self.world
        ranks, rank = world.ranks_of("cp"), world.place_in("cp")
        batch = batch_of(rows, self.data.rows.packed, ranks).part(ranks, rank)
        return batch.to(world.device)

    def _forward_backward(self, batch: Batch) -> torch.Tensor:
        """Run forward and backward of one part of a step; return its summed loss."""
        with self._autocast():
            loss = self.replica.forward(
                batch.tokens,
                cu_seqlens=batch.cu_seqlens,
                max_seqlen=batch.max_seqlen,
                targets=batch.targets,
            )
        (loss * self._scale).backward()
        return loss.detach()

    def _autocast(self) -> torch.autocast:
        # With CUDA graphs, disable autocast's weight cache: a graph would keep its copies forever.
        enabled = self.recipe.precision == "bfloat16"
        cache_enabled = not self.recipe.graph
        return torch.autocast(
            self.world.device.type, torch.bfloat16, enabled=enabled, cache_enabled=cache_enabled
        )

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Return the mean held-out loss in nats per target; every process computes its tokens."""
        rows, size = self.data.held_out, max(1, self.recipe.batch // self.recipe.accumulate)
        loss, counted = 0.0, 0
        for first in range(0, len(rows), size):
            batch = self._batch_of(rows[first : first + size])
            with self._autocast():
                total = self.model(batch.tokens, batch.cu_seqlens, batch.max_seqlen, batch.targets)
            loss += float(self.world.total_of_context(total))
            counted += batch.counted
        self.replica.reshard()
        return loss / counted if counted else math.nan

    @torch.no_grad()
    def accuracy(self) -> float:
        """Return the share of held-out targets that are the model's most likely token."""
        correct = counted = 0
        for row in self.data.held_out:
            batch = self._batch_of([row])
            with self._autocast():
                predicted = self.model(batch.tokens, batch.cu_seqlens, batch.max_seqlen).argmax(-1)
            hits = self.world.total_of_context((predicted == batch.targets).sum())
            correct += int(hits)
            counted += batch.counted
        self.replica.reshard()
        return correct / counted if counted else math.nan

    def selected_mass(self) -> list[Mass] | None:
        """Measure the mass of the selected blocks on the held-out row with the longest document.

        Returns:
            :func:`nsa_models.lm.mass.selected_mass`; None if the document is too short, the model
            is dense, its parameters are sharded, or its layers are divided.
        """
        layer = self.model.config.layer
        row = max(self.data.held_out, key=lambda r: max(r.documents), default=None)
        if self.replica.sharded or self.model.config.attention != "nsa" or row is None:
            return None
        if self.world.mesh is not None:
            return None
        if max(row.documents) <= layer.num_selected_blocks * layer.select_block_size:
            return None
        batch = batch_of([row], packed=True).to(self.world.device)
        with self._autocast():
            return selected_mass(self.model, batch.tokens, batch.cu_seqlens)

    def undo_unfinished_step(self) -> bool:
        """Return to the last complete step after an error; return whether that was possible.

        It is not if the error came during the update of the parameters.
        """
        if self._phase == "computing":
            self.lanes.undo()
            if self._graphed_work is None:  # else the graph overwrites them
                self.optimizer.zero_grad()
            self.replica.reshard()
            self._phase = "complete"
        return self._phase == "complete"

    def save(self, folder: Path) -> None:
        """Save a state that resumes exactly; every process must call this.

        Args:
            folder: An existing folder.

        Raises:
            NotSaved: A file cannot be written, and the state in the folder is unchanged.
                ``rescued`` is a folder in the temporary folder, or None if that failed too. All
                processes raise this.
        """
        tokenizer = self.data.tokenizer
        training = Training(
            step=self.step_number,
            tokens=self.tokens,
            recipe=self.recipe,
            data=self.data.spec,
            corpus=self._corpus,
            position=self.lanes.state(),
            tokenizer=None if tokenizer is None else tokenizer.kind,
            processes=self.world.size,
        )

        def write(target: Path) -> None:
            heads = self.replica.heads
            save_run(target, self.model, self.optimizer, training, self._files, self.world, heads)

        try:
            write(folder)
        except NotWritten as error:
            self.rescued = self._write_somewhere(write)
            raise NotSaved(error.errno, error.strerror, error.filename) from error
        self.saved_step = self.step_number

    def _write_somewhere(self, write: Callable[[Path], None]) -> Path | None:
        """Save to the temporary folder of the first process.

        Returns:
            The folder; None on all processes if it could not be written either.
        """
        own = ""
        if self.world.rank == 0:
            with contextlib.suppress(OSError):
                own = tempfile.mkdtemp(prefix="nsa-")
        name = self.world.collect(own)[0]
        if not name:
            return None
        try:
            write(Path(name))
        except NotWritten:
            if own:
                shutil.rmtree(own, ignore_errors=True)
            return None
        return Path(name)

    def memory(self) -> int:
        """Return the peak memory so far, in bytes: of the GPU, or of this process."""
        if self.world.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.world.device)
        import resource  # not available on every platform

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _files(model: LanguageModel, data: Data, folder: ModelFolder | None) -> dict[str, str]:
    """Return the texts of config.json and of the tokenizer's files, by name."""
    tokenizer, length = data.tokenizer, data.rows.length
    if folder is None:
        end = None if tokenizer is None else tokenizer.end
        values = config_json.json_of(model.config, length, end)
        return text_files(values, {} if tokenizer is None else tokenizer.files())
    longest = max(length, folder.values.get("max_position_embeddings") or 0)
    values = {**folder.values, "dtype": "float32", "max_position_embeddings": longest}
    return text_files(values, folder.tokenizer_texts())

"""Trainer: a step, the held-out loss, and a checkpoint of everything that the next step depends
on.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import torch

from nsa_core.dispatch.default_plan import default_plan, is_long
from nsa_core.dispatch.device import known_device
from nsa_core.dispatch.plan import Plan
from nsa_core.errors import InvalidInput
from nsa_core.layer.module import NSAttention
from nsa_models.lm import checkpoint
from nsa_models.lm.checkpoint import Checkpoint
from nsa_models.lm.data import Batch, Row, batch_of
from nsa_models.lm.graph import Graphed
from nsa_models.lm.mass import Mass, selected_mass
from nsa_models.lm.model import IGNORED, LanguageModel
from nsa_models.lm.parallel import Replica, World, whole
from nsa_models.lm.recipe import Recipe
from nsa_models.lm.task import Data


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a step tells, on the host once the device has come to its end."""

    step: int
    # [mean loss, how many processes were asked to stop, norm of the gradients before clipping]
    values: torch.Tensor
    learning_rate: float
    at_end: torch.cuda.Event | None = None

    @classmethod
    def of(cls, step: int, values: torch.Tensor, learning_rate: float) -> Measured:
        """``values`` of a step that the device may not have come to yet."""
        if values.device.type != "cuda":
            return cls(step, values, learning_rate)
        # Fetched when they are read, they would come behind whatever the device has been given by
        # then.
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(
            values, non_blocking=True
        )
        at_end = torch.cuda.Event()
        at_end.record()
        return cls(step, host, learning_rate, at_end)

    def read(self) -> list[float]:
        """``values``; waits for the end of this step, not for a later one."""
        if self.at_end is not None:
            self.at_end.synchronize()
        numbers: list[float] = self.values.tolist()
        return numbers


class Trainer:
    """A model, its optimizer and its data at some step of a recipe.

    Raises:
        InvalidInput: rows do not divide, or a CUDA graph is asked for where none can be.
        BackendUnavailable: the device is not there.
    """

    def __init__(
        self,
        model: LanguageModel,
        data: Data,
        recipe: Recipe,
        world: World,
        kept: Checkpoint | None = None,
    ) -> None:
        recipe.rows_of(world.rank, 0, world.size)
        if recipe.graph and (world.device.type != "cuda" or world.size > 1):
            what = f"{world.size} process(es) on {world.device.type}"
            raise InvalidInput(f"graph=True needs one process on one GPU, got {what}; leave it out")
        known_device(world.device)
        self.data, self.recipe, self.world = data, recipe, world
        self.model = model.to(world.device)
        self.model.recompute = recipe.recompute
        self.replica = Replica(self.model, world, recipe.parallel, recipe.compile)
        self.optimizer = recipe.optimizer(self.model)
        self.step_number = self.tokens = 0
        self._graphed = Graphed(self._part, list(self.model.parameters())) if recipe.graph else None
        # On the device: a CUDA graph would keep a number of Python's.
        self._scale = torch.ones((), device=world.device)
        if kept is not None:
            kept.restore(self.model, self.optimizer)
            data.rows.load_state_dict(kept.facts["position"])
            self.step_number, self.tokens = kept.facts["step"], kept.facts["tokens"]

    def plan(self) -> Plan | None:
        """Which backends the steps will run on; None for dense attention.

        Raises:
            Unsupported, BackendUnavailable, InvalidInput: as :func:`nsa_core.resolve`.
        """
        attn = self.model.blocks[0].attn
        if not isinstance(attn, NSAttention):
            return None
        dtype, packed = getattr(torch, self.recipe.precision), self.data.rows.packed
        long = is_long(self.data.rows.length, packed)
        return default_plan(
            attn.config, self.world.device, dtype, packed, True, attn.backends, long
        )

    def step(self, stopping: bool = False) -> Measured:
        """One update of the parameters from the next ``recipe.batch`` rows; ``stopping`` is told to
        every process.

        Raises:
            InvalidInput, OSError: a document cannot be read; model, optimizer and position are as
                they were.
        """
        recipe, world = self.recipe, self.world
        rows = self._rows()
        parts = [rows[recipe.rows_of(world.rank, p, world.size)] for p in range(recipe.accumulate)]
        counted = sum(len(row.targets) - row.targets.count(IGNORED) for row in rows)
        # Gradients of several processes are averaged, so each takes its share of the sum that many
        # times.
        self._scale.fill_(world.size / max(1, counted))
        rate = recipe.rate(self.step_number)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if self._graphed is None:
            self.optimizer.zero_grad()
        total = torch.zeros((), device=world.device)
        for number, part in enumerate(parts):
            with self.replica.syncing(last=number == len(parts) - 1):
                batch = batch_of(part, self.data.rows.packed).to(world.device)
                total += (
                    self._part(batch)
                    if self._graphed is None
                    else self._graphed(batch, add=number > 0)
                )
        norm = whole(torch.nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip))
        self.optimizer.step()
        self.step_number += 1
        self.tokens += recipe.batch * self.data.rows.length
        sums = torch.stack((total / max(1, counted), torch.full_like(total, float(stopping))))
        return Measured.of(self.step_number, torch.cat((world.total(sums), norm.reshape(1))), rate)

    def _rows(self) -> list[Row]:
        """The rows of a step; where one cannot be read, the position stays before all of them."""
        position = self.data.rows.state_dict()
        try:
            return [next(self.data.rows) for _ in range(self.recipe.batch)]
        except (InvalidInput, OSError):
            self.data.rows.load_state_dict(position)
            raise

    def _part(self, batch: Batch) -> torch.Tensor:
        """Add the gradients of one part of a step; its summed loss."""
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
        # Without its cache, whose copies of the weights a CUDA graph would keep for good.
        wanted = self.recipe.precision == "bfloat16"
        kept = not self.recipe.graph
        return torch.autocast(
            self.world.device.type, torch.bfloat16, enabled=wanted, cache_enabled=kept
        )

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Nats per target over the held-out rows; every process computes all of it."""
        rows, size = self.data.held_out, max(1, self.recipe.batch // self.recipe.accumulate)
        loss, counted = 0.0, 0
        for first in range(0, len(rows), size):
            batch = batch_of(rows[first : first + size], self.data.rows.packed).to(
                self.world.device
            )
            with self._autocast():
                loss += float(
                    self.model(batch.tokens, batch.cu_seqlens, batch.max_seqlen, batch.targets)
                )
            counted += batch.counted
        self.replica.rest()
        return loss / counted if counted else math.nan

    @torch.no_grad()
    def accuracy(self) -> float:
        """Share of the held-out targets that are the likeliest token."""
        right = counted = 0
        for row in self.data.held_out:
            batch = batch_of([row], self.data.rows.packed).to(self.world.device)
            with self._autocast():
                best = self.model(batch.tokens, batch.cu_seqlens, batch.max_seqlen).argmax(-1)
            right += int((best == batch.targets).sum())
            counted += batch.counted
        self.replica.rest()
        return right / counted if counted else math.nan

    def selected_mass(self) -> list[Mass] | None:
        """:func:`nsa_models.lm.mass.selected_mass` of the held-out row with the longest document.

        None where that is too short, where the model is dense, or where its parameters are spread
        over processes.
        """
        layer = self.model.config.layer
        row = max(self.data.held_out, key=lambda r: max(r.documents), default=None)
        if self.replica.sharded or self.model.config.attention != "nsa" or row is None:
            return None
        if max(row.documents) <= layer.num_selected_blocks * layer.select_block_size:
            return None
        batch = batch_of([row], packed=True).to(self.world.device)
        with self._autocast():
            return selected_mass(self.model, batch.tokens, batch.cu_seqlens)

    def save(self, path: Path) -> None:
        """Write a checkpoint, from which a Trainer goes on as this one would; rank 0 writes, all
        have to call.
        """
        tensors = checkpoint.gathered(self.model, self.optimizer)
        facts: dict[str, Any] = {
            "train": dataclasses.asdict(self.recipe),
            "data": dataclasses.asdict(self.data.spec),
            "position": self.data.rows.state_dict(),
            "step": self.step_number,
            "tokens": self.tokens,
        }
        if self.world.rank == 0:
            checkpoint.write(path, tensors, self.model.config, facts, self.data.tokenizer)

    def memory(self) -> int:
        """The most bytes held so far: on the GPU, or by this process."""
        if self.world.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.world.device)
        import resource  # not everywhere

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

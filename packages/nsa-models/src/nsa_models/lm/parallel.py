"""Training on one process, or on several under torchrun with DDP or FSDP2.

The number of processes does not change the result: the rows of a step are divided among the
processes, and the loss is divided by the number of targets of the whole step.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from nsa_core.dispatch.device import usable_device
from nsa_core.errors import InvalidInput
from nsa_models.lm.model import LanguageModel

KINDS = ("ddp", "fsdp")
Value = TypeVar("Value")


@dataclasses.dataclass(frozen=True)
class World:
    """The processes of a training run.

    Attributes:
        device: Device of this process.
        rank: Index of this process; rank 0 writes files.
        size: Number of processes.
    """

    device: torch.device
    rank: int = 0
    size: int = 1

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def sum_on_host(self, *values: int) -> list[int]:
        """Return the sums of integers over all processes, without waiting for a GPU."""
        sums = torch.tensor(values, dtype=torch.int64)
        if self.size > 1:
            dist.all_reduce(sums)
        numbers: list[int] = sums.tolist()
        return numbers

    def collect(self, value: Value) -> list[Value]:
        """Return the JSON-like value of each process, by rank; every process must call this."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def close(self) -> None:
        """Leave the process group."""
        if self.size > 1:
            dist.destroy_process_group()


def join(device: str) -> World:
    """Join the processes that torchrun started; without torchrun, return a world of one process.

    On GPUs each process uses the GPU with its local rank.

    Raises:
        InvalidInput: This host has fewer GPUs than processes.
        BackendUnavailable: This host has no GPU.
    """
    if not (dist.is_available() and dist.is_torchelastic_launched()):
        return World(torch.device(device))
    own_device = torch.device(device)
    if own_device.type == "cuda":
        own_device = usable_device(torch.device("cuda", dist.get_node_local_rank()))
        torch.cuda.set_device(own_device)
    if not dist.is_initialized():
        # Counts and positions travel between hosts without a GPU.
        dist.init_process_group("cpu:gloo,cuda:nccl" if own_device.type == "cuda" else "gloo")
    return World(own_device, dist.get_rank(), dist.get_world_size())


class Replica:
    """A model wrapped for training on this process: DDP, FSDP2, or neither.

    Args:
        model: The model; FSDP2 shards it in place.
        world: The processes.
        kind: "ddp" or "fsdp"; used if there are several processes.
        compiled: Compile the blocks with torch.compile.

    Raises:
        InvalidInput: ``kind`` is unknown.
    """

    def __init__(
        self, model: LanguageModel, world: World, kind: str = "ddp", compiled: bool = False
    ) -> None:
        if kind not in KINDS:
            raise InvalidInput(f"parallel must be one of {', '.join(KINDS)}, got {kind!r}")
        self.model, self.sharded = model, world.size > 1 and kind == "fsdp"
        self._wrapped: Any = model
        # Compile per block: one compilation serves all blocks, and collectives stay outside of it.
        if compiled:
            for block in model.blocks:
                block.compile()
        if self.sharded:
            self._shard()
        elif world.size > 1:
            ids = [world.device.index] if world.device.type == "cuda" else None
            self._wrapped = DistributedDataParallel(model, device_ids=ids)
        self.forward: Callable[..., torch.Tensor] = self._wrapped

    def _shard(self) -> None:
        from torch.distributed.fsdp import fully_shard

        for block in self.model.blocks:
            fully_shard(block)
        fully_shard(self.model)

    def reshard(self) -> None:
        """Free parameters that FSDP gathered for a forward without a backward."""
        if self.sharded:
            self._wrapped.reshard()

    def gradient_sync(self, last: bool) -> contextlib.AbstractContextManager[object]:
        """Return a context for one accumulated part; gradients are synchronised in the last one."""
        if self.sharded:
            self._wrapped.set_requires_gradient_sync(last)
        elif not last and isinstance(self._wrapped, DistributedDataParallel):
            return self._wrapped.no_sync()
        return contextlib.nullcontext()


def unshard(tensor: torch.Tensor) -> torch.Tensor:
    """Return an unsharded tensor, gathered from all processes; every process must call this."""
    gathered: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered.detach()

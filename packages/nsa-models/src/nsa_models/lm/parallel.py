"""One process, or several under torchrun: which rows are whose, and how gradients meet (DDP, or
FSDP2).

A run on several processes is the run on one: the rows of a step are dealt out, and the loss is
divided by the targets of the whole step.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nsa_core.dispatch.device import known_device
from nsa_core.errors import InvalidInput
from nsa_models.lm.model import LanguageModel

KINDS = ("ddp", "fsdp")


@dataclasses.dataclass(frozen=True)
class World:
    """The processes of a run; ``rank`` 0 writes files."""

    device: torch.device
    rank: int = 0
    size: int = 1

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over all processes."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def close(self) -> None:
        """Leave the process group."""
        if self.size > 1:
            dist.destroy_process_group()


def join(device: str) -> World:
    """The world that torchrun started, or a world of one; on GPUs each process has the one of its
    local rank.

    Raises:
        InvalidInput: there are fewer GPUs than processes on this host.
        BackendUnavailable: there is none.
    """
    if not (dist.is_available() and dist.is_torchelastic_launched()):
        return World(torch.device(device))
    place = torch.device(device)
    if place.type == "cuda":
        place = known_device(torch.device("cuda", dist.get_node_local_rank()))
        torch.cuda.set_device(place)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    return World(place, dist.get_rank(), dist.get_world_size())


class Replica:
    """``model`` as this process trains it: ``forward`` sums its loss, ``syncing`` says when
    gradients meet.

    Raises:
        InvalidInput: ``kind`` is not of KINDS.
    """

    def __init__(
        self, model: LanguageModel, world: World, kind: str = "ddp", compiled: bool = False
    ) -> None:
        if kind not in KINDS:
            raise InvalidInput(f"parallel must be one of {', '.join(KINDS)}, got {kind!r}")
        self.model, self.sharded = model, world.size > 1 and kind == "fsdp"
        self._wrapped: Any = model
        # one compilation serves all blocks, and what gathers parameters and gradients stays outside
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

    def rest(self) -> None:
        """After a forward without backward: give back what was gathered for it, as a backward
        would.
        """
        if self.sharded:
            self._wrapped.reshard()

    def syncing(self, last: bool) -> contextlib.AbstractContextManager[object]:
        """Around forward and backward of one part of a step; gradients meet in the ``last``."""
        if self.sharded:
            self._wrapped.set_requires_gradient_sync(last)
        elif not last and isinstance(self._wrapped, DistributedDataParallel):
            return self._wrapped.no_sync()
        return contextlib.nullcontext()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, put together from all processes where it is sharded; every process has to call
    this.
    """
    gathered: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered.detach()


def share_of(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This process's part of a whole tensor: sharded and placed as ``like`` is."""
    tensor = tensor.to(device=like.device, dtype=like.dtype)
    if not hasattr(like, "full_tensor"):
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)  # nothing else has full_tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements)


def load_whole(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Copy whole tensors into the parameters of a model, sharded or not."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(share_of(state[name], parameter))

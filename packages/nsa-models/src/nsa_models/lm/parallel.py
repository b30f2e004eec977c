"""Training on one process, or on several under torchrun.

The processes form a grid of data, context and tensor parallel ranks. Data parallel ranks (DDP or
FSDP2) have rows of their own, context parallel ranks tokens of the same rows, and tensor parallel
ranks heads of the same tokens. The grid does not change the result: the loss is divided by the
number of targets of the whole step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from nsa_core.errors import InvalidInput
from nsa_core.parallel import ContextParallel, clip_gradients
from nsa_core.plan.options import usable_device
from nsa_models.lm.head_shards import HeadShards, unshard
from nsa_models.lm.model import LanguageModel

# The longest wait of a process for another one. The watch (nsa_models.lm.watch) notices within half
# a minute that a process was killed or stopped; this ends a run in which one hangs while its
# threads go on, or in which all wait for each other. Processes of a healthy run may be minutes
# apart when they compile, read documents over a network or write to a slow disk.
TIMEOUT = timedelta(minutes=5)
ANSWER = timedelta(seconds=30)  # the wait for the others after an error
DIMENSIONS = ("dp", "cp", "tp")  # data, context and tensor parallel
Value = TypeVar("Value")
# Left groups are kept here, because DDP must not have the last reference to a Gloo group: it would
# destroy the group while it holds the GIL, and wait for a thread of the group that may wait for the
# GIL. Then the process never ends. PyTorch releases the GIL if the last reference is Python's.
_left_groups: list[dist.ProcessGroup | None] = []


@dataclasses.dataclass(frozen=True)
class World:
    """The processes of a training run.

    Rank ``(data * context_parallel + context) * tensor_parallel + tensor`` has these places in the
    grid.

    Attributes:
        device: Device of this process.
        rank: Index of this process; rank 0 writes files.
        size: Number of processes.
        mesh: The grid, with the dimensions "dp", "cp" and "tp"; None if all ranks are data
            parallel.
    """

    device: torch.device
    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None

    def arranged(self, context_parallel: int, tensor_parallel: int) -> World:
        """Return the same processes as a grid; every process must call this.

        Args:
            context_parallel: Number of ranks that share the tokens of a row.
            tensor_parallel: Number of ranks that share the heads of a layer.

        Raises:
            InvalidInput: They do not divide the number of processes.
        """
        ranks = context_parallel * tensor_parallel
        if ranks == 1:
            return self
        if self.size % ranks:
            name = "context_parallel" if context_parallel > 1 else "tensor_parallel"
            raise InvalidInput(
                f"{name} must divide the number of processes, got {ranks} for {self.size}: start a"
                f" multiple of {ranks} processes with torchrun --nproc-per-node, or set it to 1"
            )
        sizes = (self.size // ranks, context_parallel, tensor_parallel)
        return dataclasses.replace(self, mesh=_mesh(self.device.type, sizes))

    def ranks_of(self, dimension: str) -> int:
        """Return the number of ranks along a dimension of the grid: "dp", "cp" or "tp"."""
        if self.mesh is None:
            return self.size if dimension == "dp" else 1
        return self.mesh.shape[DIMENSIONS.index(dimension)]

    def place_in(self, dimension: str) -> int:
        """Return the place of this process along a dimension of the grid."""
        if self.mesh is None:
            return self.rank if dimension == "dp" else 0
        return self.mesh.get_local_rank(dimension)

    @property
    def averaged(self) -> int:
        """Number of processes over which DDP and FSDP2 average gradients: those with other tokens.

        Tensor parallel ranks have the same tokens, and their layers sum gradients.
        """
        return self.size // self.ranks_of("tp")

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def total_of_context(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the ranks that share the tokens of a row, in place."""
        if self.mesh is not None and self.ranks_of("cp") > 1:
            dist.all_reduce(values, group=self.mesh.get_group("cp"))
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
        """Leave the process groups."""
        if self.size > 1:
            _left_groups.append(dist.group.WORLD)
            if self.mesh is not None:
                _left_groups.extend(self.mesh.get_all_groups())
            dist.destroy_process_group()


class Meeting:
    """Processes that meet after an error, to save together; every process must create one.

    Args:
        world: The processes.
    """

    def __init__(self, world: World) -> None:
        self._group = dist.new_group(backend="gloo", timeout=ANSWER) if world.size > 1 else None
        self._size = world.size

    def all_at(self, step: int) -> bool:
        """Return whether all processes answer within 30 s, each with the same step >= 0."""
        steps = [step]
        if self._group is not None:
            try:
                dist.monitored_barrier(self._group, ANSWER)
                steps *= self._size
                dist.all_gather_object(steps, step, self._group)
            except RuntimeError:  # a process is gone, or waits for another one
                return False
        return step >= 0 and len(set(steps)) == 1


def _mesh(device_type: str, sizes: tuple[int, ...]) -> DeviceMesh:
    """Return a mesh of all processes whose groups have the timeout of the library.

    init_device_mesh has no option for it: groups of a part of the processes would have PyTorch's.
    """
    grid = torch.arange(math.prod(sizes)).view(sizes)
    groups = []
    for dimension, ranks in enumerate(sizes):
        lines = grid.movedim(dimension, -1).reshape(-1, ranks).tolist()
        group, _ = dist.new_subgroups_by_enumeration(lines, timeout=TIMEOUT)
        groups.append(group)
    return DeviceMesh.from_group(groups, device_type, grid, mesh_dim_names=DIMENSIONS)


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
        backends = "cpu:gloo,cuda:nccl" if own_device.type == "cuda" else "gloo"
        dist.init_process_group(backends, timeout=TIMEOUT)
    return World(own_device, dist.get_rank(), dist.get_world_size())


class Replica:
    """A model on this process of several: divided over the grid, and wrapped in DDP or FSDP2.

    Args:
        model: The model; it is divided and sharded in place.
        world: The processes.
        kind: One of :data:`nsa_models.lm.recipe.KINDS`; used if gradients of several processes are
            averaged.
        compiled: Compile the blocks with torch.compile.

    Attributes:
        heads: The parameters that tensor parallelism divides; None without it.
        sharded: Whether FSDP2 shards the model.
    """

    def __init__(
        self, model: LanguageModel, world: World, kind: str = "ddp", compiled: bool = False
    ) -> None:
        self.model, self._world = model, world
        self.sharded = world.averaged > 1 and kind == "fsdp"
        self._wrapped: Any = model
        self.heads: HeadShards | None = None
        if world.mesh is not None and world.ranks_of("cp") > 1:
            parallelize_module(model, world.mesh["cp"], {"blocks.*.attn": ContextParallel()})
        if world.mesh is not None and world.ranks_of("tp") > 1:
            self.heads = HeadShards(model, world.mesh["tp"])
        # Compile per block: one compilation serves all blocks, and collectives stay outside of it.
        if compiled:
            for block in model.blocks:
                block.compile()
        if self.sharded:
            self._shard()
        elif world.averaged > 1:
            ids = [world.device.index] if world.device.type == "cuda" else None
            mesh = self._mesh_of_copies()
            group = None if mesh is None else mesh.get_group()
            self._wrapped = DistributedDataParallel(model, device_ids=ids, process_group=group)
        self.forward: Callable[..., torch.Tensor] = self._wrapped

    def _mesh_of_copies(self) -> DeviceMesh | None:
        """Return the processes that average gradients; None for all, those of one row included."""
        if self.heads is None or self._world.mesh is None:
            return None
        return self._world.mesh["dp"]

    def _shard(self) -> None:
        from torch.distributed.fsdp import fully_shard

        mesh = self._mesh_of_copies()
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

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

    def clip_gradients(self, limit: float) -> torch.Tensor:
        """Scale the gradients of the whole model to a norm of at most ``limit``.

        Returns:
            Their norm before, an fp32 scalar.
        """
        if self.heads is not None:
            return clip_gradients(self.model, limit)
        return unshard(torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit))

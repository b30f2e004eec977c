"""One timed call: forward and backward of a layer, on one rank or on all."""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from nsa_bench.parallel.result import Traffic
from nsa_bench.parallel.settings import ParallelSettings
from nsa_bench.parallel.traffic import StandIn, Traced, repeat_alone
from nsa_bench.shapes import Shape
from nsa_bench.timing import MAX_ROUNDS, MIN_ROUNDS
from nsa_core.layer.module import NSAttention
from nsa_core.parallel import ContextParallel

SLOW_MS = 2000.0  # a slower call may have a single sample


@dataclasses.dataclass(frozen=True)
class Division:
    """How a sequence is divided.

    Attributes:
        ranks: Number of ranks; 1 is the layer on one GPU.
        mode: "sequence" or "heads"; empty on one rank.
        layout: "head_tail" or "contiguous"; empty on one rank.
    """

    ranks: int = 1
    mode: str = ""
    layout: str = ""

    @property
    def name(self) -> str:
        """Return the division in words."""
        if self.ranks == 1:
            return "1 GPU"
        return f"{self.ranks} GPUs, {self.mode}, {self.layout}"


@dataclasses.dataclass
class Place:
    """Where a rank runs.

    Attributes:
        rank: This rank.
        world: Number of ranks that take part.
        device: Device of the rank.
    """

    rank: int
    world: int
    device: torch.device

    def slowest(self, value: float) -> float:
        """Return the largest value of all ranks; no rank returns before all have called it."""
        if self.world == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return float(tensor.item())

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def milliseconds(self, call: Callable[[], Any]) -> float:
        """Return the time of ``call`` on this rank; all ranks begin together."""
        self.slowest(0.0)
        self.synchronize()
        start = time.perf_counter()
        call()
        self.synchronize()
        return (time.perf_counter() - start) * 1e3

    def slowest_milliseconds(self, call: Callable[[], Any]) -> float:
        """Return the time of ``call`` on the slowest rank."""
        return self.slowest(self.milliseconds(call))

    def free(self) -> None:
        """Release memory that nothing uses any more."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


@dataclasses.dataclass(frozen=True)
class Times:
    """The measurement of one rank; fields as in :class:`nsa_bench.parallel.result.Row`."""

    samples_ms: list[float]
    compute_ms: float
    waiting_ms: float
    peak_bytes: int | None
    traffic: list[Traffic]


def divided_layer(
    settings: ParallelSettings, shape: Shape, dtype: torch.dtype, division: Division, mesh: Any
) -> NSAttention:
    """Return the timed layer on the CPU, with the same parameters on every rank.

    Args:
        settings: The settings.
        shape: The heads.
        dtype: Dtype of the parameters.
        division: How the sequence is divided.
        mesh: The ranks, a DeviceMesh; None on one rank.
    """
    torch.manual_seed(settings.seed)
    layer = NSAttention(settings.config(shape), settings.backends).to(dtype)
    if mesh is not None:
        assert isinstance(mesh, DeviceMesh)
        style = ContextParallel(division.mode, division.layout)
        parallelize_module(layer, mesh, style)
    return layer


def training_call(
    layer: NSAttention, rows: int, dtype: torch.dtype, place: Place, seed: int
) -> Callable[[], Any]:
    """Return a function that runs forward and backward on ``rows`` random rows of this rank."""
    generator = torch.Generator(place.device).manual_seed(seed + place.rank)
    size = (1, rows, layer.config.dim)
    x, up = (
        torch.randn(size, generator=generator, device=place.device).to(dtype) for _ in range(2)
    )
    leaves = [x.requires_grad_(), *layer.parameters()]

    def call() -> None:
        torch.autograd.grad(layer(x), leaves, up)

    return call


def measure_call(
    train: Callable[[], Any], place: Place, settings: ParallelSettings, stand_in: bool = False
) -> Times:
    """Time a call, trace its collectives, and repeat them alone.

    All ranks take the same number of samples: they follow the times of the slowest.

    Args:
        train: Forward and backward.
        place: Where it runs.
        settings: Budget and limits.
        stand_in: Whether stand-ins replace the collectives, which then are not repeated alone.
    """
    call = _with_stand_ins(train, place.device) if stand_in else train
    end = time.monotonic() + settings.cell_limit_s
    place.slowest_milliseconds(call)  # compiles kernels
    samples = [place.slowest_milliseconds(call)]
    least = MIN_ROUNDS if samples[0] < SLOW_MS else 1
    rounds = min(MAX_ROUNDS, max(least, int(settings.budget_s * 1e3 / samples[0])))
    while len(samples) < rounds and place.slowest(time.monotonic() - end) < 0:
        samples.append(place.slowest_milliseconds(call))
    cuda = place.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()

    traced = (StandIn if stand_in else Traced)(place.device)

    def traced_call() -> None:
        with traced:
            train()

    total = place.milliseconds(traced_call)
    peak = torch.cuda.max_memory_allocated() if cuda else None
    waiting, calls = traced.milliseconds(), traced.calls
    traffic = [Traffic(c.name, c.received_bytes(place.rank)) for c in calls]
    if calls and not stand_in:
        place.free()
        timed = place.slowest_milliseconds
        traffic = repeat_alone(calls, place.rank, place.device, timed)
    # The host takes longer for a traced call, so only the share of its time counts.
    waiting *= statistics.median(samples) / total
    return Times(samples, statistics.median(samples) - waiting, waiting, peak, traffic)


def _with_stand_ins(call: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    def replaced() -> None:
        with StandIn(device):
            call()

    return replaced

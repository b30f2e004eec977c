"""The collectives of a call: traced while it runs, repeated alone, and replaced.

All three work on the operators of :mod:`nsa_core.parallel.collectives` and
:mod:`nsa_core.parallel.head_exchange`. Torch's own collectives run inside of these.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nsa_bench.parallel.result import Traffic
from nsa_core.parallel.collectives import group_size
from nsa_core.parallel.halo import halo_plan
from nsa_core.parallel.layouts import pieces_per_rank

REPEATS = 3


class Call:
    """One call of an operator, without the contents of its tensors.

    Args:
        func: The operator.
        args: Its arguments.
    """

    def __init__(self, func: Any, args: Sequence[Any]) -> None:
        self.func, self.name = func, str(func._opname)
        self._args: list[Any] = [_converted(x, lambda t: t.to("meta")) for x in args]

    def received_bytes(self, rank: int) -> int:
        """Return the bytes that ``rank`` receives from other ranks.

        A reduce-scatter receives one part of the sum from every other rank, as rings do.
        """
        x, *rest = self._args
        if self.name == "gather_rows":
            return (int(rest[1]) - 1) * _bytes(x)
        if self.name == "scatter_sum":
            return (int(rest[1]) - 1) * _bytes(x) // int(rest[1])
        if self.name in ("to_heads", "to_rows"):
            world = group_size(rest[1])
            return sum(map(_bytes, x)) * (world - 1) // world
        if self.name in ("extend", "extend_back"):
            return self._halo_bytes(rank)
        raise ValueError(f"the bytes of the operator {self.name} are not known")

    def _halo_bytes(self, rank: int) -> int:
        win, raw, total, _, layout, widths, group, *_ = self._args
        world, leading = group_size(group), 1 if self.name == "extend" else 2
        sizes = math.prod(win.shape[leading:]), math.prod(raw.shape[leading:])
        plan = halo_plan(total, world, rank, layout, tuple(widths))
        forward = plan.receive_sizes(world, sizes), plan.send_sizes(world, sizes)
        counts = forward[0 if self.name == "extend" else 1]
        return int((sum(counts) - counts[rank]) * win.element_size())

    def again(self, device: torch.device) -> Callable[[], Any]:
        """Return a function that runs the operator on zeros of the same shapes."""
        args = [_converted(x, lambda t: torch.zeros_like(t, device=device)) for x in self._args]
        return lambda: self.func(*args)


def _converted(argument: Any, convert: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Convert the tensors of an argument, which is a tensor, a list or a constant."""
    if isinstance(argument, list):
        return [_converted(x, convert) for x in argument]
    return convert(argument) if isinstance(argument, torch.Tensor) else argument


def _bytes(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()


class Traced(TorchDispatchMode):
    """Record the collectives inside the block, and the time that this rank spends in them.

    Attributes:
        calls: The collectives in their order.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self._device, self._spans = device, list[tuple[Any, Any]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator; time it if it is a collective."""
        if func.namespace != "nsa_parallel":
            return func(*args, **(kwargs or {}))
        self.calls.append(Call(func, args))
        start = self._now()
        result = self.run(func, args)
        self._spans.append((start, self._now()))
        return result

    def run(self, func: Any, args: Any) -> Any:
        """Run a collective."""
        return func(*args)

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter() * 1e3
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self) -> float:
        """Return the time in collectives; on a GPU, call it after a synchronisation."""
        if self._device.type != "cuda":
            return float(sum(end - start for start, end in self._spans))
        return float(sum(start.elapsed_time(end) for start, end in self._spans))


class StandIn(Traced):
    """Replace the collectives of mode sequence: other ranks' rows are made from those of this rank.

    One rank of many then runs alone, with its shapes and with keys and values like real ones. Rows
    that stand for those of another rank are rotated along their last axis, so that no two are
    equal.
    """

    def run(self, func: Any, args: Any) -> Any:
        """Return tensors of the shapes that the collective would return."""
        name, x = func._opname, args[0]
        if name == "gather_rows":
            return torch.cat([x.roll(other, -1) for other in range(args[2])])
        if name == "scatter_sum":
            return x[: x.shape[0] // args[2]].clone()
        if name == "extend":
            return tuple(_extended(x, width, args[4]) for x, width in zip(args[:2], args[5]))
        if name == "extend_back":
            return tuple(
                x[:, width:].flatten(0, 1).to(args[7], copy=True)
                for x, width in zip(args[:2], args[5])
            )
        raise ValueError(f"the results of the operator {name} are not known")


def _extended(rows: torch.Tensor, width: int, layout: str) -> torch.Tensor:
    """Return each piece with ``width`` rows to its left."""
    pieces = rows.unflatten(0, (pieces_per_rank(layout), -1))
    left = torch.arange(width, device=rows.device) % max(1, pieces.shape[1])
    return torch.cat((pieces.index_select(1, left).roll(1, -1), pieces), 1)


def repeat_alone(
    calls: Sequence[Call], rank: int, device: torch.device, timed: Callable[[Any], float]
) -> list[Traffic]:
    """Run collectives one after the other, without the computation between them.

    Args:
        calls: The collectives of a call; all ranks have the same.
        rank: This rank.
        device: Device of the tensors.
        timed: Returns the milliseconds of a function, of the slowest rank.

    Returns:
        The collectives with the shortest of three times each.
    """
    traffic = []
    for call in calls:
        run = call.again(device)
        best = min(timed(run) for _ in range(REPEATS))
        traffic.append(Traffic(call.name, call.received_bytes(rank), float(f"{best:.4g}")))
    return traffic

"""Cases of collectives, frozen parameters, padding and refused calls that run on every rank."""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from nsa_core import NSAError
from nsa_core.parallel import (
    ContextParallel,
    HeadParallel,
    Shards,
    collectives,
    heads,
    pad_to,
)
from parallel_cases import (
    Collectives,
    divided,
    gradient_errors,
    problem,
    relative_error,
    solved,
    summed,
)


def adjoint(rank: int, world: int, *, op: str) -> float:
    """Return the error of <A x, u> = <y, A' u> over all ranks, where x is not y.

    A is a collective; its gradient at y applies the adjoint A'.
    """
    name, generator = dist.group.WORLD.group_name, torch.Generator().manual_seed(rank)  # type: ignore[union-attr]
    collectives.group_name(None)
    layout, widths, exact = "head_tail", [5, 3], torch.float64
    chunk = 4
    total, rows = 2 * world * chunk, 2 * chunk
    shapes = {
        "gather_rows": [(rows, 3)],
        "scatter_sum": [(world * rows, 3)],
        "to_heads": [(rows, 2 * world, 3), (5, rows, world, 2)],
        "to_rows": [(world * rows, 2, 3), (5, world * rows, 1, 2)],
        "sum_ranks": [(rows, 3)],
        "extend": [(rows, 2, 3), (rows, 5)],
        "extend_back": [(2, widths[0] + chunk, 2, 3), (2, widths[1] + chunk, 5)],
    }
    place = (total, layout, widths, name)
    arguments: dict[str, tuple[Any, ...]] = {
        "gather_rows": (name, exact),
        "scatter_sum": (name,),
        "sum_ranks": (name,),
        "extend": place,
        "extend_back": (*place, exact),
    }

    def applied(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if op in ("to_heads", "to_rows"):
            return getattr(heads, op)(tensors, layout, name)
        given = [tensors] if op.startswith("extend") else tensors
        result = getattr(collectives, op)(*given, *arguments[op])
        return [result] if isinstance(result, torch.Tensor) else list(result)

    def random(shapes: Any) -> list[torch.Tensor]:
        return [torch.randn(s, generator=generator, dtype=exact) for s in shapes]

    x, y = random(shapes[op]), [t.requires_grad_() for t in random(shapes[op])]
    outputs = applied(y)
    u = random([t.shape for t in outputs])
    gradients = torch.autograd.grad(outputs, y, u)
    sides = torch.stack(
        [
            sum((a * b).sum() for a, b in zip(left, right))  # type: ignore[misc]
            for left, right in ((applied(x), u), (x, gradients))
        ]
    )
    dist.all_reduce(sides)
    return float((sides[0] - sides[1]).abs() / sides[0].abs())


def copied(rank: int, world: int, *, layout: str) -> dict[str, int]:
    """Count the copies of a layer in mode heads, forward and backward.

    Returns:
        sent: elements of the tensors that it exchanges.
        tensors: most tensors of an exchange; each is a message to each rank and piece.
        copied: elements that are copied for this.
        joined: number of concatenations, minus that of one process.
        angles: elements of the tables of cosines.
        rows: elements of a table for the rows of all ranks.
    """
    case = problem("packed")
    x = Shards(len(case.x), world, rank, layout).take(case.x)
    one, layer = case.layer(), divided(world, case.layer(), mode="heads", layout=layout)
    with Collectives() as seen:
        layer(x, case.cu_seqlens).sum().backward()
    before, events = _profiled(one, case.x, case), _profiled(layer, x, case)

    def elements(name: str, of_exchange: bool = False) -> int:
        named = [e for e in events if e.name == name and (not of_exchange or _is_of_exchange(e))]
        return sum(math.prod(e.input_shapes[0]) for e in named)

    joined = [sum(e.name == "aten::cat" for e in each) for each in (before, events)]
    return {
        "sent": sum(seen.elements),
        "tensors": max(seen.tensors),
        "copied": elements("aten::copy_", of_exchange=True),
        "joined": joined[1] - joined[0],
        "angles": elements("aten::cos"),
        "rows": len(case.x) * layer.config.qk_dim // 2,
    }


def _profiled(layer: Any, x: torch.Tensor, case: Any) -> Any:
    """Return the events of a forward and backward."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        layer(x.clone().requires_grad_(), case.cu_seqlens).sum().backward()
    return profile.events()


def _is_of_exchange(event: Any) -> bool:
    """Return whether an event of the profiler is inside of to_heads or to_rows."""
    while event is not None:
        if event.name in ("nsa_parallel::to_heads", "nsa_parallel::to_rows"):
            return True
        event = event.cpu_parent
    return False


def frozen(rank: int, world: int, *, names: list[str], input_grad: bool) -> tuple[int, list[str]]:
    """Return how many elements HeadParallel sums in backward, and the parameters with gradients.

    Args:
        rank: this rank.
        world: number of ranks.
        names: the parameters that are frozen begin with one of these.
        input_grad: whether x needs a gradient.
    """
    case = problem("packed", qk_norm=True)
    layer = parallelize_module(case.layer(), init_device_mesh("cpu", (world,)), HeadParallel())
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(not name.startswith(tuple(names)))
    x = case.x.clone().requires_grad_(input_grad)
    y = layer(x, case.cu_seqlens)
    with Collectives() as seen:
        (y * case.up).sum().backward()
    grads = [name for name, p in layer.named_parameters() if p.grad is not None]
    return sum(seen.elements), grads


def padded(rank: int, world: int, *, mode: str, layout: str) -> dict[str, float]:
    """Return the errors of 101 packed rows, which no number of ranks divides, after padding."""
    case, rows = problem("packed"), 101
    documents = torch.tensor([0, 5, 55, 58, rows], dtype=torch.int32)
    case = solved(case._replace(x=case.x[:rows], up=case.up[:rows], cu_seqlens=documents))
    total = pad_to(rows, world, layout)
    shards = Shards(total, world, rank, layout)
    x, up = (torch.cat((t, t.new_zeros(total - rows, 24))) for t in (case.x, case.up))
    layer = divided(world, case.layer(), mode=mode, layout=layout)
    mine = shards.take(x).clone().requires_grad_()
    y = layer(mine, torch.cat((documents, documents.new_tensor([total]))), 50)
    (y * shards.take(up)).sum().backward()
    assert mine.grad is not None
    grads = summed({n: p.grad for n, p in layer.named_parameters() if p.grad is not None})
    return {
        "y": relative_error(shards.whole(y)[:rows], case.y),
        "dx": relative_error(shards.whole(mine.grad)[:rows], case.dx),
        "parameters": max(gradient_errors(grads, case.grads).values()),
    }


def single(rank: int, world: int, *, style: str) -> tuple[bool, dict[str, int]]:
    """Apply a style over a mesh of one rank.

    Returns:
        Whether the output and all gradients have the bits of a layer without the style, and the
        collectives of forward and backward.
    """
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("dp", "one"))["one"]
    case, styles = problem("packed"), {"context": ContextParallel(), "heads": HeadParallel()}
    layer = parallelize_module(case.layer(), mesh, styles[style])
    x = case.x.clone().requires_grad_()
    with Collectives() as seen:
        y = layer(x, case.cu_seqlens)
        (y * case.up).sum().backward()
    actual = {"y": y, "dx": x.grad} | {name: p.grad for name, p in layer.named_parameters()}
    expected = {"y": case.y, "dx": case.dx, **case.grads}
    equal = all(torch.equal(actual[name], value) for name, value in expected.items())
    return equal, dict(seen.counts)


def one_refuses(rank: int, world: int, *, check: bool) -> tuple[str, float]:
    """Return the error of each rank, and its seconds, if rank 1 refuses a call.

    The group has a timeout of 30 seconds with the check, else of 4, and rank 1 does not end.
    """
    group = dist.new_group(timeout=datetime.timedelta(seconds=30 if check else 4))
    collectives.group_name(group)
    case = problem("packed")
    layer = divided(world, case.layer(), mode="sequence")
    layer.parallel = dataclasses.replace(layer.parallel, group=group.group_name)
    plan = problem("packed").layer().plan if rank == 1 else None  # for whole sequences
    os.environ["NSA_CHECK"] = str(int(check))
    dist.barrier()
    started = time.monotonic()
    try:
        layer(Shards(112, world, rank).take(case.x), case.cu_seqlens, plan=plan)
    except NSAError as error:
        seconds = time.monotonic() - started
        time.sleep(8 if rank == 1 and not check else 0)
        return f"{type(error).__name__}: {error}", seconds
    finally:
        del os.environ["NSA_CHECK"]
        dist.destroy_process_group(group)
    return "no error", 0.0

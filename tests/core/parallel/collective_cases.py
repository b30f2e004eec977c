"""Cases of collectives, frozen parameters, padding and refused calls that run on every rank."""

from __future__ import annotations

import dataclasses
import datetime
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from nsa_core import NSAError
from nsa_core.parallel import HeadParallel, Shards, collectives, pad_to
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
    counts = (
        [[3, 1], [2, 4]]
        if world == 2
        else [[1 + r + s for s in range(world)] for r in range(world)]
    )
    sends, receives = counts[rank], [row[rank] for row in counts]
    layout, widths, exact = "head_tail", [5, 3], torch.float64
    chunk = 4
    total, rows = 2 * world * chunk, 2 * chunk
    shapes = {
        "gather_rows": [(rows, 3)],
        "scatter_sum": [(world * rows, 3)],
        "exchange": [(sum(sends), 3)],
        "sum_ranks": [(rows, 3)],
        "extend": [(rows, 2, 3), (rows, 5)],
        "extend_back": [(2, widths[0] + chunk, 2, 3), (2, widths[1] + chunk, 5)],
    }
    place = (total, rank, layout, widths, name)
    arguments: dict[str, tuple[Any, ...]] = {
        "gather_rows": (name, world, exact),
        "scatter_sum": (name, world),
        "exchange": (sends, receives, name),
        "sum_ranks": (name,),
        "extend": place,
        "extend_back": (*place, exact),
    }

    def applied(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        result = getattr(collectives, op)(*tensors, *arguments[op])
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


def one_refuses(rank: int, world: int, *, check: bool) -> tuple[str, float]:
    """Return the error of each rank, and its seconds, if rank 1 refuses a call.

    The group has a timeout of 4 seconds, and rank 1 does not end.
    """
    group = dist.new_group(timeout=datetime.timedelta(seconds=4))
    collectives.group_name(group)
    case = problem("packed")
    layer = divided(world, case.layer(), mode="sequence")
    layer.parallel = dataclasses.replace(layer.parallel, group=group.group_name)
    plan = problem("packed").layer().plan if rank == 1 else None  # for whole sequences
    os.environ["NSA_CHECK"] = str(int(check))
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

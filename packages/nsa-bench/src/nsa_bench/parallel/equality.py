"""Judge the layer on several ranks against one process, before it is timed.

Both are compared with the layer in float64 on one process; the errors of several ranks may not
exceed those of one process by more than the limits of the verdict. All blocks are selected, because
roundings may swap blocks of nearly equal scores.
"""

from __future__ import annotations

import dataclasses
import itertools
import time

import torch
import torch.distributed as dist

from nsa_bench.gate import Gate
from nsa_bench.parallel.call import Division, Place, divided_layer
from nsa_bench.parallel.settings import ParallelSettings
from nsa_bench.shapes import Shape
from nsa_core.dtypes import dtype_name
from nsa_core.layer.module import NSAttention
from nsa_core.parallel import Shards, pad_to
from nsa_verify.judge.tensor import LIMITS, judge

ROWS = {"cuda": 2048, "cpu": 256}  # the float64 calls on sdpa take most of the time
# First rows of the documents, of _SCALE rows: short, empty, and across ranks.
_BOUNDS = (0, 5, 1500, 1500, 1503, 3500, 5548, 7596)
_SCALE = 8192
Tensors = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Problem:
    """Packed documents for a small layer.

    Attributes:
        shape: The heads, fewer than those of the timed layer.
        blocks: l, d, l', n, w.
        x, up: The input and the gradient of the output [T, dim].
        cu_seqlens: int32 [documents + 1].
        max_seqlen: Length of the longest document.
    """

    shape: Shape
    blocks: tuple[int, ...]
    x: torch.Tensor
    up: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int

    def gradients(self, layer: NSAttention, x: torch.Tensor, up: torch.Tensor) -> Tensors:
        """Return the output and the gradients of ``layer``, by name."""
        x = x.detach().requires_grad_()
        names, parameters = zip(*layer.named_parameters())
        y = layer(x, self.cu_seqlens, self.max_seqlen)
        dx, *grads = torch.autograd.grad(y, (x, *parameters), up)
        return {"y": y.detach(), "dx": dx} | dict(zip(names, grads))


def problem(settings: ParallelSettings, shape: Shape, device: torch.device) -> Problem:
    """Return the problem for a shape: the same groups and blocks, but fewer key/value heads."""
    ranks, group = settings.ranks, shape.n_heads // shape.n_kv_heads
    kv = min(2, shape.n_kv_heads) if shape.n_kv_heads % ranks else ranks
    small = dataclasses.replace(shape, n_heads=kv * group, n_kv_heads=kv)
    rows = ROWS[device.type]
    total = pad_to(rows, ranks)
    bounds = [first * rows // _SCALE for first in _BOUNDS] + [total]
    longest = max(end - first for first, end in itertools.pairwise(bounds))
    size, stride, select, n, window = settings.blocks
    n = max(n, -(-longest // select))
    generator = torch.Generator().manual_seed(settings.seed)
    dim = settings.config(shape).dim
    x, up = (torch.randn(total, dim, generator=generator).to(device) for _ in range(2))
    documents = torch.tensor(bounds, dtype=torch.int32, device=device)
    return Problem(small, (size, stride, select, n, window), x, up, documents, longest)


def judge_division(
    settings: ParallelSettings,
    shape: Shape,
    dtype: torch.dtype,
    division: Division,
    place: Place,
    mesh: object,
) -> Gate:
    """Judge one division in one dtype, on all ranks.

    Args:
        settings: The settings.
        shape: The heads of the timed layer.
        dtype: The dtype.
        division: The division.
        place: Where this rank runs.
        mesh: The ranks.

    Returns:
        The verdict, the same on every rank.
    """
    started = time.perf_counter()
    case = problem(settings, shape, place.device)
    reduced = dataclasses.replace(settings, blocks=case.blocks)
    x, up = case.x.to(dtype), case.up.to(dtype)

    def layer(backends: dict[str, str] | None, division: Division, mesh: object) -> NSAttention:
        chosen = dataclasses.replace(reduced, backends=backends)
        return divided_layer(chosen, case.shape, dtype, division, mesh).to(place.device)

    def all_slots(name: str) -> dict[str, str]:
        return dict.fromkeys(("cmp", "select", "sel", "win", "combine"), name)

    truth = case.gradients(
        layer(all_slots("sdpa"), Division(), None).double(), x.double(), up.double()
    )
    one = case.gradients(layer(settings.backends, Division(), None), x, up)
    shards = Shards(len(x), place.world, place.rank, division.layout)
    mine = case.gradients(layer(settings.backends, division, mesh), shards.take(x), shards.take(up))
    several = {name: _joined(name, grad, shards) for name, grad in mine.items()}
    failures = [
        f"{name}: {why}"
        for name, actual in several.items()
        if (why := _difference(name, actual, one[name], truth[name], dtype))
    ]
    seconds = round(time.perf_counter() - started, 3)
    where = f"{case.shape.name}, {len(x)} packed rows, {len(case.cu_seqlens) - 1} documents"
    return Gate(
        division.name, shape.name, dtype_name(dtype), not failures, where, seconds, failures
    )


def _joined(name: str, value: torch.Tensor, shards: Shards) -> torch.Tensor:
    """Return the rows of all ranks, or the sum of a parameter's gradient over the ranks."""
    if name in ("y", "dx"):
        return shards.whole(value)
    total = value.double()
    dist.all_reduce(total)
    return total


def _difference(
    name: str, actual: torch.Tensor, one: torch.Tensor, truth: torch.Tensor, dtype: torch.dtype
) -> str:
    """Return why a tensor of several ranks is not that of one process; empty if it is."""
    a, o, t = (x.double().reshape(1, -1, x.shape[-1]) for x in (actual, one, truth))
    verdict = judge(a, t, o, t.abs(), dtype, grad=name != "y")
    own = judge(o, t, o, t.abs(), dtype, grad=name != "y")
    limits = LIMITS[dtype]
    # Terms that cancel in a parameter's gradient bias the result of one process too.
    errors = {
        "row": (verdict.row, limits.row),
        "elem": (verdict.elem, limits.elem),
        "bias": (verdict.bias, max(1.0, 1.25 * own.bias)),
    }
    broken = [
        f"{key} {value:.3g} > {most:.3g}"
        for key, (value, most) in errors.items()
        if not value <= most
    ]
    if not broken and not (verdict.ok or verdict.row or verdict.elem or verdict.bias):
        return verdict.why  # a wrong shape, or a value that is not finite
    return ", ".join(broken)

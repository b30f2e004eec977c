"""Judge the layer on several ranks against one process, before it is timed.

Both are compared with the layer in float64 on one process; the errors of several ranks may not
exceed those of one process by more than the limits of the verdict. All blocks are selected, because
roundings may swap blocks of nearly equal scores.

All slots run on sdpa, whichever backends are timed: this judges how the sequence is divided. The
compilation of kernels for its few rows, in every dtype and mode and on every rank, took most of the
time of a run; `nsa verify` judges the kernels, also for queries that begin inside a sequence.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time

import torch
import torch.distributed as dist

from nsa_bench.gate import Gate
from nsa_bench.parallel.call import Division, Place, divided_layer
from nsa_bench.parallel.settings import ParallelSettings
from nsa_bench.shapes import Shape
from nsa_core.contract import SLOTS
from nsa_core.dtypes import dtype_name
from nsa_core.layer.module import NSAttention
from nsa_core.parallel import Shards, pad_to
from nsa_verify.judge.tensor import LIMITS, Verdict, judge

ROWS = {"cuda": 2048, "cpu": 256}
_MAX_GROUP = 4  # query heads per key/value head; the division treats them alike
# First rows of the documents, of _SCALE rows: short, empty, across ranks, and around whole pieces.
_BOUNDS = (0, 5, 1500, 1500, 1503, 3500, 8100)
_SCALE = 8192
Tensors = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Problem:
    """Packed documents for a small layer.

    Attributes:
        shape: The heads, fewer than those of the timed layer, but of the same widths.
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
    """Return the problem for a shape: the same widths and blocks, but fewer heads."""
    ranks, group = settings.ranks, min(_MAX_GROUP, shape.n_heads // shape.n_kv_heads)
    kv = min(2, shape.n_kv_heads) if shape.n_kv_heads % ranks else ranks
    small = dataclasses.replace(shape, n_heads=kv * group, n_kv_heads=kv)
    size, stride, select, n, window = settings.blocks
    # No piece is a multiple of the stride, so pieces have different numbers of compressed rows.
    pieces, rows = pad_to(1, ranks), ROWS[device.type]
    total = rows // pieces * pieces - pieces
    bounds = [first * total // _SCALE for first in _BOUNDS] + [total]
    longest = max(end - first for first, end in itertools.pairwise(bounds))
    n = max(n, -(-longest // select))
    generator = torch.Generator().manual_seed(settings.seed)
    dim = settings.config(shape).dim
    x, up = (torch.randn(total, dim, generator=generator).to(device) for _ in range(2))
    documents = torch.tensor(bounds, dtype=torch.int32, device=device)
    return Problem(small, (size, stride, select, n, window), x, up, documents, longest)


class Referee:
    """Judges divisions in one dtype, and keeps what one process computes for all of them.

    Args:
        settings: The settings.
        shape: The heads of the timed layer.
        dtype: The dtype.
        device: Device of this rank.
    """

    def __init__(
        self, settings: ParallelSettings, shape: Shape, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._shape, self._dtype, self._device = shape, dtype, device
        self._case = case = problem(settings, shape, device)
        backends = dict.fromkeys(SLOTS, "sdpa")
        self._settings = dataclasses.replace(settings, blocks=case.blocks, backends=backends)
        self._x, self._up = case.x.to(dtype), case.up.to(dtype)

    def judge(self, division: Division, place: Place, mesh: object) -> Gate:
        """Judge a division, on all ranks.

        Args:
            division: The division.
            place: Where this rank runs.
            mesh: The ranks.

        Returns:
            The verdict, the same on every rank.
        """
        started = time.perf_counter()
        case, shards = self._case, Shards(len(self._x), place.world, place.rank, division.layout)
        layer = self._layer(division, mesh)
        mine = case.gradients(layer, shards.take(self._x), shards.take(self._up))
        failures = []
        for name, own in mine.items():
            actual = _joined(name, own, shards)
            if why := self._difference(name, actual):
                failures.append(f"{name}: {why}")
        documents = len(case.cu_seqlens) - 1
        return Gate(
            division.name,
            self._shape.name,
            dtype_name(self._dtype),
            not failures,
            f"{case.shape.name} on sdpa, {len(self._x)} packed rows, {documents} documents",
            round(time.perf_counter() - started, 3),
            failures,
        )

    def _layer(self, division: Division, mesh: object) -> NSAttention:
        layer = divided_layer(self._settings, self._case.shape, self._dtype, division, mesh)
        return layer.to(self._device)

    @functools.cached_property
    def _truth(self) -> Tensors:
        """The results of one process in float64."""
        layer = self._layer(Division(), None).double()
        return self._case.gradients(layer, self._x.double(), self._up.double())

    @functools.cached_property
    def _one(self) -> Tensors:
        """The results of one process in the dtype."""
        return self._case.gradients(self._layer(Division(), None), self._x, self._up)

    @functools.cached_property
    def _own_bias(self) -> dict[str, float]:
        """The bias of one process, by tensor."""
        return {name: self._verdict(name, one).bias for name, one in self._one.items()}

    def _verdict(self, name: str, actual: torch.Tensor) -> Verdict:
        tensors = (actual, self._one[name], self._truth[name])
        a, o, t = (x.double().reshape(1, -1, x.shape[-1]) for x in tensors)
        return judge(a, t, o, t.abs(), self._dtype, grad=name != "y")

    def _difference(self, name: str, actual: torch.Tensor) -> str:
        """Return why a tensor of several ranks is not that of one process; empty if it is."""
        verdict, limits = self._verdict(name, actual), LIMITS[self._dtype]
        # Terms that cancel in a parameter's gradient bias the result of one process too.
        errors = {
            "row": (verdict.row, limits.row),
            "elem": (verdict.elem, limits.elem),
            "bias": (verdict.bias, max(1.0, 1.25 * self._own_bias[name])),
        }
        broken = [
            f"{key} {value:.3g} > {most:.3g}"
            for key, (value, most) in errors.items()
            if not value <= most
        ]
        if not broken and not (verdict.ok or verdict.row or verdict.elem or verdict.bias):
            return verdict.why  # a wrong shape, or a value that is not finite
        return ", ".join(broken)


def _joined(name: str, value: torch.Tensor, shards: Shards) -> torch.Tensor:
    """Return the rows of all ranks, or the sum of a parameter's gradient over the ranks."""
    if name in ("y", "dx"):
        return shards.whole(value)
    total = value.double().contiguous()  # the gradient of a weight may be a transposed view
    dist.all_reduce(total)
    return total

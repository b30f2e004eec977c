"""The collectives of context parallelism as torch operators, with shape inference and gradients.

    gather_rows   the rows of all ranks             gradient: scatter_sum
    scatter_sum   this rank's rows of a sum         gradient: gather_rows
    extend        rows to the left of each piece    gradient: extend_back
    extend_back   rows back, and added              gradient: extend
    sum_ranks     the sum over all ranks            gradient: sum_ranks

The results of each operator are used on every rank. A compiler would remove an operator whose
result only some ranks use, and the other ranks would wait for ever.

Operators carry the name of their process group, because schemas have no groups. torch.distributed
renamed two functions in torch 2.13; this file is the only one that calls them. The collectives of
mode heads are in :mod:`nsa_core.parallel.heads`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from nsa_core.errors import InvalidInput, NSAError
from nsa_core.parallel.halo import Segment, halo_sides
from nsa_core.parallel.layouts import pieces_per_rank
from nsa_core.plan.default_plan import constant_result
from nsa_core.torch_ops.autograd import without_tangents
from nsa_core.util.text import describe_error

_groups: dict[str, dist.ProcessGroup] = {}
_all_gather: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
_reduce_scatter: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


@constant_result  # torch.compile runs operators before it repeats the assignment
def group_name(group: dist.ProcessGroup | None) -> str:
    """Return the name under which the operators find ``group``; None: all processes.

    Raises:
        InvalidInput: there is no default process group.
    """
    if group is None:
        if not dist.is_initialized():
            raise InvalidInput(
                "group is None, but torch.distributed has no process group: call"
                " torch.distributed.init_process_group() first"
            )
        group = dist.group.WORLD
        assert group is not None  # it is initialized
    _groups[group.group_name] = group
    return str(group.group_name)


def group_of(name: str) -> dist.ProcessGroup:
    """Return the group with this name."""
    return _groups[name]


def group_size(name: str) -> int:
    """Return the number of ranks of the group with this name."""
    return _groups[name].size()


@contextlib.contextmanager
def named_errors(operator: str, group: str) -> Iterator[None]:
    """Raise an error of torch.distributed as an NSAError that names this rank and its peers.

    torch.distributed does not report which one of several peers is absent.

    On gloo, a collective raises when another rank has ended, or after the timeout of its group. On
    NCCL, the watchdog of torch ends the process after this timeout, and no error passes here.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise  # of this rank
    except RuntimeError as error:
        this = _groups[group]
        ranks = dist.get_process_group_ranks(this)
        rank = ranks[this.rank()]
        others = [str(other) for other in ranks if other != rank]
        absent = (
            f"rank {others[0]}"
            if len(others) == 1
            else f"at least one of the ranks {', '.join(others)}"
        )
        raise NSAError(
            f"{operator} failed on rank {rank}: {absent} did not take part, or ended before. The"
            " first error of the other ranks is the cause; with NSA_CHECK=1 a rank that refuses its"
            f" call is named ({describe_error(error)})"
        ) from error


@torch.library.custom_op("nsa_parallel::gather_rows", mutates_args=())
def gather_rows(x: torch.Tensor, group: str, reduce: torch.dtype) -> torch.Tensor:
    """Concatenate the rows of all ranks, in the order of the ranks.

    Args:
        x: [n, ...], contiguous, of one shape on all ranks.
        group: name of the process group of P ranks.
        reduce: dtype in which gradients are summed over the ranks, if it is wider than x's.

    Returns:
        [P * n, ...]
    """
    out = x.new_empty((group_size(group) * x.shape[0], *x.shape[1:]))
    with named_errors("gather_rows", group):
        _all_gather(out, x.contiguous(), group=_groups[group])
    return out


@gather_rows.register_fake
def _(x: torch.Tensor, group: str, reduce: torch.dtype) -> torch.Tensor:
    return x.new_empty((group_size(group) * x.shape[0], *x.shape[1:]))


@torch.library.custom_op("nsa_parallel::scatter_sum", mutates_args=())
def scatter_sum(x: torch.Tensor, group: str) -> torch.Tensor:
    """Sum a tensor over all ranks in its dtype, and return the part of this rank.

    Args:
        x: [P * n, ...], of one shape on all ranks.
        group: name of the process group of P ranks.

    Returns:
        [n, ...]
    """
    out = x.new_empty((x.shape[0] // group_size(group), *x.shape[1:]))
    with named_errors("scatter_sum", group):
        _reduce_scatter(out, x.contiguous(), group=_groups[group])
    return out


@scatter_sum.register_fake
def _(x: torch.Tensor, group: str) -> torch.Tensor:
    return x.new_empty((x.shape[0] // group_size(group), *x.shape[1:]))


@torch.library.custom_op("nsa_parallel::sum_ranks", mutates_args=())
def sum_ranks(x: torch.Tensor, group: str) -> torch.Tensor:
    """Sum a tensor over all ranks in its dtype.

    Args:
        x: a tensor of one shape on all ranks.
        group: name of the process group.

    Returns:
        The sum, of x's shape, on every rank.
    """
    out = x.clone(memory_format=torch.contiguous_format)
    with named_errors("sum_ranks", group):
        dist.all_reduce(out, group=_groups[group])
    return out


@sum_ranks.register_fake
def _(x: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _exchange(
    rows: list[torch.Tensor],
    leaving: Sequence[Segment],
    arriving: Sequence[Segment],
    row_sizes: Sequence[int],
    group: str,
) -> Iterator[tuple[Segment, torch.Tensor]]:
    """Send rows, and return the segments that arrive with their elements.

    Args:
        rows: the rows of each segment that leaves, and an empty tensor: there may be no segment.
        leaving: the segments that this rank sends.
        arriving: the segments that it receives.
        row_sizes: elements per row of each tensor.
        group: name of the process group.
    """
    this = group_of(group)

    def counts(segments: Sequence[Segment]) -> list[int]:
        return [s.rows * row_sizes[s.tensor] for s in segments]

    def of_ranks(segments: Sequence[Segment]) -> list[int]:
        sums = [0] * this.size()
        for s, count in zip(segments, counts(segments)):
            sums[s.receiver if s.sender == this.rank() else s.sender] += count
        return sums

    buffer, into = torch.cat([x.reshape(-1) for x in rows]), of_ranks(arriving)
    received = buffer.new_empty(sum(into))
    with named_errors("extend", group):
        dist.all_to_all_single(received, buffer, into, of_ranks(leaving), group=this)
    return zip(arriving, received.split(counts(arriving)))


@torch.library.custom_op("nsa_parallel::extend", mutates_args=())
def extend(
    tensors: list[torch.Tensor], total: int, layout: str, widths: list[int], group: str
) -> list[torch.Tensor]:
    """Extend each piece of several tensors by the rows to its left, in one all-to-all.

    Args:
        tensors: [n, ...] each, the rows of this rank, of one dtype.
        total: number of rows of all ranks, T.
        layout: "head_tail" or "contiguous".
        widths: number of rows to the left, for each tensor.
        group: name of the process group.

    Returns:
        For each tensor [pieces, width + chunk, ...]; rows before row 0 of all are zero.
    """
    pieces, extended = pieces_per_rank(layout), []
    for rows, width in zip(tensors, widths):
        own = rows.unflatten(0, (pieces, len(rows) // pieces))
        zeros = rows.new_zeros((pieces, width, *rows.shape[1:]))
        extended.append(torch.cat((zeros, own), 1))
    if any(widths):
        this = group_of(group)
        sent, received = halo_sides(total, this.size(), this.rank(), layout, tuple(widths))
        own_rows = [tensors[s.tensor].narrow(0, s.source, s.rows) for s in sent]
        own_rows.append(tensors[0].new_empty(0))
        row_sizes = [math.prod(x.shape[1:]) for x in tensors]
        for s, part in _exchange(own_rows, sent, received, row_sizes, group):
            target = extended[s.tensor][s.piece].narrow(0, s.target, s.rows)
            target.copy_(part.view(target.shape))
    return extended


@extend.register_fake
def _(
    tensors: list[torch.Tensor], total: int, layout: str, widths: list[int], group: str
) -> list[torch.Tensor]:
    pieces = pieces_per_rank(layout)
    return [
        x.new_empty((pieces, width + x.shape[0] // pieces, *x.shape[1:]))
        for x, width in zip(tensors, widths)
    ]


@torch.library.custom_op("nsa_parallel::extend_back", mutates_args=())
def extend_back(
    tensors: list[torch.Tensor],
    total: int,
    layout: str,
    widths: list[int],
    group: str,
    precise: torch.dtype,
) -> list[torch.Tensor]:
    """Send the rows to the left of each piece back, and add them to the rows of their rank.

    Additions have a fixed order and no atomics.

    Args:
        tensors: [pieces, width + chunk, ...] each, of one dtype.
        total, layout, widths, group: as in :func:`extend`.
        precise: dtype of the sum.

    Returns:
        For each tensor [n, ...] of dtype ``precise``.
    """
    totals = [
        x[:, width:].flatten(0, 1).to(precise, copy=True) for x, width in zip(tensors, widths)
    ]
    if any(widths):
        this = group_of(group)
        sent, received = halo_sides(total, this.size(), this.rank(), layout, tuple(widths))
        rows = [tensors[s.tensor][s.piece].narrow(0, s.target, s.rows) for s in received]
        rows.append(tensors[0].new_empty(0))
        row_sizes = [math.prod(x.shape[2:]) for x in tensors]
        for s, part in _exchange(rows, received, sent, row_sizes, group):
            target = totals[s.tensor].narrow(0, s.source, s.rows)
            target.add_(part.view(target.shape))
    return totals


@extend_back.register_fake
def _(
    tensors: list[torch.Tensor],
    total: int,
    layout: str,
    widths: list[int],
    group: str,
    precise: torch.dtype,
) -> list[torch.Tensor]:
    return [
        x.new_empty((x.shape[0] * (x.shape[1] - width), *x.shape[2:]), dtype=precise)
        for x, width in zip(tensors, widths)
    ]


def sum_dtype(dtype: torch.dtype, reduce: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of ``dtype`` are summed."""
    return torch.promote_types(dtype, reduce)


def _save_group(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.dtype, ctx.arguments = inputs[0].dtype, inputs[1:]


def _gather_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    group, reduce = ctx.arguments
    total = scatter_sum(grad.to(sum_dtype(ctx.dtype, reduce)), group)
    return total.to(ctx.dtype), None, None


def _scatter_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return gather_rows(grad, *ctx.arguments, grad.dtype), None


def _sum_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return sum_ranks(grad, *ctx.arguments), None


def _save_place(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.dtype, ctx.arguments = inputs[0][0].dtype, inputs[1:]


def _extend_backward(ctx: Any, grads: list[torch.Tensor]) -> tuple[Any, ...]:
    totals = extend_back(grads, *ctx.arguments, sum_dtype(ctx.dtype, torch.float32))
    return ([total.to(ctx.dtype) for total in totals], *[None] * 4)


def _extend_back_backward(ctx: Any, grads: list[torch.Tensor]) -> tuple[Any, ...]:
    rows = extend(grads, *ctx.arguments[:-1])
    return ([x.to(ctx.dtype) for x in rows], *[None] * 5)


gather_rows.register_autograd(_gather_backward, setup_context=_save_group)
scatter_sum.register_autograd(_scatter_backward, setup_context=_save_group)
extend.register_autograd(_extend_backward, setup_context=_save_place)
extend_back.register_autograd(_extend_back_backward, setup_context=_save_place)
sum_ranks.register_autograd(_sum_backward, setup_context=_save_group)

gather_rows, scatter_sum, extend, extend_back, sum_ranks = (  # type: ignore[assignment]
    without_tangents(op) for op in (gather_rows, scatter_sum, extend, extend_back, sum_ranks)
)

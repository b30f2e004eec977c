"""Rotary position embedding on half-split pairs (x_i, x_{i + D/2}), for queries, keys and
compressed keys.

Eagerly each pass is one node and four kernels over tables as wide as a head; for torch.compile,
which fuses, and torch.func it is written op by op. The bits are the same.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from nsa_core.layer.rope_op import cos_sin
from nsa_core.torch_ops.slot_op import stats_dtype
from nsa_core.torch_ops.torch_state import capturing, eager

# Of a table that is kept, 8 MiB at D = 128: eight of them hold little for good, and the host binds
# no longer sequence.
MOST_ROWS = 1 << 13


class RopeTable(NamedTuple):
    """cos and sin of every position's angles, both [R, 1, D/2], fp32 (fp64 for fp64 inputs)."""

    cos: torch.Tensor
    sin: torch.Tensor

    def wide(self) -> WideTable:
        """The same angles over the whole head width."""
        return WideTable(torch.cat((self.cos, self.cos), -1), torch.cat((-self.sin, self.sin), -1))


class WideTable(NamedTuple):
    """(cos, cos) and (-sin, sin) of every position's angles, both [R, 1, D]."""

    cos: torch.Tensor
    sin: torch.Tensor


Table = RopeTable | WideTable


def rope_table(
    positions: torch.Tensor,  # integer [R]
    dim: int,
    base: float,
    dtype: torch.dtype,
) -> RopeTable:
    """Angles position * base^(-2i/D), i < D/2, for tensors of ``dtype`` and even head width
    ``dim``.
    """
    return RopeTable(*cos_sin(positions, dim, base, stats_dtype(dtype)))


def as_used(table: RopeTable) -> Table:
    """``table`` in the form that :func:`rotate` need not make again for every tensor."""
    return table.wide() if eager() else table


def table_for(
    x: torch.Tensor, rows: int, step: int, dim: int, base: float, every: Table | None = None
) -> Table:
    """Angles of ``rows`` positions 0, step, 2 * step, ... for tensors like x and heads of width
    ``dim``.

    Eagerly a table is kept for the next layer and the next step of the same length. Compiled, it is
    rows of ``every``, a table of all positions up to the last: another would be ten more kernels in
    every layer.
    """
    if every is not None and not eager():
        return RopeTable(*(angles[::step].narrow(0, 0, rows) for angles in every))
    asked = (rows, step, dim, base, stats_dtype(x.dtype), x.device)
    if rows > MOST_ROWS or not eager():
        return _made(*asked)
    if type(x) is not torch.Tensor or capturing(x.device):  # a graph's memory is its own
        return _made(*asked).wide()
    return _kept(*asked, torch._C._cuda_getCurrentRawStream(x.device.index) if x.is_cuda else 0)


def _made(
    rows: int, step: int, dim: int, base: float, dtype: torch.dtype, device: torch.device
) -> RopeTable:
    positions = torch.arange(rows, device=device)
    return rope_table(positions if step == 1 else positions * step, dim, base, dtype)


@functools.lru_cache(maxsize=8)
def _kept(
    rows: int,
    step: int,
    dim: int,
    base: float,
    dtype: torch.dtype,
    device: torch.device,
    stream: int,
) -> WideTable:
    """``stream``: another one would not wait for the kernels that fill the table."""
    with torch.inference_mode(False):  # or no later backward could keep it
        return _made(rows, step, dim, base, dtype, device).wide()


def _by_ops(x: torch.Tensor, table: Table) -> torch.Tensor:
    """One upcast before the split, so that forward and backward each round to x's dtype once."""
    half = x.shape[-1] // 2
    cos, sin = table.cos[..., :half], table.sin[..., -half:]
    x1, x2 = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)


def widened(cos: torch.Tensor, sin: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A table of either kind as a :class:`WideTable`'s."""
    return (cos, sin) if cos.shape[-1] == dim else RopeTable(cos, sin).wide()


def turn(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor, back: bool = False
) -> torch.Tensor:
    """``out``, of x's shape and dtype: x turned by the angles of either table; no gradient."""
    cos, sin = widened(cos, sin, x.shape[-1])
    add = torch.sub if back else torch.add
    return add(x * cos, x.roll(x.shape[-1] // 2, -1) * sin, out=out)


class _Rotate(torch.autograd.Function):
    """The gradient is turned back by the same angles."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, back: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.back = back
        return turn(x, cos, sin, x.new_empty(x.shape), back)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, sin, not ctx.back), None, None, None


def _turned(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, back: bool = False
) -> torch.Tensor:
    if x.requires_grad and torch.is_grad_enabled():
        turned: torch.Tensor = _Rotate.apply(x, cos, sin, back)  # type: ignore[no-untyped-call]
        return turned
    return turn(x, cos, sin, x.new_empty(x.shape), back)


def rotate(
    x: torch.Tensor,  # [..., R, heads, D]
    table: Table,
) -> torch.Tensor:
    """(x1 cos - x2 sin, x2 cos + x1 sin) for the halves x1, x2 of the last axis; multiplied in the
    table's dtype.
    """
    return _turned(x, *table) if eager() else _by_ops(x, table)


class _Apart(torch.autograd.Function):
    """x [..., R, n, heads, D] to n tensors [..., R, heads, D], each in memory of its own order;
    rotated, by angles.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *angles: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(*angles)
        out = x.new_empty((x.shape[-3], *x.shape[:-3], *x.shape[-2:]))
        into = out.movedim(0, -3)
        if angles:
            cos, sin = angles
            turn(x, cos.unsqueeze(-2), sin.unsqueeze(-2), into)
        else:
            into.copy_(x)
        return tuple(out.unbind(0))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        angles, grad = ctx.saved_tensors, torch.stack(grads, -3)
        if not angles:
            return (grad,)
        cos, sin = angles
        return _turned(grad, cos.unsqueeze(-2), sin.unsqueeze(-2), back=True), None, None


def apart(x: torch.Tensor, table: Table | None) -> list[torch.Tensor]:
    """x [..., R, n, heads, D] as n tensors [..., R, heads, D] that keep nothing of x; rotated by
    ``table``.
    """
    if eager():
        return list(_Apart.apply(x, *(table or ())))  # type: ignore[no-untyped-call]
    parts = x.unbind(-3)
    return (
        [rotate(part, table) for part in parts] if table else [part.contiguous() for part in parts]
    )

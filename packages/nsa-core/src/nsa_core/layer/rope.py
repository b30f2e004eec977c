"""Rotary position embedding of queries, keys and compressed keys.

The pairs are half-split: (x_i, x_{i + D/2}). In eager mode a rotation is one autograd node of three
kernels. For torch.compile, which fuses operators, and for torch.func, the rotation is written
operator by operator. Both forms give the same bits.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from nsa_core.dtypes import stats_dtype
from nsa_core.layer.rope_op import Frequencies, cos_sin
from nsa_core.torch_ops.torch_state import (
    is_capturing,
    is_eager,
    is_exporting,
    is_transformed,
)

# Longer tables are not cached. A table of this length takes 4 MiB at D = 128, and eight are cached.
# Calls on longer sequences are not limited by the host.
MAX_CACHED_ROWS = 1 << 13


class RopeTable(NamedTuple):
    """cos and sin of the angles of R positions, both [R, 1, D/2], fp32 (fp64 for fp64 inputs)."""

    cos: torch.Tensor
    sin: torch.Tensor


def rope_table(
    positions: torch.Tensor,  # integer [R]
    dim: int,
    frequencies: Frequencies,
    dtype: torch.dtype,
) -> RopeTable:
    """Compute the angles position * frequency.

    Args:
        positions: integer positions [R].
        dim: head width D, even.
        frequencies: the base b of the frequencies b^(-2i/D), 0 <= i < D/2, or these frequencies.
        dtype: dtype of the tensors to rotate; the table is fp32, or fp64 for fp64.
    """
    return RopeTable(*cos_sin(positions, dim, frequencies, stats_dtype(dtype)))


def table_for(
    x: torch.Tensor,
    rows: int,
    step: int,
    dim: int,
    frequencies: Frequencies,
    token_table: RopeTable | None = None,
) -> RopeTable:
    """Return the angles of the ``rows`` positions 0, step, 2 * step, ...

    In eager mode the table is cached for the next layer and the next call of the same length.

    Args:
        x: a tensor with the dtype and the device of the tensors to rotate.
        rows: number of positions.
        step: difference between two positions.
        dim: head width D.
        frequencies: the base b of the frequencies b^(-2i/D), 0 <= i < D/2, or these frequencies.
        token_table: a table of all positions up to the last one, if it exists. Compiled code takes
            rows of it, because another table would add ten kernels to every layer.
    """
    # The bounds of a slice would become guards of torch.export on S.
    if token_table is not None and not is_eager() and not is_exporting():
        return RopeTable(*(angles[::step].narrow(0, 0, rows) for angles in token_table))
    arguments = (rows, step, dim, frequencies, stats_dtype(x.dtype), x.device)
    cached = is_eager() and rows <= MAX_CACHED_ROWS and type(x) is torch.Tensor
    if not cached or is_capturing(x.device):  # a graph owns its memory
        return _new_table(*arguments)
    stream = torch._C._cuda_getCurrentRawStream(x.device.index) if x.is_cuda else 0
    return _cached_table(stream, *arguments)


def _new_table(
    rows: int,
    step: int,
    dim: int,
    frequencies: Frequencies,
    dtype: torch.dtype,
    device: torch.device,
) -> RopeTable:
    positions = torch.arange(rows, device=device)
    return rope_table(positions if step == 1 else positions * step, dim, frequencies, dtype)


@functools.lru_cache(maxsize=8)
def _cached_table(stream: int, *arguments: Any) -> RopeTable:
    """One table per CUDA stream: another stream would not wait for the kernels that fill it."""
    with torch.inference_mode(False):  # backward cannot save an inference tensor
        return _new_table(*arguments)


def _rotate_by_operators(x: torch.Tensor, table: RopeTable) -> torch.Tensor:
    """Rotate with one upcast before the split, so forward and backward round to x's dtype once."""
    cos, sin = table
    x1, x2 = x.to(cos.dtype).chunk(2, dim=-1)
    rotated = (
        torch.addcmul(x1 * cos, x2, sin, value=-1),
        torch.addcmul(x2 * cos, x1, sin),
    )
    return torch.cat(rotated, dim=-1).to(x.dtype)


def rotate_pairs(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor, back: bool = False
) -> torch.Tensor:
    """Write the rotated x to ``out``, without autograd.

    Args:
        x: [..., R, heads, D], or with more axes between R and D.
        cos, sin: the tensors of a table, which broadcast over the axes between R and D.
        out: a tensor of x's shape and dtype.
        back: rotate by the negative angles.
    """
    pairs = x.unflatten(-1, (2, -1))
    x1, x2 = pairs.unbind(-2)
    scaled1, scaled2 = (pairs * cos.unsqueeze(-2)).unbind(-2)
    out1, out2 = out.unflatten(-1, (2, -1)).unbind(-2)
    sign = -1 if back else 1
    torch.addcmul(scaled1, x2, sin, value=-sign, out=out1)
    torch.addcmul(scaled2, x1, sin, value=sign, out=out2)
    return out


class _Rotate(torch.autograd.Function):
    """A rotation whose gradient is rotated by the negative angles."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, back: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.back = back
        return rotate_pairs(x, cos, sin, x.new_empty(x.shape), back)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, sin, not ctx.back), None, None, None


def _rotated(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, back: bool = False
) -> torch.Tensor:
    if is_transformed():  # the gradient of a node that was recorded before
        return _rotate_by_operators(x, RopeTable(cos, -sin if back else sin))
    if x.requires_grad and torch.is_grad_enabled():
        rotated: torch.Tensor = _Rotate.apply(x, cos, sin, back)  # type: ignore[no-untyped-call]
        return rotated
    return rotate_pairs(x, cos, sin, x.new_empty(x.shape), back)


def rotate_back(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return x [..., R, heads, D] rotated by the negative angles of a table."""
    return _rotated(x, cos, sin, back=True)


def rotate(
    x: torch.Tensor,  # [..., R, heads, D]
    table: RopeTable,
) -> torch.Tensor:
    """Return (x1 cos - x2 sin, x2 cos + x1 sin) for the halves x1, x2 of the last axis.

    The result is computed in the table's dtype and rounded to x's dtype.
    """
    return _rotated(x, *table) if is_eager() else _rotate_by_operators(x, table)

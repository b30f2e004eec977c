"""Rotary position embedding on half-split pairs (x_i, x_{i + D/2}), for queries, keys and compressed keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from nsa_core.ops import stats_dtype
from nsa_core.rope_operator import cos_sin
from nsa_core.surroundings import eager


class RopeTable(NamedTuple):
    """cos and sin of every position's angles, both [R, 1, D/2], fp32 (fp64 for fp64 inputs)."""

    cos: torch.Tensor
    sin: torch.Tensor


def rope_table(
    positions: torch.Tensor,  # integer [R]
    dim: int,
    base: float,
    dtype: torch.dtype,
) -> RopeTable:
    """Angles position * base^(-2i/D), i < D/2, for tensors of ``dtype`` and even head width ``dim``."""
    return RopeTable(*cos_sin(positions, dim, base, stats_dtype(dtype)))


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """One upcast before the split, so that forward and backward each round to x's dtype once."""
    x1, x2 = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)


class _Rotate(torch.autograd.Function):
    """The gradient is turned back by the same angles: as many ops as forward, in one node."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, -sin), None, None


def rotate(
    x: torch.Tensor,  # [..., R, heads, D]
    table: RopeTable,
) -> torch.Tensor:
    """(x1 cos - x2 sin, x2 cos + x1 sin) for the halves x1, x2 of the last axis; multiplied in the table's dtype."""
    if x.requires_grad and torch.is_grad_enabled() and eager():
        turned: torch.Tensor = _Rotate.apply(x, table.cos, table.sin)  # type: ignore[no-untyped-call]
        return turned
    return _rotated(x, table.cos, table.sin)

"""Strides of tensors as kernels take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor

Shape: TypeAlias = Sequence[int]
MAX_TILE_TOKENS = 256  # no table has larger tiles


def strides(x: Tensor, packed: bool, *, int64_products: bool = False) -> tuple[int, int, int]:
    """Return the (batch, token, head) strides of x [B, S, H, D], packed [T, H, D].

    The batch stride of a single sequence is 0: kernels multiply it by 0. Its real value may exceed
    2^31, which would make it an int64 argument and need another binary for each long batch of one.

    Args:
        int64_products: The kernel multiplies tokens and strides in 64 bits. By default, products
            inside a tile have 32 bits.

    Raises:
        ValueError: Heads, or the tokens of a tile, are further apart than 32-bit products allow.
    """
    counts = {
        "heads": x.shape[-2],
        "neighbouring tokens": 0 if int64_products else min(x.shape[-3], MAX_TILE_TOKENS),
    }
    for (name, count), stride in zip(counts.items(), (x.stride(-2), x.stride(-3))):
        if (count - 1) * stride >= 2**31:
            raise ValueError(
                f"{count} {name} of a tensor of shape {list(x.shape)} and strides"
                f" {list(x.stride())} must lie within 2^31 elements: pass x.contiguous(), with"
                " tokens before heads"
            )
    if packed:
        return 0, x.stride(0), x.stride(1)
    return x.stride(0) if x.shape[0] > 1 else 0, x.stride(1), x.stride(2)


def batch_apart(stride: tuple[int, int, int]) -> tuple[int, tuple[int, int]]:
    """Return (batch stride, (token, head) strides), which shared.rows.with_batch joins again."""
    return stride[0], stride[1:]


def new_strides(shape: Shape, packed: bool) -> tuple[int, int, int]:
    """Return :func:`strides` of a new contiguous tensor of ``shape``."""
    *batch, tokens, heads, width = shape
    return 0 if packed or batch[0] == 1 else tokens * heads * width, heads * width, width


def lse_strides(lse: Tensor, packed: bool) -> tuple[int, int]:
    """Return the (batch, head) strides of lse [B, H, S], packed [H, T]; tokens are adjacent."""
    return (0, lse.stride(0)) if packed else (lse.stride(0), lse.stride(1))


def new_lse_strides(shape: Shape, packed: bool) -> tuple[int, int]:
    """Return :func:`lse_strides` of a new contiguous tensor of ``shape``."""
    heads, tokens = shape[-2:]
    return 0 if packed else heads * tokens, tokens

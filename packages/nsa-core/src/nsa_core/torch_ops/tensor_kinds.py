"""Refuse kinds of tensors and packing arguments that no kernel can read, with the conversion."""

from __future__ import annotations

from typing import Any

import torch

from nsa_core.errors import InvalidInput, Unsupported
from nsa_core.limits import shown
from nsa_core.torch_ops.torch_state import is_exporting
from nsa_core.torch_ops.vmap_rule import PACKED_UNDER_VMAP, is_mapped


def is_strided(x: torch.Tensor) -> bool:
    """Return whether ``x`` is a dense tensor with strides: not sparse and not nested."""
    return x.layout is torch.strided and not x.is_nested


def kind_problem(name: str, x: torch.Tensor) -> str | None:
    """Return why ``x`` cannot be read as a dense tensor, and the conversion; None if it can.

    Args:
        name: name of the argument, for the message.
        x: the argument.
    """
    if x.is_nested:
        return _nested_problem(name, x)
    if x.layout is not torch.strided:
        return f"{name} is sparse ({x.layout}): pass {name}.to_dense()"
    if x.is_quantized:
        return f"{name} is quantised: pass {name}.dequantize()"
    return None


def _nested_problem(name: str, x: torch.Tensor) -> str:
    if name == "cu_seqlens":
        return "cu_seqlens is a nested tensor: pass the offsets, cu_seqlens=x.offsets().int()"
    if x.layout is not torch.jagged:
        return (
            f"{name} is a nested tensor: pass torch.cat({name}.unbind()) as {name}, and the first"
            " row of each sequence and the number of rows as cu_seqlens=, int32"
        )
    source = name
    if getattr(x, "_lengths", None) is not None:  # a view with gaps between its sequences
        source = f"{name}.contiguous()"
    return (
        f"{name} is a nested tensor: pass {source}.values() as {name}, and"
        f" cu_seqlens={source}.offsets().int()"
    )


def check_kind(name: str, x: torch.Tensor) -> None:
    """Check that ``x`` is a dense tensor.

    Raises:
        InvalidInput: It is sparse, nested or quantised; the message gives the conversion.
    """
    problem = kind_problem(name, x)
    if problem:
        raise InvalidInput(problem)


def describe_max_seqlen(max_seqlen: object) -> str:
    """Return a wrong max_seqlen for the end of a message, with the conversion of a tensor."""
    if isinstance(max_seqlen, torch.Tensor):
        return (
            "a tensor: pass int(max_seqlen), computed once per batch, because reading it from a GPU"
            " synchronises"
        )
    return shown(max_seqlen)


def boundaries_hint(cu_seqlens: object) -> str:
    """Return ": pass ..." with the conversion of cu_seqlens to int32 [documents + 1], or ""."""
    if isinstance(cu_seqlens, torch.Tensor):
        is_integer = not (cu_seqlens.is_floating_point() or cu_seqlens.is_complex())
        if cu_seqlens.dim() == 1 and is_integer and cu_seqlens.dtype is not torch.bool:
            return ": pass cu_seqlens.int()"
        return ""
    if isinstance(cu_seqlens, (list, tuple)) or type(cu_seqlens).__name__ == "ndarray":
        return ": pass torch.tensor(cu_seqlens, dtype=torch.int32, device=...), made once per batch"
    return ""


def check_packed_transforms(cu_seqlens: Any, *tensors: torch.Tensor) -> None:
    """Check that a packed call is neither mapped by vmap nor exported with dynamic sizes.

    Raises:
        Unsupported: It is; the message names the alternatives.
    """
    if torch._C._are_functorch_transforms_active() and any(map(is_mapped, (cu_seqlens, *tensors))):
        raise Unsupported(PACKED_UNDER_VMAP)
    if is_exporting() and isinstance(cu_seqlens, torch.Tensor):
        sizes = (tensors[0].shape[0], *cu_seqlens.shape)
        if not all(isinstance(size, int) for size in sizes):
            raise Unsupported(
                "packed documents (cu_seqlens) cannot be exported with a dynamic number of rows or"
                " documents: export the call on [B, S, ...] without cu_seqlens, or use"
                " torch.compile"
            )

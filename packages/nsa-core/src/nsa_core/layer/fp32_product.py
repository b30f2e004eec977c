"""x W^T in fp32 of bf16 tensors, forward and backward on matrix units.

Gates are fp32, because they scale whole branches. If a bf16 input is converted to fp32, its product
does not run on matrix units. Products of two bf16 numbers are exact in fp32, so nothing is lost if
the input stays in bf16 and only the sums are fp32.
"""

from __future__ import annotations

from typing import Any

import torch

from nsa_core.torch_ops import autograd
from nsa_core.torch_ops.torch_state import is_exporting, is_transformed

DEVICES = ("cuda",)  # types of devices on which matrix units compute the product
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _on_matrix_units(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.mm(a, b, out_dtype=torch.float32)


def _upcast(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.float() @ b.float()


def _shape(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=torch.float32)


def _both_halves(grad: torch.Tensor) -> torch.Tensor:
    """Return [M, 2 N] bf16: ``grad`` [M, N] rounded to bf16, then the rounded remainder."""
    high = grad.bfloat16()
    return torch.cat((high, (grad - high.float()).bfloat16()), 1)


def _save(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    a, b = ctx.saved_tensors
    halves, da, db = _both_halves(grad), None, None
    if ctx.needs_input_grad[1]:  # after the key set of the dispatcher
        da = halves @ torch.cat((b, b), 1).t()
    if ctx.needs_input_grad[2]:
        high, low = torch.ops.nsa_core.fp32_product(a.t(), halves).chunk(2, 1)
        db = (high + low).to(b.dtype)
    return da, db


_lib = torch.library.Library("nsa_core", "FRAGMENT")
_lib.define("fp32_product(Tensor a, Tensor b) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_lib.impl("fp32_product", _on_matrix_units, "CUDA")
_lib.impl("fp32_product", _upcast, "CPU")
torch.library.register_fake("nsa_core::fp32_product", _shape, lib=_lib)
autograd.register(
    _lib, "fp32_product", torch.ops.nsa_core.fp32_product.default, _upcast, _save, _backward
)


def takes_fp32_product(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether :func:`fp32_linear` takes the tensors: plain bf16 tensors on a CUDA device.

    Graphs that are exported keep the operators of PyTorch, and so do transformed calls: the
    operator has no rule for vmap and forward mode.
    """
    return (
        x.dtype == weight.dtype == torch.bfloat16
        and x.device.type in DEVICES
        and type(x) in _PLAIN
        and type(weight) in _PLAIN
        and torch.version.hip is None  # its torch.mm has no out_dtype
        and hasattr(torch.ops.aten.mm, "dtype")
        and not is_exporting()
        and not is_transformed()
    )


def fp32_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x W^T + b in fp32.

    Args:
        x: bf16 [.., K].
        weight: bf16 [N, K].
        bias: [N] of any dtype, or None.

    Returns:
        fp32 [.., N]. The gradients of x and the weight are bf16. Their products take each fp32
        gradient of the result as the sum of two bf16 numbers, which hold 16 significant bits. If
        such a gradient is infinite, or exceeds the largest bf16 number, theirs are NaN.
    """
    product: torch.Tensor = torch.ops.nsa_core.fp32_product(
        x.reshape(-1, x.shape[-1]), weight.t()
    ).view(*x.shape[:-1], weight.shape[0])  # -1 is ambiguous if there are no tokens
    return product if bias is None else product + bias.float()

"""Split the product of ``qkv`` into heads by autograd nodes, whose gradient is written once.

rotated_heads   eager calls: splits and rotates in one node
split_columns   torch.compile on CUDA: views, whose gradients one kernel joins
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from nsa_core.layer.rope import RopeTable, rotate_back, rotate_pairs
from nsa_core.torch_ops.torch_state import is_exporting, is_transformed

DEVICES = ("cuda",)  # types of devices on which columns are split

_lib = torch.library.Library("nsa_core", "FRAGMENT")
_lib.define("join_columns(Tensor[] parts) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_lib.impl("join_columns", lambda parts: torch.cat(parts, -1), "CompositeExplicitAutograd")
torch.library.register_fake("nsa_core::join_columns", lambda parts: torch.cat(parts, -1), lib=_lib)


class RotatedHeads(torch.autograd.Function):
    """See :func:`rotated_heads`."""

    @staticmethod
    def forward(
        ctx: Any,
        product: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        heads: int,
        groups: int,
        dk: int,
    ) -> tuple[torch.Tensor, ...]:
        """Split and rotate ``product``."""
        ctx.save_for_backward(cos, sin)
        ctx.sizes, ctx.shape = (heads, groups, dk), product.shape
        joint, v = _split(product, heads, groups, dk)
        q, k_start = _new(product, heads, dk), heads + groups
        k, v_copy = _new(product, groups, dk, 2), _new(product, groups, v.shape[-1], 2)
        rotate_pairs(joint[..., :heads, :], cos, sin, q)
        rotate_pairs(
            joint[..., k_start:, :].unflatten(-2, (2, groups)),
            *(cos.unsqueeze(-2), sin.unsqueeze(-2), k.movedim(0, -3)),
        )
        v_copy.movedim(0, -3).copy_(v[..., 1:, :, :])
        return q, joint[..., heads:k_start, :], k[0], k[1], v[..., 0, :, :], v_copy[0], v_copy[1]

    @staticmethod
    def backward(
        ctx: Any, dq: torch.Tensor, *grads: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of the product."""
        (heads, groups, dk), dk_raw = ctx.sizes, grads[0]
        cos, sin = ctx.saved_tensors
        if torch.is_grad_enabled() or is_transformed():  # autograd refuses out=
            q, _, ks = rotate_back(torch.cat((dq, *grads[:3]), -2), cos, sin).split(
                (heads, groups, 2 * groups), -2
            )
            joint, v = torch.cat((q, dk_raw, ks), -2), torch.stack(grads[3:], -3)
            grad = torch.cat((joint.flatten(-2), v.flatten(-3)), -1)
            return grad, None, None, None, None, None
        grad = dq.new_empty(ctx.shape)
        joint, v = _split(grad, heads, groups, dk)
        rotate_pairs(torch.cat((dq, *grads[:3]), -2), cos, sin, joint, back=True)
        joint[..., heads : heads + groups, :].copy_(dk_raw)
        torch.stack(grads[3:], -3, out=v)
        return grad, None, None, None, None, None


def _split(
    product: torch.Tensor, heads: int, groups: int, dk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of the product: q and k [..., Hq + 3 G, Dk], and v [..., 3, G, Dv]."""
    width = (heads + 3 * groups) * dk
    return (
        product[..., :width].unflatten(-1, (heads + 3 * groups, dk)),
        product[..., width:].unflatten(-1, (3, groups, -1)),
    )


def _new(like: torch.Tensor, heads: int, width: int, *outer: int) -> torch.Tensor:
    return like.new_empty((*outer, *like.shape[:-1], heads, width))


def rotated_heads(
    product: torch.Tensor, table: RopeTable, heads: int, groups: int, dk: int
) -> tuple[torch.Tensor, ...]:
    """Split the output of the fused projection into heads, and rotate q, k_sel and k_win.

    q and the tensors of sel and win are copies, so that saving one for backward does not keep the
    product alive. The tensors of cmp are views.

    Args:
        product: output of the projection [..., R, W], W = (Hq + 3 G) Dk + 3 G Dv.
        table: the angles of the R rows.
        heads: number of query heads, Hq.
        groups: number of kv heads, G.
        dk: width of a query or key head, Dk.

    Returns:
        q [..., R, Hq, Dk]; the keys of cmp, sel and win [..., R, G, Dk]; the values of cmp, sel and
        win [..., R, G, Dv].
    """
    result: tuple[torch.Tensor, ...] = RotatedHeads.apply(  # type: ignore[no-untyped-call]
        product, *table, heads, groups, dk
    )
    return result


class _Columns(torch.autograd.Function):
    """See :func:`split_columns`."""

    @staticmethod
    def forward(x: torch.Tensor, widths: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        parts: tuple[torch.Tensor, ...] = x.split(widths, -1)
        return parts

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return torch.ops.nsa_core.join_columns.default(grads), None


def joins_columns(x: torch.Tensor) -> bool:
    """Return whether :func:`split_columns` splits ``x``: a plain CUDA tensor under torch.compile.

    Graphs that are exported keep the operators of PyTorch, and so do transforms of torch.func: the
    gradient has no rule for vmap.
    """
    return (
        torch.compiler.is_compiling()
        and x.device.type in DEVICES
        and type(x) is torch.Tensor
        and not is_exporting()
        and not torch._C._are_functorch_transforms_active()
    )


def split_columns(x: torch.Tensor, widths: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Return views of x [..., W] with these widths, whose sum is W.

    The gradient of torch.split is a concatenation. In the kernel that torch.compile writes for it,
    each element tests all parts: for seven parts of 64k rows, 1536 columns in bf16, it takes 426 us
    on an H200. The kernel of torch.cat takes 99 us.
    """
    apply: Callable[..., tuple[torch.Tensor, ...]] = _Columns.apply
    return apply(x, tuple(widths))

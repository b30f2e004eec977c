"""Splitting the product of the fused projection into heads and rotating them, as one autograd
node.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from nsa_core.layer.rope import Table, rotate_pairs, widened


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
        """Cut and rotate ``product``."""
        # The keys of cmp are multiplied too and not used: leaving them out costs more.
        ctx.save_for_backward(cos, sin)
        ctx.sizes, ctx.shape = (heads, groups, dk), product.shape
        joint, v = _cut(product, heads, groups, dk)
        cos, sin = widened(cos, sin, dk)
        plain, crossed, after = joint * cos, joint.roll(dk // 2, -1) * sin, heads + groups
        q = torch.add(plain[..., :heads, :], crossed[..., :heads, :], out=_new(product, heads, dk))
        k, v_copy = _new(product, groups, dk, 2), _new(product, groups, v.shape[-1], 2)
        pairs = (t[..., after:, :].unflatten(-2, (2, groups)) for t in (plain, crossed))
        torch.add(*pairs, out=k.movedim(0, -3))
        v_copy.movedim(0, -3).copy_(v[..., 1:, :, :])
        return q, joint[..., heads:after, :], k[0], k[1], v[..., 0, :, :], v_copy[0], v_copy[1]

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(
        ctx: Any, dq: torch.Tensor, *grads: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        """The gradient of the product."""
        (heads, groups, dk), dk_raw = ctx.sizes, grads[0]
        grad = dq.new_empty(ctx.shape)
        joint, v = _cut(grad, heads, groups, dk)
        cos, sin = ctx.saved_tensors
        rotate_pairs(torch.cat((dq, *grads[:3]), -2), cos, sin, joint, back=True)
        joint[..., heads : heads + groups, :].copy_(dk_raw)
        torch.stack(grads[3:], -3, out=v)
        return grad, None, None, None, None, None


def _cut(
    product: torch.Tensor, heads: int, groups: int, dk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the product: q and k [..., Hq + 3 G, Dk], and v [..., 3, G, Dv]."""
    width = (heads + 3 * groups) * dk
    return (
        product[..., :width].unflatten(-1, (heads + 3 * groups, dk)),
        product[..., width:].unflatten(-1, (3, groups, -1)),
    )


def _new(like: torch.Tensor, heads: int, width: int, *several: int) -> torch.Tensor:
    return like.new_empty((*several, *like.shape[:-1], heads, width))


def rotated_heads(
    product: torch.Tensor, table: Table, heads: int, groups: int, dk: int
) -> tuple[torch.Tensor, ...]:
    """q, then the keys of cmp, sel and win, then the values of cmp, sel and win.

    q and the keys of sel and win are rotated. All tensors are copies, so that keeping one for
    backward does not keep the product, except those of cmp, which are views.

    Args:
        product: [..., R, W], W = (Hq + 3 G) Dk + 3 G Dv.
        table: the angles of the R rows.
        heads: Hq.
        groups: G.
        dk: Dk.

    Shapes:
        q [..., R, Hq, Dk], keys [..., R, G, Dk], values [..., R, G, Dv].
    """
    result: tuple[torch.Tensor, ...] = RotatedHeads.apply(  # type: ignore[no-untyped-call]
        product, *table, heads, groups, dk
    )
    return result

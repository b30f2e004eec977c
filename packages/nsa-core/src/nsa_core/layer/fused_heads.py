"""The fused projection's product cut into heads and rotated, as one autograd node."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from nsa_core.layer.rope import Table, rotate_pairs, widened


class RotatedHeads(torch.autograd.Function):
    """product [..., R, W] -> q [..., R, Hq, Dk]; k of cmp as it is, of sel and win [..., R, G, Dk];
    v likewise.

    W = (Hq + 3 G) Dk + 3 G Dv. q, and k of sel and win, are turned by the table's angles. All but
    the entries of cmp, which are views, keep nothing of the product.
    """

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
        """Products of k of cmp with the angles are not used: cheaper than to leave it out."""
        ctx.save_for_backward(cos, sin)
        ctx.sizes, ctx.shape = (heads, groups, dk), product.shape
        joint, v = _cut(product, heads, groups, dk)
        cos, sin = widened(cos, sin, dk)
        plain, crossed, after = joint * cos, joint.roll(dk // 2, -1) * sin, heads + groups
        q = torch.add(plain[..., :heads, :], crossed[..., :heads, :], out=_new(product, heads, dk))
        k, v_kept = _new(product, groups, dk, 2), _new(product, groups, v.shape[-1], 2)
        pairs = (t[..., after:, :].unflatten(-2, (2, groups)) for t in (plain, crossed))
        torch.add(*pairs, out=k.movedim(0, -3))
        v_kept.movedim(0, -3).copy_(v[..., 1:, :, :])
        return q, joint[..., heads:after, :], k[0], k[1], v[..., 0, :, :], v_kept[0], v_kept[1]

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(
        ctx: Any, dq: torch.Tensor, *grads: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        """Of the product."""
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
    """[..., Hq + 3 G, Dk] of q and k, and [..., 3, G, Dv], as views."""
    turned = (heads + 3 * groups) * dk
    return (
        product[..., :turned].unflatten(-1, (heads + 3 * groups, dk)),
        product[..., turned:].unflatten(-1, (3, groups, -1)),
    )


def _new(like: torch.Tensor, heads: int, width: int, *several: int) -> torch.Tensor:
    return like.new_empty((*several, *like.shape[:-1], heads, width))


def rotated_heads(
    product: torch.Tensor, table: Table, heads: int, groups: int, dk: int
) -> tuple[torch.Tensor, ...]:
    """See :class:`RotatedHeads`: q, k of cmp, sel and win, v of cmp, sel and win."""
    made: tuple[torch.Tensor, ...] = RotatedHeads.apply(  # type: ignore[no-untyped-call]
        product, *table, heads, groups, dk
    )
    return made

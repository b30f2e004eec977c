"""phi of kinds mlp and linear, for one tensor or for keys and values together, as one autograd
node.

W flatten(block + position) + b is split in two. The rows of W [out, l*D], token outermost, are cut
into r = l/d parts W_j. The sum of W_j x_j over a block's r chunks depends on the tokens; W e + b,
with e the flattened position encoding, is the same vector for every block.

Operator by operator PyTorch takes three times the kernels for the gradient, and again as many for
the second tensor. A short sequence is bound by their launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from nsa_core.dtypes import stats_dtype
from nsa_core.torch_ops.torch_state import autocasts, no_autocast


def fits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the product of x with parameters like ``weight`` has x's dtype under the current
    autocast.
    """
    device = x.device
    return x.dtype == (torch.get_autocast_dtype(device.type) if autocasts(device) else weight.dtype)


def _stack(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return (tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(list(tensors))).to(dtype)


class JointPhi(torch.autograd.Function):
    """P tensors x [B, S, G, D] -> P tensors [B, n_c, G, out], S > l.

    ``parameters``: position [l, D], weight [hidden, l*D] and bias [hidden] of each, and for an mlp,
    after its GELU, weight [out, hidden] and bias [out]: P positions, then P weights, and so on.
    """

    @staticmethod
    def forward(
        ctx: Any, stride: int, count: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """``tensors``: ``count`` times x, then the parameters; d is ``stride``."""
        x, position, weight, bias, *down = (
            tensors[i : i + count] for i in range(0, len(tensors), count)
        )
        (batch, length, heads, width), places = x[0].shape, len(position[0]) // stride
        rows, dtype = length // stride, x[0].dtype
        blocks, hidden_width = rows - places + 1, len(weight[0])
        with no_autocast(x[0].device):
            whole = [t if rows * stride == length else t[:, : rows * stride] for t in x]
            chunks = _stack([t.unflatten(1, (rows, stride)).transpose(2, 3) for t in whole], dtype)
            tokens = chunks.reshape(count, -1, stride * width)
            cast, e = _stack(weight, dtype), _stack(position, position[0].dtype).flatten(1)
            parts = torch.bmm(tokens, cast.view(count, -1, stride * width).mT)
            parts = parts.view(count, batch, rows, heads, hidden_width, places)
            constant = [torch.addmv(*each) for each in zip(bias, weight, e)]
            total = _stack(constant, stats_dtype(dtype)).view(count, 1, 1, 1, hidden_width)
            for place in range(places - 1):
                total = total + parts[:, :, place : place + blocks, ..., place]
            hidden = x[0].new_empty((count, batch, blocks, heads, hidden_width))
            torch.add(total, parts[:, :, places - 1 :, ..., places - 1], out=hidden)
            saved, out = [tokens, cast, e], hidden
            if down:
                inner, outer = F.gelu(hidden).view(count, -1, hidden_width), _stack(down[0], dtype)
                out = torch.baddbmm(_stack(down[1], dtype).unsqueeze(1), inner, outer.mT)
                out = out.view(count, batch, blocks, heads, len(down[0][0]))
                saved += [hidden, inner, outer]
        ctx.save_for_backward(*saved, *weight)
        ctx.stride, ctx.count, ctx.shape, ctx.down = stride, count, x[0].shape, bool(down)
        return out.unbind(0)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients of every tensor, in the order of forward; those of parameters in their
        dtype.
        """
        count, after = ctx.count, []
        tensors = ctx.saved_tensors  # read once: a checkpoint refuses to unpack twice
        saved, weight = tensors[:-count], tensors[-count:]
        precise, master = stats_dtype(grads[0].dtype), weight[0].dtype
        with no_autocast(grads[0].device):
            grad = _stack(grads, grads[0].dtype)
            if ctx.down:
                hidden, inner, outer = saved[3:]
                rows = grad.reshape(count, -1, grad.shape[-1])
                after += [*torch.bmm(rows.mT, inner).to(master).unbind(0)]
                after += [*rows.sum(1, dtype=precise).to(master).unbind(0)]
                grad = torch.ops.aten.gelu_backward(torch.bmm(rows, outer).view_as(hidden), hidden)
            dx, dw = _of_products(grad, saved[0], saved[1], ctx.shape, ctx.stride)
            db = grad.sum((1, 2, 3), dtype=precise).to(master)
            dw = dw.to(master).addcmul_(db.unsqueeze(2), saved[2].unsqueeze(1))
            de = [torch.mv(w.t(), b).view(-1, ctx.shape[-1]) for w, b in zip(weight, db)]
        return None, None, *dx.unbind(0), *de, *dw.unbind(0), *db.unbind(0), *after


def _of_products(
    grad: torch.Tensor,  # [P, B, n_c, G, hidden]
    tokens: torch.Tensor,  # [P, B*m*G, d*D]
    cast: torch.Tensor,  # [P, hidden, l*D]
    shape: torch.Size,  # of x, [B, S, G, D]
    stride: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x [P, B, S, G, D] and of W [P, hidden, l*D], the latter without the term from
    W e.
    """
    (batch, length, heads, width), (count, _, blocks, _, hidden) = shape, grad.shape
    rows, places = length // stride, cast.shape[-1] // (stride * width)
    parts = grad.new_zeros((count, batch, rows, heads, hidden, places))
    for place in range(places):
        parts[:, :, place : place + blocks, ..., place].copy_(grad)
    flat = parts.view(count, -1, hidden * places)
    chunks = torch.bmm(flat, cast.view(count, hidden * places, -1)).view(
        count, batch, rows, heads, stride, width
    )
    dx = grad.new_empty((count, *shape))
    if rows * stride < length:
        dx[:, :, rows * stride :].zero_()
    dx[:, :, : rows * stride].unflatten(2, (rows, stride)).copy_(chunks.transpose(3, 4))
    return dx, torch.bmm(flat.mT, tokens).view_as(cast)

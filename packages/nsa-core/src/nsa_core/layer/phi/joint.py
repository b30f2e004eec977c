"""phi of kinds mlp and linear for one tensor, or for keys and values together.

W flatten(block + position) + b has two terms. The rows of W [out, l*D], token outermost, are cut
into r = l/d parts W_j. The sum of W_j x_j over the r chunks of a block depends on the tokens. W e
+ b, where e is the flattened position encoding, is the same vector for every block.

Short sequences are launch-bound. So both forms here take keys and values together, which halves the
number of products. :class:`JointPhi` is one autograd node, for eager calls: written operator by
operator, the gradient takes three times as many kernels. :func:`joint_hidden` is written operator
by operator, for torch.compile, torch.export, transforms and packed documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from nsa_core.dtypes import stats_dtype
from nsa_core.layer.phi.chunks import Chunks, PackedBlocks
from nsa_core.layout import BlockGeometry
from nsa_core.torch_ops.autograd import final_gradients
from nsa_core.torch_ops.torch_state import no_autocast


def stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the tensors along a new first axis; a view of a single one."""
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(list(tensors))


def _stack(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return stacked(tensors).to(dtype)


def joint_hidden(
    xs: Sequence[torch.Tensor],
    position: Sequence[torch.Tensor],
    weight: Sequence[torch.Tensor],
    bias: Sequence[torch.Tensor],
    geometry: BlockGeometry,
    packed: PackedBlocks | None,
) -> torch.Tensor:
    """Return W flatten(block + position) + b of the blocks of P tensors, operator by operator.

    Args:
        xs: P tensors [B, S, G, D], or packed [T, G, D].
        position: P tensors [l, D].
        weight: P tensors [hidden, l*D].
        bias: P tensors [hidden].
        geometry: the block sizes.
        packed: the blocks of packed documents.

    Returns:
        [P, B, n_c, G, hidden], or packed [P, T // d, G, hidden], in the dtype of the product: that
        of the tensors, or of autocast.
    """
    chunks, count = [Chunks(x, geometry, packed) for x in xs], len(xs)
    e, w, b = (stacked(tensors) for tensors in (position, weight, bias))
    precise = stats_dtype(w.dtype)
    constant = (w.to(precise) * e.flatten(1).unsqueeze(1).to(precise)).sum(-1) + b
    tokens = stacked([each.tokens for each in chunks]).flatten(-2)
    per_block, hidden = chunks[0].per_block, w.shape[1]
    rows = w.to(tokens.dtype).view(count, hidden * per_block, -1)
    parts = torch.bmm(tokens.flatten(1, -2), rows.mT)
    parts = parts.view(*tokens.shape[:-1], hidden, per_block)
    total = chunks[0].total(parts, 1)
    return (total + constant.view(count, *(1,) * (total.dim() - 2), hidden)).to(parts.dtype)


class JointPhi(torch.autograd.Function):
    """Compress P tensors x [B, S, G, D] to P tensors [B, n_c, G, out], with S > l.

    The parameters of each tensor are position [l, D], weight [hidden, l*D] and bias [hidden]. A phi
    of kind mlp has, after its GELU, also weight [out, hidden] and bias [out]. They are passed as P
    positions, then P weights, and so on.
    """

    @staticmethod
    def forward(
        ctx: Any, stride: int, count: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Compress ``count`` tensors.

        Args:
            ctx: the autograd context.
            stride: d.
            count: number of tensors, P.
            tensors: P times x, then the parameters.
        """
        x, position, weight, bias, *down = (
            tensors[i : i + count] for i in range(0, len(tensors), count)
        )
        (batch, length, heads, width), per_block = x[0].shape, len(position[0]) // stride
        rows, dtype = length // stride, x[0].dtype
        blocks, hidden_width = rows - per_block + 1, len(weight[0])
        with no_autocast(x[0].device):
            full = [t if rows * stride == length else t[:, : rows * stride] for t in x]
            chunks = _stack([t.unflatten(1, (rows, stride)).transpose(2, 3) for t in full], dtype)
            tokens = chunks.reshape(count, -1, stride * width)
            cast, e = _stack(weight, dtype), _stack(position, position[0].dtype).flatten(1)
            parts = torch.bmm(tokens, cast.view(count, -1, stride * width).mT)
            parts = parts.view(count, batch, rows, heads, hidden_width, per_block)
            constant = [torch.addmv(*each) for each in zip(bias, weight, e)]
            total = _stack(constant, stats_dtype(dtype)).view(count, 1, 1, 1, hidden_width)
            for j in range(per_block - 1):
                total = total + parts[:, :, j : j + blocks, ..., j]
            hidden = x[0].new_empty((count, batch, blocks, heads, hidden_width))
            torch.add(total, parts[:, :, per_block - 1 :, ..., per_block - 1], out=hidden)
            saved, out = [tokens, cast, e], hidden
            if down:
                inner, outer = F.gelu(hidden).view(count, -1, hidden_width), _stack(down[0], dtype)
                out = torch.baddbmm(_stack(down[1], dtype).unsqueeze(1), inner, outer.mT)
                out = out.view(count, batch, blocks, heads, len(down[0][0]))
                saved += [hidden, inner, outer]
        outs = out.unbind(0)
        # The last result has the graph of all inputs, for a second derivative.
        ctx.save_for_backward(*saved, *weight, outs[-1])
        ctx.stride, ctx.count, ctx.shape, ctx.down = stride, count, x[0].shape, bool(down)
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of all tensors in the order of forward, in their dtypes."""
        *saved, out = ctx.saved_tensors  # read once: a checkpoint refuses to unpack twice
        if not torch.is_grad_enabled():
            return JointPhi._gradients(ctx, saved, grads)
        with torch.no_grad():
            results = JointPhi._gradients(ctx, saved, grads)
        return final_gradients("phi", results, (*grads, out))

    @staticmethod
    def _gradients(
        ctx: Any, tensors: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the result of backward, without a graph."""
        count, d_down = ctx.count, []
        saved, weight = tensors[:-count], tensors[-count:]
        precise, master = stats_dtype(grads[0].dtype), weight[0].dtype
        with no_autocast(grads[0].device):
            grad = _stack(grads, grads[0].dtype)
            if ctx.down:
                hidden, inner, outer = saved[3:]
                rows = grad.reshape(count, -1, grad.shape[-1])
                d_down += [*torch.bmm(rows.mT, inner).to(master).unbind(0)]
                d_down += [*rows.sum(1, dtype=precise).to(master).unbind(0)]
                grad = torch.ops.aten.gelu_backward(torch.bmm(rows, outer).view_as(hidden), hidden)
            dx, dw = _product_gradients(grad, saved[0], saved[1], ctx.shape, ctx.stride)
            db = grad.sum((1, 2, 3), dtype=precise).to(master)
            dw = dw.to(master).addcmul_(db.unsqueeze(2), saved[2].unsqueeze(1))
            de = [torch.mv(w.t(), b).view(-1, ctx.shape[-1]) for w, b in zip(weight, db)]
        return None, None, *dx.unbind(0), *de, *dw.unbind(0), *db.unbind(0), *d_down


def _product_gradients(
    grad: torch.Tensor,  # [P, B, n_c, G, hidden]
    tokens: torch.Tensor,  # [P, B*m*G, d*D]
    cast: torch.Tensor,  # [P, hidden, l*D]
    shape: torch.Size,  # of x, [B, S, G, D]
    stride: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of x [P, B, S, G, D] and of W [P, hidden, l*D].

    The latter lacks the term of W e.
    """
    (batch, length, heads, width), (count, _, blocks, _, hidden) = shape, grad.shape
    rows, per_block = length // stride, cast.shape[-1] // (stride * width)
    parts = grad.new_zeros((count, batch, rows, heads, hidden, per_block))
    for j in range(per_block):
        parts[:, :, j : j + blocks, ..., j].copy_(grad)
    flat = parts.view(count, -1, hidden * per_block)
    chunks = torch.bmm(flat, cast.view(count, hidden * per_block, -1)).view(
        count, batch, rows, heads, stride, width
    )
    dx = grad.new_empty((count, *shape))
    if rows * stride < length:
        dx[:, :, rows * stride :].zero_()
    dx[:, :, : rows * stride].unflatten(2, (rows, stride)).copy_(chunks.transpose(3, 4))
    return dx, torch.bmm(flat.mT, tokens).view_as(cast)

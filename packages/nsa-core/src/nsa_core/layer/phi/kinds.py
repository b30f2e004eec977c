"""The kinds of phi: k_cmp[i] = phi(k[i*d : i*d + l]) (Eq. 7), and the same for values.

Each token belongs to l/d blocks, so a copy of every block would take l/d times the memory of the
sequence. Instead the sequence is cut into chunks of d tokens: block i consists of the r = l/d
chunks i .. i+r-1. Every phi maps single chunks, with one result per index j of the chunk in a
block, and then combines r results per block. The tokens are copied once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nsa_core.dtypes import stats_dtype
from nsa_core.errors import InvalidInput
from nsa_core.layer.phi.chunks import Chunks, PackedBlocks
from nsa_core.layer.phi.joint import JointPhi, joint_hidden, stacked
from nsa_core.layer.plain_linear import PLAIN_TENSORS, are_plain, are_plain_linear
from nsa_core.layer.unit_linear import Affine
from nsa_core.layout import BlockGeometry
from nsa_core.limits import WIDTH
from nsa_core.torch_ops.torch_state import dtype_of_products, is_eager

_GELU_RMS = 0.43**0.5  # root mean square of GELU over a standard normal


def _dense_mean(x: torch.Tensor, size: int, stride: int) -> torch.Tensor:
    """Mean of each block of x [B, S, G, D], rounded once."""
    rows, blocks = x.shape[1] // stride, (x.shape[1] - size) // stride + 1
    if blocks == 1:
        return x[:, :size].mean(1, keepdim=True)
    if x.is_cuda:  # one launch, which sums in fp32
        return x.unfold(1, size, stride).mean(-1)
    full = x if rows * stride == x.shape[1] else x[:, : rows * stride]
    chunks = full.unflatten(1, (rows, stride)).sum(2, dtype=stats_dtype(x.dtype))
    total = chunks if blocks == rows else chunks[:, :blocks]
    for j in range(1, size // stride):
        total = total + chunks[:, j : j + blocks]
    mean: torch.Tensor = total.div_(size).to(x.dtype)
    return mean


class _Mean(torch.autograd.Function):
    """mean_compress of a dense tensor as one autograd node.

    The gradient takes fewer operators than the gradients of the single operators.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, size: int, stride: int) -> torch.Tensor:
        ctx.size, ctx.stride, ctx.shape = size, stride, x.shape
        return _dense_mean(x, size, stride)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        batch, length, *head_shape = ctx.shape
        rows, per_block = length // ctx.stride, ctx.size // ctx.stride
        # Padded, so that every chunk belongs to ``per_block`` blocks.
        padded = F.pad(grad, (0, 0, 0, 0, per_block - 1, rows - grad.shape[1]))
        chunks = (
            padded.unfold(1, per_block, 1).sum(-1, dtype=stats_dtype(grad.dtype)).div_(ctx.size)
        )
        tokens = (
            grad.new_empty((batch, rows, ctx.stride, *head_shape))
            .copy_(chunks.unsqueeze(2))
            .flatten(1, 2)
        )
        tail = length - rows * ctx.stride
        return (F.pad(tokens, (0, 0, 0, 0, 0, tail)) if tail else tokens), None, None


def mean_compress(
    x: torch.Tensor,  # [B, S, G, D] or packed [T, G, D]
    geometry: BlockGeometry,
    packed: PackedBlocks | None = None,
) -> torch.Tensor:
    """Return the mean over the tokens of each block, summed in fp32 (fp64 for fp64).

    Args:
        x: [B, S, G, D], or packed [T, G, D].
        geometry: the block sizes.
        packed: the blocks of packed documents.

    Returns:
        [B, n_c, G, D], or packed [T // d, G, D], in x's dtype.
    """
    size, stride = geometry.compress_block_size, geometry.compress_stride
    if packed is None and is_eager() and x.shape[1] >= size:  # transforms need single operators
        needs_grad = torch.is_grad_enabled() and x.requires_grad
        return _Mean.apply(x, size, stride) if needs_grad else _dense_mean(x, size, stride)  # type: ignore[no-untyped-call]
    chunks = Chunks(x, geometry, packed)
    sums = (
        chunks.tokens.sum(-2, dtype=stats_dtype(x.dtype))
        .unsqueeze(-1)
        .expand(*(-1,) * x.dim(), chunks.per_block)
    )
    mean = (chunks.total(sums) / size).to(x.dtype)
    return mean


class Phi(nn.Module):
    """The base class of all kinds of phi.

    ``forward(x, packed=None)`` compresses x [B, S, G, D] to [B, n_c, G, D], or packed [T, G, D] to
    [T // d, G, D], in x's dtype. The heads G share the parameters.
    """

    def __init__(self, geometry: BlockGeometry, width: int) -> None:
        super().__init__()
        self.geometry, self.width = geometry, width

    @torch.no_grad()
    def start_as_mean(self) -> None:
        """Set the parameters so that phi is the mean of the tokens of each block (Eq. 7).

        The keys of a trained dense model have a meaning, which their mean keeps and a random phi
        does not. So models that are converted from dense attention start here. With M [D, l*D],
        the matrix of the mean of a flattened block:

        - mlp: ``up`` = [M; -M] and ``down`` = [I, -I], because GELU(z) - GELU(-z) = z;
        - linear: ``proj`` = M;
        - conv: all weights are 1 / l;
        - attn_pool: ``query`` = 0, so that all tokens of a block weigh the same.

        Position encodings and biases are 0. All parameters can still learn: both halves of ``up``
        get different gradients, because GELU has another slope at z than at -z.
        """
        for parameter in self.parameters():
            parameter.zero_()
        self._set_mean()

    def _set_mean(self) -> None:
        """Set those parameters, now 0, that are not 0 in the mean."""

    def _identity(self) -> torch.Tensor:
        """Return I [D, D] in fp64, on the device of the parameters."""
        device = next(self.parameters()).device
        return torch.eye(self.width, dtype=torch.float64, device=device)

    def _mean_matrix(self) -> torch.Tensor:
        """Return the mean of a flattened block as a matrix [D, l*D] in fp64."""
        size = self.geometry.compress_block_size
        return self._identity().repeat(1, size) / size

    def extra_repr(self) -> str:
        """Return the sizes, for repr."""
        return (
            f"l={self.geometry.compress_block_size}, d={self.geometry.compress_stride},"
            f" D={self.width}"
        )


class MeanPhi(Phi):
    """Mean over the l tokens, without parameters."""

    def forward(self, x: torch.Tensor, packed: PackedBlocks | None = None) -> torch.Tensor:
        """See :class:`Phi`."""
        return mean_compress(x, self.geometry, packed)


def _block_linear(
    x: torch.Tensor,
    position: torch.Tensor,
    layer: Affine,
    geometry: BlockGeometry,
    packed: PackedBlocks | None,
) -> torch.Tensor:
    """Apply ``layer`` to flatten(block + position), operator by operator: [..., n_c, G, out].

    A single block takes one product. A layer that is not plain is called on copied
    blocks.
    """
    if not are_plain_linear(layer):
        chunks = Chunks(x, geometry, packed)
        blocks = torch.cat([chunks.at(j, chunks.tokens) for j in range(chunks.per_block)], -2)
        result: torch.Tensor = layer((blocks + position).flatten(-2).to(position.dtype))
        return result
    if packed is None and is_eager() and x.shape[-3] == geometry.compress_block_size:
        constant = F.linear(position.flatten(), layer.weight, layer.bias).to(x.dtype)
        tokens, weight = x.transpose(-3, -2).flatten(-2), layer.weight.to(x.dtype)
        single: torch.Tensor = F.linear(tokens, weight, constant)
        return single.unsqueeze(-3)
    return joint_hidden([x], [position], [layer.weight], [layer.bias], geometry, packed)[0]


PhiWeights = tuple[torch.Tensor, ...]


def _weights(phi: LinearPhi | MLPPhi, layers: Sequence[Affine]) -> PhiWeights:
    """Return the parameters in the order of :class:`nsa_core.layer.phi.joint.JointPhi`.

    ``layers`` are the layers of ``phi``, which are plain. Their parameters are read from the
    dictionaries: the attributes of a module take ten times as long.
    """
    parameters = [layer._parameters[name] for layer in layers for name in ("weight", "bias")]
    return (phi.position, *parameters)  # type: ignore[arg-type]  # none of a plain layer is None


def _fits(x: torch.Tensor) -> bool:
    """Return whether products of x have its dtype under the current autocast."""
    return x.dtype == dtype_of_products(x)


def _joint(
    phis: Sequence[LinearPhi | MLPPhi], xs: Sequence[torch.Tensor], packed: PackedBlocks | None
) -> Sequence[torch.Tensor] | None:
    """Apply plain phis of one kind to tensors of one shape, together.

    Returns None if that is not possible, or if an eager call has no more than one block. Phis of
    different dtypes, such as one that trains in fp32, are applied one by one.
    """
    geometry, eager = phis[0].geometry, packed is None and is_eager()
    if eager and xs[0].shape[-3] <= geometry.compress_block_size:
        return None
    layers = [phi.linears() for phi in phis]
    if not are_plain_linear(*itertools.chain(*layers)):
        return None
    weights = [_weights(*each) for each in zip(phis, layers)]
    if len({weight.dtype for _, weight, *_ in weights}) > 1:
        return None
    kinds = list(zip(*weights))  # positions, weights, biases, and those of the second layer
    if eager and all(_fits(x) and x.device == w.device for x, (_, w, *_) in zip(xs, weights)):
        compressed: Sequence[torch.Tensor] = JointPhi.apply(  # type: ignore[no-untyped-call]
            geometry.compress_stride, len(xs), *xs, *(each for kind in kinds for each in kind)
        )
        return compressed
    position, weight, bias, *down = kinds
    out = joint_hidden(xs, position, weight, bias, geometry, packed)
    if down:
        inner, (outer, outer_bias) = F.gelu(out), map(stacked, down)
        bias_row, outer = outer_bias.unsqueeze(1).to(inner.dtype), outer.to(inner.dtype)
        rows = torch.baddbmm(bias_row, inner.flatten(1, -2), outer.mT)
        out = rows.view(*inner.shape[:-1], outer.shape[1])
    return out.to(xs[0].dtype).unbind(0)


class LinearPhi(Phi):
    """Linear map of the flattened block: W flatten(block + position) + b."""

    def __init__(self, geometry: BlockGeometry, width: int) -> None:
        super().__init__(geometry, width)
        size = geometry.compress_block_size
        self.position = nn.Parameter(torch.empty(size, width))
        self.proj = Affine(size * width, width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the position encoding; ``proj`` initialises itself."""
        nn.init.normal_(self.position, std=0.02)

    def _set_mean(self) -> None:
        self.proj.weight.copy_(self._mean_matrix())

    def forward(self, x: torch.Tensor, packed: PackedBlocks | None = None) -> torch.Tensor:
        """See :class:`Phi`."""
        if (joint := _joint([self], [x], packed)) is not None:
            return joint[0]
        return _block_linear(x, self.position, self.proj, self.geometry, packed).to(x.dtype)

    def linears(self) -> tuple[Affine, ...]:
        """Return the linear layers, which must all be plain for the joint form."""
        return (self.proj,)


class MLPPhi(Phi):
    """MLP of the flattened block: W_down GELU(W_up flatten(block + position) + b_up) + b_down.

    It has 2D hidden units.
    """

    def __init__(self, geometry: BlockGeometry, width: int) -> None:
        super().__init__(geometry, width)
        size = geometry.compress_block_size
        self.position = nn.Parameter(torch.empty(size, width))
        self.up = Affine(size * width, 2 * width)
        self.down = Affine(2 * width, width, gain=_GELU_RMS**-1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the position encoding; ``up`` and ``down`` initialise themselves."""
        nn.init.normal_(self.position, std=0.02)

    def _set_mean(self) -> None:
        mean, identity = self._mean_matrix(), self._identity()
        self.up.weight.copy_(torch.cat([mean, -mean]))
        self.down.weight.copy_(torch.cat([identity, -identity], 1))

    def forward(self, x: torch.Tensor, packed: PackedBlocks | None = None) -> torch.Tensor:
        """See :class:`Phi`."""
        if (joint := _joint([self], [x], packed)) is not None:
            return joint[0]
        hidden = F.gelu(_block_linear(x, self.position, self.up, self.geometry, packed))
        out: torch.Tensor = self.down(hidden.to(self.position.dtype))
        return out.to(x.dtype)

    def linears(self) -> tuple[Affine, ...]:
        """Return the linear layers, which must all be plain for the joint form."""
        return self.up, self.down


class ConvPhi(Phi):
    """Depthwise convolution of length l and stride d over the tokens, initially near their mean."""

    def __init__(self, geometry: BlockGeometry, width: int) -> None:
        super().__init__(geometry, width)
        self.weight = nn.Parameter(torch.empty(width, 1, geometry.compress_block_size))
        self.bias = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise to the mean of the tokens, plus noise of about a tenth of it."""
        size = self.geometry.compress_block_size
        nn.init.normal_(self.weight, mean=1 / size, std=0.1 / size)
        nn.init.zeros_(self.bias)

    def _set_mean(self) -> None:
        self.weight.fill_(1 / self.geometry.compress_block_size)

    def forward(self, x: torch.Tensor, packed: PackedBlocks | None = None) -> torch.Tensor:
        """See :class:`Phi`."""
        chunks = Chunks(x, self.geometry, packed)
        weight = self.weight.to(x.dtype).view(self.width, chunks.per_block, -1)
        total = chunks.total(torch.einsum("...gtc,cjt->...gcj", chunks.tokens, weight))
        return (total + self.bias).to(x.dtype)


class AttnPoolPhi(Phi):
    """Attention pooling: softmax over the l tokens of a learned query's scores, weighted sum.

    With x = token + position, the result is sum over tokens of softmax(query . x / sqrt(D)) x. It
    is computed as a softmax inside each chunk, and a softmax over the r chunks of a block weighted
    by the log-sum-exp of the chunks.
    """

    def __init__(self, geometry: BlockGeometry, width: int) -> None:
        super().__init__(geometry, width)
        self.position = nn.Parameter(torch.empty(geometry.compress_block_size, width))
        self.query = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise to unit-variance logits for unit-variance tokens."""
        nn.init.normal_(self.position, std=0.02)
        nn.init.normal_(self.query)

    def forward(self, x: torch.Tensor, packed: PackedBlocks | None = None) -> torch.Tensor:
        """See :class:`Phi`."""
        chunks, precise = Chunks(x, self.geometry, packed), stats_dtype(x.dtype)
        position = self.position.unflatten(0, (chunks.per_block, -1))  # [r, d, D]
        tokens = chunks.tokens.contiguous()  # backward keeps this copy, not the base of x
        query = self.query  # read once: a parametrisation computes it
        token_logits = (tokens @ query.to(x.dtype)).unsqueeze(-2)  # [..., G, 1, d]
        logits = (
            token_logits.to(precise) + (position @ query).to(precise)
        ) * self.width**-0.5  # [..., G, r, d]
        weights = logits.softmax(-1).to(x.dtype)
        pooled = weights @ tokens + torch.einsum("...jt,jtc->...jc", weights, position.to(x.dtype))
        members = range(chunks.per_block)
        shares = torch.stack(
            [chunks.at(j, logits.logsumexp(-1)[..., j]) for j in members], -1
        ).softmax(-1)
        outs = [chunks.at(j, pooled[..., j, :]) * shares[..., j, None] for j in members]
        return torch.stack(outs).sum(0).to(x.dtype)


_KINDS: dict[str, type[Phi]] = {
    "mlp": MLPPhi,
    "linear": LinearPhi,
    "conv": ConvPhi,
    "mean": MeanPhi,
    "attn_pool": AttnPoolPhi,
}


def kind_of(phi: nn.Module) -> str | None:
    """Return the kind of a phi that :func:`make_phi` has made; None of another module."""
    return next((kind for kind, cls in _KINDS.items() if type(phi) is cls), None)


def make_phi(kind: str, geometry: BlockGeometry, width: int) -> Phi:
    """Create a phi for heads of ``width``; ``kind`` is one of config.COMPRESS_KINDS.

    Raises:
        InvalidInput: the parameters for the tokens of a block are too many.
    """
    size = geometry.compress_block_size
    if kind != "mean" and size * width > WIDTH:
        raise InvalidInput(
            f"compress_block_size * head width must be <= {WIDTH} for compress={kind!r}, whose"
            f" parameters grow with it, got {size} * {width}: use smaller blocks, or"
            " compress='mean'"
        )
    return _KINDS[kind](geometry, width)


def _kind(phi: nn.Module) -> type[LinearPhi | MLPPhi] | None:
    """Return the class of which ``phi`` has the forward: linear or mlp, else None."""
    forward = type(phi).forward
    return next((kind for kind in (LinearPhi, MLPPhi) if kind.forward is forward), None)


def compress_pair(
    phi_k: Phi, phi_v: Phi, k: torch.Tensor, v: torch.Tensor, packed: PackedBlocks | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return phi_k(k) and phi_v(v), in one pass if both are plain and of one kind and width."""
    can_join = k.shape == v.shape and k.dtype == v.dtype
    if can_join and (kind := _kind(phi_k)) is not None and are_plain(kind, phi_k, phi_v):
        joint = _joint((phi_k, phi_v), (k, v), packed)  # type: ignore[arg-type]  # of class kind
        if joint is not None:
            return joint[0], joint[1]
    return phi_k(k, packed), phi_v(v, packed)


def weights_of_pair(
    phi_k: nn.Module, phi_v: nn.Module, k: torch.Tensor, v: torch.Tensor
) -> tuple[PhiWeights, PhiWeights] | None:
    """Return the parameters of both phis, in the order of weights(), for a fused decode form.

    Those of the mean are empty. Returns None unless both phis are plain and of one kind, mean, mlp
    or linear, and their products with k and v have the dtype and the device of k and v.
    """
    if are_plain(MeanPhi, phi_k, phi_v):
        return (), ()
    kind = _kind(phi_k)
    if kind is None or not are_plain(kind, phi_k, phi_v):
        return None
    layers_k, layers_v = phi_k.linears(), phi_v.linears()  # type: ignore[operator]
    if not are_plain_linear(*layers_k, *layers_v):
        return None
    weights = _weights(phi_k, layers_k), _weights(phi_v, layers_v)  # type: ignore[arg-type]
    for x, tensors in ((k, weights[0]), (v, weights[1])):
        device = x.device
        if type(tensors[0]) not in PLAIN_TENSORS or not _fits(x):
            return None
        for tensor in tensors:
            if tensor.device != device:
                return None
    return weights

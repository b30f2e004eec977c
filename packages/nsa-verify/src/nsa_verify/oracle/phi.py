"""Oracle of phi (Eq. 7) and of the rotary embedding, differentiable by autograd."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import torch

from nsa_core.layout import BlockGeometry
from nsa_verify.oracle.rows import compressed_bounds, compressed_count, documents, token_bounds


def rope(
    x: torch.Tensor, positions: torch.Tensor, frequencies: float | tuple[float, ...]
) -> torch.Tensor:
    """Apply the half-split rotary embedding.

    The pair (x[m], x[m + D/2]) is rotated by the angle positions[s] * frequency[m].

    Args:
        x: [.., S, H, D].
        positions: Token positions [S].
        frequencies: The D/2 frequencies, or the base b of the frequencies b^(-2m/D).
    """
    half = x.shape[-1] // 2
    if not isinstance(frequencies, tuple):
        frequencies = tuple(frequencies ** (-m / half) for m in range(half))
    frequency = torch.tensor(frequencies, dtype=torch.float64)
    angle = positions.to("cpu", torch.float64)[:, None, None] * frequency  # [S, 1, D/2]
    a, b = x.to("cpu", torch.float64).split(half, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """Compute the exact GELU, x Phi(x)."""
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def _phi(kind: str, params: Mapping[str, torch.Tensor], block: torch.Tensor) -> torch.Tensor:
    """Compress one block [l, G, D] to one token [G, D]."""
    if kind == "mean":
        return block.sum(0) / len(block)
    if kind == "conv":
        return torch.einsum("lgd,dl->gd", block, params["weight"][:, 0]) + params["bias"]
    encoded = block + params["position"][:, None]
    if kind == "attn_pool":
        logits = torch.einsum("d,lgd->lg", params["query"], encoded) / math.sqrt(block.shape[-1])
        weights = (logits - logits.amax(0)).exp()
        return torch.einsum("lg,lgd->gd", weights / weights.sum(0), encoded)
    # [G, l*D], with the token as the outer index
    flat = torch.stack([encoded[:, g].reshape(-1) for g in range(encoded.shape[1])])
    if kind == "linear":
        return torch.einsum("gi,oi->go", flat, params["proj.weight"]) + params["proj.bias"]
    if kind == "mlp":
        hidden = gelu(torch.einsum("gi,oi->go", flat, params["up.weight"]) + params["up.bias"])
        return torch.einsum("gi,oi->go", hidden, params["down.weight"]) + params["down.bias"]
    raise ValueError(f"compress must be mlp, linear, conv, mean or attn_pool, got {kind!r}")


def compress(
    kind: str,
    params: Mapping[str, torch.Tensor],
    x: torch.Tensor,  # [B, S, G, D], packed [T, G, D]
    geometry: BlockGeometry,
    *,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compress keys or values: token i of a document is phi(x[i*d : i*d + l]) (Eq. 7).

    Args:
        kind: mlp, linear, conv, mean or attn_pool.
        params: Parameters by their names in ``phi_k`` or ``phi_v`` (position, up.weight, ...).
        x: Keys or values [B, S, G, D], packed [T, G, D].
        geometry: Block sizes.
        cu_seqlens: Document bounds, int32 [documents + 1]; None if dense.

    Returns:
        float64 [B, n_c, G, D], packed [T // d, G, D] with zeros after the rows of the documents,
        before rotary embedding. Differentiable in ``x`` and ``params``.

    Raises:
        ValueError: ``kind`` is unknown.
    """
    size, stride, bounds = (
        geometry.compress_block_size,
        geometry.compress_stride,
        token_bounds(cu_seqlens),
    )
    x = x.to("cpu", torch.float64)
    params = {name: value.to("cpu", torch.float64) for name, value in params.items()}
    spans = documents(x, bounds)
    compressed = []
    for span in spans:
        starts = range(0, compressed_count(len(span), geometry) * stride, stride)
        tokens = [_phi(kind, params, span[a : a + size]) for a in starts]
        compressed.append(torch.stack(tokens) if tokens else span[:0])
    if bounds is None:
        count = compressed_count(x.shape[1], geometry)
        return torch.stack(compressed) if compressed else x.new_zeros((0, count, *x.shape[2:]))
    tail = x.shape[0] // stride - sum(len(part) for part in compressed)
    return torch.cat([*compressed, x.new_zeros((tail, *x.shape[1:]))])


def token_positions(total: int, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """Return the position of each token in its document, int64 [total]."""
    bounds = token_bounds(cu_seqlens) or [0, total]
    return torch.tensor(
        [t for a, b in itertools.pairwise(bounds) for t in range(b - a)], dtype=torch.long
    )


def compressed_positions(
    total: int, geometry: BlockGeometry, cu_seqlens: torch.Tensor | None
) -> torch.Tensor:
    """Return the position i*d of each compressed token in its document.

    The result is int64 [n_c], packed [T // d] with 0 after the rows of the documents.
    """
    bounds = token_bounds(cu_seqlens)
    if bounds is None:
        return torch.arange(compressed_count(total, geometry)) * geometry.compress_stride
    starts = compressed_bounds(bounds, geometry) or [0]
    positions = [
        i * geometry.compress_stride for a, b in itertools.pairwise(starts) for i in range(b - a)
    ]
    return torch.tensor(
        positions + [0] * (total // geometry.compress_stride - len(positions)), dtype=torch.long
    )

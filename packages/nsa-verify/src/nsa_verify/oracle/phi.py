"""The compression phi of every kind, and rotary embeddings; torch operations, so autograd
differentiates them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import torch

from nsa_core.layout import BlockGeometry
from nsa_verify.oracle.rows import compressed_bounds, compressed_count, documents, token_bounds


def rope(x: torch.Tensor, positions: torch.Tensor, base: float) -> torch.Tensor:
    """Rotate the pairs (x[m], x[m + D/2]) of [.., S, H, D] by positions[s] * base^(-2m/D);
    positions [S].
    """
    half = x.shape[-1] // 2
    frequency = torch.tensor([base ** (-m / half) for m in range(half)], dtype=torch.float64)
    angle = positions.to("cpu", torch.float64)[:, None, None] * frequency  # [S, 1, D/2]
    a, b = x.to("cpu", torch.float64).split(half, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """x Phi(x), exact."""
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def _phi(kind: str, params: Mapping[str, torch.Tensor], block: torch.Tensor) -> torch.Tensor:
    """One compression block [l, G, D] as one token [G, D]."""
    if kind == "mean":
        return block.sum(0) / len(block)
    if kind == "conv":
        return torch.einsum("lgd,dl->gd", block, params["weight"][:, 0]) + params["bias"]
    placed = block + params["position"][:, None]
    if kind == "attn_pool":
        logits = torch.einsum("d,lgd->lg", params["query"], placed) / math.sqrt(block.shape[-1])
        weights = (logits - logits.amax(0)).exp()
        return torch.einsum("lg,lgd->gd", weights / weights.sum(0), placed)
    # [G, l*D], token outermost
    flat = torch.stack([placed[:, g].reshape(-1) for g in range(placed.shape[1])])
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
    """Compressed token i of a document is phi(x[i*d : i*d + l]), before any rotary.

    Returns:
        float64 [B, n_c, G, D], packed [T // d, G, D] with zeros past the documents' rows.
        Differentiable in ``x`` and
        ``params`` (the names below a module's ``phi_k.``: position, up.weight, ...).
    """
    size, stride, bounds = (
        geometry.compress_block_size,
        geometry.compress_stride,
        token_bounds(cu_seqlens),
    )
    x = x.to("cpu", torch.float64)
    params = {name: value.to("cpu", torch.float64) for name, value in params.items()}
    spans = documents(x, bounds)
    pieces = []
    for span in spans:
        starts = range(0, compressed_count(len(span), geometry) * stride, stride)
        tokens = [_phi(kind, params, span[a : a + size]) for a in starts]
        pieces.append(torch.stack(tokens) if tokens else span[:0])
    if bounds is None:
        count = compressed_count(x.shape[1], geometry)
        return torch.stack(pieces) if pieces else x.new_zeros((0, count, *x.shape[2:]))
    tail = x.shape[0] // stride - sum(len(p) for p in pieces)
    return torch.cat([*pieces, x.new_zeros((tail, *x.shape[1:]))])


def token_positions(total: int, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """int64 [total]: each token's position in its document."""
    bounds = token_bounds(cu_seqlens) or [0, total]
    return torch.tensor(
        [t for a, b in itertools.pairwise(bounds) for t in range(b - a)], dtype=torch.long
    )


def compressed_positions(
    total: int, geometry: BlockGeometry, cu_seqlens: torch.Tensor | None
) -> torch.Tensor:
    """int64 [n_c], packed [T // d]: i*d of each compressed token, counted in its document; 0 in the
    packed tail.
    """
    bounds = token_bounds(cu_seqlens)
    if bounds is None:
        return torch.arange(compressed_count(total, geometry)) * geometry.compress_stride
    starts = compressed_bounds(bounds, geometry) or [0]
    places = [
        i * geometry.compress_stride for a, b in itertools.pairwise(starts) for i in range(b - a)
    ]
    return torch.tensor(
        places + [0] * (total // geometry.compress_stride - len(places)), dtype=torch.long
    )

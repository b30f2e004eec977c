"""Heads mode: all-to-alls give every rank all rows of some key/value heads, and bring rows back.

The core is that of one process on G / P groups. Every element of its results has the bits of one
process, because no sum crosses groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nsa_core.layer.attention import nsa_attention
from nsa_core.layer.gating import compute_gates, has_sigmoid
from nsa_core.layer.phi.chunks import packed_blocks
from nsa_core.layer.phi.kinds import compress_pair
from nsa_core.layer.rope import rotate
from nsa_core.parallel.collectives import exchange
from nsa_core.parallel.exchange_rows import Ranks
from nsa_core.parallel.layouts import in_order, in_rank_order

if TYPE_CHECKING:
    from nsa_core.config import NSAConfig
    from nsa_core.dispatch.plan import Plan
    from nsa_core.layer.module import NSAttention


def forward(
    layer: NSAttention,
    x: torch.Tensor,  # [B, n, dim], or packed [n, dim]
    cu_seqlens: torch.Tensor | None,
    max_seqlen: int | None,
    plan: Plan,
    ranks: Ranks,
    config: NSAConfig,
) -> torch.Tensor:
    """Apply ``layer`` to the rows of this rank.

    Args:
        layer: the layer.
        x: the rows of this rank.
        cu_seqlens: int32 [documents + 1], the documents of all ranks.
        max_seqlen: length of the longest document, or an upper bound.
        plan: a plan for ``config``.
        ranks: the rows and the process group.
        config: the config of the layer with the heads of one rank.

    Returns:
        The output of x's shape.
    """
    product = layer.qkv(x)
    q, raw, ks, vs = layer.rotated(product, None)
    q, k_raw, v_raw, *kv = _to_heads([q, *raw, *ks, *vs], ranks)
    ks, vs = kv[: len(ks)], kv[len(ks) :]
    (gates,) = _to_heads([compute_gates(layer.gate, x)], ranks)
    packed = None
    if cu_seqlens is not None:
        packed = packed_blocks(cu_seqlens, q.shape[0], config.geometry)
    table = None
    if config.rope:
        table = layer._rope_of_tokens(q[..., 0, :], cu_seqlens)
        q, *ks = (rotate(t, table) for t in (q, *ks))
        if config.rope_before_compress:
            k_raw = rotate(k_raw, table)
    k_cmp, v_cmp = compress_pair(layer.phi_k, layer.phi_v, k_raw, v_raw, packed)
    if config.rope and not config.rope_before_compress:
        k_cmp = rotate(k_cmp, layer._rope_of_blocks(k_cmp, packed, table))
    o = nsa_attention(
        q,
        (None, ks[0], ks[-1]),
        (None, vs[0], vs[-1]),
        gates,
        k_cmp=k_cmp,
        v_cmp=v_cmp,
        config=config,
        cu_seqlens=cu_seqlens,
        max_seqlen=max_seqlen,
        plan=plan,
        recompute=layer.recompute,
        nonnegative_gates=has_sigmoid(layer.gate),
    )
    y: torch.Tensor = layer.out(_to_rows(o, ranks).flatten(-2))
    return y


def _to_heads(tensors: list[torch.Tensor], ranks: Ranks) -> list[torch.Tensor]:
    """Exchange rows for heads in one all-to-all.

    Args:
        tensors: each [B, n, H, D] or [n, H, D], of one dtype; the rows of this rank.
        ranks: the rows and the group.

    Returns:
        For each tensor all T rows of this rank's heads, [B, T, H / P, D] or [T, H / P, D].
    """
    world = ranks.world
    parts, shapes = [], []
    for x in tensors:
        rows = x.movedim(-3, 0).unflatten(-2, (world, -1)).movedim(-3, 0)  # [P, n, (B,) h, D]
        shapes.append(rows.shape[2:])
        parts.append(rows.flatten(2))
    buffer = torch.cat(parts, 2)
    received = _exchange_evenly(buffer.flatten(0, 1), ranks)
    whole = in_order(received, world, ranks.layout)
    split = whole.split([part.shape[2] for part in parts], 1)
    return [x.unflatten(1, shape).movedim(0, -3) for x, shape in zip(split, shapes)]


def _to_rows(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Exchange heads for rows: the inverse of :func:`_to_heads` for one tensor."""
    rows = in_rank_order(x.movedim(-3, 0), ranks.world, ranks.layout)  # [T, (B,) h, D]
    received = _exchange_evenly(rows.contiguous(), ranks).unflatten(0, (ranks.world, -1))
    out: torch.Tensor = received.movedim(0, -3).flatten(-3, -2).movedim(0, -3)
    return out


def _exchange_evenly(rows: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Send an equal part of ``rows`` to every rank."""
    sizes = [rows.shape[0] // ranks.world] * ranks.world
    received: torch.Tensor = exchange(rows.contiguous(), sizes, sizes, ranks.group)
    return received

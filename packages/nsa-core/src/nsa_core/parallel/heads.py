"""Heads mode: all-to-alls give every rank all rows of some key/value heads, and bring rows back.

The core is that of one process on G / P groups. Every element of its results has the bits of one
process, because no sum crosses groups. A rank rotates its rows before it sends them: one node then
splits and rotates all heads, and the table has the angles of these rows only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nsa_core.layer.attention import nsa_attention
from nsa_core.layer.gating import compute_gates, has_sigmoid
from nsa_core.layer.phi.chunks import packed_blocks
from nsa_core.layer.phi.kinds import compress_pair
from nsa_core.layer.rope import rotate
from nsa_core.parallel.exchange_rows import Ranks
from nsa_core.parallel.head_exchange import to_heads, to_rows
from nsa_core.parallel.row_angles import rope_of_rows

if TYPE_CHECKING:
    from nsa_core.config import NSAConfig
    from nsa_core.layer.module import NSAttention
    from nsa_core.plan.plan import Plan


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
    product, table = layer.qkv(x), None
    if config.rope:
        table = rope_of_rows(x, cu_seqlens, ranks, config, product.dtype)
    q, raw, ks, vs = layer.rotated(product, table)
    tensors = [q, compute_gates(layer.gate, x), *raw, *ks, *vs]
    q, gates, k_raw, v_raw, *kv = to_heads(tensors, ranks.layout, ranks.group)
    ks, vs = kv[: len(ks)], kv[len(ks) :]
    packed = None
    if cu_seqlens is not None:
        packed = packed_blocks(cu_seqlens, q.shape[0], config.geometry)
    k_cmp, v_cmp = compress_pair(layer.phi_k, layer.phi_v, k_raw, v_raw, packed)
    if config.rope and not config.rope_before_compress:
        k_cmp = rotate(k_cmp, layer._rope_of_blocks(k_cmp, packed, None))
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
    (rows,) = to_rows([o], ranks.layout, ranks.group)
    y: torch.Tensor = layer.out(rows.flatten(-2))
    return y

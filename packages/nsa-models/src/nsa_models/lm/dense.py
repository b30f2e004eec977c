"""Dense causal attention with grouped queries: the baseline for NSAttention, with equal heads."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nsa_core.config import NSAConfig
from nsa_core.layer.projection import HeadNorm
from nsa_core.layer.rope import rope_table, rotate, table_for
from nsa_core.packing import token_positions


class DenseAttention(nn.Module):
    """Causal attention o_t = W_o concat_h softmax(q_t K^T scale) V over keys <= t.

    Queries and keys get the same rotary embedding as in NSAttention. Packed documents run one
    attention call each; the boundaries are copied to the host once per call.

    Args:
        config: Width, heads, rotary embedding, q/k norm and scale; NSA's sizes are not used.

    Shapes:
        x [B, S, dim] -> [B, S, dim]; packed [T, dim] -> [T, dim].
    """

    def __init__(self, config: NSAConfig) -> None:
        super().__init__()
        self.config = config
        k_width, v_width = config.n_kv_heads * config.qk_dim, config.n_kv_heads * config.v_dim
        self._widths = [config.n_heads * config.qk_dim, k_width, v_width]
        self.qkv = nn.Linear(config.dim, sum(self._widths), bias=False)
        self.q_norm = HeadNorm(config.qk_dim) if config.qk_norm else nn.Identity()
        self.k_norm = HeadNorm(config.qk_dim) if config.qk_norm else nn.Identity()
        self.out = nn.Linear(config.n_heads * config.v_dim, config.dim, bias=False)
        for linear in (self.qkv, self.out):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)

    def forward(
        self,
        x: torch.Tensor,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> torch.Tensor:
        """Return the layer's output, with x's shape.

        Args:
            x: [B, S, dim], or packed [T, dim].
            cu_seqlens: int32 [documents + 1] boundaries of packed documents.
            max_seqlen: Ignored; NSAttention has it too.
        """
        config, rows = self.config, x.shape[-2]
        q, k, v = self.qkv(x).split(self._widths, dim=-1)
        q = self.q_norm(q.unflatten(-1, (config.n_heads, -1)))
        k, v = (
            self.k_norm(k.unflatten(-1, (config.n_kv_heads, -1))),
            v.unflatten(-1, (config.n_kv_heads, -1)),
        )
        if config.rope:
            if cu_seqlens is None:
                table = table_for(q, rows, 1, config.qk_dim, config.frequencies)
            else:
                positions = token_positions(cu_seqlens, rows).position
                table = rope_table(positions, config.qk_dim, config.frequencies, q.dtype)
            q, k = rotate(q, table), rotate(k, table)
        o = (
            causal(q, k, v, config.softmax_scale)
            if cu_seqlens is None
            else causal_documents(q, k, v, cu_seqlens, config.softmax_scale)
        )
        result: torch.Tensor = self.out(o.flatten(-2))
        return result


# torch.compile would compile one graph per list of lengths.
@torch.compiler.disable
def causal_documents(
    q: torch.Tensor,  # [T, Hq, Dk]
    k: torch.Tensor,  # [T, G, Dk]
    v: torch.Tensor,  # [T, G, Dv]
    cu_seqlens: torch.Tensor,
    scale: float | None,
) -> Any:
    """Return causal attention in each packed document, [T, Hq, Dv]. Synchronises."""
    bounds = cu_seqlens.tolist()
    spans = [slice(a, b) for a, b in itertools.pairwise(bounds) if b > a]
    return torch.cat([causal(q[None, s], k[None, s], v[None, s], scale)[0] for s in spans])


def causal(
    q: torch.Tensor,  # [B, S, Hq, Dk]
    k: torch.Tensor,  # [B, S, G, Dk]
    v: torch.Tensor,  # [B, S, G, Dv]
    scale: float | None,
) -> torch.Tensor:
    """Return causal attention [B, S, Hq, Dv] with PyTorch's SDPA."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    assert q.shape[2] == k.shape[2], (
        "is_causal aligns top-left, so it needs as many queries as keys"
    )
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    return o.transpose(1, 2)

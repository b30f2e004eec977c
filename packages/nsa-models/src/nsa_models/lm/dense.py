"""Dense causal attention with grouped queries: the baseline for NSAttention, with equal heads."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nsa_core.cache.state import CacheSizes
from nsa_core.config import NSAConfig
from nsa_core.errors import InvalidInput
from nsa_core.layer.projection import HeadNorm
from nsa_core.layer.rope import rope_table, rotate, table_for, wide_if_eager
from nsa_core.packing import token_positions


class DenseCache:
    """A decode cache of keys and values for sequences of equal length.

    Args:
        attn: The layer; its weights decide device and dtype.
        batch: Number of sequences.
        max_len: Maximum number of tokens per sequence.

    Raises:
        InvalidInput: A size is out of range.
    """

    def __init__(self, attn: DenseAttention, batch: int, max_len: int) -> None:
        CacheSizes(batch, max_len).check()
        config, weight = attn.config, attn.qkv.weight
        self.k = weight.new_empty((batch, max_len, config.n_kv_heads, config.qk_dim))
        self.v = weight.new_empty((batch, max_len, config.n_kv_heads, config.v_dim))
        self.length = 0

    def append(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append k [B, n, G, Dk] and v [B, n, G, Dv]; return all cached keys and values.

        The caller adds n to ``length`` when its step is complete: an error before leaves the cache
        as it was.

        Raises:
            InvalidInput: The new tokens do not fit.
        """
        first, end = self.length, self.length + k.shape[1]
        if end > self.k.shape[1]:
            raise InvalidInput(
                f"the cache holds {first} of at most {self.k.shape[1]} tokens, so {k.shape[1]} more"
                " do not fit; create it with a larger max_len"
            )
        self.k[:, first:end], self.v[:, first:end] = k.detach(), v.detach()
        return self.k[:, :end], self.v[:, :end]


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
        cache: DenseCache | None = None,
    ) -> torch.Tensor:
        """Return the layer's output, with x's shape.

        Args:
            x: [B, S, dim], or packed [T, dim].
            cu_seqlens: int32 [documents + 1] boundaries of packed documents.
            max_seqlen: Ignored; NSAttention has it too.
            cache: Cache to which x's tokens are appended; x then holds each sequence's next tokens.
        """
        config, rows, first = self.config, x.shape[-2], 0 if cache is None else cache.length
        q, k, v = self.qkv(x).split(self._widths, dim=-1)
        q = self.q_norm(q.unflatten(-1, (config.n_heads, -1)))
        k, v = (
            self.k_norm(k.unflatten(-1, (config.n_kv_heads, -1))),
            v.unflatten(-1, (config.n_kv_heads, -1)),
        )
        if config.rope:
            if cu_seqlens is None and not first:
                table = table_for(q, rows, 1, config.qk_dim, config.frequencies)
            else:
                positions = torch.arange(first, first + rows, device=x.device)
                if cu_seqlens is not None:
                    positions = token_positions(cu_seqlens, rows).position
                table = wide_if_eager(
                    rope_table(positions, config.qk_dim, config.frequencies, q.dtype)
                )
            q, k = rotate(q, table), rotate(k, table)
        if cache is not None:
            k, v = cache.append(k, v)
        o = (
            causal(q, k, v, config.softmax_scale)
            if cu_seqlens is None
            else self._packed(q, k, v, cu_seqlens)
        )
        result: torch.Tensor = self.out(o.flatten(-2))
        if cache is not None:
            cache.length = first + rows
        return result

    # torch.compile would compile one graph per list of lengths.
    @torch.compiler.disable
    def _packed(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor
    ) -> Any:
        bounds = cu_seqlens.tolist()
        spans = [slice(a, b) for a, b in itertools.pairwise(bounds) if b > a]
        scale = self.config.softmax_scale
        return torch.cat([causal(q[None, s], k[None, s], v[None, s], scale)[0] for s in spans])


def causal(
    q: torch.Tensor,  # [B, n, Hq, Dk]
    k: torch.Tensor,  # [B, S, G, Dk]
    v: torch.Tensor,  # [B, S, G, Dv]
    scale: float,
) -> torch.Tensor:
    """Return causal attention [B, n, Hq, Dv] of the last n of S tokens, with PyTorch's SDPA."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped, (rows, keys) = q.shape[1] != k.shape[1], (q.shape[2], k.shape[2])
    if rows != keys:
        visible = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril(keys - rows)
        o = F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, scale=scale, enable_gqa=grouped
        )
        return o.transpose(1, 2)
    assert q.shape[2] == k.shape[2], (
        "is_causal aligns top-left, so it needs as many queries as keys"
    )
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scale, enable_gqa=grouped
    ).transpose(1, 2)

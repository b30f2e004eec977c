"""LanguageModel: pre-norm blocks of attention and SwiGLU, input and output embedding one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from nsa_core.cache import NSACache
from nsa_core.errors import InvalidInput
from nsa_core.layer.module import NSAttention
from nsa_models.lm.config import LMConfig
from nsa_models.lm.dense import DenseAttention, DenseCache

IGNORED = -100  # a target that is not trained on
Cache = NSACache | DenseCache
_LOGITS_AT_ONCE = 1 << 28  # fp32 logits: 1 GiB


class SwiGLU(nn.Module):
    """W_down(SiLU(W_gate x) * W_up x); gate and up are one product."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)
        for linear in (self.up, self.down):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., dim] -> the same shape."""
        gate, up = self.up(x).chunk(2, dim=-1)
        result: torch.Tensor = self.down(F.silu(gate) * up)
        return result


class Block(nn.Module):
    """x + attn(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self, config: LMConfig, backends: str | Mapping[str, str] | None, layer: int
    ) -> None:
        super().__init__()
        dim = config.layer.dim
        self.attn_norm, self.mlp_norm = nn.RMSNorm(dim, eps=1e-6), nn.RMSNorm(dim, eps=1e-6)
        self.attn: NSAttention | DenseAttention
        if config.attention == "nsa":
            self.attn = NSAttention(config.layer, backends, layer=layer)
        else:
            self.attn = DenseAttention(config.layer)
        self.mlp = SwiGLU(dim, config.hidden)
        with torch.no_grad():  # 2 n branches add up to about what one would
            for linear in (self.attn.out, self.mlp.down):
                linear.weight *= (2 * config.n_layers) ** -0.5

    def forward(
        self,
        x: torch.Tensor,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: int | None = None,
        cache: Cache | None = None,
    ) -> torch.Tensor:
        """x [B, S, dim], or packed [T, dim] -> the same shape."""
        x = x + self.attn(
            self.attn_norm(x), cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, cache=cache
        )
        result: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return result

    def new_cache(self, batch: int, max_len: int) -> Cache:
        """An empty cache of the attention, for ``batch`` sequences of up to ``max_len`` tokens."""
        if isinstance(self.attn, DenseAttention):
            return DenseCache(self.attn, batch, max_len)
        return self.attn.new_cache(batch, max_len)


class LanguageModel(nn.Module):
    """logits = E norm(blocks(E[tokens])): tokens [B, S], or packed documents [T] with
    ``cu_seqlens``.

    ``backends`` is that of :class:`nsa_core.NSAttention`; errors of a layer name its number.
    ``recompute`` keeps only the blocks' inputs for backward and computes the rest again.
    """

    def __init__(self, config: LMConfig, backends: str | Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.config, self.recompute = config, False
        self.embed = nn.Embedding(config.vocab_size, config.layer.dim)
        # so that a token does not begin by predicting itself
        nn.init.normal_(self.embed.weight, std=0.02)
        self.blocks = nn.ModuleList(
            Block(config, backends, layer) for layer in range(config.n_layers)
        )
        self.norm = nn.RMSNorm(config.layer.dim, eps=1e-6)

    def forward(
        self,
        tokens: torch.Tensor,  # integer [B, S], or packed [T]
        cu_seqlens: torch.Tensor | None = None,  # int32 [documents + 1]
        max_seqlen: int | None = None,
        targets: torch.Tensor | None = None,  # int64, of tokens' shape, IGNORED where there is none
    ) -> torch.Tensor:
        """logits [..., vocab_size]; with ``targets``, the sum of -log p(target) over them, fp32 [].

        Raises:
            InvalidInput: tokens are not [B, S], or [T] beside cu_seqlens, or targets have another
                shape.
            Unsupported: no backend takes the request.
        """
        if tokens.dim() != (2 if cu_seqlens is None else 1):
            raise InvalidInput(
                f"tokens must be [B, S], or [T] with cu_seqlens; got {list(tokens.shape)}"
            )
        if targets is not None and targets.shape != tokens.shape:
            raise InvalidInput(
                f"targets must be {list(tokens.shape)}, as tokens are, got {list(targets.shape)}"
            )
        x = self.hidden(tokens, cu_seqlens, max_seqlen)
        return F.linear(x, self.embed.weight) if targets is None else self._loss(x, targets)

    def hidden(
        self,
        tokens: torch.Tensor,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: int | None = None,
        caches: Sequence[Cache] | None = None,
    ) -> torch.Tensor:
        """What the output embedding is applied to, [..., dim].

        With ``caches``, those of :meth:`new_caches`, tokens [B, n] are the next of each sequence
        and are added to them.
        """
        x = self.embed(tokens)
        for layer, block in enumerate(self.blocks):
            if caches is not None:
                x = block(x, cache=caches[layer])
            elif self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, cu_seqlens, max_seqlen, use_reentrant=False)
            else:
                x = block(x, cu_seqlens, max_seqlen)
        result: torch.Tensor = self.norm(x)
        return result

    def new_caches(self, batch: int, max_len: int) -> list[Cache]:
        """An empty cache a layer, for ``batch`` sequences of up to ``max_len`` tokens.

        Raises:
            Unsupported: no backend decodes here.
        """
        made: list[Cache] = []
        for block in self.blocks:
            assert isinstance(block, Block)  # as __init__ made it
            made.append(block.new_cache(batch, max_len))
        return made

    def _loss(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x, targets = x.flatten(0, -2), targets.flatten()
        rows = max(1, _LOGITS_AT_ONCE // self.config.vocab_size)
        if len(x) <= rows:
            return _nats(x, self.embed.weight, targets)
        # The logits of one part after another, each computed again in backward: never all at once.
        parts: list[Any] = [
            checkpoint(_nats, part, self.embed.weight, wanted, use_reentrant=False)
            for part, wanted in zip(x.split(rows), targets.split(rows))
        ]
        return torch.stack(parts).sum()


def _nats(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = F.linear(x, weight).float()
    return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


def parameter_count(model: nn.Module) -> int:
    """Numbers that training changes; the embedding, used twice, counts once."""
    return sum(p.numel() for p in model.parameters())

"""LanguageModel: pre-norm blocks of attention and SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from nsa_core.errors import InvalidInput
from nsa_core.layer.module import NSAttention
from nsa_models.lm.config import LMConfig
from nsa_models.lm.dense import DenseAttention

IGNORED = -100  # target of positions that do not contribute to the loss
_LOGITS_AT_ONCE = 1 << 28  # fp32 logits: 1 GiB


class SwiGLU(nn.Module):
    """W_down(SiLU(W_gate x) * W_up x), with gate and up in one matrix product."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)
        for linear in (self.up, self.down):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [..., dim] to the same shape."""
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
        self.attn_norm, self.mlp_norm = (nn.RMSNorm(dim, eps=config.norm_eps) for _ in range(2))
        self.attn: NSAttention | DenseAttention
        if config.attention_of(layer) == "nsa":
            self.attn = NSAttention(config.layer, backends, layer=layer)
        else:
            self.attn = DenseAttention(config.layer)
        for linear, has_bias in (
            (self.attn.qkv, config.qkv_bias),
            (self.attn.out, config.out_bias),
        ):
            if has_bias:
                linear.bias = nn.Parameter(torch.zeros(linear.out_features))
        if config.layer.qk_norm:
            self.attn.q_norm.eps = self.attn.k_norm.eps = config.norm_eps
        self.mlp = SwiGLU(dim, config.hidden)
        with torch.no_grad():  # 2 n_layers residual branches then have the variance of one
            for linear in (self.attn.out, self.mlp.down):
                linear.weight *= (2 * config.n_layers) ** -0.5

    def forward(
        self,
        x: torch.Tensor,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> torch.Tensor:
        """Map x [B, S, dim], or packed [T, dim], to the same shape."""
        x = x + self.attn(self.attn_norm(x), cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
        result: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return result


class LanguageModel(nn.Module):
    """A decoder language model: logits = E_out norm(blocks(E[tokens])), with E_out = E if tied.

    Set ``recompute`` to keep only the inputs of the blocks for backward (activation checkpointing).
    Errors of a layer name its number.

    Args:
        config: The sizes.
        backends: As in :class:`nsa_core.NSAttention`.

    Shapes:
        tokens [B, S] -> logits [B, S, vocab_size]; packed tokens [T] with ``cu_seqlens`` -> logits
        [T, vocab_size].

    Example:
        >>> model = LanguageModel(size("tiny"))
        >>> logits = model(torch.zeros(1, 64, dtype=torch.long))
    """

    def __init__(self, config: LMConfig, backends: str | Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.config, self.recompute = config, False
        self.embed = nn.Embedding(config.vocab_size, config.layer.dim)
        # A small scale, so that an untrained model does not predict the input token itself.
        nn.init.normal_(self.embed.weight, std=0.02)
        self.blocks = nn.ModuleList(
            Block(config, backends, layer) for layer in range(config.n_layers)
        )
        self.norm = nn.RMSNorm(config.layer.dim, eps=config.norm_eps)
        if not config.tied:
            self.head = nn.Linear(config.layer.dim, config.vocab_size, bias=False)
            nn.init.normal_(self.head.weight, std=0.02)

    @property
    def output_weight(self) -> torch.Tensor:
        """The output embedding [vocab_size, dim]."""
        return self.embed.weight if self.config.tied else self.head.weight

    def forward(
        self,
        tokens: torch.Tensor,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: int | None = None,
        targets: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return logits or, with targets, the loss.

        Args:
            tokens: Integer [B, S], or packed [T].
            cu_seqlens: int32 [documents + 1] boundaries of packed documents.
            max_seqlen: Length of the longest packed document, or an upper bound.
            targets: int64 with the shape of tokens; IGNORED for positions without a target.

        Returns:
            Logits [..., vocab_size]; with targets, the sum of -log p(target) as an fp32 scalar.

        Raises:
            InvalidInput: tokens are not [B, S], or [T] with cu_seqlens; or targets have another
                shape.
            Unsupported: No backend accepts the request.
        """
        if tokens.dim() != (2 if cu_seqlens is None else 1):
            raise InvalidInput(
                f"tokens must be [B, S], or [T] with cu_seqlens; got {list(tokens.shape)}"
            )
        if targets is not None and targets.shape != tokens.shape:
            raise InvalidInput(
                f"targets must have the shape of tokens, {list(tokens.shape)}, got"
                f" {list(targets.shape)}"
            )
        x = self.hidden(tokens, cu_seqlens, max_seqlen)
        return F.linear(x, self.output_weight) if targets is None else self._loss(x, targets)

    def hidden(
        self,
        tokens: torch.Tensor,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> torch.Tensor:
        """Return the normalised hidden states [..., dim], the input of the output embedding."""
        x = self.embed(tokens)
        for block in self.blocks:
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, cu_seqlens, max_seqlen, use_reentrant=False)
            else:
                x = block(x, cu_seqlens, max_seqlen)
        result: torch.Tensor = self.norm(x)
        return result

    def _loss(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x, targets = x.flatten(0, -2), targets.flatten()
        rows = max(1, _LOGITS_AT_ONCE // self.config.vocab_size)
        if len(x) <= rows:
            return _summed_loss(x, self.output_weight, targets)
        # Compute the logits part by part, and again in backward, so that they never exist in full.
        parts: list[Any] = [
            checkpoint(_summed_loss, part, self.output_weight, part_targets, use_reentrant=False)
            for part, part_targets in zip(x.split(rows), targets.split(rows))
        ]
        return torch.stack(parts).sum()


def _summed_loss(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = F.linear(x, weight).float()
    return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


def parameter_count(model: nn.Module) -> int:
    """Return the number of parameters; the tied embedding counts once."""
    return sum(p.numel() for p in model.parameters())

"""NSA in place of the attention of torchtitan's Llama: a module for its option override.imports.

    PYTHONPATH=examples torchrun ... -m torchtitan.train ... --override.imports torchtitan_nsa.nsa

torchtitan_train.py trains a tiny model with it.
"""

from dataclasses import dataclass, replace

import torch
from torch import nn
from torchtitan.config import derive, override
from torchtitan.models.common.attention import GQAttention
from torchtitan.models.common.rope import ComplexRoPE
from torchtitan.protocols.module import Module

from nsa_core import NSAConfig, NSAttention, attention_flops


class TitanNSA(Module, NSAttention):
    """NSAttention with the configuration and the call of torchtitan's attention."""

    @dataclass(kw_only=True, slots=True)
    class Config(GQAttention.Config):
        """Configuration of a GQAttention and of the NSAttention that replaces it."""

        nsa: NSAConfig

    def __init__(self, config: Config) -> None:
        NSAttention.__init__(self, config.nsa)
        for child in self.modules():  # torchtitan takes modules of its own class only
            if child is not self:
                child.__class__ = type(type(child).__name__, (Module, type(child)), {})

    def forward(self, x, attention_masks, positions=None):
        """Apply the layer to packed documents x [B, S, dim]; the masks are their boundaries."""
        documents, longest = attention_masks.cu_seq_q, attention_masks.max_q
        return NSAttention.forward(self, x.flatten(0, 1), documents, longest).view_as(x)


@override(target=GQAttention.Config)
def nsa(config: GQAttention.Config, **fields) -> TitanNSA.Config:
    """Return the configuration of the layer; ``fields`` are those of NSAConfig.

    The model needs ``attn_backend="varlen"``, whose masks are the boundaries of documents, and
    ``parallelism.spmd_backend="partial_dtensor"``.
    """
    assert isinstance(config.rope, ComplexRoPE.Config), "only rotary pairs of neighbours"
    frequencies = replace(config.rope, max_seq_len=2).build().cache[1].angle()
    layer = NSAConfig(
        dim=config.dim,
        n_heads=config.n_heads,
        n_kv_heads=config.n_kv_heads or config.n_heads,
        head_dim=config.head_dim,
        qk_norm=config.qk_norm is not None,
        rope_frequencies=tuple(frequencies.tolist()),
        **fields,
    )
    return derive(config, TitanNSA.Config, nsa=layer, sharding_config=None)


def from_dense(state: dict[str, torch.Tensor], head_dim: int) -> dict[str, torch.Tensor]:
    """Return NSA weights for those of a GQAttention, whose rotary pairs are neighbours."""
    q, k, v = (state[f"qkv_linear.w{name}.weight"] for name in "qkv")
    q, k = (w.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2) for w in (q, k))
    return {"qkv.weight": torch.cat([q, k, k, k, v, v, v]), "out.weight": state["wo.weight"]}


def flops_per_token(model: nn.Module, seq_len: int) -> float:
    """Return the operations of a training step per token; torchtitan counts dense attention."""
    weights = [p.numel() for name, p in model.named_parameters() if "tok_embeddings" not in name]
    layers = [module.config for module in model.modules() if isinstance(module, NSAttention)]
    return 6 * sum(weights) + sum(attention_flops(layer, seq_len) for layer in layers) / seq_len

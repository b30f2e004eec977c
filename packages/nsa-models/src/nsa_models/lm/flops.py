"""Operations of a training step that the mathematics needs, for the share of the device's matrix
rate.
"""

from __future__ import annotations

from nsa_bench.roofline import part_costs
from nsa_models.lm.model import LanguageModel

_NSA = ("cmp", "select", "sel", "win")


def row_flops(model: LanguageModel, length: int) -> int:
    """Forward and backward over one row of one document: 6 a weight and use, and 2, then 5,
    products per visible pair.

    phi's weights are used once per compressed token and key/value head, the rest once per token.
    Recomputation is not counted. A row of several documents has fewer visible pairs: for it this is
    an upper bound.
    """
    config, layer = model.config, model.config.layer
    phi = sum(p.numel() for n, p in model.named_parameters() if ".phi_" in n and p.dim() > 1)
    rest = sum(p.numel() for n, p in model.named_parameters() if ".phi_" not in n and p.dim() > 1)
    pairs = part_costs(layer, 1, length, 2, "both")
    parts = _NSA if config.attention == "nsa" else ("dense",)
    attention = config.n_layers * sum(pairs[part].flops for part in parts)
    compressed = layer.geometry.num_compressed(length) * layer.n_kv_heads
    return 6 * (rest * length + phi * compressed) + attention

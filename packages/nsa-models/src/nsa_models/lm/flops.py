"""Count the operations of a training step, for its share of the device's matrix rate."""

from __future__ import annotations

from nsa_core.flops import attention_flops
from nsa_models.lm.model import LanguageModel


def row_flops(model: LanguageModel, length: int) -> int:
    """Return the operations of forward and backward over one row of a single document.

    Each use of a weight counts 6 operations. phi's weights are used once per compressed token and
    key/value head, all others once per token. Attention counts as in
    :func:`nsa_core.attention_flops`; nothing that is computed again is counted. A row of several
    documents has fewer visible pairs, so the count is an upper bound for it.
    """
    config, layer = model.config, model.config.layer
    phi = sum(p.numel() for n, p in model.named_parameters() if ".phi_" in n and p.dim() > 1)
    other = sum(p.numel() for n, p in model.named_parameters() if ".phi_" not in n and p.dim() > 1)
    attention = sum(
        attention_flops(layer, length, dense=config.attention_of(number) == "dense")
        for number in range(config.n_layers)
    )
    compressed = layer.geometry.num_compressed(length) * layer.n_kv_heads
    return 6 * (other * length + phi * compressed) + attention


def matrix_share(flops_per_s: float, peak_flops_per_s: float) -> float | None:
    """Return the rate of the counted operations as a share of the measured matrix rate.

    None means that the measurement failed: no device exceeds its matrix rate, so a share above 1
    comes from a rate measured too low, on a busy device for example.
    """
    share = flops_per_s / peak_flops_per_s
    return share if share <= 1 else None

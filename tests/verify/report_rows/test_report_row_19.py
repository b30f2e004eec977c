"""Report row 19, 'gate fc2 std about 0.023 in 12 layers, outputs not uniform', at that size.

tests/core/layer/test_initialisation.py trains twelve small layers in float64.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from nsa_core import NSAConfig, NSAttention

LAYERS, LENGTH = 12, 64
BLOCKS = {
    "compress_block_size": 8,
    "compress_stride": 4,
    "select_block_size": 8,
    "num_selected_blocks": 4,
}


@pytest.mark.few_cases("linear")
@pytest.mark.parametrize("gate", ["linear", "mlp"])
def test_report_row_19_gate_spread_per_layer(gate: str, figure: Any) -> None:
    """In each layer, gate weights have the documented std, gates vary, and all get a gradient."""
    config = NSAConfig(
        dim=768, n_heads=12, n_kv_heads=2, gate=gate, compress="mean", window_size=16, **BLOCKS
    )
    layers = [NSAttention(config, layer=index) for index in range(LAYERS)]
    gates: list[torch.Tensor] = []
    x = torch.randn(1, LENGTH, 768)
    for layer in layers:
        layer.gate.register_forward_hook(lambda module, args, out: gates.append(out))
        x = F.rms_norm(x + layer(x), (768,))
    x.square().mul(torch.randn_like(x)).sum().backward()
    # 0.5 / sqrt(fan-in); the hidden units of the mlp have an RMS of 0.6 after SiLU
    expected = 0.5 * 768**-0.5 if gate == "linear" else 0.5 / 0.6 * 192**-0.5
    projections = [layer.gate if gate == "linear" else layer.gate[2] for layer in layers]
    weight_stds, gate_stds = (
        [float(p.weight.detach().std()) for p in projections],
        [float(g.detach().std()) for g in gates],
    )
    mean = sum(float(g.detach().mean()) for g in gates) / LAYERS
    figure(
        f"weights' std {min(weight_stds):.4f} to {max(weight_stds):.4f} (expected {expected:.4f}),"
        f" gates' std {min(gate_stds):.3f} to {max(gate_stds):.3f} around {mean:.3f}, 12 layers"
    )
    for layer, weight_std, output, projection in zip(layers, weight_stds, gates, projections):
        assert weight_std == pytest.approx(expected, rel=0.05), layer.layer
        assert 0.05 < output.std() < 0.25, layer.layer  # neither constant nor saturated
        # No branch is preferred.
        assert (output.mean((0, 1, 2)) - 0.5).abs().max() < 0.06, layer.layer
        assert (projection.weight.grad != 0).all(), layer.layer
        assert (projection.bias.grad != 0).all(), layer.layer

"""Report row 19, 'gate fc2 std about 0.023 in 12 layers, outputs not uniform', at the reports'
size.

tests/core/layer/test_initialisation.py trains the same through twelve small layers in fp64.
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


@pytest.mark.parametrize("gate", ["linear", "mlp"])
def test_report_row_19_gate_spread_per_layer(gate: str, figure: Any) -> None:
    """Each layer's gate weights have the documented spread, its gates vary, and every one gets a
    gradient at step 0.
    """
    config = NSAConfig(
        dim=768, n_heads=12, n_kv_heads=2, gate=gate, compress="mean", window_size=16, **BLOCKS
    )
    layers = [NSAttention(config, layer=index) for index in range(LAYERS)]
    gates: list[torch.Tensor] = []
    x = torch.randn(1, LENGTH, 768)
    for layer in layers:
        layer.gate.register_forward_hook(lambda module, given, out: gates.append(out))
        x = F.rms_norm(x + layer(x), (768,))
    x.square().mul(torch.randn_like(x)).sum().backward()
    # 0.5 / sqrt(fan in); an mlp's hidden units have an RMS of 0.6 after SiLU
    expected = 0.5 * 768**-0.5 if gate == "linear" else 0.5 / 0.6 * 192**-0.5
    last = [layer.gate if gate == "linear" else layer.gate[2] for layer in layers]
    spreads, outputs = (
        [float(g.weight.detach().std()) for g in last],
        [float(g.detach().std()) for g in gates],
    )
    middle = sum(float(g.detach().mean()) for g in gates) / LAYERS
    figure(
        f"weights' std {min(spreads):.4f} to {max(spreads):.4f} (expected {expected:.4f}), gates'"
        f" std {min(outputs):.3f} to {max(outputs):.3f} around {middle:.3f}, 12 layers"
    )
    for layer, spread, given, final in zip(layers, spreads, gates, last):
        assert spread == pytest.approx(expected, rel=0.05), layer.layer
        assert 0.05 < given.std() < 0.25, layer.layer  # neither a constant nor stuck
        # no branch is preferred
        assert (given.mean((0, 1, 2)) - 0.5).abs().max() < 0.06, layer.layer
        assert (final.weight.grad != 0).all(), layer.layer
        assert (final.bias.grad != 0).all(), layer.layer

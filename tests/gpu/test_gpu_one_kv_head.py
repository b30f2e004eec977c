"""Layers with one kv head on the triton backend, at lengths where sel uses buckets.

Triton specialises integer arguments that equal 1, such as the number of kv heads. The interpreter
does not, so only a GPU runs the specialised code.
"""

from __future__ import annotations

import pytest
import torch

from nsa_core import NSAConfig, NSAttention
from nsa_core.contract import SLOTS
from nsa_verify.checks.slots import parity
from nsa_verify.problems.cases import Case
from nsa_verify.problems.combination import Combination

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

TRITON = Combination(dict.fromkeys(SLOTS, "triton"), "cuda")
ROWS = (0, 64, 511, 8192, 16383, 40000, 65535)
HEADS = ((1, 64), (2, 64), (4, 64), (6, 64), (8, 64), (12, 64), (4, 128), (8, 128))


@pytest.mark.parametrize("length", [1 << 14, 1 << 16], ids=["16k", "64k"])
@pytest.mark.parametrize(("heads", "width"), HEADS)
def test_every_slot_matches_the_oracle(heads: int, width: int, length: int) -> None:
    config = NSAConfig(dim=heads * width, n_heads=heads, n_kv_heads=1, head_dim=width, rope=False)
    rows = tuple(row for row in ROWS if row < length)
    case = Case(f"{heads}/1/{width}, {length} tokens", config, (length,), rows=rows)
    findings = list(parity(TRITON, case, torch.bfloat16))
    assert {finding.slot for finding in findings} == set(SLOTS)
    assert not [finding for finding in findings if finding.ok is not True]


@pytest.mark.parametrize("heads", [1, 2, 4, 6, 8, 12])
def test_a_layer_trains_at_64k_tokens(heads: int) -> None:
    config = NSAConfig(dim=64 * heads, n_heads=heads, n_kv_heads=1)
    layer = NSAttention(config, backends="triton").to("cuda", torch.bfloat16)
    x = torch.randn(1, 1 << 16, config.dim, device="cuda", dtype=torch.bfloat16)
    layer(x.requires_grad_()).float().square().mean().backward()
    gradients = [x.grad, *(parameter.grad for parameter in layer.parameters())]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)

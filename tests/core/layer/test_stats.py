"""attn.stats() against values computed by hand and by loops."""

import math

import pytest
import torch

from cases import boundaries, small
from nsa_core import BlockGeometry, NSAttention
from nsa_core.layer.stats import summarize

GEOMETRY = BlockGeometry(4, 4, 4, 4, init_blocks=1, local_blocks=1)


def test_statistics_computed_by_hand():
    gates = torch.tensor([[[0.5, 0.5, 0.5]], [[1.0, 0.5, 0.0]]])  # T=2, one head
    blocks = torch.tensor([[[0, 1, 3, -1]], [[0, 2, 3, -1]]])
    # The two tokens have positions 13 and 14 in their document, so their current block is 3.
    gates, blocks = (torch.cat([x[:1].repeat(13, 1, 1), x]) for x in (gates, blocks))
    blocks[:13] = torch.tensor([0, -1, -1, -1])
    stats = summarize(gates[None], blocks[None], GEOMETRY)
    assert stats.gate_mean["cmp"] == pytest.approx((14 * 0.5 + 1) / 15)
    assert stats.gate_mean["win"] == pytest.approx(14 * 0.5 / 15)
    assert stats.gate_entropy["sel"] == pytest.approx(math.log(2))
    assert stats.gate_entropy["cmp"] == pytest.approx(14 * math.log(2) / 15)
    last = -(2 / 3) * math.log(2 / 3) - (1 / 3) * math.log(1 / 3)
    assert stats.mixture_entropy == pytest.approx((14 * math.log(3) + last) / 15)
    assert stats.blocks_per_token == pytest.approx((13 + 6) / 15)
    assert stats.forced_share == pytest.approx((13 + 2 + 2) / 19)
    assert stats.mean_distance == pytest.approx((sum(range(13)) + (13 + 9 + 1) + (14 + 6 + 2)) / 19)
    assert stats.distinct_blocks == 4
    assert stats.neighbour_overlap == pytest.approx((12 * 1 + 1 / 3 + 2 / 4) / 14)


def test_documents_are_separate():
    gates, blocks = torch.full((6, 1, 3), 0.5), torch.zeros(6, 2, 1, dtype=torch.int32)
    stats = summarize(gates, blocks, GEOMETRY, boundaries(2, 0, 4))
    assert stats.distinct_blocks == 1
    assert stats.mean_distance == pytest.approx((0 + 1 + 0 + 1 + 2 + 3) / 6)
    blocks[2:] = 1
    assert summarize(gates, blocks, GEOMETRY, boundaries(2, 4)).neighbour_overlap == 1


def test_stats_of_a_layer(planned):
    attn, x = NSAttention(small(), layer=0).double(), torch.randn(2, 60, 24, dtype=torch.float64)
    stats = attn.stats(x)
    gates = attn.gate(x)
    assert stats.gate_mean["sel"] == pytest.approx(gates[..., 1].mean().item())
    assert 1.0 < stats.mixture_entropy <= math.log(3)
    assert 0 < stats.forced_share < 1
    assert stats.distinct_blocks <= 8
    packed = attn.stats(x.flatten(0, 1), boundaries(60, 60))
    for name in ("forced_share", "mean_distance", "neighbour_overlap", "distinct_blocks"):
        assert getattr(packed, name) == pytest.approx(getattr(stats, name))


def test_stats_run_cmp_and_select_without_gradient(planned):
    from nsa_core.torch_ops.backend_call import record_dispatch

    attn, x = (
        NSAttention(small()).double(),
        torch.randn(1, 60, 24, dtype=torch.float64, requires_grad=True),
    )
    with record_dispatch() as calls:
        attn.stats(x)
    assert [c.slot for c in calls] == ["cmp", "select"]
    assert x.grad is None
    with record_dispatch() as calls:
        attn(x)
    assert [c.slot for c in calls] == ["cmp", "select", "sel", "win", "combine"]


def test_stats_of_an_empty_input():
    stats = summarize(torch.zeros(1, 0, 2, 3), torch.zeros(1, 0, 2, 4, dtype=torch.int32), GEOMETRY)
    assert stats.distinct_blocks == 0
    assert stats.neighbour_overlap == 0

"""The mass of the selected blocks."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from nsa_core import InvalidInput
from nsa_core.packing import token_positions
from nsa_models.lm.mass import row_mass, select_blocks, selected_mass
from nsa_models.lm.model import LanguageModel


def test_selected_mass_equals_a_sum_key_by_key(config):
    """Compare the first layer with a sum over the selected keys."""
    model = LanguageModel(config).double()
    lengths, layer = [30, 5, 22], config.layer
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    tokens = torch.randint(256, (57,))
    block = model.blocks[0]
    x = block.attn_norm(model.embed(tokens))
    projected = block.attn.project(x, bounds)
    plan = block.attn.plan
    _, lse = plan.cmp(projected.q, projected.k_cmp, projected.v_cmp, cu_seqlens=bounds)
    blocks = plan.select(projected.q, projected.k_cmp, lse, cu_seqlens=bounds)
    masses, shares, by_chance, near = [], [], [], []
    for first, length in zip(bounds.tolist(), lengths):
        for t in range(layer.num_selected_blocks * layer.select_block_size, length):
            for head in range(4):
                q, k = (
                    projected.q[first + t, head],
                    projected.k[1][first : first + t + 1, head // 2],
                )
                p = (k @ q * layer.softmax_scale).softmax(0)
                chosen = blocks[first + t, head // 2].tolist()
                inside = torch.tensor(
                    [j // layer.select_block_size in chosen for j in range(t + 1)]
                )
                masses.append(p[inside].sum())
                near.append(p[-layer.window_size :].sum())
                shares.append(inside.double().mean())
                block_mass = [part.sum() for part in p.split(layer.select_block_size)]
                forced = {0, *range(len(block_mass) - layer.local_blocks, len(block_mass))}
                free = [m for j, m in enumerate(block_mass) if j not in forced]
                odds = len(set(chosen) - forced - {-1}) / len(free) if free else 0
                by_chance.append(sum(block_mass[j] for j in forced) + odds * sum(free))
    result = selected_mass(model, tokens, bounds, rows=1000)
    assert len(result) == 2
    assert result[0].selected == pytest.approx(torch.stack(masses).mean().item(), abs=1e-5)
    assert result[0].keys == pytest.approx(torch.stack(shares).mean().item(), abs=1e-5)
    assert result[0].window == pytest.approx(torch.stack(near).mean().item(), abs=1e-5)
    assert result[0].random == pytest.approx(torch.stack(by_chance).mean().item(), abs=1e-5)
    assert result[0].best >= max(result[0].selected, result[0].random)
    assert selected_mass(model, tokens[:30], rows=5)[1].selected < 1


def test_selected_mass_needs_nsa_and_a_long_document(config):
    with pytest.raises(InvalidInput, match="longer than num_selected_blocks blocks, 16 tokens"):
        selected_mass(LanguageModel(config), torch.zeros(16, dtype=torch.long))
    with pytest.raises(InvalidInput, match="attention 'dense' selects no blocks"):
        selected_mass(
            LanguageModel(dataclasses.replace(config, attention="dense")),
            torch.zeros(40, dtype=torch.long),
        )


def test_autocast_does_not_round_the_mass(config):
    """Mixed-precision training measures the mass in autocast, for which 16 bits are too few."""
    model, bounds = LanguageModel(config), torch.tensor([0, 40], dtype=torch.int32)
    attn = model.blocks[0].attn
    projected, blocks = select_blocks(attn, torch.randn(40, config.layer.dim), bounds)
    arguments = (config.layer, projected.q, projected.k[1], blocks, token_positions(bounds, 40))
    expected = row_mass(*arguments, torch.arange(20, 40))
    with torch.autocast("cpu", torch.bfloat16):
        found = row_mass(*arguments, torch.arange(20, 40))
    for a, b in zip(found, expected):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)

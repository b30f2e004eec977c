"""Generation, and the mass of the selected blocks."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from nsa_core import InvalidInput
from nsa_models.lm.generate import advance, generate
from nsa_models.lm.mass import selected_mass
from nsa_models.lm.model import LanguageModel


@pytest.fixture
def model(config, attention) -> LanguageModel:
    language_model = LanguageModel(dataclasses.replace(config, attention=attention)).double()
    with torch.no_grad():
        language_model.embed.weight *= 20  # makes one token clearly more likely than all others
    return language_model


def test_temperature_0_takes_the_most_likely_token(model):
    prompt = torch.randint(256, (2, 9))
    new = generate(model, prompt, 12, temperature=0)
    everything = torch.cat((prompt, new), 1)
    assert torch.equal(new, model(everything).argmax(-1)[:, 8:-1])


def test_advance_equals_the_logits_of_the_whole_sequence(model):
    tokens = torch.randint(256, (2, 20))
    expected = model(tokens)[:, -1].float()
    caches = model.new_caches(2, 20)
    for part in tokens.split([7, 1, 3, 9], 1):
        logits = advance(model, caches, part)
    torch.testing.assert_close(logits, expected)
    with pytest.raises(InvalidInput):
        advance(model, caches, tokens[:, :1])


@pytest.mark.few_cases
@pytest.mark.parametrize("rows", [1, 9, 70])
def test_error_in_one_layer_leaves_the_caches_of_all_layers_as_they_were(model, rows):
    tokens = torch.randint(256, (2, 90))
    expected, caches = [], [model.new_caches(2, 90) for _ in range(2)]
    for part in tokens.split([15, rows, 75 - rows], 1):
        expected.append(advance(model, caches[0], part))
        for failing in (model.blocks[1].mlp, model.blocks[-1], model.blocks[1].attn.out):
            hook = failing.register_forward_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                advance(model, caches[1], part)
            hook.remove()
        assert torch.equal(advance(model, caches[1], part), expected[-1])


def test_each_step_reads_only_the_new_token(model):
    """After the prompt the layers get one token per step."""
    seen = []
    model.blocks[1].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
    generate(model, torch.randint(256, (1, 9)), 4)
    assert seen == [9, 1, 1, 1]


@pytest.mark.few_cases("dense")
def test_sampling_follows_seed_top_k_and_temperature(model):
    prompt = torch.randint(256, (1, 5))

    def sample(**options):
        return generate(model, prompt, 8, **options)

    assert torch.equal(sample(seed=3), sample(seed=3))
    assert len({tuple(sample(seed=s, temperature=3.0)[0].tolist()) for s in range(4)}) > 1
    for options in ({"top_k": 1}, {"temperature": 1e-40}, {"temperature": 5e-324}):
        assert torch.equal(sample(seed=5, **options), sample(temperature=0))
    for seed in range(4):
        everything = torch.cat((prompt, sample(seed=seed, top_k=3, temperature=50.0)), 1)
        top = model(everything)[:, 4:-1].topk(3).indices
        assert (top == everything[:, 5:, None]).any(-1).all()


def test_generation_stops_when_every_sequence_has_ended(model, monkeypatch):
    fixed = torch.tensor([[1, 2, 9, 4, 5], [3, 9, 6, 7, 8]])
    calls = iter(fixed.T)
    monkeypatch.setattr("nsa_models.lm.generate._sample", lambda *_: next(calls))
    assert generate(model, fixed[:, :1], 5, end=9).tolist() == [[1, 2, 9], [3, 9, 9]]
    assert generate(model, fixed[:, :1], 0).shape == (2, 0)


def test_the_error_names_every_wrong_argument(model):
    with pytest.raises(InvalidInput) as caught:
        generate(model, torch.zeros(1, 0, dtype=torch.long), -1, temperature=-2.0, top_k=0)
    for text in (r"prompt must be [B, S]", "max_new_tokens must", "temperature must", "top_k must"):
        assert text in str(caught.value)


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
    masses, shares = [], []
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
                shares.append(inside.double().mean())
    result = selected_mass(model, tokens, bounds, rows=1000)
    assert len(result) == 2
    assert result[0].selected == pytest.approx(torch.stack(masses).mean().item(), abs=1e-5)
    assert result[0].keys == pytest.approx(torch.stack(shares).mean().item(), abs=1e-5)
    assert selected_mass(model, tokens[:30], rows=5)[1].selected < 1


def test_selected_mass_needs_nsa_and_a_long_document(config):
    with pytest.raises(InvalidInput, match="longer than num_selected_blocks blocks, 16 tokens"):
        selected_mass(LanguageModel(config), torch.zeros(16, dtype=torch.long))
    with pytest.raises(InvalidInput, match="attention 'dense' selects no blocks"):
        selected_mass(
            LanguageModel(dataclasses.replace(config, attention="dense")),
            torch.zeros(40, dtype=torch.long),
        )

"""The language model: sizes, packing, causality, recomputation, and dense attention."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from nsa_core import InvalidInput, NSAConfig
from nsa_core.errors import NSAError
from nsa_core.layer.rope import rope_table, rotate
from nsa_models.lm import model as model_module
from nsa_models.lm.config import SIZES, LMConfig, size
from nsa_models.lm.dense import DenseAttention
from nsa_models.lm.model import IGNORED, LanguageModel, parameter_count


def test_the_error_names_every_wrong_field(config):
    with pytest.raises(InvalidInput) as caught:
        LMConfig(config.layer, 0, vocab_size=1, mlp_dim=-3, attention="sparse")
    for text in (
        "n_layers must be",
        "got 0",
        "vocab_size",
        "got 1",
        "mlp_dim",
        "got -3",
        "nsa, dense, got 'sparse'",
    ):
        assert text in str(caught.value)
    with pytest.raises(InvalidInput, match="layer must be an NSAConfig, got dict"):
        LMConfig({}, 2)
    with pytest.raises(InvalidInput, match="one of tiny, toy, m7c_125m, got 'huge'"):
        size("huge")


def test_the_size_m7c_125m_is_that_of_the_reports():
    large = SIZES["m7c_125m"]
    layer = NSAConfig(dim=768, n_heads=12, n_kv_heads=2, head_dim=64)
    assert (large.layer, large.n_layers, large.mlp_dim) == (layer, 12, 2048)
    assert (layer.v_dim, layer.geometry) == (
        64,
        NSAConfig(dim=64, n_heads=1, n_kv_heads=1).geometry,
    )
    with torch.device("meta"):
        assert (
            parameter_count(LanguageModel(dataclasses.replace(large, attention="dense")))
            == 73_353_984
        )
    toy = SIZES["toy"]
    assert (toy.layer.dim, toy.n_layers) == (128, 1)


def test_an_untrained_model_predicts_uniformly(config, attention):
    model = LanguageModel(dataclasses.replace(config, attention=attention))
    tokens = torch.randint(256, (2, 40))
    assert abs(model(tokens, targets=tokens.roll(-1, 1)).item() / 80 - math.log(256)) < 0.1


def test_dense_attention_equals_its_formula(config):
    layer = dataclasses.replace(config.layer, qk_norm=True)
    attn, x = DenseAttention(layer).double(), torch.randn(2, 13, 24, dtype=torch.float64)
    q, k, v = attn.qkv(x).split([32, 16, 12], -1)
    q, k, v = q.unflatten(-1, (4, 8)), k.unflatten(-1, (2, 8)), v.unflatten(-1, (2, 6))
    table = rope_table(torch.arange(13), 8, 10000.0, torch.float64)
    q, k = (rotate(t / (t.square().mean(-1, keepdim=True) + 1e-6).sqrt(), table) for t in (q, k))
    k, v = (t.repeat_interleave(2, 2) for t in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) / 8**0.5
    p = scores.masked_fill(torch.ones(13, 13).triu(1).bool(), -torch.inf).softmax(-1)
    expected = attn.out(torch.einsum("bhts,bshd->bthd", p, v).flatten(-2))
    torch.testing.assert_close(attn(x), expected)


def test_packed_forward_equals_separate_documents(config, attention):
    model = LanguageModel(dataclasses.replace(config, attention=attention)).double()
    lengths = [1, 17, 0, 40, 6, 0]
    tokens = torch.randint(256, (sum(lengths),))
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    packed = model(tokens, bounds, 40)
    separate = torch.cat([model(part[None])[0] for part in tokens.split(lengths) if len(part)])
    torch.testing.assert_close(packed, separate)
    weights = list(model.parameters())
    found, expected = (torch.autograd.grad(x.square().sum(), weights) for x in (packed, separate))
    torch.testing.assert_close(found, expected)


def test_logits_do_not_depend_on_future_tokens(config, attention):
    model = LanguageModel(dataclasses.replace(config, attention=attention)).double()
    tokens = torch.randint(256, (1, 50))
    other = torch.cat((tokens[:, :33], torch.randint(256, (1, 17))), 1)
    assert torch.equal(model(tokens)[:, :33], model(other)[:, :33])
    assert not torch.equal(model(tokens)[:, 33:], model(other)[:, 33:])


def test_every_parameter_gets_a_gradient_in_the_first_step(config, attention):
    model = LanguageModel(dataclasses.replace(config, attention=attention)).double()
    tokens = torch.randint(256, (2, 44))
    model(tokens, targets=tokens.roll(-1, 1)).backward()
    without_gradient = {
        n: p.grad is None or not float(p.grad.norm()) > 1e-6 for n, p in model.named_parameters()
    }
    assert not any(without_gradient.values()), without_gradient


def gradients(model, tokens, targets):
    model.zero_grad()
    loss = model(tokens, targets=targets)
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters()]


def test_recomputation_gives_equal_bits(config):
    model, tokens = LanguageModel(config), torch.randint(256, (2, 40))
    before, expected = gradients(model, tokens, tokens)
    calls = []
    model.blocks[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    model.recompute = True
    after, recomputed = gradients(model, tokens, tokens)
    assert len(calls) == 2
    assert torch.equal(before, after)
    assert all(map(torch.equal, expected, recomputed))


def test_the_loss_in_parts_equals_the_loss(config, monkeypatch):
    model = LanguageModel(config).double()
    tokens = torch.randint(256, (3, 20))
    targets = tokens.masked_fill(torch.rand(3, 20) < 0.3, IGNORED)
    loss, gradients_at_once = gradients(model, tokens, targets)
    expected = F.cross_entropy(
        model(tokens).flatten(0, 1).float(), targets.flatten(), reduction="sum"
    )
    torch.testing.assert_close(loss, expected.detach())
    part_sizes = []
    monkeypatch.setattr(model_module, "_LOGITS_AT_ONCE", 7 * 256)
    monkeypatch.setattr(
        model_module,
        "_summed_loss",
        lambda x, *rest, of=model_module._summed_loss: part_sizes.append(len(x)) or of(x, *rest),
    )
    loss_in_parts, gradients_in_parts = gradients(model, tokens, targets)
    assert max(part_sizes) == 7
    torch.testing.assert_close(loss, loss_in_parts)
    for one, other in zip(gradients_at_once, gradients_in_parts):
        torch.testing.assert_close(one, other)


def test_tokens_and_targets_of_wrong_shapes_are_refused(config):
    model = LanguageModel(config)
    with pytest.raises(
        InvalidInput, match=r"tokens must be \[B, S\], or \[T\] with cu_seqlens; got \[8\]"
    ):
        model(torch.zeros(8, dtype=torch.long))
    with pytest.raises(
        InvalidInput, match=r"targets must have the shape of tokens, \[1, 8\], got \[1, 7\]"
    ):
        model(torch.zeros(1, 8, dtype=torch.long), targets=torch.zeros(1, 7, dtype=torch.long))


def test_an_error_inside_a_layer_names_its_number(config):
    model = LanguageModel(config)
    model.blocks[1].attn.check = True
    with torch.no_grad():
        model.blocks[1].attn.qkv.weight.fill_(torch.nan)
    with pytest.raises(NSAError, match="layer 1, branch"):
        model(torch.zeros(1, 8, dtype=torch.long))

"""from_dense: what a dense model hands on, and what it is told when it does not fit."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from nsa_core import InvalidInput
from nsa_models.lm import checkpoint
from nsa_models.lm.model import LanguageModel
from nsa_models.lm.start import from_dense, read_dense


@pytest.fixture
def dense(config) -> LanguageModel:
    return LanguageModel(dataclasses.replace(config, attention="dense"))


def llama(dense):
    """The same weights under the names of Hugging Face's Llama."""
    found, layer = {}, dense.config.layer
    names = {"embed": "model.embed_tokens", "norm": "model.norm"}
    inside = {
        "attn_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "attn.out": "self_attn.o_proj",
    }
    inside |= {"mlp.down": "mlp.down_proj"}
    for name, tensor in dense.state_dict().items():
        stem = name.removesuffix(".weight")
        if stem in names:
            found[f"{names[stem]}.weight"] = tensor
            continue
        _, number, part = stem.split(".", 2)
        parts = {"attn.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]}
        parts |= {"mlp.up": ["mlp.gate_proj", "mlp.up_proj"]}
        widths = (
            [32, layer.n_kv_heads * layer.qk_dim, layer.n_kv_heads * layer.v_dim]
            if "qkv" in part
            else [32, 32]
        )
        pieces = tensor.split(widths) if part in parts else [tensor]
        for theirs, piece in zip(parts.get(part, [inside.get(part)]), pieces):
            found[f"model.layers.{number}.{theirs}.weight"] = piece
    return found


@pytest.mark.parametrize("kind", ["model", "state", "llama", "llama with its head"])
def test_what_a_dense_model_hands_on(dense, config, kind):
    given = {"model": dense, "state": dense.state_dict(), "llama": llama(dense)}.get(kind)
    given = (
        {**llama(dense), "lm_head.weight": dense.embed.weight.detach()} if given is None else given
    )
    made = from_dense(given, config)
    old, new = dense.state_dict(), made.state_dict()
    assert made.config.attention == "nsa"
    for name in new.keys() & old.keys() - {n for n in old if "qkv" in n}:
        assert torch.equal(new[name], old[name]), name
    for number in range(2):
        q, k, v = old[f"blocks.{number}.attn.qkv.weight"].split([32, 16, 12])
        assert torch.equal(
            new[f"blocks.{number}.attn.qkv.weight"], torch.cat([q, k, k, k, v, v, v])
        )
    fresh = {n.split("attn.")[1].split(".")[0] for n in new.keys() - old.keys()}
    assert fresh == {"phi_k", "phi_v", "gate"}
    made(torch.zeros(1, 20, dtype=torch.long))


def test_one_pair_of_keys_and_values_gets_one_copy(dense, config):
    layer = dataclasses.replace(config.layer, shared_kv=True)
    made = from_dense(dense, dataclasses.replace(config, layer=layer))
    assert torch.equal(made.blocks[0].attn.qkv.weight, dense.blocks[0].attn.qkv.weight)


def test_within_the_window_it_is_the_dense_model_but_for_its_gates(dense, config):
    """With every key in the window and the gates (0, 0, 1) both models compute the same."""
    layer = dataclasses.replace(config.layer, window_size=64)
    made = from_dense(dense, dataclasses.replace(config, layer=layer)).double()
    for block in made.blocks:
        torch.nn.init.zeros_(block.attn.gate.weight)
        block.attn.gate.bias.data = torch.tensor([-800.0, -800.0, 800.0] * 4, dtype=torch.float64)
    tokens = torch.randint(256, (2, 30))
    torch.testing.assert_close(made(tokens), dense.double()(tokens))


def test_what_does_not_fit_is_named(dense, config):
    state = dense.state_dict()
    state["blocks.7.norm.weight"] = state.pop("norm.weight")
    state["embed.weight"] = state["embed.weight"][:100]
    with pytest.raises(InvalidInput) as caught:
        from_dense(state, config)
    for said in (
        "norm.weight is missing",
        "blocks.7.norm.weight fits nowhere",
        "must be [256, 24], got [100, 24]",
    ):
        assert said in str(caught.value)
    untied = {**llama(dense), "lm_head.weight": torch.zeros(256, 24)}
    with pytest.raises(InvalidInput, match="only tied embeddings"):
        from_dense(untied, config)


def test_dense_weights_are_read_from_a_run_its_file_or_a_llamas(dense, config, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    state = dense.state_dict()
    run, theirs = tmp_path / checkpoint.FILE, tmp_path / "theirs.safetensors"
    checkpoint.write(
        run, {f"model.{name}": tensor for name, tensor in state.items()}, dense.config, {}, None
    )
    safetensors.save_file(
        {name: tensor.contiguous().clone() for name, tensor in llama(dense).items()}, theirs
    )
    for path in (tmp_path, run, theirs):
        found = read_dense(path)
        assert found.keys() == (llama(dense) if path == theirs else state).keys()
        for name, parameter in from_dense(found, config).blocks[0].mlp.named_parameters():
            assert torch.equal(parameter, dense.blocks[0].mlp.get_parameter(name))
    theirs.write_bytes(theirs.read_bytes()[:-8])
    with pytest.raises(InvalidInput, match=r"theirs\.safetensors cannot be read as safetensors"):
        read_dense(theirs)
    checkpoint.write(run, {}, config, {}, None)
    with pytest.raises(InvalidInput, match="is no dense model; its attention is nsa"):
        read_dense(run)

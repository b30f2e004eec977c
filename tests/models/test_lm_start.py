"""from_dense: copied weights, and errors for weights that do not fit."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from nsa_core import InvalidInput
from nsa_models.lm.model import LanguageModel
from nsa_models.lm.start import from_dense, read_dense


@pytest.fixture
def dense(config) -> LanguageModel:
    return LanguageModel(dataclasses.replace(config, attention="dense"))


def llama(dense):
    """Return the same weights under the names of a Hugging Face Llama."""
    renamed, layer = {}, dense.config.layer
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
            renamed[f"{names[stem]}.weight"] = tensor
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
            renamed[f"model.layers.{number}.{theirs}.weight"] = piece
    return renamed


@pytest.mark.parametrize("kind", ["model", "state", "llama", "llama with its head"])
def test_from_dense_copies_all_dense_weights(dense, config, kind):
    dense_weights = {"model": dense, "state": dense.state_dict(), "llama": llama(dense)}.get(kind)
    dense_weights = (
        {**llama(dense), "lm_head.weight": dense.embed.weight.detach()}
        if dense_weights is None
        else dense_weights
    )
    model = from_dense(dense_weights, config)
    old, new = dense.state_dict(), model.state_dict()
    assert model.config.attention == "nsa"
    for name in new.keys() & old.keys() - {n for n in old if "qkv" in n}:
        assert torch.equal(new[name], old[name]), name
    for number in range(2):
        q, k, v = old[f"blocks.{number}.attn.qkv.weight"].split([32, 16, 12])
        assert torch.equal(
            new[f"blocks.{number}.attn.qkv.weight"], torch.cat([q, k, k, k, v, v, v])
        )
    fresh = {n.split("attn.")[1].split(".")[0] for n in new.keys() - old.keys()}
    assert fresh == {"phi_k", "phi_v", "gate"}
    model(torch.zeros(1, 20, dtype=torch.long))


def test_shared_kv_gets_one_copy_of_keys_and_values(dense, config):
    layer = dataclasses.replace(config.layer, shared_kv=True)
    model = from_dense(dense, dataclasses.replace(config, layer=layer))
    assert torch.equal(model.blocks[0].attn.qkv.weight, dense.blocks[0].attn.qkv.weight)


def test_with_the_window_gate_alone_it_equals_the_dense_model(dense, config):
    """Every key is in the window and the gates are (0, 0, 1), so both models agree."""
    layer = dataclasses.replace(config.layer, window_size=64)
    model = from_dense(dense, dataclasses.replace(config, layer=layer)).double()
    for block in model.blocks:
        torch.nn.init.zeros_(block.attn.gate.weight)
        block.attn.gate.bias.data = torch.tensor([-800.0, -800.0, 800.0] * 4, dtype=torch.float64)
    tokens = torch.randint(256, (2, 30))
    torch.testing.assert_close(model(tokens), dense.double()(tokens))


def test_the_error_names_every_tensor_that_does_not_fit(dense, config):
    state = dense.state_dict()
    state["blocks.7.norm.weight"] = state.pop("norm.weight")
    state["embed.weight"] = state["embed.weight"][:100]
    with pytest.raises(InvalidInput) as caught:
        from_dense(state, config)
    for text in (
        "norm.weight is missing",
        "blocks.7.norm.weight is not a parameter of the model",
        "must be [256, 24], got [100, 24]",
    ):
        assert text in str(caught.value)
    untied = {**llama(dense), "lm_head.weight": torch.zeros(256, 24)}
    with pytest.raises(InvalidInput, match="only tied embeddings"):
        from_dense(untied, config)


def test_read_dense_reads_runs_checkpoints_and_llama_files(
    dense, config, tmp_path, write_checkpoint
):
    safetensors = pytest.importorskip("safetensors.torch")
    state = dense.state_dict()
    run, theirs = write_checkpoint(dense), tmp_path / "theirs.safetensors"
    safetensors.save_file(
        {name: tensor.contiguous().clone() for name, tensor in llama(dense).items()}, theirs
    )
    for path in (tmp_path, run, theirs):
        weights = read_dense(path)
        assert weights.keys() == (llama(dense) if path == theirs else state).keys()
        for name, parameter in from_dense(weights, config).blocks[0].mlp.named_parameters():
            assert torch.equal(parameter, dense.blocks[0].mlp.get_parameter(name))
    theirs.write_bytes(theirs.read_bytes()[:-8])
    with pytest.raises(InvalidInput, match=r"theirs\.safetensors cannot be read as safetensors"):
        read_dense(theirs)
    write_checkpoint(LanguageModel(config))
    with pytest.raises(InvalidInput, match="is not a dense model; its attention is nsa"):
        read_dense(run)

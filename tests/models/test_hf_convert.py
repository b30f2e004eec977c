"""Conversion of dense models of transformers, and the first training stage."""

from __future__ import annotations

import copy
import json
from statistics import fmean

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, GPT2Config

import nsa_models.hf as hf
from hf_models import DENSE_CONFIGS, NSA, NSA_MODELS, SIZES, SIZES_OF_KIND, nsa_model, randomize
from nsa_core import InvalidInput, NSAConfig
from nsa_core.config import COMPRESS_KINDS
from nsa_core.layer.phi.kinds import mean_compress

ROTARY = {
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "linear": {"factor": 4.0},
    "proportional": {"partial_rotary_factor": 0.5},
}
# Every key is in the window, so that NSA with the gates of the window only is dense attention.
DENSE_WINDOW = NSA | {"window_size": 150}


def dense_model(kind="llama", dtype=torch.float32, **changes):
    model = AutoModelForCausalLM.from_config(
        DENSE_CONFIGS[kind](**{**SIZES, **SIZES_OF_KIND[kind], **changes})
    )
    randomize(model)
    return model.to(dtype).eval()


@torch.no_grad()
def only_window(model):
    """Set the gates to 0, 0 and 1."""
    for layer in model.model.layers:
        gate = layer.self_attn.gate
        gate.weight.zero_()
        gate.bias.view(-1, 3).copy_(torch.tensor([-60.0, -60.0, 60.0]))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": None}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 16, "attention_bias": True, "rms_norm_eps": 1e-2}),
        *[
            ("llama", {"rope_parameters": {"rope_type": name, "rope_theta": 500.0, **values}})
            for name, values in ROTARY.items()
        ],
    ],
)
def test_a_converted_model_whose_window_sees_all_keys_is_the_dense_model(kind, changes):
    dense = dense_model(kind, torch.float64, **changes)
    ids = torch.randint(1, 61, (2, 150))
    expected = dense(ids).logits
    model, carried, new = hf.convert(dense, DENSE_WINDOW)
    assert carried == [name for name, _ in dense.named_parameters(remove_duplicate=False)]
    assert new
    assert all(any(x in name for x in ("phi_k", "phi_v", "gate")) for name in new)
    assert (model(ids).logits - expected).abs().max() > 1e-3
    only_window(model)
    # transformers computes the angles in single precision
    assert torch.allclose(model(ids).logits, expected, rtol=0, atol=2e-6)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(dense(ids).logits, expected)
    assert (model.dtype, model.training) == (torch.float64, False)


@pytest.mark.parametrize("kind", COMPRESS_KINDS)
def test_phi_of_a_converted_model_is_the_mean_of_a_block(kind):
    dense = dense_model("qwen3", torch.float64)
    model, _, new = hf.convert(dense, NSA | {"compress": kind}, nsa_layers=[1])
    attention = model.model.layers[1].self_attn
    k, v = (torch.randn(2, 50, 2, phi.width).double() for phi in (attention.phi_k, attention.phi_v))
    compressed = attention.compressed(k, v, None)
    expected = mean_compress(v, attention.config.geometry)
    torch.testing.assert_close(compressed[1], expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(attention.phi_k(k), mean_compress(k, attention.config.geometry))
    again = hf.convert(dense, NSA | {"compress": kind}, nsa_layers=[1]).model.state_dict()
    assert all(torch.equal(again[name], model.get_parameter(name)) for name in new)


def test_branches_share_keys_and_compress_by_means_unless_the_caller_says_otherwise():
    dense = dense_model()
    default, stated = hf.convert(dense), hf.convert(dense, {"shared_kv": False})
    configs = [c.model.model.layers[0].self_attn.config for c in (default, stated)]
    assert [(c.shared_kv, c.compress) for c in configs] == [(True, "mean"), (False, "mean")]
    assert all("gate" in name for name in default.new)
    total, own = (sum(p.numel() for p in m.parameters()) for m in (default.model, dense))
    assert total - own == sum(default.model.get_parameter(name).numel() for name in default.new)


@torch.no_grad()
def test_a_converted_model_is_near_the_dense_model_while_all_blocks_are_selected():
    dense = dense_model(dtype=torch.float64)
    ids = torch.randint(1, 61, (4, 48))
    expected = dense(ids).logits
    model = hf.convert(dense, NSA | {"compress": "mlp"}).model
    error = (model(ids).logits - expected).norm() / expected.norm()
    for layer in model.model.layers:
        layer.self_attn.phi_k.reset_parameters()
        layer.self_attn.phi_v.reset_parameters()
        layer.self_attn.gate.reset_parameters()
    random = (model(ids).logits - expected).norm() / expected.norm()
    assert error < 0.3 * random


def test_a_sharded_checkpoint_is_converted_with_its_tokenizer(tmp_path):
    source, target = tmp_path / "dense", tmp_path / "nsa"
    dense = dense_model("qwen2", torch.bfloat16)
    dense.generation_config.max_new_tokens = 7
    dense.save_pretrained(source, max_shard_size="10KB")
    assert len(list(source.glob("*.safetensors"))) > 2
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, "a")).to_str()
    (source / "tokenizer.json").write_text(tokenizer)
    converted = hf.convert_checkpoint(source, target, NSA, backends="sdpa")
    again = AutoModelForCausalLM.from_pretrained(target)
    pairs = zip(again.state_dict().items(), converted.model.state_dict().values(), strict=True)
    assert all(torch.equal(tensor, saved) for (_, tensor), saved in pairs)
    assert again.dtype == torch.bfloat16
    assert again.config.nsa_backends == "sdpa"
    assert again.generation_config.max_new_tokens == 7
    assert (target / "tokenizer.json").read_text() == tokenizer
    with pytest.raises(InvalidInput, match=r"is not empty: it holds .*; give a new folder"):
        hf.convert_checkpoint(source, target, NSA)


def change_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: change_config(f, attention_dropout=0.1), "attention_dropout = 0.1"),
        (
            lambda f: change_config(f, model_type="nsa_llama"),
            "must be one of llama, qwen2, qwen3, got 'nsa_llama': the model has NSA already$",
        ),
        (
            lambda f: change_config(
                f, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
            ),
            "rope_parameters = .*'dynamic'.* fixed frequencies: those of default, linear, llama3,",
        ),
    ],
)
def test_a_checkpoint_that_cannot_be_carried_over_is_refused(damage, message, tmp_path):
    dense_model().save_pretrained(tmp_path / "dense")
    damage(tmp_path / "dense")
    with pytest.raises(InvalidInput, match=message):
        hf.convert_checkpoint(tmp_path / "dense", tmp_path / "nsa")
    assert not (tmp_path / "nsa").exists()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "frozen",
    [(), ("embed_tokens",), ("q_proj", "norm"), ("q_proj", "k_proj", "v_proj"), ("",)],
    ids="-".join,
)
def test_frozen_parameters_stay_frozen_and_nothing_is_shared(tied, frozen):
    dense = dense_model("qwen2", tie_word_embeddings=tied)
    for name, parameter in dense.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    dense.generation_config.max_new_tokens = 7
    values = {name: p.clone() for name, p in dense.state_dict().items()}
    with torch.no_grad():
        model, _, new = hf.convert(dense)
    is_joint = all(f"{name}_proj" in frozen for name in "qkv") or frozen == ("",)
    for name, parameter in model.named_parameters():
        if name in new:
            expected = False
        elif ".qkv." in name:
            expected = is_joint
        else:
            expected = any(part in name for part in frozen)
        assert parameter.requires_grad is not expected, name
        parameter.data.zero_()
    assert model.generation_config.max_new_tokens == 7
    model.generation_config.max_new_tokens = 99
    model.config.rope_parameters["rope_theta"] = 3.0
    assert dense.generation_config.max_new_tokens == 7
    assert dense.config.rope_parameters["rope_theta"] != 3.0
    assert all(torch.equal(p, values[name]) for name, p in dense.state_dict().items())


def test_fields_of_nsa_must_be_a_dict():
    layer = NSAConfig(dim=32, n_heads=4, n_kv_heads=2)
    message = r"nsa must be a dict with fields of NSAConfig, .* got "
    with pytest.raises(InvalidInput, match=message + r"NSAConfig\("):
        hf.convert(dense_model(), layer)
    with pytest.raises(InvalidInput, match=message + "'window_size'"):
        nsa_model(nsa="window_size")


def test_a_wrong_field_is_blamed_on_the_argument_or_on_the_model(tmp_path):
    dense = dense_model()
    dense.save_pretrained(tmp_path / "dense")
    calls = (
        lambda nsa: hf.convert(dense, nsa),
        lambda nsa: hf.convert_checkpoint(tmp_path / "dense", tmp_path / "nsa", nsa),
    )
    for call in calls:
        for nsa, message in (
            ({"windo": 3}, "NSAConfig has no field 'windo'"),
            ({"window_size": 0}, "window_size must be an integer >= 1, got 0"),
            ({"window_size": 2**20 + 1}, "window_size must be <= 1,048,576"),
            ({"head_dim": 8}, "head_dim must not be set"),
        ):
            with pytest.raises(InvalidInput, match=f"^nsa: {message}"):
                call(nsa)
    dense.config.attention_dropout = 0.1
    change_config(tmp_path / "dense", nsa={"window_size": 0})
    messages = ("^NSA cannot express", "^.*/config.json: window_size must")
    for call, message in zip(calls, messages):
        with pytest.raises(InvalidInput, match=message):
            call({"windo": 3})


def test_models_of_other_kinds_are_refused():
    adapters = get_peft_model(dense_model(), LoraConfig(target_modules=["q_proj"], r=2))
    other = AutoModelForCausalLM.from_config(
        GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9)
    )
    quantised = dense_model()
    quantised.config.quantization_config = {"quant_method": "bitsandbytes"}
    extra = dense_model()
    extra.model.layers[0].self_attn.sinks = torch.nn.Parameter(torch.zeros(4))
    for model, message in (
        (adapters, r"got PeftModel; merge the adapters first"),
        (other, "model_type must be one of llama, qwen2, qwen3, got 'gpt2'"),
        (nsa_model(), "got 'nsa_llama': the model has NSA already"),
        (quantised, "quantization_config"),
        (extra, r"0.self_attn.sinks has no place in the model with NSA"),
        (dense_model().to("meta"), "weights on the meta device, for example because device_map"),
    ):
        with pytest.raises(InvalidInput, match=message):
            hf.convert(model)


def test_the_first_stage_trains_only_new_parameters_and_measures_the_mass():
    torch.manual_seed(0)
    model, _, new = hf.convert(dense_model("qwen3"), NSA | {"compress": "mlp"})
    model.model.norm.weight.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    text = torch.randint(1, 61, (20,)).repeat(6)
    stages = hf.train_new_parameters(
        model, [text.view(1, -1)] * 6, learning_rate=0.05, measure=text, measure_every=4
    )
    progress = list(stages)
    assert [entry.step for entry in progress] == [0, 1, 2, 3, 4, 5, 6, 6]
    measured = [entry.step for entry in progress if entry.selected_mass is not None]
    assert measured == [0, 4, 6]
    assert progress[-1].loss < progress[1].loss
    for entry in progress:
        if entry.selected_mass is not None:
            assert 0 < entry.random_mass < entry.selected_mass + 0.2 < 1.2
    masses = hf.selected_mass(model, text)
    assert progress[-1].selected_mass == pytest.approx(fmean(m.selected for m in masses))
    assert progress[-1].random_mass == pytest.approx(fmean(m.random for m in masses))
    assert fmean(m.keys for m in masses) != pytest.approx(fmean(m.random for m in masses))
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed
    assert changed <= set(new)
    assert any("phi_k" in name for name in changed)
    graded = {name for name, p in model.named_parameters() if p.grad is not None}
    assert graded <= set(new)
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert frozen == ["model.norm.weight"]


def test_a_dense_checkpoint_is_no_nsa_model(tmp_path):
    """transformers would load all but the attention, and leave that random."""
    dense_model("qwen3").save_pretrained(tmp_path)
    for kind in ("qwen3", "llama"):
        message = f"must be one of nsa_{kind}, got 'qwen3': .*; run nsa convert first"
        with pytest.raises(InvalidInput, match=message):
            NSA_MODELS[kind].from_pretrained(tmp_path)
    nsa_model("qwen2").save_pretrained(tmp_path)
    with pytest.raises(InvalidInput, match=r"must be one of nsa_llama, got 'nsa_qwen2'$"):
        NSA_MODELS["llama"].from_pretrained(tmp_path)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_tokens_may_be_any_integers(dtype):
    model, text = hf.convert(dense_model(), NSA).model, torch.randint(1, 61, (60,))
    found = hf.selected_mass(model, text.to(dtype))
    assert found == hf.selected_mass(model, text)
    (progress,) = hf.train_new_parameters(model, [text[None].to(dtype)])
    assert progress.loss > 0


@pytest.mark.parametrize(
    ("batch", "passed"),
    [
        (torch.ones(2, 1, dtype=torch.long), r"\[2, 1\] int64"),
        (torch.ones(60, dtype=torch.long), r"\[60\] int64"),
        (torch.ones(2, 60), r"\[2, 60\] float32"),
        (torch.ones(2, 60).bool(), r"\[2, 60\] bool"),
        ({"input_ids": [1, 2]}, "dict"),
    ],
)
def test_a_batch_without_next_tokens_changes_nothing(batch, passed):
    model = hf.convert(dense_model(), NSA).model
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(InvalidInput, match=rf"batch 1 of batches must be .* got {passed}$"):
        list(hf.train_new_parameters(model, [batch]))
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    with pytest.raises(InvalidInput, match=r"integer tensor \[T\] with T >= 1, got list"):
        hf.selected_mass(model, [1, 2])


@torch.no_grad()
def test_selected_mass_is_the_softmax_over_the_selected_blocks():
    """The mass of a layer is that of softmax(q k_sel) over the selected blocks."""
    model = nsa_model()
    text = torch.randint(1, 61, (64,))
    first, _ = hf.selected_mass(model, text, rows=4)
    attn = model.model.layers[0].self_attn
    x = model.model.layers[0].input_layernorm(model.model.embed_tokens(text))[None]
    projected = attn.project(x)
    scores = torch.einsum("rghd,tgd->ghrt", projected.q[0].unflatten(1, (2, 2)), projected.k[1][0])
    scores = scores * attn.config.softmax_scale
    p = scores.masked_fill(torch.ones(64, 64).triu(1).bool(), -torch.inf).softmax(-1).mean(1)
    plan = attn.resolve_plan(x, projected.q, False)
    _, lse = plan.cmp(projected.q, projected.k_cmp, projected.v_cmp)
    blocks = plan.select(projected.q, projected.k_cmp, lse)[0]
    rows = torch.linspace(48, 63, 4).long()
    expected = [
        sum(p[g, r, b * 16 : b * 16 + 16].sum() for b in blocks[r, g].tolist() if b >= 0)
        for r in rows.tolist()
        for g in range(2)
    ]
    assert first.selected == pytest.approx(float(torch.stack(expected).mean()), abs=1e-5)
    with pytest.raises(InvalidInput, match="longer than num_selected_blocks blocks, 48 tokens"):
        hf.selected_mass(model, text[:48])
    with pytest.raises(InvalidInput, match="must have NSA layers, got LlamaForCausalLM"):
        hf.selected_mass(dense_model(), text)

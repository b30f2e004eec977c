"""NSA models of transformers: other heads, adapters of peft and quantised projections."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

from hf_models import NSA_MODELS, nsa_model, padded_batch
from test_quantised_projections import Int8Linear

NEW = ("phi_k", "phi_v", "gate")


@pytest.mark.parametrize("kind", NSA_MODELS)
def test_auto_classes_load_the_decoder_and_a_classifier(kind, tmp_path):
    model = nsa_model(kind, torch.float64)
    model.save_pretrained(tmp_path)
    ids, mask, prompts = padded_batch((50, 30), "right")
    decoder = AutoModel.from_pretrained(tmp_path)
    assert type(decoder) is type(model.model)
    hidden = decoder(ids, attention_mask=mask).last_hidden_state
    assert hidden.equal(model.model(ids, attention_mask=mask).last_hidden_state)
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    assert type(classifier).__name__ == type(model).__name__.replace(
        "CausalLM", "SequenceClassification"
    )
    expected = torch.stack([classifier.score(model.model(p)[0])[0, -1] for p in prompts])
    output = classifier(ids, attention_mask=mask, labels=torch.tensor([2, 0]))
    torch.testing.assert_close(output.logits, expected)
    output.loss.backward()
    assert all(p.grad is not None for p in classifier.parameters())
    classifier.save_pretrained(tmp_path / "classifier")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "classifier")
    assert again(ids, attention_mask=mask).logits.equal(output.logits)


def test_a_folder_holds_no_code(tmp_path):
    """TRL reads auto_map where transformers has no class of the name in `architectures`."""
    nsa_model().save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).auto_map == {}
    assert "auto_map" not in json.loads((tmp_path / "config.json").read_text())


@pytest.mark.parametrize("kind", NSA_MODELS)
def test_adapters_have_default_targets(kind):
    """They also name the projections of dense layers, which a model may have beside NSA."""
    for config, adapted in ((LoraConfig(r=2), {"qkv"}), (IA3Config(), {"qkv", "down_proj"})):
        model = get_peft_model(nsa_model(kind), config)
        ids = torch.randint(1, 61, (1, 40))
        model(ids, labels=ids).loss.backward()
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        parts = {name.split(".lora_")[0].split(".ia3_")[0].split(".")[-1] for name in trained}
        assert parts == adapted
        assert all(p.grad is not None for p in trained.values())
        assert "q_proj" in config.target_modules or "k_proj" in config.target_modules


def _step(model: Any, ids: torch.Tensor) -> set[str]:
    """Train twice, so that the factor B of LoRA is not 0, and return the changed parameters."""
    plain = {name: p for name, p in model.named_parameters() if type(p) is nn.Parameter}
    before = {name: p.detach().clone() for name, p in plain.items()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name for name, p in plain.items() if not torch.equal(p, before[name])}


@pytest.mark.parametrize("whole", [False, True], ids=["as they are", "whole"])
def test_all_linear_adapts_the_projections_and_leaves_phi_and_gate(whole):
    plain, ids = nsa_model("qwen2", torch.float64), torch.randint(1, 61, (2, 70))
    extra = {"modules_to_save": list(NEW)} if whole else {}
    config = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", **extra)
    model = get_peft_model(copy.deepcopy(plain), config, autocast_adapter_dtype=False)
    assert torch.equal(model(ids).logits, plain(ids).logits)
    changed = _step(model, ids)
    for part in ("qkv.lora_B", "out.lora_B", "down_proj.lora_B"):
        assert any(part in name for name in changed), part
    new = [name for name in changed if any(f".{part}." in name for part in NEW)]
    assert bool(new) is whole
    assert all("modules_to_save" in name for name in new)
    expected = model(ids).logits
    assert not torch.allclose(expected, plain(ids).logits)
    merged = model.merge_and_unload()
    assert [type(m) for m in merged.modules()] == [type(m) for m in plain.modules()]
    torch.testing.assert_close(merged(ids).logits, expected)


def _quantise(model: Any) -> Any:
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            model.set_submodule(name, Int8Linear(module))
    return model


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("prepared", [False, True], ids=["as loaded", "prepared"])
def test_adapters_above_a_quantised_base_train_and_generate(prepared, autocast):
    """fp32 adapters, phi and gate above integers and bfloat16 embeddings.

    ``prepared`` makes the embeddings fp32.
    """
    base, ids = _quantise(nsa_model("llama", torch.bfloat16)), torch.randint(1, 61, (2, 50))
    for layer in base.model.layers:
        for part in NEW:
            getattr(layer.self_attn, part).float()
    if prepared:
        base = prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
    model = get_peft_model(base, LoraConfig(r=2, target_modules="all-linear"))
    dtype = torch.float32 if prepared else torch.bfloat16
    context = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
    with context:
        changed = _step(model, ids)
        assert changed
        assert all("lora_" in name for name in changed)
        tokens = model.generate(input_ids=ids, max_new_tokens=4, do_sample=False)
        with torch.no_grad():
            logits = model(tokens).logits
    assert logits.dtype == (torch.bfloat16 if autocast else dtype)
    greedy = logits[:, 49:-1].argmax(-1)
    close = logits[:, 49:-1].gather(-1, tokens[:, 50:, None])[..., 0]
    best = logits[:, 49:-1].gather(-1, greedy[..., None])[..., 0]
    assert (best - close).max() < 0.05  # bfloat16: a step over a cache rounds differently


def _weights_of(layer: nn.Module, inputs: int) -> torch.Tensor:
    with torch.no_grad():
        return layer(torch.eye(inputs)).T.contiguous()


def _dequantised(model: Any) -> Any:
    """A copy with plain projections, which compute what the quantised ones compute."""
    plain = nsa_model("llama", hidden_size=64, intermediate_size=128)
    for name, module in plain.named_modules():
        other = model.get_submodule(name)
        if isinstance(module, nn.Linear):
            module.weight.data = _weights_of(other, module.in_features)
        else:
            for key, parameter in module.named_parameters(recurse=False):
                parameter.data = other.get_parameter(key).data
    return plain


def _bitsandbytes(**options: Any) -> Any:
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(**options)


def _torchao() -> Any:
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


QUANTISED: dict[str, tuple[Any, float]] = {  # and the error of activations in int8
    "8 bit": (lambda: _bitsandbytes(load_in_8bit=True), 0.05),
    "4 bit": (lambda: _bitsandbytes(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32), 1e-5),
    "torchao": (_torchao, 1e-5),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", QUANTISED)
def test_a_quantised_model_equals_its_dequantised_weights(kind, tmp_path):
    make, tolerance = QUANTISED[kind]
    nsa_model("llama", hidden_size=64, intermediate_size=128).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=make(), dtype=torch.float32
    )
    model.train()  # bitsandbytes packs the weights of a model in evaluation, without gradients
    quantised = {
        name.split(".")[-1]
        for name, module in model.named_modules()
        if hasattr(module, "weight") and type(module.weight) is not nn.Parameter
    }
    assert quantised == {"qkv", "out", "gate_proj", "up_proj", "down_proj"}
    ids, plain = torch.randint(1, 61, (2, 70)), _dequantised(model)
    with torch.no_grad():
        expected = plain(ids).logits
        assert (model(ids).logits - expected).norm() / expected.norm() < tolerance
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    changed = _step(adapted, ids)
    assert any("qkv.lora_A" in name for name in changed)
    assert all("lora_" in name for name in changed)
    assert adapted.eval().generate(input_ids=ids, max_new_tokens=4).shape == (2, 74)

"""NSA models of transformers: configurations, saving, padded and packed training, LoRA, Trainer."""

from __future__ import annotations

import importlib
import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, DataCollatorWithFlattening

import nsa_models.hf as hf
from hf_models import (
    DENSE_CONFIGS,
    NSA,
    NSA_CONFIGS,
    NSA_MODELS,
    SIZES,
    nsa_model,
    padded_batch,
    trained,
)
from nsa_core import BackendUnavailable, InvalidInput
from nsa_core.layer.module import NSAttention

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.few_cases
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", NSA_MODELS)
def test_a_saved_model_has_the_same_logits(kind, tied, tmp_path):
    # Qwen2 has biases of q, k and v only, whatever an attribute of its configuration says.
    extra = {"attention_bias": True} | ({} if kind == "qwen2" else {"head_dim": 16})
    model = nsa_model(kind, tie_word_embeddings=tied, rope_parameters=YARN, **extra)
    ids = torch.randint(1, 61, (2, 70))
    expected = model(ids).logits
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(config) is NSA_CONFIGS[kind]
    assert config.nsa == NSA
    assert type(again) is NSA_MODELS[kind]
    pairs = zip(again.state_dict().items(), model.state_dict().values(), strict=True)
    assert all(torch.equal(tensor, saved) for (_, tensor), saved in pairs)
    assert torch.allclose(again(ids).logits, expected, rtol=0, atol=1e-6)
    assert (again.lm_head.weight is again.model.embed_tokens.weight) is tied
    biases = {name.split(".")[-2] for name in again.state_dict() if name.endswith("bias")}
    assert biases & {"qkv", "out"} == ({"qkv"} if kind == "qwen2" else {"qkv", "out"})


@pytest.mark.parametrize("device_map", [{"": "cpu"}, "auto"], ids=["cpu", "auto"])
def test_dtype_and_device_arguments(device_map, tmp_path):
    saved = nsa_model(dtype=torch.bfloat16)
    saved.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, device_map=device_map
    )
    on_gpu = device_map == "auto" and torch.cuda.is_available()
    kinds = {(parameter.dtype, parameter.device.type) for parameter in model.parameters()}
    assert kinds == {(torch.bfloat16, "cuda" if on_gpu else "cpu")}
    ids = torch.randint(1, 61, (1, 40))
    logits = model(ids.to(model.device)).logits.cpu()
    assert torch.allclose(logits, saved(ids).logits, rtol=0, atol=0.02 if on_gpu else 0)
    assert model.generate(ids.to(model.device), max_new_tokens=3).shape == (1, 43)


def test_offloaded_layers_are_refused(tmp_path):
    nsa_model().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, device_map="auto", max_memory={"cpu": "60KB"}, offload_folder=tmp_path / "disk"
    )
    with pytest.raises(InvalidInput, match=r"are on the meta device, .* device_map offloads"):
        model(torch.ones(1, 40, dtype=torch.long))


def test_parameters_that_a_checkpoint_lacks_are_initialised_as_in_a_new_layer(tmp_path):
    """Models load on the meta device, where the layer's own initial values are lost."""
    model = nsa_model()
    tensors = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if "phi_k" not in name and "1.self_attn.gate" not in name
    }
    model.save_pretrained(tmp_path, state_dict=tensors)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, parameter in again.named_parameters():
        if name in tensors:
            assert torch.equal(parameter, tensors[name]), name
    first, second = (layer.self_attn for layer in again.model.layers)
    fresh = NSAttention(first.config)
    for attn, parts in ((first, ["phi_k"]), (second, ["phi_k", "gate"])):
        for part in parts:
            pairs = zip(
                attn.get_submodule(part).named_parameters(),
                fresh.get_submodule(part).parameters(),
                strict=True,
            )
            for (name, parameter), reference in pairs:
                assert parameter.isfinite().all(), name
                close = pytest.approx(reference.std().item(), rel=0.5, abs=1e-6)
                assert parameter.std().item() == close, name


@pytest.mark.parametrize("boundaries", ["cu_seq_lens_q", "position_ids"])
def test_packed_documents_do_not_see_each_other(boundaries):
    model = nsa_model("qwen3", torch.float64)
    documents = [torch.randint(1, 61, (n,)) for n in (40, 1, 70, 33)]
    collate = DataCollatorWithFlattening(
        return_flash_attn_kwargs=boundaries == "cu_seq_lens_q", return_tensors="pt"
    )
    batch = collate([{"input_ids": document.tolist()} for document in documents])
    assert ("cu_seq_lens_q" in batch) is (boundaries == "cu_seq_lens_q")
    logits = model(**batch).logits[0].split([len(document) for document in documents])
    for actual, document in zip(logits, documents):
        assert torch.allclose(actual, model(document[None]).logits[0], rtol=0, atol=1e-12)
    whole = model(batch["input_ids"]).logits[0]
    assert (whole[-1] - logits[-1][-1]).abs().max() > 1e-6


@pytest.mark.slow
def test_compiled_forward_and_backward_equal_the_eager_ones():
    model = nsa_model()
    compiled = torch.compile(model, backend="inductor")
    ids, mask, _ = padded_batch((75, 30))
    for arguments in ({"input_ids": ids}, {"input_ids": ids, "attention_mask": mask}):
        results = []
        for each in (model, compiled):
            logits = each(**arguments).logits
            loss = logits[mask.bool()].square().mean()
            results.append((logits, torch.autograd.grad(loss, list(model.parameters()))))
        (expected, gradients), (actual, compiled_gradients) = results
        assert torch.allclose(actual, expected, rtol=0, atol=1e-5)
        for (name, _), gradient, other in zip(
            model.named_parameters(), gradients, compiled_gradients, strict=True
        ):
            assert gradient.any(), name
            assert torch.allclose(other, gradient, rtol=1e-4, atol=1e-7), name


@pytest.mark.parametrize("padded", [False, True])
def test_one_compiled_graph_serves_all_batch_sizes_and_lengths(padded):
    torch.compiler.reset()  # other tests may have compiled this code as often as PyTorch allows
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model = nsa_model(num_hidden_layers=1)
    compiled = torch.compile(model, backend=backend, dynamic=True)
    for lengths in ((75, 30), (50, 61, 20)):
        ids, mask, _ = padded_batch(lengths)
        arguments = {"input_ids": ids, "attention_mask": mask} if padded else {"input_ids": ids}
        with torch.no_grad():
            expected, actual = model(**arguments).logits, compiled(**arguments).logits
        assert torch.allclose(actual, expected, rtol=0, atol=1e-5)
    assert len(graphs) == 1


def test_compiled_graphs_serve_any_documents_of_several_rows():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(nsa_model(num_hidden_layers=1), backend=backend, dynamic=True)
    ids, counts = torch.randint(1, 61, (2, 60)), []
    for starts in ([0, 20], [0, 10, 30], [0, 5, 11, 20]):
        boundaries = torch.tensor([*starts, 60, 120], dtype=torch.int32)
        with torch.no_grad():
            compiled(input_ids=ids, cu_seq_lens_q=boundaries)
        counts.append(len(graphs))
    assert counts[0] == counts[1] == counts[2]


def test_lora_trains_adapters_and_new_parameters_only():
    model = get_peft_model(
        nsa_model(),
        LoraConfig(target_modules=["qkv", "out"], modules_to_save=["phi_k", "phi_v", "gate"], r=2),
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    ids = torch.randint(1, 61, (2, 70))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):  # the first update makes the factor B of LoRA other than 0
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert changed <= trainable
    for part in ("qkv.lora_A", "qkv.lora_B", "out.lora_B", "phi_k", "phi_v", "gate"):
        assert any(part in name for name in changed), part
    assert model.generate(input_ids=ids, max_new_tokens=4).shape == (2, 74)


def test_a_loop_generates_answers_and_trains_on_padded_pairs():
    """As preference training does: an answer that is preferred beside one of the model's own."""
    model = nsa_model("qwen2", torch.float64).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
    prompts, prompt_mask, alone = padded_batch((40, 25))
    preferred = torch.randint(1, 61, (2, 8))
    answer_mask = torch.ones(4, 8, dtype=torch.long)
    answer_mask[1, 5:] = 0  # a shorter answer: this row has padding on both sides
    losses = []
    for _ in range(4):
        with torch.no_grad():
            rows = model.generate(
                prompts, attention_mask=prompt_mask, max_new_tokens=8, do_sample=False
            )
        answers = torch.cat([preferred, rows[:, 40:]])
        ids = torch.cat([prompts.repeat(2, 1), answers], 1)
        mask = torch.cat([prompt_mask.repeat(2, 1), answer_mask], 1)
        logits = model(ids, attention_mask=mask, logits_to_keep=9).logits[:, :-1]
        assert torch.equal(logits[2:].argmax(-1), answers[2:])  # greedy, with the current weights
        short = model(torch.cat([alone[1], preferred[1:, :5]], 1)).logits[:, 24:-1]
        assert torch.allclose(logits[1:2, :5], short, rtol=0, atol=1e-12)
        log_p = logits.log_softmax(-1).take_along_dim(answers[..., None], -1)[..., 0]
        score = (log_p * answer_mask).sum(1)
        loss = -torch.nn.functional.logsigmoid(score[:2] - score[2:]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.slow
def test_trainer_lowers_the_loss_and_writes_a_model(tmp_path):
    row = [*range(1, 41)] * 2
    data = [{"input_ids": row, "labels": row, "attention_mask": [1] * 80}] * 8
    options = {"max_steps": 6, "learning_rate": 0.02, "gradient_checkpointing": True}
    trainer, losses = trained(nsa_model(), data, tmp_path / "run", **options)
    assert losses[-1] < 0.9 * losses[0]
    assert trainer.evaluate(data[:2])["eval_loss"] < losses[0]
    trainer.save_model(str(tmp_path / "model"))
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("nsa_llama", ["NSALlamaForCausalLM"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rope_parameters": {**YARN, "rope_type": "dynamic"}},
            "'dynamic'.*NSA rotates with fixed",
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 10000.0,
                    "short_factor": [1.0] * 4,
                    "long_factor": [4.0] * 4,
                    "original_max_position_embeddings": 64,
                }
            },
            "rope_parameters = .*'longrope'.*NSA rotates with fixed frequencies: those of default",
        ),
        ({"attention_dropout": 0.1}, r"attention_dropout = 0.1 \(NSA has no dropout\)"),
        ({"nsa": {"head_dim": 8}}, r"config.nsa: head_dim must not be set"),
        ({"nsa": {"window": 8}}, r"config.nsa: NSAConfig has no field 'window'"),
        ({"is_causal": False}, r"config.is_causal must be True, got False"),
        ({"attn_implementation": "sdpa"}, r"attn_implementation must be 'nsa' or None, got 'sdpa'"),
    ],
)
def test_a_configuration_that_nsa_cannot_express_is_refused(changes, message):
    with pytest.raises(InvalidInput, match=message):
        nsa_model(**changes)
    with pytest.raises(InvalidInput, match=r"sliding_window = 8 \(NSA attends to the whole past"):
        nsa_model("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=0)


def test_fields_of_a_dense_configuration_describe_a_new_model():
    dense = DENSE_CONFIGS["qwen3"](**SIZES)
    config = NSA_CONFIGS["qwen3"](**dense.to_dict())
    assert (config.model_type, config.hidden_size) == ("nsa_qwen3", dense.hidden_size)
    with pytest.raises(InvalidInput, match=r"must be one of nsa_llama, llama, got 'qwen3'$"):
        NSA_CONFIGS["llama"](**dense.to_dict())
    own = type("Own", (NSA_CONFIGS["qwen3"],), {"model_type": "own"})
    assert own(**dense.to_dict()).model_type == "own"


@pytest.mark.parametrize("version", ["4.57.1", "5.18.0"])
def test_an_old_version_of_transformers_is_named(version, monkeypatch):
    monkeypatch.setattr("transformers.__version__", version)
    message = rf"needs transformers 5.19 or newer, but {version} is installed; pip install"
    with pytest.raises(BackendUnavailable, match=message):
        importlib.reload(hf)

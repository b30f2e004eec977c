"""MiniCPM4 with attention "infllm2": its equations in float64, and documents that run alone."""

from __future__ import annotations

import copy
import itertools
import json
import math
import pathlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    DataCollatorWithFlattening,
    DynamicCache,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from hf_models import trained
from nsa_core.errors import InvalidInput
from nsa_models.hf import infllm2
from nsa_models.recipes.infllm2 import infllm2_attention

infllm2.register()
TOKENS, DENSE = 150, 60
NEAR = 1e-6  # logits are about 1; transformers has norms and angles in float32
SPARSE = {
    "kernel_size": 4,
    "kernel_stride": 2,
    "init_blocks": 1,
    "block_size": 8,
    "window_size": 16,
    "topk": 2,
    "use_nope": False,
    "dense_len": DENSE,
}
FACTORS = [1.0, 1.1, 1.5, 4.0]
# config.json of MiniCPM4 with small sizes
MINICPM = {
    "architectures": ["MiniCPMForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_minicpm.MiniCPMConfig",
        "AutoModelForCausalLM": "modeling_minicpm.MiniCPMForCausalLM",
    },
    "model_type": "minicpm",
    "bos_token_id": 1,
    "eos_token_id": [2, 73440],
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.1,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "longrope",
        "long_factor": FACTORS,
        "short_factor": FACTORS,
        "original_max_position_embeddings": 128,
    },
    "scale_depth": 1.4,
    "scale_emb": 12,
    "dim_model_base": 8,
    "mup_denominator": 32,
    "tie_word_embeddings": False,
    "torch_dtype": "float64",
    "transformers_version": "4.46.3",
    "use_cache": True,
    "vocab_size": 128,
    "sparse_config": SPARSE,
}


def new_model(**changes: Any) -> GraniteForCausalLM:
    torch.manual_seed(0)
    model = GraniteForCausalLM(infllm2.granite_config(MINICPM | changes)).double().eval()
    model.set_attn_implementation("infllm2")
    return model


@pytest.fixture(scope="module")
def model() -> GraniteForCausalLM:
    return new_model()


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(3, 128, (2, TOKENS), generator=torch.Generator().manual_seed(0))


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + MINICPM["rms_norm_eps"]).sqrt()


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotate [B, S, heads, D] by LongRoPE, whose angles and amplitude MiniCPM has in float32."""
    width = x.shape[-1]
    inverse = 1 / 10000 ** (torch.arange(0, width, 2) / width) / torch.tensor(FACTORS)
    angles = torch.arange(x.shape[1])[:, None] * inverse
    amplitude = math.sqrt(1 + math.log(512 / 128) / math.log(128))
    cos, sin = ((f * amplitude).double()[:, None] for f in (angles.cos(), angles.sin()))
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def minicpm(weights: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of MiniCPM4, from its equations and those of InfLLM-v2."""
    depth = MINICPM["scale_depth"] / math.sqrt(MINICPM["num_hidden_layers"])
    x = weights["model.embed_tokens.weight"][ids] * MINICPM["scale_emb"]
    sizes = {"pool": 4, "stride": 2, "init_blocks": 1, "block_size": 8, "local_blocks": 2}
    for i in range(MINICPM["num_hidden_layers"]):
        w = {name: weights[f"model.layers.{i}.{name}.weight"] for name in names_of_a_layer()}
        y = norm(x, w["input_layernorm"])
        q, k, v = (F.linear(y, w[f"self_attn.{n}_proj"]).unflatten(-1, (-1, 8)) for n in "qkv")
        q, k = rotate(q), rotate(k)
        if ids.shape[1] >= DENSE:
            o = infllm2_attention(q, k, v, topk=2, **sizes)
        else:
            k, v = (t.repeat_interleave(2, 2) for t in (k, v))
            scores = torch.einsum("bshd,bthd->bhst", q, k) / math.sqrt(8)
            hidden = torch.ones(scores.shape[-2:]).triu(1).bool()
            o = torch.einsum(
                "bhst,bthd->bshd", scores.masked_fill(hidden, -math.inf).softmax(-1), v
            )
        x = x + F.linear(o.flatten(2), w["self_attn.o_proj"]) * depth
        y = norm(x, w["post_attention_layernorm"])
        y = F.silu(F.linear(y, w["mlp.gate_proj"])) * F.linear(y, w["mlp.up_proj"])
        x = x + F.linear(y, w["mlp.down_proj"]) * depth
    x = norm(x, weights["model.norm.weight"]) / (MINICPM["hidden_size"] / MINICPM["dim_model_base"])
    return F.linear(x, weights["lm_head.weight"])


def names_of_a_layer() -> list[str]:
    projections = [f"self_attn.{n}_proj" for n in "qkvo"]
    mlp = [f"mlp.{n}_proj" for n in ("gate", "up", "down")]
    return [*projections, *mlp, "input_layernorm", "post_attention_layernorm"]


def separate(model: GraniteForCausalLM, ids: torch.Tensor, rows: list[list[int]]) -> torch.Tensor:
    parts = [part for row, lengths in zip(ids, rows, strict=True) for part in row.split(lengths)]
    weights = dict(model.named_parameters())
    return torch.cat([minicpm(weights, part[None])[0] for part in parts])


def gradients(model: GraniteForCausalLM, logits: torch.Tensor) -> torch.Tensor:
    found = torch.autograd.grad(logits.square().mean(), list(model.parameters()))
    return torch.cat([x.flatten() for x in found])


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).detach().abs().max())


@pytest.mark.parametrize("length", [TOKENS, DENSE, DENSE - 1])
def test_logits_and_gradients_are_those_of_minicpm4(model, tokens, length):
    ids = tokens[:, :length]
    logits = model(ids).logits
    expected = minicpm(dict(model.named_parameters()), ids)
    assert float(expected.detach().abs().max()) > 0.5
    assert difference(logits, expected) < NEAR
    assert difference(gradients(model, logits), gradients(model, expected)) < NEAR


def test_attention_is_sparse_from_dense_len_on(model, tokens):
    dense = new_model(sparse_config={**SPARSE, "dense_len": TOKENS + 1})
    dense.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert difference(model(tokens).logits, dense(tokens).logits) > 1e-3
        short = tokens[:, : DENSE - 1]
        assert difference(model(short).logits, dense(short).logits) == 0


def test_a_checkpoint_loads_without_its_code(model, tokens, tmp_path: pathlib.Path):
    (tmp_path / "config.json").write_text(json.dumps(MINICPM))
    save_file(model.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    for name in ("configuration_minicpm", "modeling_minicpm"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the code was run')")
    config = infllm2.granite_config(tmp_path)
    loaded = GraniteForCausalLM.from_pretrained(
        tmp_path, config=config, attn_implementation="infllm2"
    )
    assert loaded.dtype == torch.float64
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    loaded.save_pretrained(tmp_path / "saved")
    again = AutoConfig.from_pretrained(tmp_path / "saved")
    assert (again.model_type, again.sparse_config) == ("granite", SPARSE)


@torch.no_grad()
@pytest.mark.parametrize("bounds", [[0, 70, 147, 148, 149, 150], [0, 40, 58, 59, 60, 61]])
def test_a_cache_changes_nothing(model, tokens, bounds):
    """A prompt, chunks and steps; the second prompt is dense, and the steps from 60 on are not."""
    cache = DynamicCache(config=model.config)
    for start, end in itertools.pairwise(bounds):
        logits = model(tokens[:, start:end], past_key_values=cache).logits
        if bounds[1] >= DENSE or end < DENSE:
            whole = model(tokens[:, :end]).logits[:, start:]
            assert difference(logits, whole) < NEAR
    if bounds[1] < DENSE:  # the keys of the layers above are those of dense attention
        dense = new_model(sparse_config={**SPARSE, "dense_len": 1000})
        dense.load_state_dict(model.state_dict())
        cache = DynamicCache(config=model.config)
        dense(tokens[:, :59], past_key_values=cache)
        steps = [model(tokens[:, i : i + 1], past_key_values=cache).logits for i in (59, 60)]
        assert torch.equal(steps[-1], logits)
        assert difference(logits, dense(tokens[:, :61]).logits[:, -1:]) > 1e-4


PACKED = {
    "one row": [[70, 1, 20, 59]],
    "two rows": [[90, 60], [150]],
    "single tokens": [[1, 1, 148], [148, 1, 1]],
}


def positions(rows: list[list[int]]) -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])


@pytest.mark.parametrize("boundaries", [True, False], ids=["boundaries", "positions"])
@pytest.mark.parametrize("rows", PACKED)
def test_packed_documents_equal_separate_ones(model, tokens, rows, boundaries):
    lengths = PACKED[rows]
    ids = tokens[: len(lengths)]
    options = {"position_ids": positions(lengths)}
    if boundaries:
        bounds = torch.tensor([0, *itertools.accumulate(itertools.chain(*lengths))])
        options |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), bounds.to(torch.int32))
    with torch.device("meta"):  # the default device has no effect
        logits = model(ids, use_cache=False, **options).logits.flatten(0, 1)
    expected = separate(model, ids, lengths)
    assert difference(logits, expected) < NEAR
    assert difference(gradients(model, logits), gradients(model, expected)) < NEAR


@pytest.mark.parametrize("own_positions", [True, False])
@pytest.mark.parametrize(("left", "right"), [(37, 0), (0, 95), (20, 30)])
def test_padded_rows_equal_unpadded_ones(model, tokens, left, right, own_positions):
    mask = torch.ones_like(tokens)
    mask[0, :left] = 0
    mask[0, TOKENS - right :] = 0
    options: dict[str, torch.Tensor] = {"attention_mask": mask}
    if own_positions:
        options["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(tokens, **options).logits[mask.bool()]
    alone = [tokens[:1, left : TOKENS - right], tokens[1:]]
    weights = dict(model.named_parameters())
    expected = torch.cat([minicpm(weights, ids)[0] for ids in alone])
    # without positions of its own, a padded row has other angles, which are float32
    near = NEAR if own_positions or not left else 1e-4
    assert difference(logits, expected) < near
    assert difference(gradients(model, logits), gradients(model, expected)) < near


@torch.no_grad()
def test_padding_over_a_cache_may_end_inside_a_chunk(model, tokens):
    mask = torch.ones_like(tokens)
    mask[0, :37] = 0
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
    cache, logits = DynamicCache(config=model.config), []
    for start, end in itertools.pairwise([0, 20, 110, 111, 150]):
        part = {"attention_mask": mask[:, :end], "position_ids": position_ids[:, start:end]}
        logits.append(model(tokens[:, start:end], past_key_values=cache, **part).logits)
    for row, left in enumerate((37, 0)):
        # the first 20 keys, fewer than dense_len, are no more blocks than a query chooses
        expected = model(tokens[row : row + 1, left:]).logits
        assert difference(torch.cat(logits, 1)[row : row + 1, left:], expected) < NEAR


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"num_beams": 3}])
def test_rows_padded_on_the_left_generate_what_they_generate_alone(model, tokens, options):
    mask = torch.ones_like(tokens)
    mask[0, :37] = 0
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, **options}
    texts = model.generate(tokens, attention_mask=mask, **settings)
    for row, left in enumerate((37, 0)):
        alone = model.generate(tokens[row : row + 1, left:], **settings)
        assert torch.equal(texts[row : row + 1, left:], alone)


@pytest.mark.slow
def test_the_trainer_packs_documents(tokens, tmp_path):
    data = [{"input_ids": row, "labels": row} for row in tokens[:, :100].tolist()] * 4
    losses = {}
    for name, collator in (("rows", None), ("packed", DataCollatorWithFlattening())):
        model = new_model().float().train()
        if collator is not None:
            collator.return_flash_attn_kwargs = True
        options = {"gradient_checkpointing": True, "learning_rate": 0.01}
        _, losses[name] = trained(model, data, tmp_path / name, collator, **options)
    assert losses["rows"][-1] < losses["rows"][0] - 0.1
    assert max(abs(a - b) for a, b in zip(*losses.values(), strict=True)) < 1e-4


def test_other_models_take_the_implementation(tokens):
    """A Llama model whose config has sparse_config; a query sees blocks 0, own - 1 and own."""
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).double().eval()
    model.config.sparse_config = {**SPARSE, "topk": 1}
    model.set_attn_implementation("infllm2")
    changed = tokens.clone()
    changed[:, 8:128] = 5  # blocks 1 to 15
    with torch.no_grad():
        same = model(tokens).logits[:, 140] - model(changed).logits[:, 140]
        model.config.sparse_config = {**SPARSE, "topk": 2}
        other = model(tokens).logits[:, 140] - model(changed).logits[:, 140]
    assert float(same.abs().max()) == 0
    assert float(other.abs().max()) > 1e-6


def test_autocast_computes_in_its_dtype(model, tokens):
    """Rotations leave q and k in float32, and v is in bfloat16."""
    model = copy.deepcopy(model).float()
    with torch.no_grad():
        expected = model(tokens).logits
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens, use_cache=False).logits
    logits.sum().backward()
    assert logits.dtype == torch.bfloat16
    assert float((logits.detach() - expected).abs().max()) < 0.05 * float(expected.abs().max())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_nope": True}, "use_nope must be false"),
        ({"kernel_size": 8}, r"kernel_size must be 2 \* kernel_stride.* got 8, 2 and 8"),
        ({"block_size": 9}, "block_size a multiple of kernel_stride.* got 4, 2 and 9"),
        ({"window_size": 7}, "window_size must be at least block_size = 8, got 7"),
        ({"topk": -1}, "sparse_config.topk must be an integer >= 0, got -1"),
        ({"kernel_stride": 0}, "sparse_config.kernel_stride must be an integer >= 1, got 0"),
        ({"select_blocks": 3}, r"sparse_config takes .*, got \['select_blocks'\]"),
    ],
)
def test_sparse_configs_that_are_not_supported_are_refused(model, tokens, changes, message):
    config = SPARSE | changes
    with pytest.raises(InvalidInput, match=message):
        infllm2.granite_config(MINICPM | {"sparse_config": config})
    other = new_model()
    other.config.sparse_config = config
    with pytest.raises(InvalidInput, match=message):
        other(tokens)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "minicpm3"}, "model_type must be \"minicpm\" .*, got 'minicpm3'"),
        ({"mixer_types": ["minicpm4"], "qk_norm": True}, r"fields \['mixer_types', 'qk_norm'\]"),
        ({"head_dim": 16}, "head_dim must be hidden_size / num_attention_heads = 8, got 16"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling must be .* 'linear'"),
        (
            {"rope_scaling": {**MINICPM["rope_scaling"], "short_factor": [1.0] * 4}},
            "long_factor and short_factor must be equal",
        ),
    ],
)
def test_configurations_of_other_models_are_refused(changes, message):
    with pytest.raises(InvalidInput, match=message):
        infllm2.granite_config(MINICPM | changes)


def test_missing_fields_are_refused_and_none_is_no_value():
    fields = {name: x for name, x in MINICPM.items() if name != "scale_emb"}
    with pytest.raises(InvalidInput, match=r"\['scale_emb'\]; they are missing"):
        infllm2.granite_config(fields)
    config = infllm2.granite_config(MINICPM | {"kv_channels": None, "rope_scaling": None})
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}


def test_a_model_without_sparse_config_is_refused(tokens):
    model = new_model(sparse_config=None)
    with pytest.raises(InvalidInput, match=r"reads config\.sparse_config, which is missing"):
        model(tokens)


@torch.no_grad()
def test_what_cannot_be_kept_apart_is_refused(model, tokens):
    packed = {"position_ids": positions([[90, 60]])}
    bounds = torch.tensor([0, 60, 150])
    holes = torch.ones_like(tokens)
    holes[:, 50:60] = 0
    calls: list[tuple[dict[str, Any], str]] = [
        (packed, "pass use_cache=False"),
        ({**packed, "use_cache": False, "cu_seq_lens_q": bounds}, "do not start again where"),
        ({"attention_mask": holes}, "padding before or after the tokens of a row only"),
        ({"attention_mask": torch.ones(1, 1, TOKENS, TOKENS).bool()}, r"got attention_mask of"),
    ]
    for options, message in calls:
        with pytest.raises(InvalidInput, match=message):
            model(
                tokens[:1], **{n: x[:1] if n == "attention_mask" else x for n, x in options.items()}
            )
    with pytest.raises(InvalidInput, match="use a dynamic cache"):
        model.generate(tokens, max_new_tokens=2, cache_implementation="static")
    model.train()
    model.config.attention_dropout = 0.1
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    try:
        with pytest.raises(InvalidInput, match=r"got dropout 0\.1"):
            model(tokens)
    finally:
        model.eval()
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.0


@pytest.mark.slow
@torch.no_grad()
def test_it_compiles_without_graph_breaks(model, tokens):
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    expected = model(tokens, use_cache=False).logits
    assert difference(compiled(tokens, use_cache=False).logits, expected) < NEAR

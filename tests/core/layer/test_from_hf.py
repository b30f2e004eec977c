"""NSAConfig.from_hf and the names of fields in other libraries."""

import contextlib
import dataclasses
import json
import os
import pathlib

import pytest

from nsa_core import InvalidInput, NSAConfig
from nsa_core.hugging_face import _REFUSALS, FIELDS

LLAMA3 = {  # Llama 3 8B
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
LLAMA31_SCALING = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
QWEN3 = {  # Qwen3 8B
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_size": 4096,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "use_sliding_window": False,
}
MISTRAL = {  # Mistral 7B v0.1
    "hidden_size": 4096,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
}
GEMMA = {  # Gemma 7B
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 256,
    "hidden_size": 3072,
    "model_type": "gemma",
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "rope_theta": 10000.0,
}
GEMMA2 = {  # Gemma 2 9B
    **GEMMA,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "hidden_size": 3584,
    "model_type": "gemma2",
    "num_key_value_heads": 8,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}


def test_llama_3():
    expected = NSAConfig(dim=4096, n_heads=32, n_kv_heads=8, rope_base=500000.0)
    assert NSAConfig.from_hf(LLAMA3) == expected
    changed = NSAConfig.from_hf(LLAMA3, window_size=1024, n_kv_heads=4)
    assert changed == dataclasses.replace(expected, window_size=1024, n_kv_heads=4)


def test_qwen_3_has_head_norms_and_an_unused_window():
    config = NSAConfig.from_hf(QWEN3)
    assert (config.qk_dim, config.qk_norm, config.rope_base) == (128, True, 1000000)
    assert NSAConfig.from_hf({**QWEN3, "sliding_window": 4096}) == config
    assert NSAConfig.from_hf({**QWEN3, "model_type": "llama"}).qk_norm is False


def test_gemma_has_wide_heads():
    config = NSAConfig.from_hf(GEMMA)
    assert (config.dim, config.qk_dim, config.n_kv_heads) == (3072, 256, 16)


def test_gemma_2_is_refused_by_name_and_accepted_without_its_additions():
    with pytest.raises(InvalidInput) as caught:
        NSAConfig.from_hf(GEMMA2)
    ignore = ("sliding_window", "attn_logit_softcapping")
    assert str(caught.value).endswith(f"To build the layer anyway, pass ignore={ignore!r}")
    assert "attn_logit_softcapping = 50.0 (NSA does not cap the scores)" in str(caught.value)
    assert "final" not in str(caught.value)
    assert NSAConfig.from_hf(GEMMA2, ignore=ignore).scale == 1 / 16


OLD_LLAMA = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32}

REFUSED = {
    "sliding_window": MISTRAL,
    "rope_scaling": {**LLAMA3, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "rope_parameters": {**LLAMA3, "rope_parameters": {"sliding_attention": {"rope_theta": 1e5}}},
    "partial_rotary_factor": {**LLAMA3, "partial_rotary_factor": 0.5},
    "rotary_dim": {**LLAMA3, "rotary_dim": 64, "head_dim": 128},
    "attention_bias": {**LLAMA3, "attention_bias": True},
    "attention_dropout": {**LLAMA3, "attention_dropout": 0.1},
    "clip_qkv": {**LLAMA3, "clip_qkv": 8.0},
    "kv_lora_rank": {**LLAMA3, "kv_lora_rank": 512},
    "no_rope_layers": {**LLAMA3, "no_rope_layers": [1, 1, 1, 0]},
    "layer_types": {**LLAMA3, "layer_types": ["linear_attention", "full_attention"]},
    "use_bias": {**LLAMA3, "model_type": "starcoder2", "use_bias": True},
    "use_qkv_bias": {**LLAMA3, "model_type": "stablelm", "use_qkv_bias": True},
    "qk_norm": {**LLAMA3, "model_type": "olmo2"},
    "rope_interleaved": {**LLAMA3, "model_type": "cohere"},
    "attention_sinks": {**LLAMA3, "model_type": "gpt_oss"},
    "use_qk_norm": {**LLAMA3, "use_qk_norm": True},
    "qk_norm_type": {**LLAMA3, "model_type": "molmo2_text", "qk_norm_type": "olmo"},
    "key_multiplier": {**LLAMA3, "model_type": "falcon_h1", "key_multiplier": 0.4},
    "llama_4_scaling_beta": {**LLAMA3, "rope_parameters": {"llama_4_scaling_beta": 0.1}},
    "rotary_embedding": {
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "model_type": "jamba",
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_mathematics_is_refused_by_name(name):
    message = rf"^NSA cannot express this attention: {name} = .*pass ignore=\('{name}',\)$"
    with pytest.raises(InvalidInput, match=message):
        NSAConfig.from_hf(REFUSED[name])
    assert NSAConfig.from_hf(REFUSED[name], ignore=[name]).n_heads == 32


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("olmoe", "qk_norm"),
        ("minimax_m2", "qk_norm"),
        ("hunyuan_v1_dense", "qk_norm"),
        ("ernie4_5", "rope_interleaved"),
        ("glm4", "rope_interleaved"),
        ("helium", "rope_interleaved"),
        ("glm4v_text", "rope_interleaved"),
        ("hunyuan_vl_text", "qk_norm"),
        ("qwen2_5_omni_text", "attention_bias"),
        ("qwen2_5_omni_talker", "attention_bias"),
        ("chameleon", "qk_norm"),
        ("diffllama", "attention_kind"),
        ("bitnet", "attention_kind"),
        ("eurobert", "attention_kind"),
    ],
)
def test_mathematics_that_only_the_code_of_a_model_states_is_refused(kind, name):
    with pytest.raises(InvalidInput, match=f"{name} = "):
        NSAConfig.from_hf(
            {k: v for k, v in LLAMA3.items() if k != "attention_bias"} | {"model_type": kind}
        )


@pytest.mark.parametrize("stated", [{}, {"qk_norm": True}])
@pytest.mark.parametrize("kind", ["apertus", "qwen3_vl_text", "minimax_m3_vl_text", "lfm2"])
def test_norms_of_heads_are_implied_by_the_type(kind, stated):
    assert NSAConfig.from_hf({**LLAMA3, "model_type": kind, **stated}).qk_norm
    olmo2 = {**LLAMA3, "model_type": "olmo2", **stated}
    with pytest.raises(InvalidInput, match="qk_norm = 'over all heads'"):
        NSAConfig.from_hf(olmo2)


def test_biases_that_only_the_code_of_a_model_states_are_refused():
    with pytest.raises(InvalidInput, match="attention_bias = True"):
        NSAConfig.from_hf({**LLAMA3, "model_type": "qwen2"} | {"attention_bias": True})
    without = {n: x for n, x in LLAMA3.items() if n != "attention_bias"}
    with pytest.raises(InvalidInput, match="attention_bias = True"):
        NSAConfig.from_hf({**without, "model_type": "qwen2"})
    with pytest.raises(InvalidInput, match="attention_bias = True"):
        NSAConfig.from_hf({**without, "model_type": "bert"}, rope=False)
    with pytest.raises(InvalidInput, match="enable_bias = True"):
        NSAConfig.from_hf({**without, "model_type": "opt", "enable_bias": True}, rope=False)


@pytest.mark.parametrize(
    ("values", "heads"),
    [
        ({}, 1),
        ({"new_decoder_architecture": True}, 8),
        ({"multi_query": False}, 8),
        ({"multi_query": False, "num_kv_heads": None}, 32),
    ],
)
def test_falcon_states_its_kv_heads_by_other_names(values, heads):
    falcon = {**OLD_LLAMA, "model_type": "falcon", "num_kv_heads": 8, "multi_query": True, **values}
    assert NSAConfig.from_hf(falcon).n_kv_heads == heads


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_model_that_rotates_need_not_state_it(kind):
    config = NSAConfig.from_hf({**OLD_LLAMA, "model_type": kind})
    assert (config.rope, config.rope_base, config.n_kv_heads) == (True, 10_000.0, 32)


def test_overrides_make_refusals_moot():
    assert NSAConfig.from_hf(REFUSED["rotary_embedding"], rope=False).rope is False
    scaled = REFUSED["rope_scaling"]
    assert NSAConfig.from_hf(scaled, rope=False).rope is False
    stated = (0.5,) * 64
    assert NSAConfig.from_hf(scaled, rope_frequencies=stated).rope_frequencies == stated
    assert NSAConfig.from_hf(REFUSED["use_qk_norm"], qk_norm=True).qk_norm is True


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
SCALED = {
    "Llama 3.1": LLAMA31_SCALING,
    "Llama 3.2": {**LLAMA31_SCALING, "factor": 32.0},
    "linear": {"type": "linear", "factor": 8},
    "YaRN": YARN,
    "YaRN of few turns": {**YARN, "factor": 40.0, "beta_fast": 4, "beta_slow": 2},
    "YaRN not truncated": {**YARN, "truncate": False},
    "YaRN with a factor of attention": {**YARN, "attention_factor": 1.3},
    "YaRN of DeepSeek": {**YARN, "factor": 40, "mscale": 1.0, "mscale_all_dim": 0.7},
    "YaRN by the lengths": {"type": "yarn", "factor": 2.0},
    "YaRN without a factor": {**YARN, "factor": None},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.3},
    "proportional and slowed": {"rope_type": "proportional", "factor": 8.0},
}


@pytest.mark.parametrize("inside", [None, 0.5])
def test_the_rotated_part_of_a_head_may_stand_beside_the_rotary_parameters(inside):
    library = pytest.importorskip("transformers")
    rope = {"rope_type": "proportional", "rope_theta": 1e4}
    rope |= {} if inside is None else {"partial_rotary_factor": inside}
    values = {**LLAMA3, "partial_rotary_factor": 0.25, "rope_scaling": None}
    config = library.LlamaConfig(**{**values, "rope_parameters": dict(rope)})
    compute = library.modeling_rope_utils.ROPE_INIT_FUNCTIONS["proportional"]
    expected = pytest.approx(compute(config, None)[0].tolist(), rel=2e-6)
    for source in (config, {**values, "rope_parameters": rope}):
        assert NSAConfig.from_hf(source).rope_frequencies == expected


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("model", [LLAMA3, QWEN3], ids=["llama", "qwen3"])
@pytest.mark.parametrize("kind", SCALED)
def test_scaled_frequencies_are_those_of_transformers(kind, model, place):
    library = pytest.importorskip("transformers")
    rope = {**SCALED[kind], "rope_theta": model["rope_theta"]}
    longest = 131072 if "Llama" in kind else 8192
    values = {**model, "max_position_embeddings": longest, "rope_scaling": None, place: rope}
    config = library.AutoConfig.for_model(
        values["model_type"], **{k: v for k, v in values.items() if k != "model_type"}
    )
    compute = library.modeling_rope_utils.ROPE_INIT_FUNCTIONS[rope.get("rope_type") or rope["type"]]
    frequencies, factor = compute(config, None)
    for source in (values, config):
        layer = NSAConfig.from_hf(source)
        assert layer.rope_frequencies == pytest.approx(frequencies.tolist(), rel=2e-6)
        assert layer.softmax_scale == pytest.approx(factor**2 * 128**-0.5, rel=1e-12)
        assert max(abs(f / g - 1) for f, g in zip(layer.rope_frequencies, _plain(model))) > 0.4


def _plain(model):
    return [model["rope_theta"] ** (-2 * i / 128) for i in range(64)]


def test_overrides_and_ignored_names_replace_scaled_frequencies():
    values = {**LLAMA3, "rope_scaling": YARN}
    assert NSAConfig.from_hf(values, ignore=["rope_scaling"]) == NSAConfig.from_hf(LLAMA3)
    assert NSAConfig.from_hf(values, scale=0.25).scale == 0.25
    assert NSAConfig.from_hf(values, rope=False).rope_frequencies is None
    assert len(NSAConfig.from_hf(values, head_dim=64).rope_frequencies) == 32
    other = NSAConfig.from_hf({**values, "rope_theta": 1e4})
    assert NSAConfig.from_hf(values, rope_base=1e4).rope_frequencies == other.rope_frequencies


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"factor": None, "rope_type": "llama3"}, "float.. argument must be a string or a"),
        ({"factor": 0}, "division by zero"),
        ({"rope_type": "llama3", "low_freq_factor": 0, "high_freq_factor": 4}, "got 0, 4$"),
        ({"rope_type": "llama3", "low_freq_factor": 4, "high_freq_factor": 1}, "got 4, 1$"),
        ({"rope_type": "proportional", "partial_rotary_factor": -0.5}, "from 0 to 1, got -0.5$"),
        ({"rope_type": "proportional", "partial_rotary_factor": 1.5}, "from 0 to 1, got 1.5$"),
        ({"factor": 10**5000}, "int too large to convert to float"),
        ({"original_max_position_embeddings": "long"}, "could not convert string to float"),
        ({"original_max_position_embeddings": -4}, "math domain error"),
        ({"beta_fast": []}, None),
        ({"beta_fast": [[[]]]}, "argument must be a string or a real number, not 'list'"),
        ({"factor": float("nan")}, "rope_frequencies must be a tuple of .* finite numbers"),
    ],
)
def test_odd_values_of_scaled_frequencies_are_one_sentence(changes, words):
    values = {**LLAMA3, "rope_scaling": {**YARN, **changes}}
    if words is None:
        assert NSAConfig.from_hf(values).rope_frequencies
        return
    with pytest.raises(InvalidInput, match=words) as caught:
        NSAConfig.from_hf(values)
    assert len(str(caught.value)) < 400


def test_plain_frequencies_by_their_newer_name():
    newer = {n: x for n, x in LLAMA3.items() if n not in ("rope_theta", "rope_scaling")}
    newer["rope_parameters"] = {"rope_type": "default", "rope_theta": 500000.0}
    assert NSAConfig.from_hf(newer) == NSAConfig.from_hf(LLAMA3)


class PretrainedConfig:
    """What from_hf uses of a transformers configuration."""

    def __init__(self, **values):
        self.values = values

    def to_dict(self):
        return self.values


def test_objects_files_and_folders(tmp_path):
    expected = NSAConfig.from_hf(LLAMA3)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA3))
    for source in (
        PretrainedConfig(**LLAMA3),
        {"text_config": LLAMA3, "model_type": "gemma3"},
        tmp_path,
        str(tmp_path / "config.json"),
    ):
        assert NSAConfig.from_hf(source) == expected


ODD = {
    "deep": ("[" * 10**5, "is not JSON: maximum recursion"),
    "no text": (b"\xff", "is not JSON"),
    "a list": ("[1]", r"must be a JSON object, got \[1\]"),
    "long number": (f'{{"hidden_size": {"1" * 5000}}}', "is not JSON: Exceeds the limit"),
    "large": (b" " * (2**24 + 1), "must be a plain file of at most 16 MiB"),
}


@pytest.mark.parametrize("kind", [*ODD, "pipe", "device", "zero"])
def test_an_odd_file_is_one_sentence(kind, tmp_path):
    file = tmp_path / "config.json"
    content, words = ODD.get(kind, ("", "must be a plain file of at most 16 MiB"))
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "zero":
        file, words = "config\0.json", "is not JSON: embedded null byte"
    else:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InvalidInput, match=words):
        NSAConfig.from_hf("/dev/zero" if kind == "device" else file)


DEEP: list = []
for _ in range(900):
    DEEP = [DEEP]
VALUES = [None, True, -1, 0, 10**9, 10**5000, float("nan"), "/dev/zero", [], [[1]], {"a": {}}, DEEP]


@pytest.mark.parametrize("name", [*_REFUSALS, *FIELDS, "model_type", "text_config"])
def test_any_value_of_a_field_is_accepted_or_one_sentence(name):
    for value in VALUES:
        for values in ({name: value}, {**LLAMA3, name: value}):
            with contextlib.suppress(InvalidInput):
                NSAConfig.from_hf(values)


@pytest.mark.parametrize("path", ["config.json", pathlib.Path("config.json")])
def test_a_configuration_names_no_file(path):
    with pytest.raises(InvalidInput, match="text_config must be a JSON object"):
        NSAConfig.from_hf({"text_config": path})


def test_a_rotated_width_may_be_that_of_the_head():
    assert NSAConfig.from_hf({**LLAMA3, "rotary_dim": 128, "head_dim": 128}).rope
    assert NSAConfig.from_hf({**LLAMA3, "rotary_dim": 128, "head_dim": None}).rope


def test_the_error_about_a_model_without_rotary_embedding_names_the_override():
    words = r"NSA rotates q and k: pass rope=False .*To build the layer anyway, pass ignore="
    with pytest.raises(InvalidInput, match=words):
        NSAConfig.from_hf(REFUSED["rotary_embedding"])


def test_multi_head_attention_without_kv_heads():
    config = NSAConfig.from_hf({"hidden_size": 64, "num_attention_heads": 4})
    assert (config.n_kv_heads, config.head_dim) == (4, 16)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ({"n_embd": 64}, {}, "lacks hidden_size and num_attention_heads; its names are n_embd"),
        ("meta-llama/x", {}, "cannot read hf_config 'meta-llama/x' .*AutoConfig.from_pretrained"),
        ('{"hidden_size": 64}', {}, r"JSON text: pass json.loads\(text\)"),
        (3, {}, "must be a transformers configuration, a dict, or the path .* got int"),
        (LLAMA3, {"ignore": "rope_scaling"}, r"pass \['rope_scaling'\]"),
        (LLAMA3, {"ignore": ["rope_scalin"]}, "never refused; did you mean 'rope_scaling'"),
    ],
)
def test_sources_and_options_that_are_refused(source, options, message):
    with pytest.raises(InvalidInput, match=message):
        NSAConfig.from_hf(source, **options)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"num_attention_heads": 8},
            r"^NSAConfig has no field 'num_attention_heads'; pass n_heads= instead of"
            r" num_attention_heads=\. NSAConfig\.from_hf\(hf_config\) reads",
        ),
        ({"num_heads": 8}, "^NSAConfig has no field 'num_heads'; pass n_heads= instead of num_h"),
        ({"windowsize": 8}, r"^NSAConfig has no field 'windowsize'; did you mean 'window_size'\?$"),
    ],
)
def test_unknown_fields_name_the_right_one(fields, message):
    with pytest.raises(TypeError, match=message):
        NSAConfig(dim=64, n_kv_heads=2, **fields)
    with pytest.raises(TypeError, match=message):
        NSAConfig.from_hf(LLAMA3, **fields)
    with pytest.raises(TypeError, match=message):
        dataclasses.replace(NSAConfig(64, 4, 2), **fields)

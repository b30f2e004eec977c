"""Read the configuration of a Hugging Face model as fields of an NSAConfig.

This module imports neither torch nor transformers.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nsa_core import rope_scaling
from nsa_core.errors import InvalidInput
from nsa_core.limits import integer_problems, shown
from nsa_core.util.text import did_you_mean, one_line

# Hugging Face name -> field of NSAConfig
FIELDS = {
    "hidden_size": "dim",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "head_dim": "head_dim",
    "rope_theta": "rope_base",
}
_REQUIRED = ("hidden_size", "num_attention_heads")

_LARGEST_FILE = 1 << 24  # bytes; a config.json has a few thousand

# Facts that only the code of a model states: (name, value) -> the model types that imply it.
_IMPLIED: dict[tuple[str, object], str] = {
    ("attention_bias", True): (
        "qwen2 qwen2_moe qwen2_vl_text qwen2_5_vl_text qwen2_5_omni_text qwen2_5_omni_talker"
        " bert bert-generation biogpt camembert data2vec-text electra ernie git megatron-bert"
        " rembert roberta roberta-prelayernorm roc_bert xlm-roberta xlm-roberta-xl xmod"
    ),
    ("qk_norm", "per head"): (
        "qwen3 qwen3_moe qwen3_vl_text qwen3_vl_moe_text qwen3_omni_moe_talker_text"
        " qwen3_omni_moe_talker_code_predictor gemma3_text apertus apertus1p5_text dots1 exaone4"
        " hy_v3 lfm2 lfm2_moe minimax_m3_vl_text"
    ),
    ("qk_norm", "of means and variances"): "chameleon",
    ("qk_norm", "over all heads"): "olmo2 olmo3 olmoe flex_olmo minimax_m2",
    ("qk_norm", "after rotary embedding"): (
        "hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl_text nanochat"
    ),
    ("rope_interleaved", True): (
        "cohere cohere2 cohere2_moe ernie4_5 ernie4_5_moe ernie4_5_vl_moe_text glm glm4 glm4v_text"
        " glm_ocr_text helium"
    ),
    ("attention_sinks", True): "gpt_oss",
    ("attention_kind", "differential"): "diffllama",
    ("attention_kind", "with a mask of values"): "doge",
    ("attention_kind", "gated"): "hrm_text",
    ("attention_kind", "with a norm before the output projection"): "bitnet",
    ("attention_kind", "of experts"): "jetmoe",
    ("attention_kind", "of wider inputs"): "zamba zamba2",
    ("attention_kind", "not causal"): "esm esmc eurobert gte jina_embeddings_v3 nomic_bert",
}
# These rotate with the default rope_theta if a config.json states none.
_ROTATING = ("llama", "qwen2", "qwen3", "falcon")


class _Refusal(NamedTuple):
    """A property that NSAConfig cannot express.

    Attributes:
        applies: whether a value of the property changes the mathematics.
        reason: the effect that NSA lacks.
        moot: the override (field, value) of NSAConfig with which the property has no effect.
    """

    applies: Callable[[Any], bool]
    reason: str
    moot: tuple[str, object] | None = None


def _has_other_layers(value: Any) -> bool:
    kinds = value if isinstance(value, (list, tuple)) else [value] * bool(value)
    return any(kind not in ("full_attention", "sliding_attention") for kind in kinds)


_NO_ROPE = ("rope", False)
_SCALING = _Refusal(
    lambda rope: rope_scaling.kind_of(rope) not in ("default", *rope_scaling.KINDS),
    f"NSA rotates with fixed frequencies: those of default, {', '.join(rope_scaling.KINDS)}, or"
    " the override rope_frequencies; a cache holds rotated keys, so use yarn for longer inputs",
    _NO_ROPE,
)
_PARTIAL = _Refusal(lambda part: part not in (None, 1), "NSA rotates whole heads", _NO_ROPE)
_INTERLEAVED = _Refusal(bool, "NSA rotates half-split pairs, not neighbours", _NO_ROPE)
_BIAS = _Refusal(bool, "the projections of NSA have no bias")
_REFUSALS: dict[str, _Refusal] = {
    "attention_kind": _Refusal(bool, "NSA replaces causal attention of projected q, k and v only"),
    "rotary_embedding": _Refusal(
        bool,
        "NSA rotates q and k: pass rope=False for a model that does not; if a config.json leaves"
        " out defaults, pass transformers.AutoConfig.from_pretrained(name)",
        _NO_ROPE,
    ),
    "rope_scaling": _SCALING,
    "rope_parameters": _SCALING,
    "rope_local_base_freq": _Refusal(bool, "NSA has one rope_base for all layers", _NO_ROPE),
    "partial_rotary_factor": _PARTIAL,
    "rotary_pct": _PARTIAL,
    "rotary_dim": _Refusal(bool, "NSA rotates whole heads", _NO_ROPE),
    "rope_interleaved": _INTERLEAVED,
    "rope_interleave": _INTERLEAVED,
    "no_rope_layers": _Refusal(
        lambda layers: isinstance(layers, (list, tuple)) and not all(layers),
        "NSA rotates in every layer",
        _NO_ROPE,
    ),
    "llama_4_scaling_beta": _Refusal(bool, "NSA does not scale queries by their position"),
    "key_multiplier": _Refusal(
        lambda factor: factor not in (None, 1),
        "NSA does not scale keys; a scale multiplied by it has the same effect",
    ),
    "sliding_window": _Refusal(
        bool, "NSA attends to the whole past; its window branch has window_size"
    ),
    "attention_chunk_size": _Refusal(bool, "NSA attends to the whole past"),
    "layer_types": _Refusal(_has_other_layers, "NSA replaces softmax attention only"),
    "attention_bias": _BIAS,
    "qkv_bias": _BIAS,
    "use_qkv_bias": _BIAS,
    "use_bias": _BIAS,
    "enable_bias": _BIAS,
    "attn_logit_softcapping": _Refusal(bool, "NSA does not cap the scores"),
    "attention_dropout": _Refusal(bool, "NSA has no dropout"),
    "attention_sinks": _Refusal(bool, "NSA has no attention sinks"),
    "clip_qkv": _Refusal(bool, "NSA does not clip q, k and v"),
    "alibi": _Refusal(bool, "NSA adds no bias to the scores"),
    "kv_lora_rank": _Refusal(bool, "NSA has no latent attention (MLA)"),
    "qk_norm": _Refusal(
        lambda norm: norm not in (None, False, "per head"),
        "NSA has RMS norms of single heads, before rotary embedding",
        ("qk_norm", True),
    ),
    "use_qk_norm": _Refusal(bool, "the kind of norm is not stated", ("qk_norm", True)),
    "qk_norm_type": _Refusal(
        bool, "pass qk_norm=True if the norms are RMS norms of single heads", ("qk_norm", True)
    ),
    "qk_layernorm": _Refusal(bool, "NSA has RMS norms only", ("qk_norm", True)),
}


def read_fields(
    source: object,
    ignore: Collection[str],
    overrides: Mapping[str, Any],
    remedy: str = "To build the layer anyway, pass ignore={names!r}",
) -> dict[str, Any]:
    """Return the fields of an NSAConfig for ``source``; see :meth:`nsa_core.NSAConfig.from_hf`.

    Args:
        source: a configuration object, a mapping, or a path.
        ignore: names of properties that are dropped and not refused.
        overrides: fields of NSAConfig that replace those read.
        remedy: the sentence of the error message about refused properties, ``{names}``.

    Raises:
        InvalidInput: as :meth:`nsa_core.NSAConfig.from_hf`.
    """
    values = _effective_values(_values_of(source))
    _check_ignored(ignore)
    if missing := [name for name in _REQUIRED if values.get(name) is None]:
        raise InvalidInput(
            f"the Hugging Face configuration lacks {' and '.join(missing)}; its names are"
            f" {', '.join(sorted(map(one_line, values))[:50]) or '(none)'}. If a config.json leaves"
            " out defaults, pass transformers.AutoConfig.from_pretrained(name)"
        )
    if refused := _refused(values, ignore, overrides):
        names = tuple(refused)
        raise InvalidInput(
            "NSA cannot express this attention: "
            + "; ".join(f"{n} = {shown(values[n])} ({_REFUSALS[n].reason})" for n in names)
            + f". {remedy.format(names=names)}"
        )
    fields = {ours: values[theirs] for theirs, ours in FIELDS.items() if theirs in values}
    fields = {name: value for name, value in fields.items() if value is not None}
    fields.setdefault("n_kv_heads", fields["n_heads"])
    if values.get("qk_norm") == "per head":
        fields["qk_norm"] = True
    if (scalar := values.get("query_pre_attn_scalar")) is not None:
        fields["scale"] = _inverse_root(scalar)
    elif values.get("attention_multiplier") is not None:
        fields["scale"] = values["attention_multiplier"]
    fields |= overrides
    if fields.get("rope", True) and "rope_frequencies" not in overrides:
        fields |= _scaled_rope(values, ignore, fields, "scale" in overrides)
    return fields


def _scaled_rope(
    values: Mapping[str, Any],
    ignore: Collection[str],
    fields: Mapping[str, Any],
    keeps_scale: bool,
) -> dict[str, Any]:
    """Return the fields for scaled rotary frequencies; empty if the model does not scale them."""
    for name in ("rope_parameters", "rope_scaling"):
        rope: Any = values.get(name)
        if name in ignore or rope_scaling.kind_of(rope) not in rope_scaling.KINDS:
            continue
        sizes = {"head_dim": fields.get("head_dim")}
        if sizes["head_dim"] is None:
            sizes = {name: fields[name] for name in ("dim", "n_heads")}
        if any(integer_problems(*size) for size in sizes.items()):
            return {}  # NSAConfig names them
        width = fields.get("head_dim") or max(1, fields["dim"] // fields["n_heads"])
        base, longest = fields.get("rope_base", 10000.0), values.get("max_position_embeddings")
        frequencies, factor = rope_scaling.scaled_frequencies(name, rope, width, base, longest)
        scaled: dict[str, Any] = {"rope_frequencies": frequencies}
        if factor != 1 and not keeps_scale:  # of both q and k
            scaled["scale"] = fields.get("scale", width**-0.5) * factor**2
        return scaled
    return {}


def _inverse_root(scalar: Any) -> float:
    """Return query_pre_attn_scalar to the power -1/2."""
    try:
        root = math.sqrt(scalar) if type(scalar) in (int, float) else math.nan
    except (OverflowError, ValueError):  # too large, or negative
        root = math.nan
    if not 0 < root < math.inf:
        raise InvalidInput(
            f"query_pre_attn_scalar must be a finite number > 0, got {shown(scalar)}"
        )
    return 1 / root


def _values_of(source: object) -> dict[str, Any]:
    """Return the names and values of a configuration object, a mapping, or a file."""
    if isinstance(source, Mapping):
        return dict(source)
    if isinstance(source, (str, os.PathLike)):
        return _values_of_file(source)
    to_dict = getattr(source, "to_dict", None)
    if not callable(to_dict) or isinstance(source, type):
        raise InvalidInput(
            "hf_config must be a transformers configuration, a dict, or the path of a config.json,"
            f" got {type(source).__name__}"
        )
    return dict(to_dict())


def _values_of_file(source: str | os.PathLike[str]) -> dict[str, Any]:
    if isinstance(source, str) and source.lstrip().startswith("{"):
        raise InvalidInput("hf_config is JSON text: pass json.loads(text)")
    path = Path(source)
    try:
        path = path / "config.json" if path.is_dir() else path
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST_FILE:  # a pipe would hang
            raise InvalidInput(
                f"hf_config {str(path)!r} must be a plain file of at most"
                f" {_LARGEST_FILE >> 20} MiB; pass the path of a config.json"
            )
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(
            f"cannot read hf_config {str(path)!r} ({error.strerror}); for a model on the Hub, pass"
            " transformers.AutoConfig.from_pretrained(name)"
        ) from error
    except InvalidInput:
        raise
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"hf_config {str(path)!r} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise InvalidInput(f"hf_config {str(path)!r} must be a JSON object, got {shown(values)}")
    return values


def _effective_values(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of the text model, with those that its code or other names imply."""
    text = values.get("text_config")
    if "num_attention_heads" not in values and text is not None:
        if isinstance(text, (str, os.PathLike)):
            raise InvalidInput(f"text_config must be a JSON object, got {shown(text)}")
        values = _values_of(text)
    kind = values.get("model_type")
    implied = dict(fact for fact, kinds in _IMPLIED.items() if kind in kinds.split())
    values = {**implied, **values}
    if values.get("qk_norm") is True:  # the configuration of Apertus states no kind
        values["qk_norm"] = implied.get("qk_norm", True)
    states_rope = any("rope" in str(name) or "rotary" in str(name) for name in values)
    if not states_rope and kind not in (None, *_ROTATING):
        values["rotary_embedding"] = "not stated"
    dim, heads, width = map(values.get, ("hidden_size", "num_attention_heads", "head_dim"))
    if width is None and type(dim) is type(heads) is int and heads > 0:
        width = dim // heads
    if values.get("rotary_dim") == width:
        values.pop("rotary_dim", None)
    if kind == "falcon":
        has_kv_heads = values.get("new_decoder_architecture") or not values.get("multi_query", True)
        values["num_key_value_heads"] = values.get("num_kv_heads") if has_kv_heads else 1
    if values.get("use_sliding_window") is False:
        values["sliding_window"] = None
    rope: Any = values.get("rope_parameters")
    if isinstance(rope, Mapping):  # may have one entry per kind of layer
        rope = rope.get("full_attention", rope)
    if isinstance(rope, Mapping):  # as in transformers, its values are those that count
        names = ("rope_theta", "partial_rotary_factor", "llama_4_scaling_beta")
        stated = {name: rope.get(name) for name in names}
        values |= {name: value for name, value in stated.items() if value is not None}
    for name in ("rope_parameters", "rope_scaling"):
        rope = values.get(name)
        if rope_scaling.kind_of(rope) == "proportional":  # its frequencies have this factor
            part = values.pop("partial_rotary_factor", None)
            values[name] = {"partial_rotary_factor": 1 if part is None else part, **rope}
    return values


def _check_ignored(ignore: Collection[str]) -> None:
    if isinstance(ignore, str):
        raise InvalidInput(
            f"ignore must be a collection of names, got {ignore!r}: pass [{ignore!r}]"
        )
    for name in ignore:
        if name not in _REFUSALS:
            raise InvalidInput(
                f"ignore: {name!r} is never refused{did_you_mean(str(name), _REFUSALS)}"
            )


def _refused(
    values: Mapping[str, Any], ignore: Collection[str], overrides: Mapping[str, Any]
) -> list[str]:
    """Return the names of the properties that NSAConfig cannot express."""
    return [
        name
        for name, refusal in _REFUSALS.items()
        if name in values
        and name not in ignore
        and refusal.applies(values[name])
        and (refusal.moot is None or overrides.get(refusal.moot[0]) is not refusal.moot[1])
        and not (refusal is _SCALING and overrides.get("rope_frequencies") is not None)
    ]

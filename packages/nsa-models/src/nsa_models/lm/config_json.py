"""config.json of a model folder: the configuration of Hugging Face transformers as an LMConfig.

This module imports neither torch nor transformers, except for a configuration that leaves out
values.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

from nsa_core.config import NSAConfig
from nsa_core.contract import DTYPES
from nsa_core.errors import InvalidInput
from nsa_core.hugging_face import read_fields
from nsa_core.limits import integer_problems, shown
from nsa_core.util.extras import require_module
from nsa_core.util.text import describe_error
from nsa_models.lm import json_fields
from nsa_models.lm.config import LMConfig, memory_problems

DENSE_TYPES = ("llama", "qwen2", "qwen3")
NSA_TYPES = tuple(f"nsa_{name}" for name in DENSE_TYPES)
TYPES = (*DENSE_TYPES, *NSA_TYPES)
# Fields of NSAConfig that the model states under names of transformers.
_STATED = ("dim", "n_heads", "n_kv_heads", "head_dim", "rope_base", "qk_norm")
# Fields that change dense attention, and that a dense Llama or Qwen3 does not have.
_NOT_DENSE = ("v_head_dim", "rope", "rope_frequencies", "scale")
# Values that transformers may leave out, with defaults that depend on the type of the model.
_NEEDED = ("num_key_value_heads", "rms_norm_eps", "rope_parameters", "tie_word_embeddings")
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
_OPTIONAL_SIZES = ("num_key_value_heads", "head_dim", "max_position_embeddings")
# Fields with which transformers loads the code or the kernels of a stranger.
_NAME_CODE = ("auto_map", "attn_implementation", "_attn_implementation", "experts_implementation")


class _Fields(TypedDict):
    """The fields of config.json that are read; transformers gets no other."""

    architectures: list[str] | None
    model_type: str
    dtype: str | None
    torch_dtype: str | None
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None
    head_dim: int | None
    max_position_embeddings: int | None
    hidden_act: str
    rms_norm_eps: float
    rope_theta: float | None
    rope_scaling: dict[str, Any] | None
    rope_parameters: dict[str, Any] | None
    attention_bias: bool | None
    attention_dropout: float | None
    mlp_bias: bool | None
    tie_word_embeddings: bool
    sliding_window: int | None
    use_sliding_window: bool | None
    max_window_layers: int | None
    layer_types: list[str] | None
    initializer_range: float
    bos_token_id: int | None
    eos_token_id: int | list[int] | None
    pad_token_id: int | None
    nsa: dict[str, Any] | None
    nsa_backends: str | dict[str, str] | None
    nsa_layers: list[int] | None


_KINDS_OF_FIELDS = typing.get_type_hints(_Fields)

# (qk_norm, qkv_bias, out_bias) -> type of the model
_KINDS = {
    (False, False, False): "llama",
    (False, True, True): "llama",
    (False, True, False): "qwen2",
    (True, False, False): "qwen3",
    (True, True, True): "qwen3",
}


class LayerSpec(NamedTuple):
    """The attention layers of a model.

    Attributes:
        config: Shapes and options.
        backends: The requested backends.
        qkv_bias: Whether the projections to queries, keys and values have a bias.
        out_bias: Whether the output projection has a bias.
        norm_eps: The constant in the RMS norms of queries and keys.
    """

    config: NSAConfig
    backends: str | dict[str, str] | None
    qkv_bias: bool
    out_bias: bool
    norm_eps: float


def layer_spec(values: Mapping[str, Any]) -> LayerSpec:
    """Return the attention layers of a Llama, Qwen2 or Qwen3, dense or with NSA.

    Args:
        values: The configuration, as plain values.

    Raises:
        InvalidInput: NSA cannot express the attention of the model, a size is out of range, or a
            field of ``nsa`` is invalid or is stated by the model. The message names the fields.
    """
    check_sizes(values)
    kind = str(values["model_type"]).removeprefix("nsa_")
    options = nsa_fields(values.get("nsa"))
    if stated := sorted(options.keys() & {"dim", "n_heads", "n_kv_heads", "head_dim", "rope_base"}):
        raise InvalidInput(
            f"config.nsa: {', '.join(stated)} must not be set, because the model states"
            " hidden_size, num_attention_heads, num_key_value_heads, head_dim and rope_parameters"
        )
    if isinstance(options.get("rope_frequencies"), list):  # JSON has no tuples
        options["rope_frequencies"] = tuple(options["rope_frequencies"])
    fields = read_fields(
        {**values, "model_type": kind},
        ["attention_bias"],  # these models have it beside NSA
        options,
        "Set these fields of the configuration to their defaults",
    )
    try:
        layer = NSAConfig(**fields)
    except TypeError as error:  # an unknown field
        raise InvalidInput(f"config.nsa: {error}") from error
    if problems := memory_problems(layer):
        raise InvalidInput(f"config.nsa: {'; '.join(problems)}")
    bias = bool(values.get("attention_bias"))
    return LayerSpec(
        config=layer,
        backends=values.get("nsa_backends"),
        qkv_bias=bias or kind == "qwen2",
        out_bias=bias and kind != "qwen2",
        norm_eps=_number("rms_norm_eps", values.get("rms_norm_eps")),
    )


def nsa_fields(nsa: Any) -> dict[str, Any]:
    """Return fields of :class:`nsa_core.NSAConfig` as a dict; empty for None.

    Raises:
        InvalidInput: ``nsa`` is no mapping.
    """
    if nsa is not None and not isinstance(nsa, Mapping):
        raise InvalidInput(
            'nsa must be a dict with fields of NSAConfig, such as {"window_size": 512}, got'
            f" {shown(nsa)}"
        )
    return dict(nsa or {})


def check_sizes(values: Mapping[str, Any]) -> None:
    """Check the sizes of a model before anything is allocated for it.

    Raises:
        InvalidInput: A size is out of range; the message names every such size.
    """
    problems: list[str] = []
    for name in (*_SIZES, "num_attention_heads"):
        problems += integer_problems(name, values.get(name))
    for name in _OPTIONAL_SIZES:
        problems += integer_problems(name, values.get(name), optional=True)
    if problems:
        raise InvalidInput("; ".join(problems))


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1:
        raise InvalidInput(f"{name} must be a number > 0 and < 1, got {value!r:.60}")
    return float(value)


def check_type(kind: Any, types: Sequence[str] = TYPES) -> None:
    """Check that ``kind``, the model_type of a model, is one of ``types``.

    Raises:
        InvalidInput: It is not; the message names the types.
    """
    if kind in types:
        return
    reason = ""
    if kind in NSA_TYPES and types == DENSE_TYPES:
        reason = ": the model has NSA already"
    elif kind in DENSE_TYPES and not set(types) & set(DENSE_TYPES):
        reason = ": the model has dense attention, which selects no blocks; run nsa convert first"
    raise InvalidInput(f"model_type must be one of {', '.join(types)}, got {shown(kind)}{reason}")


def known_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are read, of a config.json whose types and options are checked.

    Raises:
        InvalidInput: The model is of another type, a field has another type or is out of range, or
            a field names code or has no place in these models. The message names the fields.
    """
    kind = values.get("model_type")
    check_type(kind)
    for name in _NAME_CODE:
        if values.get(name) is not None and (name == "auto_map" or "/" in str(values[name])):
            raise InvalidInput(
                f"{name} names code, and a model folder is read as data: remove the field if the"
                f" model is a plain {kind}"
            )
    if values.get("quantization_config") is not None:
        raise InvalidInput("quantization_config must not be set: give the model in bfloat16")
    fields = {name: values[name] for name in _KINDS_OF_FIELDS if name in values}
    if problems := json_fields.problems(_KINDS_OF_FIELDS, fields):
        raise InvalidInput("; ".join(problems[:4]))
    check_sizes(fields)
    for name, expected in (("hidden_act", "silu"), ("mlp_bias", False)):
        if fields.get(name) not in (expected, None):
            raise InvalidInput(f"{name} must be {expected!r}, got {shown(fields[name])}")
    if fields.get("initializer_range", 0) < 0:
        raise InvalidInput(f"initializer_range must be >= 0, got {fields['initializer_range']}")
    for name in ("dtype", "torch_dtype"):
        if fields.get(name) not in (*DTYPES, None):
            known = ", ".join(DTYPES)
            raise InvalidInput(f"{name} must be one of {known}, got {fields[name]!r:.60}")
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        ids = fields.get(name)
        for number in ids if isinstance(ids, list) else [ids]:
            if number is not None and not -1 <= number < fields["vocab_size"]:  # some have -1
                raise InvalidInput(
                    f"{name} must be less than vocab_size {fields['vocab_size']:,}, got {number}"
                )
    return fields


def complete(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return :func:`known_fields` with the defaults that transformers leaves out of config.json.

    Raises:
        InvalidInput: The values are not those of a model of this type.
        BackendUnavailable: Values are missing, and transformers is not installed.
    """
    kind = str(values["model_type"])
    if "rope_scaling" not in values and all(name in values for name in _NEEDED):
        return dict(values)
    library = require_module("transformers", f"the defaults of {kind} need", "nsa-models[hf]")
    kind = kind.removeprefix("nsa_")
    try:
        config = type(library.AutoConfig.for_model(kind)).from_dict({**values, "model_type": kind})
        completed: dict[str, Any] = config.to_dict()
    except Exception as error:  # the checks of transformers raise errors of several libraries
        raise InvalidInput(describe_error(error)) from error
    return {**completed, "model_type": values["model_type"]}


def config_of(values: Mapping[str, Any]) -> LMConfig:
    """Return the sizes of the model that a config.json describes.

    Args:
        values: The content of config.json.

    Raises:
        InvalidInput: The model is of another type, or a value is missing, out of range or not
            supported; the message names it.
        BackendUnavailable: The values need transformers, which is not installed.
    """
    fields = complete(known_fields(values))
    kind, values = fields["model_type"], {**values, **fields}
    spec = layer_spec(values)
    layers = values.get("nsa_layers")
    stated = [name for name in ("qk_norm", *_NOT_DENSE) if name in (values.get("nsa") or {})]
    if stated and layers is not None and len(layers) < values["num_hidden_layers"]:
        raise InvalidInput(
            f"config.nsa: {', '.join(stated)} must not be set, because the dense layers beside"
            " nsa_layers do not have it: load the folder with from_pretrained after import"
            " nsa_models.hf"
        )
    return LMConfig(
        layer=spec.config,
        n_layers=values["num_hidden_layers"],
        vocab_size=values["vocab_size"],
        mlp_dim=values["intermediate_size"],
        attention="nsa" if kind.startswith("nsa_") else "dense",
        norm_eps=spec.norm_eps,
        qkv_bias=spec.qkv_bias,
        out_bias=spec.out_bias,
        tied=bool(values["tie_word_embeddings"]),
        nsa_layers=None if layers is None else tuple(layers),
    )


def json_of(config: LMConfig, length: int, end: int | None) -> dict[str, Any]:
    """Return the content of the config.json of a model.

    Args:
        config: The sizes of the model.
        length: Tokens of a row in training.
        end: The token between documents; None for a task without text.

    Raises:
        InvalidInput: transformers has no model with these sizes; the message names the fields.
    """
    layer, is_nsa = config.layer, config.attention == "nsa"
    defaults = NSAConfig(layer.dim, layer.n_heads, layer.n_kv_heads, layer.head_dim)
    nsa = {
        field.name: getattr(layer, field.name)
        for field in dataclasses.fields(layer)
        if field.name not in _STATED and getattr(layer, field.name) != getattr(defaults, field.name)
    }
    has_dense = not is_nsa or config.nsa_layers is not None
    if has_dense and (unknown := [name for name in _NOT_DENSE if name in nsa]):
        settings = ", ".join(f"{name}={nsa[name]!r:.60}" for name in unknown)
        raise InvalidInput(
            f"the dense layers of transformers have no {settings}: leave these fields out, or train"
            " with NSA in all layers"
        )
    facts = (layer.qk_norm, config.qkv_bias, config.out_bias)
    if (kind := _KINDS.get(facts)) is None:
        raise InvalidInput(
            f"transformers has no model with qk_norm={facts[0]}, qkv_bias={facts[1]} and"
            f" out_bias={facts[2]}"
        )
    name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[kind]
    return {
        "architectures": [f"{'NSA' * is_nsa}{name}ForCausalLM"],
        "model_type": f"{'nsa_' * is_nsa}{kind}",
        "dtype": "float32",
        "vocab_size": config.vocab_size,
        "hidden_size": layer.dim,
        "intermediate_size": config.hidden,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": layer.n_heads,
        "num_key_value_heads": layer.n_kv_heads,
        "head_dim": layer.qk_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": layer.rope_base},
        "attention_bias": config.out_bias,
        "tie_word_embeddings": config.tied,
        "max_position_embeddings": length,
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": None,
        "nsa": nsa,
        **({} if config.nsa_layers is None else {"nsa_layers": list(config.nsa_layers)}),
    }

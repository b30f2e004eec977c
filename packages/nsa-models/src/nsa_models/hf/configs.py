"""Configurations of the NSA models, and the layer that each of them describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nsa_core.config import NSAConfig
from nsa_core.errors import InvalidInput
from nsa_core.hugging_face import read_fields
from nsa_core.limits import integer_problems

# Their frequencies depend on the length of the input. Keys in a cache are rotated already.
_LENGTH_DEPENDENT = ("dynamic", "longrope")
# Properties that NSAConfig.from_hf refuses, and that the layers of this package have.
_SUPPORTED = ("rope_scaling", "rope_parameters", "attention_bias")
# NSAttention has no plan for tensor parallelism.
_MLP_PLAN = {
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}


class NSALlamaConfig(LlamaConfig):
    """The configuration of a Llama with NSA.

    The constructor takes the attributes, and the arguments of LlamaConfig, as keywords.

    Attributes:
        nsa: Fields of :class:`nsa_core.NSAConfig` that the model itself does not state, for example
            ``{"select_block_size": 64, "window_size": 512}``. Default: those of NSAConfig.
        nsa_backends: The backends of the slots, as in :class:`nsa_core.NSAttention`.
    """

    model_type = "nsa_llama"
    base_model_tp_plan = _MLP_PLAN
    nsa: dict[str, Any] | None = None
    nsa_backends: str | dict[str, str] | None = None


class NSAQwen2Config(Qwen2Config):
    """The configuration of a Qwen2 with NSA; ``nsa`` and ``nsa_backends`` as in NSALlamaConfig."""

    model_type = "nsa_qwen2"
    base_model_tp_plan = _MLP_PLAN
    nsa: dict[str, Any] | None = None
    nsa_backends: str | dict[str, str] | None = None


class NSAQwen3Config(Qwen3Config):
    """The configuration of a Qwen3 with NSA; ``nsa`` and ``nsa_backends`` as in NSALlamaConfig."""

    model_type = "nsa_qwen3"
    base_model_tp_plan = _MLP_PLAN
    nsa: dict[str, Any] | None = None
    nsa_backends: str | dict[str, str] | None = None


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


def layer_spec(config: PreTrainedConfig) -> LayerSpec:
    """Return the attention layers of a Llama, Qwen2 or Qwen3, dense or with NSA.

    Args:
        config: The configuration of the model.

    Raises:
        InvalidInput: NSA cannot express the attention of the model, a size is out of range, a field
            of ``config.nsa`` is invalid or is stated by the model, or the rotary embedding is not
            supported. The message names the fields.
    """
    values = config.to_dict()
    _check_sizes(values)
    values["model_type"] = values["model_type"].removeprefix("nsa_")
    frequencies, factor = rotary_frequencies(config)
    options = dict(values.get("nsa") or {})
    if stated := sorted(options.keys() & {"dim", "n_heads", "n_kv_heads", "head_dim", "rope_base"}):
        raise InvalidInput(
            f"config.nsa: {', '.join(stated)} must not be set, because the model states"
            " hidden_size, num_attention_heads, num_key_value_heads, head_dim and rope_parameters"
        )
    if frequencies is not None:
        options.setdefault("rope_frequencies", frequencies)
    if isinstance(options.get("rope_frequencies"), list):  # JSON has no tuples
        options["rope_frequencies"] = tuple(options["rope_frequencies"])
    supported: tuple[str, ...] = _SUPPORTED
    if (values.get("rope_parameters") or {}).get("rope_type") == "proportional":
        # its frequencies are 0 in the part of a head that is not rotated
        supported = (*_SUPPORTED, "partial_rotary_factor")
    fields = read_fields(
        values, supported, options, "Set these fields of the configuration to their defaults"
    )
    try:
        layer = NSAConfig(**fields)
    except TypeError as error:  # an unknown field
        raise InvalidInput(f"config.nsa: {error}") from error
    if factor != 1.0:  # of both cos and sin, so of q and of k
        layer = NSAConfig(**{**fields, "scale": layer.softmax_scale * factor**2})
    is_qwen2 = values["model_type"] == "qwen2"
    bias = bool(values.get("attention_bias"))
    return LayerSpec(
        config=layer,
        backends=values.get("nsa_backends"),
        qkv_bias=bias or is_qwen2,
        out_bias=bias and not is_qwen2,
        norm_eps=float(values["rms_norm_eps"]),
    )


def _check_sizes(values: Mapping[str, Any]) -> None:
    """Check the sizes of a model before anything is allocated for it.

    Raises:
        InvalidInput: A size is out of range; the message names every such size.
    """
    problems: list[str] = []
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"):
        problems += integer_problems(name, values.get(name))
    problems += integer_problems("num_attention_heads", values.get("num_attention_heads"))
    for name in ("num_key_value_heads", "head_dim", "max_position_embeddings"):
        problems += integer_problems(name, values.get(name), optional=True)
    if problems:
        raise InvalidInput("; ".join(problems))


def rotary_frequencies(config: PreTrainedConfig) -> tuple[tuple[float, ...] | None, float]:
    """Return the rotary frequencies of a model and the factor of its cosines and sines.

    Args:
        config: The configuration of the model.

    Returns:
        The frequencies in radians per token, or None for powers of ``rope_theta``; and the factor.

    Raises:
        InvalidInput: The kind of rotary embedding is not supported; the message names it.
    """
    rope: Any = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind == "default" and not any(isinstance(value, Mapping) for value in rope.values()):
        return None, 1.0
    supported = [name for name in ROPE_INIT_FUNCTIONS if name not in _LENGTH_DEPENDENT]
    if kind not in supported or any(isinstance(value, Mapping) for value in rope.values()):
        reason = "its frequencies depend on the length, but a cache holds rotated keys"
        if kind not in _LENGTH_DEPENDENT:
            reason = "the frequencies must be the same in every layer"
        raise InvalidInput(
            f"rope_parameters: rope_type {kind!r} is not supported, because {reason}; supported are"
            f" default, {', '.join(supported)}. For longer inputs use yarn"
        )
    with torch.device("cpu"):  # a model may be built on the meta device
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return tuple(frequencies.tolist()), float(factor)

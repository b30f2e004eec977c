"""Configurations of the NSA models, and the layer that each of them describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nsa_core.errors import InvalidInput
from nsa_core.limits import shown
from nsa_core.util.text import describe_error
from nsa_models.lm import config_json
from nsa_models.lm.config_json import LayerSpec, check_sizes

ATTENTION = "nsa"  # the attention implementation of transformers
# Their frequencies depend on the length of the input. Keys in a cache are rotated already.
_LENGTH_DEPENDENT = ("dynamic", "longrope")
# NSAttention has no plan for tensor parallelism.
_MLP_PLAN = {
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}


class _NSAConfig:
    """Refuse other implementations of attention; a mixin.

    transformers would load them, also from the Hub, before a model is created.
    """

    _attn_implementation_internal: str | None

    @property
    def _attn_implementation(self) -> str | None:
        return self._attn_implementation_internal

    @_attn_implementation.setter
    def _attn_implementation(self, value: Any) -> None:
        if value not in (None, ATTENTION):
            raise InvalidInput(
                f"attn_implementation must be {ATTENTION!r} or None, got {shown(value)}; choose the"
                " kernels of NSA with config.nsa_backends"
            )
        self._attn_implementation_internal = value


class NSALlamaConfig(_NSAConfig, LlamaConfig):
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


class NSAQwen2Config(_NSAConfig, Qwen2Config):
    """The configuration of a Qwen2 with NSA; ``nsa`` and ``nsa_backends`` as in NSALlamaConfig."""

    model_type = "nsa_qwen2"
    base_model_tp_plan = _MLP_PLAN
    nsa: dict[str, Any] | None = None
    nsa_backends: str | dict[str, str] | None = None


class NSAQwen3Config(_NSAConfig, Qwen3Config):
    """The configuration of a Qwen3 with NSA; ``nsa`` and ``nsa_backends`` as in NSALlamaConfig."""

    model_type = "nsa_qwen3"
    base_model_tp_plan = _MLP_PLAN
    nsa: dict[str, Any] | None = None
    nsa_backends: str | dict[str, str] | None = None


def layer_spec(config: PreTrainedConfig) -> LayerSpec:
    """Return the attention layers of a Llama, Qwen2 or Qwen3, dense or with NSA.

    Args:
        config: The configuration of the model.

    Raises:
        InvalidInput: As :func:`nsa_models.lm.config_json.layer_spec`, or the rotary embedding is
            not supported.
    """
    values = config.to_dict()
    check_sizes(values)
    return config_json.layer_spec(values, *rotary_frequencies(config))


def frequencies_of(values: Mapping[str, Any]) -> tuple[tuple[float, ...] | None, float]:
    """Return :func:`rotary_frequencies` of the values of a config.json.

    Raises:
        InvalidInput: The rotary embedding is not supported, or its values are invalid.
    """
    dense = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
    config = dense[str(values["model_type"]).removeprefix("nsa_")]
    names = ("hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings")
    try:
        return rotary_frequencies(
            config(
                rope_parameters=dict(values["rope_parameters"]),
                **{name: values[name] for name in names if values.get(name) is not None},
            )
        )
    except InvalidInput:
        raise
    except Exception as error:  # the checks of transformers raise errors of several libraries
        raise InvalidInput(f"rope_parameters: {describe_error(error)}") from error


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

"""Configurations of the NSA models, and the layer that each of them describes."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from nsa_core.errors import InvalidInput
from nsa_core.limits import shown
from nsa_models.lm import config_json
from nsa_models.lm.config_json import LayerSpec, check_sizes
from nsa_models.lm.rotary import rotary_frequencies

ATTENTION = "nsa"  # the attention implementation of transformers
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

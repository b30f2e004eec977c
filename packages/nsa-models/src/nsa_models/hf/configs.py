"""Configurations of the NSA models, and the layer that each of them describes."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from nsa_core.errors import InvalidInput
from nsa_core.limits import shown
from nsa_models.lm import config_json
from nsa_models.lm.config import layers_with_nsa
from nsa_models.lm.config_json import LayerSpec

ATTENTION = "nsa"  # the attention implementation of transformers
# NSAttention has no plan for tensor parallelism.
_MLP_PLAN = {
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}


class NSAConfigMixin:
    """Resolve ``nsa_layers``, and refuse other implementations of attention; a mixin.

    transformers would load them, also from the Hub, before a model is created. The fields of a
    dense configuration, ``NSAQwen3Config(**dense.to_dict())``, describe a new model with NSA.

    Attributes:
        auto_map: Empty, because the folder of an NSA model holds no code. TRL reads it.
    """

    auto_map: ClassVar[dict[str, str]] = {}
    model_type: ClassVar[str]
    _attn_implementation_internal: str | None
    num_hidden_layers: int
    nsa_layers: list[int] | str | None

    def __post_init__(self, model_type: str | None = None, **kwargs: Any) -> None:
        if model_type is not None:  # transformers would set it on the object
            dense = super().model_type  # type: ignore[misc]
            config_json.check_type(model_type, (type(self).model_type, dense))
        if self.nsa_layers is not None:
            self.nsa_layers = layers_with_nsa(self.nsa_layers, self.num_hidden_layers)
        super().__post_init__(**kwargs)  # type: ignore[misc]

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Create the configuration from plain values, whose ``model_type`` must be its own.

        From the checkpoint of a dense model, transformers would create a model whose attention has
        random weights.

        Raises:
            InvalidInput: The values have another ``model_type``.
        """
        config_json.check_type(config_dict.get("model_type", cls.model_type), (cls.model_type,))
        return super().from_dict(config_dict, **kwargs)  # type: ignore[misc]

    @property
    def _attn_implementation(self) -> str:
        return ATTENTION

    @_attn_implementation.setter
    def _attn_implementation(self, value: Any) -> None:
        if value not in (None, ATTENTION):
            raise InvalidInput(
                f"attn_implementation must be {ATTENTION!r} or None, got {shown(value)}; choose the"
                " kernels of NSA with config.nsa_backends"
            )
        self._attn_implementation_internal = value


class NSALlamaConfig(NSAConfigMixin, LlamaConfig):
    """The configuration of a Llama with NSA.

    The constructor takes the attributes, and the arguments of LlamaConfig, as keywords.

    Attributes:
        nsa: Fields of :class:`nsa_core.NSAConfig` that the model itself does not state, for example
            ``{"select_block_size": 64, "window_size": 512}``. Default: those of NSAConfig.
        nsa_backends: The backends of the slots, as in :class:`nsa_core.NSAttention`.
        nsa_layers: Numbers of the layers with NSA; all others keep dense attention. "all", or
            "every_4th_dense", which keeps layers 3, 7, 11 and so on dense, are stored as numbers.
            Default: all layers have NSA.
    """

    model_type = "nsa_llama"
    base_model_tp_plan = _MLP_PLAN
    nsa: dict[str, Any] | None = None
    nsa_backends: str | dict[str, str] | None = None
    nsa_layers: list[int] | str | None = None


class NSAQwen2Config(NSAConfigMixin, Qwen2Config):
    """The configuration of a Qwen2 with NSA; its own fields are those of NSALlamaConfig."""

    model_type = "nsa_qwen2"
    base_model_tp_plan = _MLP_PLAN
    nsa: dict[str, Any] | None = None
    nsa_backends: str | dict[str, str] | None = None
    nsa_layers: list[int] | str | None = None


class NSAQwen3Config(NSAConfigMixin, Qwen3Config):
    """The configuration of a Qwen3 with NSA; its own fields are those of NSALlamaConfig."""

    model_type = "nsa_qwen3"
    base_model_tp_plan = _MLP_PLAN
    nsa: dict[str, Any] | None = None
    nsa_backends: str | dict[str, str] | None = None
    nsa_layers: list[int] | str | None = None


def layer_spec(config: PreTrainedConfig) -> LayerSpec:
    """Return the attention layers of a Llama, Qwen2 or Qwen3, dense or with NSA.

    Args:
        config: The configuration of the model.

    Raises:
        InvalidInput: As :func:`nsa_models.lm.config_json.layer_spec`.
    """
    return config_json.layer_spec(config.to_dict())

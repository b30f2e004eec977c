"""Llama, Qwen2 and Qwen3 of transformers with NSA in place of dense attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
)
from transformers.generation import GenerationMode
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from nsa_core.errors import InvalidInput
from nsa_models.hf.cache import NSAModelCache
from nsa_models.hf.configs import (
    ATTENTION,
    NSALlamaConfig,
    NSAQwen2Config,
    NSAQwen3Config,
)
from nsa_models.hf.decoder import (
    CACHE,
    NSALlamaModel,
    NSAPreTrained,
    NSAQwen2Model,
    NSAQwen3Model,
    one_cache,
)
from nsa_models.hf.dense import dense_attention
from nsa_models.hf.divided import check_divided_labels
from nsa_models.hf.rows import nsa_mask

# Assisted generation removes at most the candidates of one round, of which there are few.
MAX_ROLLBACK = 1024


class _NSACausalLM(NSAPreTrained):
    """Put a decoder with NSA into a dense model of transformers; a mixin."""

    decoder_class: Any

    def __init__(self, config: Any) -> None:
        # As the dense model, whose __init__ would create the dense decoder.
        PreTrainedModel.__init__(self, config)  # type: ignore[arg-type]
        self.model = self.decoder_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[attr-defined]

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: NSAModelCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        cache: NSAModelCache | None = None,
        **kwargs: Any,
    ) -> Any:
        """Apply the model, as the dense model of transformers does.

        Args:
            input_ids: Integer [B, S].
            attention_mask: As for the decoder, :meth:`NSALlamaModel.forward`.
            position_ids: As for the decoder.
            past_key_values: As for the decoder.
            inputs_embeds: Embeddings [B, S, dim] in place of ``input_ids``.
            labels: Integer [B, S], for the loss.
            use_cache: As for the decoder.
            logits_to_keep: Number of last rows with logits; 0 for all.
            cache: As for the decoder.
            **kwargs: ``cu_seq_lens_q`` and ``max_length_q`` for packed documents, as for the
                decoder; ``shift_labels`` [B, S], the label of each row, in place of ``labels``;
                and other arguments of the dense model.

        Raises:
            InvalidInput: As for the decoder; or ``labels`` would be shifted within a part of a
                sequence (:class:`nsa_core.parallel.ContextParallel`).
            Unsupported: Layers that are divided over ranks do not support the call.
        """
        shift_labels = kwargs.get("shift_labels")
        if labels is None:  # transformers computes a loss only if there are labels
            labels = shift_labels
        elif shift_labels is None:
            check_divided_labels(self.model.first_nsa)
        return super().forward(  # type: ignore[misc]
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            labels=labels,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            **{**kwargs, CACHE: one_cache(past_key_values, cache)},
        )

    def new_cache(self, max_len: int = 0, max_rollback: int = 0) -> NSAModelCache:
        """Create an empty cache for ``past_key_values``.

        Args:
            max_len: Number of tokens per sequence for which the first call allocates memory; the
                cache grows when it is full.
            max_rollback: Maximum number of tokens that ``crop`` can remove.

        Raises:
            InvalidInput: A number is out of range.
            Unsupported: A style of nsa_core.parallel divided the layers.
        """
        cache: NSAModelCache = self.model.new_cache(max_len, max_rollback)
        return cache

    def _get_name(self) -> str:
        # The Trainer looks this name up to decide that label smoothing shifts the labels. FSDP2
        # puts "FSDP" before it.
        return type(self).__name__.removeprefix("FSDP")

    def _prepare_position_ids_for_generation(self, *arguments: Any) -> None:
        """Make no positions; `generate` calls this function if the user passes none.

        The cache knows them, and a check of passed ones waits for the device.
        """

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """Put a cache into ``model_kwargs``; `generate` calls this function."""
        parallel = self.model.first_nsa.parallel
        if parallel is not None:
            parallel.refuse("generation")
        if generation_config.cache_implementation not in (None, "dynamic"):
            raise InvalidInput(
                "cache_implementation must be None for an NSA model, which has a cache of its own,"
                f" got {generation_config.cache_implementation!r}"
            )
        early_exit, first = generation_config.assistant_early_exit, self.model.nsa_layers[0]
        if early_exit is not None and early_exit <= first:  # an NSA layer counts the tokens
            raise InvalidInput(
                f"assistant_early_exit must be greater than {first}, the number of the first layer"
                f" with NSA, got {early_exit}"
            )
        rolls_back = generation_config.is_assistant or (
            generation_mode == GenerationMode.ASSISTED_GENERATION
        )
        if (cache := model_kwargs.get(CACHE)) is not None:
            if rolls_back and isinstance(cache, NSAModelCache) and not cache.is_croppable:
                raise InvalidInput(
                    "past_key_values must have max_rollback > 0 for assisted generation, which"
                    " removes rejected tokens, got 0: create it with"
                    " model.new_cache(max_rollback=...)"
                )
            cache._is_user_defined = True
            return
        if generation_config.use_cache is False:
            return
        max_rollback = min(max_cache_length, MAX_ROLLBACK) if rolls_back else 0
        model_kwargs[CACHE] = self.new_cache(max_rollback=max_rollback)
        for layer in model_kwargs[CACHE].layers:
            layer.limit = max_cache_length


class NSALlamaForCausalLM(_NSACausalLM, LlamaForCausalLM):
    """Llama with NSA; a LlamaForCausalLM whose ``self_attn`` are :class:`NSASelfAttention`."""

    config_class = NSALlamaConfig
    decoder_class = NSALlamaModel
    config: NSALlamaConfig


class NSAQwen2ForCausalLM(_NSACausalLM, Qwen2ForCausalLM):
    """Qwen2 with NSA; a Qwen2ForCausalLM whose ``self_attn`` are :class:`NSASelfAttention`."""

    config_class = NSAQwen2Config
    decoder_class = NSAQwen2Model
    config: NSAQwen2Config


class NSAQwen3ForCausalLM(_NSACausalLM, Qwen3ForCausalLM):
    """Qwen3 with NSA; a Qwen3ForCausalLM whose ``self_attn`` are :class:`NSASelfAttention`."""

    config_class = NSAQwen3Config
    decoder_class = NSAQwen3Model
    config: NSAQwen3Config


class NSALlamaForSequenceClassification(NSAPreTrained, LlamaForSequenceClassification):
    """Llama with NSA and a head that classifies sequences, or scores them as a reward model."""

    config_class = NSALlamaConfig
    config: NSALlamaConfig


class NSAQwen2ForSequenceClassification(NSAPreTrained, Qwen2ForSequenceClassification):
    """Qwen2 with NSA; see :class:`NSALlamaForSequenceClassification`."""

    config_class = NSAQwen2Config
    config: NSAQwen2Config


class NSAQwen3ForSequenceClassification(NSAPreTrained, Qwen3ForSequenceClassification):
    """Qwen3 with NSA; see :class:`NSALlamaForSequenceClassification`."""

    config_class = NSAQwen3Config
    config: NSAQwen3Config


MODELS: dict[str, Any] = {  # by the type of the dense model
    "llama": NSALlamaForCausalLM,
    "qwen2": NSAQwen2ForCausalLM,
    "qwen3": NSAQwen3ForCausalLM,
}
_CLASSIFIERS = (
    NSALlamaForSequenceClassification,
    NSAQwen2ForSequenceClassification,
    NSAQwen3ForSequenceClassification,
)


# The projection of an NSA layer that computes what a dense one does.
_PROJECTIONS = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "o_proj": "out"}


def register() -> None:
    """Register the models with transformers; a second call has no effect."""
    AttentionInterface.register(ATTENTION, dense_attention)
    AttentionMaskInterface.register(ATTENTION, nsa_mask)
    for model, classifier in zip(MODELS.values(), _CLASSIFIERS):
        config = model.config_class
        AutoConfig.register(config.model_type, config, exist_ok=True)
        AutoModelForCausalLM.register(config, model, exist_ok=True)
        AutoModel.register(config, model.decoder_class, exist_ok=True)
        AutoModelForSequenceClassification.register(config, classifier, exist_ok=True)
        # The Trainer, pipelines and `transformers serve` know the kinds of models by these.
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type] = model.__name__
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[config.model_type] = classifier.__name__
    _register_adapter_targets()


def _register_adapter_targets() -> None:
    """Tell peft, if it is installed, the modules that its adapters change by default."""
    try:
        from peft.utils import constants
    except ImportError:
        return
    for name, targets in vars(constants).items():
        if not (name.startswith("TRANSFORMERS_MODELS_TO_") and name.endswith("_MODULES_MAPPING")):
            continue
        for kind, model in MODELS.items():
            if dense := targets.get(kind):
                ours = [_PROJECTIONS[n] for n in dense if n in _PROJECTIONS]
                targets[model.config_class.model_type] = [*dense, *dict.fromkeys(ours)]

"""Llama, Qwen2 and Qwen3 of transformers with NSA in place of dense attention."""

from __future__ import annotations

import os
from inspect import signature
from typing import Any, NoReturn

import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    LlamaForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)
from transformers.generation import GenerationMode

from nsa_core.errors import InvalidInput
from nsa_models.hf.attention import NSASelfAttention
from nsa_models.hf.cache import NSAModelCache
from nsa_models.hf.configs import NSALlamaConfig, NSAQwen2Config, NSAQwen3Config, layer_spec
from nsa_models.hf.divided import check_divided_call, divided_heads_of, whole_state
from nsa_models.hf.packed import packed_boundaries
from nsa_models.hf.rows import nsa_mask

ATTENTION = "nsa"  # the attention implementation of transformers
# The argument for the cache; transformers 5.24 renamed it.
_CACHE = "cache" if "cache" in signature(LlamaForCausalLM.forward).parameters else "past_key_values"
# Assisted generation removes at most the candidates of one round, of which there are few.
MAX_ROLLBACK = 1024


class _NSACausalLM:
    """Put NSA layers and their cache into a dense model of transformers; a mixin."""

    _supports_flash_attn = False
    _supports_sdpa = False
    _supports_flex_attn = False

    def __init__(self, config: Any) -> None:
        requested = config._attn_implementation
        if requested not in (None, ATTENTION):
            raise InvalidInput(
                f"attn_implementation must be {ATTENTION!r} or None, got {requested!r}; choose the"
                " kernels of NSA with config.nsa_backends"
            )
        config._attn_implementation = ATTENTION
        spec = layer_spec(config)
        super().__init__(config)  # type: ignore[call-arg]
        for index, layer in enumerate(self._decoder_layers()):
            layer.self_attn = NSASelfAttention(spec, index)

    def _decoder_layers(self) -> Any:
        return self.model.layers  # type: ignore[attr-defined]

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
            attention_mask: [B, S] with the tokens of a cache before the input; 0 marks padding, on
                either side.
            position_ids: [B, S]. Only positions that count the tokens of each sequence or packed
                document from 0 are supported.
            past_key_values: A cache from :meth:`new_cache` or from an earlier output.
            inputs_embeds: Embeddings [B, S, dim] in place of ``input_ids``.
            labels: Integer [B, S], for the loss.
            use_cache: Return a cache in the output. Default: only if ``past_key_values`` is passed.
            logits_to_keep: Number of last rows with logits; 0 for all.
            cache: The same as ``past_key_values``, under the name that transformers uses from 5.24
                on.
            **kwargs: ``cu_seq_lens_q`` int32 [documents + 1] and ``max_length_q`` for documents
                packed in one row; ``shift_labels`` [B, S], the label of each row, in place of
                ``labels``; and other arguments of the dense model.

        Raises:
            InvalidInput: The cache is of another kind, the attention weights are requested, the
                positions are not supported, or an argument does not go with layers that hold a part
                of each sequence (:class:`nsa_core.parallel.ContextParallel`).
            Unsupported: Layers that are divided over ranks do not support the call.
        """
        if kwargs.get("output_attentions"):
            raise InvalidInput(
                "output_attentions is not supported, because NSA computes no attention matrix; see"
                " docs/how-to/inspect.md for the gates and the selected blocks"
            )
        cache = past_key_values if cache is None else cache
        if cache is None and use_cache:
            cache = self.new_cache()
        if labels is None:  # transformers computes a loss only if there are labels
            labels = kwargs.get("shift_labels")
        arguments = {
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "past_key_values": cache,
            "labels": labels,
        }
        check_divided_call(self._decoder_layers()[0].self_attn, arguments, kwargs)
        if cache is not None and not isinstance(cache, NSAModelCache):
            raise InvalidInput(
                "past_key_values must be a cache of an NSA model, got"
                f" {type(cache).__name__}: create it with model.new_cache()"
            )
        packed = packed_boundaries(attention_mask, position_ids, cache is not None, kwargs)
        return super().forward(  # type: ignore[misc]
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            labels=labels,
            use_cache=cache is not None,
            logits_to_keep=logits_to_keep,
            **{**kwargs, **packed, _CACHE: cache},
        )

    def new_cache(self, max_len: int = 0, max_rollback: int = 0) -> NSAModelCache:
        """Create an empty cache for ``past_key_values``.

        Args:
            max_len: Number of tokens per sequence for which the first call allocates memory; the
                cache grows when it is full.
            max_rollback: Maximum number of tokens that ``crop`` can remove.

        Raises:
            Unsupported: A style of nsa_core.parallel divided the layers.
        """
        layers = [layer.self_attn for layer in self._decoder_layers()]
        for layer in layers:
            if layer.parallel is not None:
                layer.parallel.refuse("a cache")
        return NSAModelCache(layers, max_len, max_rollback)

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """Put a cache into ``model_kwargs``; `generate` calls this function."""
        parallel = self._decoder_layers()[0].self_attn.parallel
        if parallel is not None:
            parallel.refuse("generation")
        if generation_config.cache_implementation not in (None, "dynamic"):
            raise InvalidInput(
                "cache_implementation must be None for an NSA model, which has a cache of its own,"
                f" got {generation_config.cache_implementation!r}"
            )
        if model_kwargs.get(_CACHE) is not None:
            model_kwargs[_CACHE]._is_user_defined = True
            return
        if generation_config.use_cache is False:
            return
        rolls_back = generation_config.is_assistant or (
            generation_mode == GenerationMode.ASSISTED_GENERATION
        )
        model_kwargs[_CACHE] = self.new_cache(
            max_cache_length, min(max_cache_length, MAX_ROLLBACK) if rolls_back else 0
        )

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: dict[str, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> None:
        """Save the model, as the dense model of transformers does.

        If :class:`nsa_core.parallel.HeadParallel` divides the heads of the layers, all ranks must
        call this. The first one of a mesh writes the model of one process.

        Args:
            save_directory: The folder.
            is_main_process: Whether this process writes files.
            state_dict: The parameters to save. Default: those of the model.
            **kwargs: Other arguments of the dense model.

        Raises:
            InvalidInput: The heads are divided, and ``state_dict`` is passed.
        """
        if (divided := divided_heads_of(self)) is not None:  # type: ignore[arg-type]  # a mixin
            state_dict = whole_state(self, state_dict)  # type: ignore[arg-type]
            is_main_process = is_main_process and divided.rank == 0
        super().save_pretrained(  # type: ignore[misc]
            save_directory, is_main_process=is_main_process, state_dict=state_dict, **kwargs
        )

    def initialize_weights(self) -> None:
        """Initialise the parameters that a checkpoint did not have; transformers calls this."""
        for module in self.modules():  # type: ignore[attr-defined]
            if isinstance(module, NSASelfAttention):
                module.reset_uninitialized()
        super().initialize_weights()  # type: ignore[misc]


class NSALlamaForCausalLM(_NSACausalLM, LlamaForCausalLM):
    """Llama with NSA; a LlamaForCausalLM whose ``self_attn`` are :class:`NSASelfAttention`."""

    config_class = NSALlamaConfig
    config: NSALlamaConfig


class NSAQwen2ForCausalLM(_NSACausalLM, Qwen2ForCausalLM):
    """Qwen2 with NSA; a Qwen2ForCausalLM whose ``self_attn`` are :class:`NSASelfAttention`."""

    config_class = NSAQwen2Config
    config: NSAQwen2Config


class NSAQwen3ForCausalLM(_NSACausalLM, Qwen3ForCausalLM):
    """Qwen3 with NSA; a Qwen3ForCausalLM whose ``self_attn`` are :class:`NSASelfAttention`."""

    config_class = NSAQwen3Config
    config: NSAQwen3Config


MODELS: dict[str, tuple[Any, Any]] = {
    "llama": (NSALlamaConfig, NSALlamaForCausalLM),
    "qwen2": (NSAQwen2Config, NSAQwen2ForCausalLM),
    "qwen3": (NSAQwen3Config, NSAQwen3ForCausalLM),
}


def _refuse(*args: Any, **options: Any) -> NoReturn:
    raise InvalidInput(
        'the attention implementation "nsa" is for the models nsa_llama, nsa_qwen2 and nsa_qwen3;'
        " convert a dense model with nsa_models.hf.convert(model)"
    )


def register() -> None:
    """Register the models with transformers; a second call has no effect."""
    AttentionInterface.register(ATTENTION, _refuse)
    AttentionMaskInterface.register(ATTENTION, nsa_mask)
    for config, model in MODELS.values():
        AutoConfig.register(config.model_type, config, exist_ok=True)
        AutoModelForCausalLM.register(config, model, exist_ok=True)

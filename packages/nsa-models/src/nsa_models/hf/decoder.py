"""The decoders of Llama, Qwen2 and Qwen3 with NSA: documents, positions and caches.

Every call of a model passes a decoder, also a call of ``model.model``, of ``get_decoder()`` or of a
wrapper. So the checks and conversions of arguments belong here, not to the model with a head.
"""

from __future__ import annotations

import os
from inspect import signature
from typing import Any

import torch
from transformers import LlamaModel, Qwen2Model, Qwen3Model

from nsa_core.errors import InvalidInput
from nsa_core.torch_ops.packing_checks import has_values
from nsa_core.torch_ops.torch_state import checks_values
from nsa_models.hf.attention import NSASelfAttention
from nsa_models.hf.cache import NSAModelCache
from nsa_models.hf.configs import (
    NSALlamaConfig,
    NSAQwen2Config,
    NSAQwen3Config,
    layer_spec,
)
from nsa_models.hf.dense import dense_arguments
from nsa_models.hf.divided import check_divided_call, divided_heads_of, whole_state
from nsa_models.hf.packed import Call, packed_documents
from nsa_models.lm.config import layers_with_nsa

# The argument for the cache; transformers 5.24 renamed it.
CACHE = "cache" if "cache" in signature(LlamaModel.forward).parameters else "past_key_values"


class NSAPreTrained:
    """Attention, and weights that a checkpoint lacks, of decoders and models; a mixin."""

    _supports_flash_attn = False
    _supports_sdpa = False
    _supports_flex_attn = False

    def initialize_weights(self) -> None:
        """Initialise the parameters that a checkpoint did not have; transformers calls this."""
        for module in self.modules():  # type: ignore[attr-defined]
            if isinstance(module, NSASelfAttention):
                module.reset_uninitialized()
        super().initialize_weights()  # type: ignore[misc]

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


def one_cache(past_key_values: Any, cache: Any) -> Any:
    """Return the cache, whose argument has two names.

    Raises:
        InvalidInput: Both names have a cache.
    """
    if past_key_values is None or cache is None or past_key_values is cache:
        return past_key_values if cache is None else cache
    raise InvalidInput("past_key_values and cache are passed; pass only one of them")


class _NSADecoder(NSAPreTrained):
    """Put NSA layers and their cache into a dense decoder of transformers; a mixin.

    Attributes:
        nsa_layers: Numbers of the layers with NSA; all others are those of the dense decoder.
    """

    layers: Any
    config: Any
    gradient_checkpointing: bool
    training: bool

    def __init__(self, config: Any) -> None:
        if getattr(config, "is_causal", None) is False:
            raise InvalidInput(
                "config.is_causal must be True, got False: NSA attends to the past only"
            )
        spec = layer_spec(config)
        nsa_layers = layers_with_nsa(config.nsa_layers, config.num_hidden_layers)
        super().__init__(config)  # type: ignore[call-arg]
        self.nsa_layers = nsa_layers
        for index in nsa_layers:
            self.layers[index].self_attn = NSASelfAttention(spec, index)

    @property
    def first_nsa(self) -> NSASelfAttention:
        """The attention of the first layer with NSA."""
        attn: NSASelfAttention = self.layers[self.nsa_layers[0]].self_attn
        return attn

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: NSAModelCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        cache: NSAModelCache | None = None,
        **kwargs: Any,
    ) -> Any:
        """Apply the decoder, as the dense one of transformers does.

        Args:
            input_ids: Integer [B, S].
            attention_mask: [B, S], 1 at tokens and 0 at padding, on either side. Beside a cache it
                begins with the masks of the earlier calls. Other values are an error; on a GPU,
                only masks of floats are checked, or all with NSA_CHECK=1. Compiled calls do not
                check masks.
            position_ids: Integers [B, S], or [1, S] for all rows. A token whose position does not
                follow that of the token before it starts a document, at any position. Beside a
                cache, a row has one document, whose positions start at 0 and follow those of the
                tokens in the cache; they may count padding before the document.
            past_key_values: A cache from :meth:`new_cache` or from an earlier output.
            inputs_embeds: Embeddings [B, S, dim] in place of ``input_ids``.
            use_cache: Return a cache in the output. Default: only if ``past_key_values`` is passed.
            cache: The same as ``past_key_values``, under the name that transformers uses from 5.24
                on.
            **kwargs: ``cu_seq_lens_q`` int32 [documents + 1] and ``max_length_q`` for packed
                documents: the boundaries in the B rows laid end to end, from 0 to B * S, with a
                boundary at the end of each row, without a cache. ``position_ids`` have
                no effect beside them; those that do not count up by 1 in each document are an error
                on the CPU, and on a GPU with NSA_CHECK=1. Other arguments of the dense decoder.

        Raises:
            InvalidInput: The cache is of another kind, the mask or the positions are not supported,
                the arguments contradict each other, the attention weights or attention to later
                tokens are requested, or an argument does not go with layers that hold a part of
                each sequence (:class:`nsa_core.parallel.ContextParallel`).
            Unsupported: Layers that are divided over ranks do not support the call.
        """
        cache = one_cache(past_key_values, cache)
        recomputes = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        self._check_call(cache, recomputes, kwargs)
        if cache is None and use_cache and not recomputes:
            cache = self.new_cache()
        inputs = input_ids if inputs_embeds is None else inputs_embeds
        if inputs is not None:  # otherwise the dense decoder raises
            name, axes = ("input_ids", 2) if inputs_embeds is None else ("inputs_embeds", 3)
            if inputs.dim() != axes:
                raise InvalidInput(
                    f"{name} must be {'[B, S]' if axes == 2 else '[B, S, dim]'}, got"
                    f" {list(inputs.shape)}: pass {name}[None] for a single sequence"
                )
            call = Call(inputs.shape[:2], attention_mask, position_ids, cache, kwargs)
            if cache is not None:
                cache.check_complete(inputs.shape[0])
            has_dense = len(self.nsa_layers) < len(self.layers)
            if check_divided_call(self.first_nsa, has_dense, call):
                call = call._replace(position_ids=None)
            _check_mask(call)
            packing = packed_documents(call, self.first_nsa.config)
            kwargs |= packing
            if has_dense:
                kwargs |= dense_arguments(call, packing, inputs.device)
                position_ids = kwargs.pop("position_ids")
        return super().forward(  # type: ignore[misc]
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache or cache is not None,
            **{**kwargs, CACHE: cache},
        )

    def _check_call(self, cache: Any, recomputes: bool, options: dict[str, Any]) -> None:
        """Check the cache, and that the other arguments ask for what NSA computes.

        Args:
            cache: The cache.
            recomputes: Whether activation checkpointing drops the cache.
            options: Other arguments of :meth:`forward`.

        Raises:
            InvalidInput: as :meth:`forward`.
        """
        if options.get("output_attentions"):
            raise InvalidInput(
                "output_attentions is not supported, because NSA computes no attention matrix; see"
                " docs/how-to/inspect.md for the gates and the selected blocks"
            )
        if options.get("is_causal") is False:
            raise InvalidInput("is_causal must be True, got False: NSA attends to the past only")
        if options.get("cu_seq_lens_q") is not None and getattr(self, "_is_replica", False):
            raise InvalidInput(
                "cu_seq_lens_q is divided by nn.DataParallel, which does not know boundaries: pass"
                " position_ids that start at 0 in each document, or use DistributedDataParallel"
            )
        if cache is None:
            return
        if not isinstance(cache, NSAModelCache):
            raise InvalidInput(
                "past_key_values must be a cache of an NSA model, got"
                f" {type(cache).__name__}: create it with model.new_cache()"
            )
        if recomputes:
            raise InvalidInput(
                "past_key_values is passed to a model in training with activation checkpointing,"
                " which computes without a cache: call the model under torch.no_grad()"
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
        layers: list[Any] = [None] * len(self.layers)
        for index in self.nsa_layers:
            layers[index] = self.layers[index].self_attn
            if layers[index].parallel is not None:
                layers[index].parallel.refuse("a cache")
        # assistant_early_exit of `generate` drafts with the first layers and lowers their number.
        return NSAModelCache(layers[: self.config.num_hidden_layers], max_len, max_rollback)


def _check_mask(call: Call) -> None:
    """Check the shape of ``attention_mask``, and its values.

    Reads any mask on the CPU or with NSA_CHECK=1, and otherwise a mask of floats, which may be an
    additive one. Only a mask that is read on a GPU synchronises.

    Raises:
        InvalidInput: It is no tensor with one entry per token of the cache and of the input, has
            other values than 0 and 1, has floats and no 1, or differs from the masks of the calls
            that filled the cache.
    """
    mask: Any = call.attention_mask
    if mask is None:
        return
    past = 0 if call.cache is None else call.cache.get_seq_length()
    shape = [call.size[0], call.size[1] + past]
    if not isinstance(mask, torch.Tensor) or list(mask.shape) != shape:
        passed = list(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise InvalidInput(
            f"attention_mask must be a 2-D mask {shape}, one entry per token of the cache and of"
            f" the input, got {passed}"
        )
    is_float = mask.is_floating_point()
    if not has_values(mask) or not (is_float or checks_values(mask)):
        return
    wrong = mask[mask != mask.bool().to(mask.dtype)]
    if is_float and not mask.any():  # all padding, or an additive mask without padding
        wrong = mask
    if wrong.numel():
        values = sorted({*wrong.flatten().tolist()})[:4]
        raise InvalidInput(
            f"attention_mask must be 1 at tokens and 0 at padding, got {values}: pass mask == 0 for"
            " an additive mask (0 marks tokens), position_ids if each token has the number of its"
            " document, or else mask != 0"
        )
    if call.cache is not None and checks_values(mask):
        call.cache.check_mask(mask.bool())


class NSALlamaModel(_NSADecoder, LlamaModel):
    """The decoder of :class:`nsa_models.hf.NSALlamaForCausalLM`."""

    config_class = NSALlamaConfig
    config: NSALlamaConfig


class NSAQwen2Model(_NSADecoder, Qwen2Model):
    """The decoder of :class:`nsa_models.hf.NSAQwen2ForCausalLM`."""

    config_class = NSAQwen2Config
    config: NSAQwen2Config


class NSAQwen3Model(_NSADecoder, Qwen3Model):
    """The decoder of :class:`nsa_models.hf.NSAQwen3ForCausalLM`."""

    config_class = NSAQwen3Config
    config: NSAQwen3Config

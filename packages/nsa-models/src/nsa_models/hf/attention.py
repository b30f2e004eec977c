"""NSAttention with the call and the parameters of an attention layer of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nsa_core.errors import InvalidInput
from nsa_core.layer.module import NSAttention
from nsa_core.layer.plain_linear import base_weight
from nsa_models.hf.cache import NSAModelCache
from nsa_models.hf.rows import TokenRows
from nsa_models.lm.config_json import LayerSpec


class NSASelfAttention(NSAttention):
    """The attention layer of an NSA model; a :class:`nsa_core.NSAttention` with optional biases.

    Args:
        spec: Shapes and options.
        layer_idx: Index of the layer.
    """

    def __init__(self, spec: LayerSpec, layer_idx: int) -> None:
        super().__init__(spec.config, spec.backends, layer=layer_idx)
        self.spec, self.layer_idx = spec, layer_idx
        for linear, has_bias in ((self.qkv, spec.qkv_bias), (self.out, spec.out_bias)):
            if has_bias:
                linear.bias = nn.Parameter(torch.zeros(linear.out_features))
        for norm in (self.q_norm, self.k_norm):
            if spec.config.qk_norm:
                norm.eps = spec.norm_eps
        for module in self.modules():  # reset_uninitialized initialises them
            if module is not self:
                module._is_hf_initialized = True  # type: ignore[assignment]
        for parameter in self.parameters():
            parameter._is_hf_initialized = not parameter.is_meta  # type: ignore[attr-defined]

    def forward(  # type: ignore[override]  # the call of transformers
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Any = None,
        attention_mask: TokenRows | None = None,
        past_key_values: NSAModelCache | None = None,
        cache: NSAModelCache | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        max_length_q: int | None = None,
        **other: Any,
    ) -> tuple[torch.Tensor, None]:
        """Apply the layer.

        Args:
            hidden_states: The input [B, S, dim].
            position_embeddings: Ignored; NSA rotates at the positions of the tokens.
            attention_mask: The rows that are tokens, from :func:`nsa_models.hf.rows.nsa_mask`; None
                if all are.
            past_key_values: The cache, to which the tokens are appended; before transformers 5.24.
            cache: The same, from transformers 5.24 on.
            cu_seq_lens_q: int32 [documents + 1], the boundaries of packed documents in the B rows
                laid end to end, with the padding of a row after its tokens, as if it were a
                document.
            max_length_q: Length of the longest packed document.
            **other: Arguments of other attention layers, ignored.

        Returns:
            The output [B, S, dim], and None in place of the attention weights.

        Raises:
            InvalidInput: ``attention_mask`` is a tensor, because the model does not have the
                attention implementation "nsa" or because it was called with a mask that is not 2-D;
                or the weights of the layer are on the meta device.
            Unsupported: A style of nsa_core.parallel divided the layer, and there is a cache.
        """
        x, rows = hidden_states, attention_mask
        weight = base_weight(self.qkv)
        if weight is not None and weight.is_meta and not x.is_meta:
            raise InvalidInput(
                f"the weights of layer {self.layer_idx} are on the meta device, for example because"
                " device_map offloads them to the CPU or the disk, which NSA layers do not support:"
                " load the model on devices that hold all layers, with a larger max_memory, more"
                " GPUs or a smaller dtype"
            )
        if rows is not None and not isinstance(rows, TokenRows):
            raise InvalidInput(
                f"attention_mask reached an NSA layer as {type(rows).__name__}"
                f" {list(getattr(rows, 'shape', []))}: pass a 2-D mask [B, S] to the model, and"
                ' keep its attention implementation "nsa"'
            )
        cache = past_key_values if cache is None else cache
        if cache is not None:
            return cache.layers[self.layer_idx].attend(super().forward, x, rows), None
        x = x if rows is None else rows.to_front(x)
        if cu_seq_lens_q is None:
            y = super().forward(x)
        else:
            packed = super().forward(x.flatten(0, 1), cu_seq_lens_q, max_length_q)
            y = packed.unflatten(0, x.shape[:2])
        return y if rows is None else rows.restore(y), None

    @torch.no_grad()
    def reset_uninitialized(self) -> None:
        """Initialise the parameters that a checkpoint did not have, as a new layer does.

        transformers marks the parameters that it has loaded.
        """
        missing = {
            name: parameter
            for name, parameter in self.named_parameters()
            if not getattr(parameter, "_is_hf_initialized", False)
        }
        if not missing:
            return
        with torch.device("cpu"):
            fresh = dict(NSASelfAttention(self.spec, self.layer_idx).named_parameters())
        for name, parameter in missing.items():
            parameter.copy_(fresh[name])
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]

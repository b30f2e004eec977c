"""Dense layers of a model in which some layers have NSA: positions, masks and attention.

They are layers of transformers that call the attention implementation "nsa". They see the tokens
that NSA layers see, at the same positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from nsa_core.errors import InvalidInput
from nsa_core.packing import token_positions
from nsa_models.hf.configs import NSAConfigMixin
from nsa_models.hf.packed import Call
from nsa_models.hf.rows import TokenRows
from nsa_models.lm.dense import causal_documents


def dense_arguments(call: Call, packing: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the arguments that dense layers need, and NSA layers ignore.

    Args:
        call: The call of the decoder.
        packing: Arguments of NSA layers, from :func:`nsa_models.hf.packed.packed_documents`.
        device: Device of the input.

    Returns:
        ``position_ids`` [B, S], which count the tokens of each sequence and document from 0; and
        ``dense_mask``, bool [B, 1, S, columns of the cache + S], True where a token attends; None
        for all earlier tokens of the sequence or document.
    """
    (batch, rows), attention_mask, cache, past = call.size, call.attention_mask, call.cache, 0
    positions = torch.arange(rows, device=device).expand(batch, rows)
    if attention_mask is not None:
        attention_mask = attention_mask.to(device).bool()
        positions = (attention_mask[:, -rows:].cumsum(-1) - 1).clamp(min=0)
    if (boundaries := packing.get("cu_seq_lens_q")) is not None:  # the padding of a row comes last
        in_documents = token_positions(boundaries.to(device), batch * rows).position
        return {"position_ids": in_documents.view(batch, rows).gather(1, positions)}
    if cache is not None:
        past = cache.get_seq_length()
        positions = positions + positions.new_tensor(cache.host_lengths(batch))[:, None]
        if attention_mask is None and cache.has_padding:
            new = torch.ones(batch, rows, dtype=torch.bool, device=device)
            attention_mask = torch.cat([cache.tokens(batch, device), new], 1)
    mask = sdpa_mask(batch, rows, past + rows, past, attention_mask=attention_mask, device=device)
    return {"position_ids": positions, "dense_mask": mask}


def dense_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: TokenRows | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    dense_mask: torch.Tensor | None = None,
    **other: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers' "sdpa" does; the attention function "nsa" of transformers.

    Args:
        module: The attention layer.
        query: [B, Hq, S, D].
        key: [B, G, T, D].
        value: [B, G, T, D].
        attention_mask: The rows that are tokens; None if all are.
        dropout: Probability of dropout; 0 in all models with NSA.
        scaling: Factor of the scores.
        cu_seq_lens_q: int32 [documents + 1], the boundaries of packed documents; as for NSA layers.
        dense_mask: From :func:`dense_arguments`.
        **other: Arguments of other attention functions, ignored.

    Returns:
        The output [B, S, Hq, D], and None in place of the attention weights.

    Raises:
        InvalidInput: The model is no model with NSA.
    """
    if not isinstance(module.config, NSAConfigMixin):
        raise InvalidInput(
            'the attention implementation "nsa" is for the models nsa_llama, nsa_qwen2 and'
            " nsa_qwen3; convert a dense model with nsa_models.hf.convert(model)"
        )
    if cu_seq_lens_q is None:
        y, _ = sdpa_attention_forward(
            module, query, key, value, dense_mask, dropout=dropout, scaling=scaling
        )
        return y, None
    batch, heads, length, _ = query.shape
    q, k, v = (x.transpose(1, 2).flatten(2) for x in (query, key, value))
    if attention_mask is not None:
        q, k, v = (attention_mask.to_front(x) for x in (q, k, v))
    q, k, v = (
        x.flatten(0, 1).unflatten(1, (of.shape[1], -1))
        for x, of in zip((q, k, v), (query, key, value))
    )
    o = causal_documents(q, k, v, cu_seq_lens_q, scaling).view(batch, length, -1)
    if attention_mask is not None:
        o = attention_mask.restore(o)
    return o.unflatten(2, (heads, -1)), None

"""MiniMax-M3 of Hugging Face transformers on :func:`nsa_core.block_attention`.

The indexer of MiniMax-M3 chooses 16 blocks of 128 keys for each query and kv head. transformers
passes these blocks to the attention implementation of the model; :func:`register` adds one that
attends to them with the kernels of this library, forward and backward.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function

from nsa_core import block_attention_with_lse
from nsa_core.errors import InvalidInput

NAME = "nsa_blocks"
# A masked key has this product with every query, before the scale; float16 can hold it. Its weight
# in the softmax is 0 beside any key whose score is at most some thousands lower.
_MASKED = -(2.0**15)
_MASK_COLUMNS = 8  # added to q and k; rows stay aligned to 16 bytes


def register() -> None:
    """Add the attention implementation "nsa_blocks" to transformers.

    Layers whose indexer chooses blocks run :func:`nsa_core.block_attention`; all other layers run
    PyTorch's scaled dot product attention, as with "sdpa". The model's outputs are those of the
    implementation "eager" up to rounding, with and without a cache. Calling it again is harmless.

    Example:
        >>> from nsa_models.hf import minimax
        >>> minimax.register()
        >>> model.set_attn_implementation("nsa_blocks")  # doctest: +SKIP
    """
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, usable_keys)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    block_indices: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as an attention function of transformers.

    The S queries are the last ones of the N keys.

    Args:
        module: The attention layer. If it chooses blocks, it has an ``indexer``.
        query: [B, Hq, S, D].
        key: [B, G, N, D], or more keys than ``attention_mask`` has columns; those are not used.
        value: [B, G, N, D].
        attention_mask: Result of :func:`usable_keys`, bool [B, N], or None.
        dropout: Dropout probability; must be 0 if blocks are chosen.
        scaling: Factor of q k^T before the softmax; default 1 / sqrt(D).
        block_indices: Chosen blocks of the layer's indexer, integers [B, heads of the indexer, S,
            n], -1 padded. None: attend to all keys.
        **options: Arguments of transformers' "sdpa" attention.

    Returns:
        The output [B, S, Hq, D], and None for the attention weights.

    Raises:
        InvalidInput: The mask is not from :func:`usable_keys`, the boundaries of packed documents
            are passed, the dropout is not 0, or the heads of the indexer and of the keys do not
            divide.
    """
    if options.get("cu_seq_lens_q") is not None:
        raise InvalidInput(
            f'"{NAME}" does not keep the packed documents of cu_seq_lens_q apart: give each'
            " document a row of its own"
        )
    if attention_mask is not None and attention_mask.dim() != 2:
        raise InvalidInput(
            f'"{NAME}" takes a padding mask [B, N], got attention_mask of shape'
            f" {list(attention_mask.shape)}; pass attention_mask with 2 axes, or use"
            ' model.set_attn_implementation("sdpa")'
        )
    all_values = value
    if attention_mask is not None:
        keys = attention_mask.shape[1]
        key, value = key[:, :, :keys], value[:, :, :keys]
    if block_indices is None:
        mask = _dense_mask(query.shape[2], key.shape[2], attention_mask, query.device)
        output: torch.Tensor = sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, **options
        )[0]
        if attention_mask is not None and mask is not None:
            output = _fill_empty(output, ~mask[:, 0].any(-1)[..., None], all_values)
        return output, None
    if dropout:
        raise InvalidInput(
            f'"{NAME}" has no dropout, got dropout {dropout}; set config.attention_dropout to 0'
        )
    first_query = key.shape[2] - query.shape[2]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if attention_mask is not None:
        query, key = _add_mask_columns(query, key, attention_mask)
    key, value, block_indices = _match_heads(key, value, block_indices)
    indexer: Any = module.indexer
    missing = indexer.topk_blocks - block_indices.shape[-1]  # short sequences have fewer blocks
    blocks = torch.nn.functional.pad(block_indices, (0, max(0, missing)), value=-1)
    attended, lse = block_attention_with_lse(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        blocks.transpose(1, 2),
        block_size=indexer.block_size,
        scale=scale,
        first_query=first_query,
    )
    if attention_mask is not None:
        attended = _fill_empty(attended, (lse < _MASKED * scale / 2).transpose(1, 2), all_values)
    return attended, None


def usable_keys(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> torch.Tensor | None:
    """Return which keys are tokens, as a mask function of transformers.

    Padding on the right needs no mask, because no earlier query sees it.

    Args:
        batch_size: Number of rows, B.
        q_length: Number of queries, S.
        kv_length: Number of keys. A static cache also counts the keys that it has room for.
        q_offset: Position of the first query; a tensor if the cache is static.
        mask_function: Must be transformers' causal mask.
        attention_mask: Padding mask [B, up to kv_length], True at tokens.
        device: Device of the mask.

    Returns:
        bool [B, N], True at tokens; None if causality hides all other keys. N counts the keys up to
        the last query, or all of a static cache for a single query.

    Raises:
        InvalidInput: The mask is not causal, or rows hold packed documents.
    """
    compiling = torch.compiler.is_compiling()
    if mask_function is not causal_mask_function and not compiling:
        raise InvalidInput(
            f'"{NAME}" takes causal masks and padding only, got another mask; if position_ids start'
            " again inside a row, the row holds packed documents: give each document a row of its"
            " own"
        )
    end = q_offset + q_length
    static = isinstance(end, torch.Tensor) or end < kv_length
    if not static and attention_mask is None:
        return None
    if static and q_length == 1:  # nothing here waits for the device
        mask = (torch.arange(kv_length, device=device) < end).expand(batch_size, -1)
    else:
        mask = torch.ones(batch_size, int(end), dtype=torch.bool, device=device)
    if attention_mask is not None:
        tokens = attention_mask[:, : mask.shape[1]].to(torch.bool)
        mask = mask & torch.nn.functional.pad(tokens, (0, mask.shape[1] - tokens.shape[1]))
    if compiling or (static and q_length == 1):
        return mask
    hidden = bool((mask[:, 1:] & ~mask[:, :-1]).any())  # padding before a token
    if hidden and q_length > 1:
        warnings.warn(
            "rows are padded on the left: transformers counts the blocks of MiniMax-M3 from the"
            " padding, so the outputs of these rows differ from those of unpadded rows, with every"
            " attention implementation; pad on the right, or batch prompts of one length",
            stacklevel=2,
        )
    return mask if hidden or static else None


def _dense_mask(
    queries: int, keys: int, usable: torch.Tensor | None, device: torch.device
) -> torch.Tensor | None:
    """Return the mask [B or 1, 1, S, N] of a layer that attends to all keys.

    None: it has as many queries as keys, or one query, and needs no mask beyond is_causal.
    """
    if usable is None and queries in (1, keys):
        return None
    position = torch.arange(keys - queries, keys, device=device)
    causal = torch.arange(keys, device=device) <= position[:, None]
    return causal[None, None] if usable is None else causal & usable[:, None, None]


def _add_mask_columns(
    query: torch.Tensor, key: torch.Tensor, usable: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q and k with columns that leave the scores of usable keys as they are.

    One column of q is 1; that of k is 0 at usable keys and ``_MASKED`` at all others.
    """
    ones = torch.nn.functional.pad(query.new_ones(*query.shape[:3], 1), (0, _MASK_COLUMNS - 1))
    masked = torch.zeros_like(usable, dtype=key.dtype).masked_fill_(~usable, _MASKED)
    column = masked[:, None, :, None].expand(-1, key.shape[1], -1, -1)
    columns = torch.nn.functional.pad(column, (0, _MASK_COLUMNS - 1))
    return torch.cat([query, ones], -1), torch.cat([key, columns], -1)


def _fill_empty(output: torch.Tensor, empty: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return ``output`` [B, S, Hq, D] with the mean of all values at ``empty`` [B, S, Hq or 1].

    A query that sees no token, such as one of the padding, has equal weights for all keys in the
    implementation "eager".
    """
    mean = value.mean(2).repeat_interleave(output.shape[2] // value.shape[1], 1)
    return torch.where(empty[..., None], mean[:, None], output)


def _match_heads(
    key: torch.Tensor, value: torch.Tensor, blocks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Repeat heads so that each kv head has blocks of its own.

    Raises:
        InvalidInput: Neither number of heads divides the other.
    """
    heads, chosen = key.shape[1], blocks.shape[1]
    if max(heads, chosen) % min(heads, chosen):
        raise InvalidInput(
            f"index_n_heads and num_key_value_heads must divide one another, got {chosen} and"
            f" {heads}"
        )
    if chosen < heads:
        blocks = blocks.repeat_interleave(heads // chosen, 1)
    elif heads < chosen:
        key, value = (x.repeat_interleave(chosen // heads, 1) for x in (key, value))
    return key, value, blocks

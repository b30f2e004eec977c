"""MiniMax-M3 of Hugging Face transformers on :func:`nsa_core.block_attention`.

The indexer of MiniMax-M3 chooses 16 blocks of 128 keys for each query and kv head. transformers
passes these blocks to the attention implementation of the model; :func:`register` adds one that
attends to them with the kernels of this library, forward and backward.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import (
    MiniMaxM3VLIndexer,
    apply_rotary_pos_emb,
)

from nsa_core import block_attention_with_lse
from nsa_core.errors import InvalidInput
from nsa_core.torch_ops.torch_state import dtype_of_products
from nsa_models.hf.documents import boundaries, check_passed_boundaries, is_causal, is_packed
from nsa_models.recipes.indexer_loss import indexer_loss

NAME = "nsa_blocks"
_choose_in_row = MiniMaxM3VLIndexer.forward
# A masked key has this product with every query, before the scale; float16 can hold it. Its weight
# in the softmax is 0 beside any key whose score is at most some thousands lower.
_MASKED = -(2.0**15)
_MASK_COLUMNS = 8  # added to q and k; rows stay aligned to 16 bytes


def register() -> None:
    """Add the attention implementation "nsa_blocks" to transformers.

    Layers whose indexer chooses blocks run :func:`nsa_core.block_attention`; all other layers run
    PyTorch's scaled dot product attention, as with "sdpa". The model's outputs are those of the
    implementation "eager" up to rounding, with and without a cache. Calling it again is harmless.

    Documents packed in a row are those of ``position_ids`` that start again. Their outputs and
    gradients are those of separate rows. For this, ``MiniMaxM3VLIndexer.forward`` is replaced by
    :func:`choose_blocks`, which differs under "nsa_blocks" only.

    Example:
        >>> from nsa_models.hf import minimax
        >>> minimax.register()
        >>> model.set_attn_implementation("nsa_blocks")  # doctest: +SKIP
    """
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, usable_keys)
    MiniMaxM3VLIndexer.forward = choose_blocks


def train_indexer(model: torch.nn.Module, weight: float = 1.0) -> None:
    """Let each backward through ``model`` train its indexers too, under "nsa_blocks".

    In each layer with an indexer, ``weight`` times the gradient of
    :func:`nsa_models.recipes.indexer_loss.indexer_loss` is added to the gradients of the indexer's
    weights, once per forward whose output has a gradient. The value of the loss is in
    ``indexer.last_loss`` of the layer. The input of the indexer is detached, so nothing else
    changes. The weight is not divided by the number of batches whose gradients are accumulated.

    Args:
        model: A model with layers of MiniMax-M3.
        weight: Factor of the loss; 0 turns it off.

    Raises:
        InvalidInput: The model has no indexer.
    """
    indexers = [x for x in model.modules() if isinstance(x, MiniMaxM3VLIndexer)]
    if not indexers:
        raise InvalidInput(f"{type(model).__name__} has no indexer of MiniMax-M3")
    for indexer in indexers:
        indexer.loss_weight = weight


@functools.wraps(_choose_in_row)
def choose_blocks(
    indexer: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    cache: Any,
    position_ids: torch.Tensor,
) -> torch.Tensor:
    """Choose blocks as transformers does, for each document of a packed row as if it were alone.

    Without a cache, and outside torch.compile, this holds for every row whose positions do not
    count from 0 to S - 1.

    Args:
        indexer: A ``MiniMaxM3VLIndexer``.
        hidden_states: Input of the layer [B, S, dim].
        position_embeddings: Cosines and sines of the positions, [B or 1, S, rotary width].
        cache: The cache of the call, or None.
        position_ids: [B, S].

    Returns:
        int64 [B, heads of the indexer, S, n], -1 padded. The blocks of packed documents count from
        the document's first token, and the tensor has the boundaries as ``bounds``. It has the
        rotated queries and keys of an indexer that is trained as ``states``.
    """
    blocks: torch.Tensor
    is_ours = indexer.config._attn_implementation == NAME
    is_read = is_ours and cache is None and not torch.compiler.is_compiling()
    states = None
    if is_read and torch.is_grad_enabled() and getattr(indexer, "loss_weight", 0):
        states = _index_states(indexer, hidden_states.detach(), position_embeddings)
    bounds = boundaries(position_ids) if is_read else None
    if bounds is None:
        blocks = _choose_in_row(indexer, hidden_states, position_embeddings, cache, position_ids)
        if is_read:
            blocks.bounds, blocks.states = None, states  # type: ignore[attr-defined]
        return blocks
    size = hidden_states.shape[:2]
    angles = [x.expand(size[0], -1, -1).flatten(0, 1)[None] for x in position_embeddings]
    tokens = hidden_states.flatten(0, 1)[None]
    position = torch.arange(tokens.shape[1], device=tokens.device)[None]
    blocks = position.new_full((indexer.num_heads, tokens.shape[1], indexer.topk_blocks), -1)
    blocks[..., 0] = 0  # all that a document of one token has
    for start, end in itertools.pairwise(bounds):
        if end - start > 1:
            own_angles = tuple(x[:, start:end] for x in angles)
            own_tokens, own_positions = tokens[:, start:end], position[:, : end - start]
            chosen = _choose_in_row(indexer, own_tokens, own_angles, None, own_positions)[0]
            blocks[:, start:end, : chosen.shape[-1]] = chosen
    blocks = blocks.unflatten(1, size).transpose(0, 1)
    blocks.bounds, blocks.states = bounds, states  # type: ignore[attr-defined]
    return blocks


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
        InvalidInput: The mask is not from :func:`usable_keys`, documents are packed over a cache,
            ``cu_seq_lens_q`` contradicts ``position_ids``, the dropout is not 0, or the heads of
            the indexer and of the keys do not divide.
    """
    if attention_mask is not None and attention_mask.dim() != 2:
        raise InvalidInput(
            f'"{NAME}" takes a padding mask [B, N], got attention_mask of shape'
            f" {list(attention_mask.shape)}; pass attention_mask with 2 axes, or use"
            ' model.set_attn_implementation("sdpa")'
        )
    # Under autocast, norms and rotations leave q and k in float32.
    query, key, value = (x.to(dtype_of_products(x)) for x in (query, key, value))
    all_values = value
    if attention_mask is not None:
        keys = attention_mask.shape[1]
        key, value = key[:, :, :keys], value[:, :, :keys]
    bounds = _checked_boundaries(query, key, block_indices, attention_mask, options)
    if block_indices is None:
        mask = _dense_mask(query, key, attention_mask, bounds)
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
    indexer: Any = module.indexer
    size = query.shape[0], query.shape[2]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    loss = None
    if getattr(block_indices, "states", None) is not None:
        if attention_mask is not None:
            raise InvalidInput(
                "train_indexer takes rows without padding on the left: pad on the right, or pack"
                " documents"
            )
        loss = _indexer_loss(query, key, block_indices, indexer.block_size, scale)
        indexer.last_loss = loss.detach()
    if attention_mask is not None:
        query, key = _add_mask_columns(query, key, attention_mask)
    key, value, block_indices = _match_heads(key, value, block_indices)
    missing = indexer.topk_blocks - block_indices.shape[-1]  # short sequences have fewer blocks
    blocks = torch.nn.functional.pad(block_indices, (0, max(0, missing)), value=-1)
    rows: list[torch.Tensor] = [x.transpose(1, 2) for x in (query, key, value, blocks)]
    layout: dict[str, Any] = {"first_query": key.shape[2] - query.shape[2]}
    if bounds is not None:
        rows = [x.flatten(0, 1) for x in rows]
        on_device = torch.tensor(bounds, dtype=torch.int32, device=query.device)
        longest = max(end - start for start, end in itertools.pairwise(bounds))
        layout = {"cu_seqlens": on_device, "max_seqlen": longest}
    attended, lse = block_attention_with_lse(
        *rows, block_size=indexer.block_size, scale=scale, **layout
    )
    if bounds is not None:
        attended, lse = attended.unflatten(0, size), lse.unflatten(1, size).transpose(0, 1)
    if loss is not None:
        attended = _WithLoss.apply(  # type: ignore[no-untyped-call]
            attended, loss * indexer.loss_weight
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
        mask_function: Must be transformers' causal mask, of rows or of packed documents.
        attention_mask: Padding mask [B, up to kv_length], True at tokens.
        device: Device of the mask.

    Returns:
        bool [B, N], True at tokens; None if causality hides all other keys. N counts the keys up to
        the last query, or all of a static cache for a single query.

    Raises:
        InvalidInput: The mask is not causal.
    """
    compiling = torch.compiler.is_compiling()
    if not compiling and not is_causal(mask_function):
        raise InvalidInput(
            f'"{NAME}" takes causal masks, padding and packed documents, got another mask; use'
            ' model.set_attn_implementation("sdpa")'
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
            "rows are padded on the left: over a cache, or without position_ids that count the"
            " tokens, transformers counts the blocks of MiniMax-M3 from the padding, so the outputs"
            " of these rows differ from those of unpadded rows, with every attention"
            " implementation; pad on the right, or batch prompts of one length",
            stacklevel=2,
        )
    return mask if hidden or static else None


class _WithLoss(torch.autograd.Function):
    """Return a tensor as it is; its backward is also the backward of a loss."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(torch.ones_like(loss))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return grad, ctx.saved_tensors[0]


def _index_states(
    indexer: Any, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indexer's queries [B, S, I, E] and keys [B, S, E], with gradients."""
    q = indexer.q_norm(indexer.q_proj(hidden_states).unflatten(-1, (-1, indexer.head_dim)))
    k = indexer.k_norm(indexer.k_proj(hidden_states))
    angles = (x[..., : indexer.head_dim] for x in position_embeddings)
    rotated: tuple[torch.Tensor, torch.Tensor] = apply_rotary_pos_emb(
        q, k[:, :, None], *angles, unsqueeze_dim=2
    )
    return rotated[0], rotated[1][:, :, 0]


def _indexer_loss(
    query: torch.Tensor, key: torch.Tensor, blocks: Any, block_size: int, scale: float
) -> torch.Tensor:
    """Return the loss of an indexer, the mean over all queries of all documents."""
    index_q, index_k = blocks.states
    rows = [query.transpose(1, 2), key.transpose(1, 2), index_q, index_k, blocks.transpose(1, 2)]
    bounds: list[int] | None = blocks.bounds
    if bounds is None:
        return indexer_loss(*rows, block_size=block_size, scale=scale)
    rows = [x.flatten(0, 1)[None] for x in rows]
    total = torch.zeros((), device=query.device)
    for start, end in itertools.pairwise(bounds):
        if end - start > 1:  # one token has no other choice
            part = [x[:, start:end] for x in rows]
            loss = indexer_loss(*part, block_size=block_size, scale=scale)
            total = total + loss * (end - start)
    return total / bounds[-1]


def _checked_boundaries(
    query: torch.Tensor,
    key: torch.Tensor,
    blocks: torch.Tensor | None,
    usable: torch.Tensor | None,
    options: dict[str, Any],
) -> list[int] | None:
    """Return the boundaries of packed documents for a layer; None if each row is one document.

    Raises:
        InvalidInput: Documents are packed over a cache, or under torch.compile, or the boundaries
            in ``options`` contradict the positions.
    """
    positions = options.get("position_ids")
    batch, columns = query.shape[0], query.shape[2]
    if torch.compiler.is_compiling():
        if options.get("cu_seq_lens_q") is not None:
            raise InvalidInput(
                f'"{NAME}" does not read cu_seq_lens_q under torch.compile: compile with one'
                " document per row"
            )
        return None
    bounds = None
    if hasattr(blocks, "bounds"):
        bounds = blocks.bounds  # type: ignore[union-attr]
    elif positions is not None and columns > 1:
        positions = positions.expand(batch, -1)
        if blocks is None and columns == key.shape[2]:
            bounds = boundaries(positions)
        elif is_packed(positions, usable):
            raise InvalidInput(
                f'"{NAME}" takes documents packed in a row (position_ids that start again) only'
                " without a cache: pass use_cache=False"
            )
    check_passed_boundaries(options, bounds, batch, columns)
    return bounds


def _dense_mask(
    query: torch.Tensor,
    key: torch.Tensor,
    usable: torch.Tensor | None,
    bounds: list[int] | None,
) -> torch.Tensor | None:
    """Return the mask [B or 1, 1, S, N] of a layer that attends to all keys.

    None: it has as many queries as keys, or one query, and needs no mask beyond is_causal.
    """
    queries, keys = query.shape[2], key.shape[2]
    if usable is None and bounds is None and queries in (1, keys):
        return None
    position = torch.arange(keys, device=query.device)
    mask = (position <= position[keys - queries :, None])[None, None]
    if usable is not None:
        mask = mask & usable[:, None, None]
    if bounds is not None:
        starts = torch.tensor(bounds[1:-1], device=query.device, dtype=torch.int64)
        token = torch.arange(bounds[-1], device=query.device)
        document = torch.bucketize(token, starts, right=True).view(-1, 1, 1, queries)
        mask = mask & (document == document.mT)
    return mask


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

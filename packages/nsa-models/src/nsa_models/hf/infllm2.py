"""InfLLM-v2 as an attention implementation of transformers, and MiniCPM4 as a model for it.

transformers has no class for MiniCPM4, whose checkpoints come with code of their own. Its decoder
is that of Granite, with other names for the multipliers, so :func:`granite_config` reads its
configuration, and ``GraniteForCausalLM`` its weights. No code of a checkpoint is run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    GraniteConfig,
    PreTrainedConfig,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function

from nsa_core.errors import InvalidInput
from nsa_core.limits import check_integers
from nsa_core.torch_ops.torch_state import dtype_of_products
from nsa_models.hf.documents import boundaries, check_passed_boundaries, is_causal, is_packed
from nsa_models.recipes.infllm2 import infllm2_attention

NAME = "infllm2"
_DEFAULTS = {  # of MiniCPM4
    "kernel_size": 32,
    "kernel_stride": 16,
    "init_blocks": 1,
    "block_size": 64,
    "window_size": 2048,
    "topk": 64,
    "use_nope": False,
    "dense_len": 8192,
}
# Fields of MiniCPM4 that mean the same in Granite, that have another name in it, and that do not
# change what the model computes.
_SAME = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "hidden_act"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps"),
    *("attention_bias", "attention_dropout", "initializer_range", "use_cache", "sparse_config"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "dtype", "torch_dtype"),
}
_RENAMED = {
    *("scale_emb", "scale_depth", "dim_model_base", "rope_theta", "rope_scaling"),
    *("tie_word_embeddings", "head_dim"),
}
_WITHOUT_EFFECT = {
    *("_name_or_path", "architectures", "auto_map", "model_type", "transformers_version"),
    *("mup_denominator", "pretraining_tp"),
}


def register() -> None:
    """Add the attention implementation "infllm2" to transformers.

    It serves causal decoders whose attention takes rotated queries and keys, such as Llama, Qwen
    and Granite, with a field ``sparse_config`` in the configuration, as in MiniCPM4. The attention
    is :func:`nsa_models.recipes.infllm2.infllm2_attention` from ``dense_len`` keys on, and dense
    for fewer, with gradients, packed documents, padding and dynamic caches. Each document and each
    padded row gives what it gives alone.

    Example:
        >>> from nsa_models.hf import infllm2
        >>> infllm2.register()
        >>> model.config.sparse_config = {"topk": 64, "dense_len": 8192}  # doctest: +SKIP
        >>> model.set_attn_implementation("infllm2")  # doctest: +SKIP
    """
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, token_mask)


def granite_config(source: str | os.PathLike[str] | Mapping[str, Any]) -> GraniteConfig:
    """Return the configuration of Granite that computes what a MiniCPM4 model computes.

    Embeddings are multiplied by ``scale_emb``, the outputs of attention and MLP by ``scale_depth``
    / sqrt(layers), and logits are divided by ``hidden_size / dim_model_base``. The names of the
    weights are the same.

    Args:
        source: A folder or a name on the Hub, of which only config.json is read, or its content.

    Returns:
        The configuration, with ``sparse_config`` if ``source`` has one. MiniCPM4 publishes it in
        its README: without it, set ``config.sparse_config`` before attention "infllm2" is used.

    Raises:
        InvalidInput: A field is missing, or changes the model in a way that Granite does not have.

    Example:
        >>> config = granite_config("openbmb/MiniCPM4-8B")  # doctest: +SKIP
        >>> GraniteForCausalLM.from_pretrained(  # doctest: +SKIP
        ...     "openbmb/MiniCPM4-8B", config=config, attn_implementation="infllm2"
        ... )
    """
    fields: dict[str, Any] = (
        dict(source)
        if isinstance(source, Mapping)
        else PreTrainedConfig.get_config_dict(os.fspath(source))[0]
    )
    if fields.get("model_type", "minicpm") not in ("minicpm", "minicpm4"):
        raise InvalidInput(f'model_type must be "minicpm" (MiniCPM4), got {fields["model_type"]!r}')
    required = ("scale_emb", "scale_depth", "dim_model_base", "hidden_size", "num_hidden_layers")
    if missing := [name for name in (*required, "num_attention_heads") if name not in fields]:
        raise InvalidInput(f"the configuration of a MiniCPM4 model has {missing}; they are missing")
    known = _SAME | _RENAMED | _WITHOUT_EFFECT | set(PreTrainedConfig().to_dict())
    others = [name for name, x in fields.items() if name not in known and x is not None]
    if others:
        raise InvalidInput(
            f"fields {others} are not known to be those of a MiniCPM4 model, and may change what it"
            " computes: remove those that do not"
        )
    head_dim = fields["hidden_size"] // fields["num_attention_heads"]
    if fields.get("head_dim", head_dim) != head_dim:
        raise InvalidInput(
            f"head_dim must be hidden_size / num_attention_heads = {head_dim}, got"
            f" {fields['head_dim']}"
        )
    if fields.get("sparse_config") is not None:
        _read_sparse_config(fields["sparse_config"])
    return GraniteConfig(
        **{name: fields[name] for name in _SAME if name in fields},
        tie_word_embeddings=fields.get("tie_word_embeddings", True),  # MiniCPM's default
        embedding_multiplier=fields["scale_emb"],
        residual_multiplier=fields["scale_depth"] / math.sqrt(fields["num_hidden_layers"]),
        logits_scaling=fields["hidden_size"] / fields["dim_model_base"],
        attention_multiplier=head_dim**-0.5,
        rope_parameters=_rope_parameters(fields.get("rope_scaling"), fields.get("rope_theta", 1e4)),
    )


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as an attention function of transformers.

    The S queries are the last ones of the N keys. The fields of ``module.config.sparse_config`` are
    ``kernel_size``, ``kernel_stride``, ``init_blocks``, ``block_size``, ``window_size``, ``topk``,
    ``use_nope`` and ``dense_len``; those left out are MiniCPM4's.

    Args:
        module: The attention layer.
        query: [B, Hq, S, D].
        key: [B, G, N, D].
        value: [B, G, N, D].
        attention_mask: Result of :func:`token_mask`.
        dropout: Dropout probability; must be 0.
        scaling: Factor of q k^T before the softmax; default 1 / sqrt(D).
        **options: Other arguments of attention functions.

    Returns:
        The output [B, S, Hq, D], 0 at padding, and None for the attention weights.

    Raises:
        InvalidInput: ``sparse_config`` is missing, or has a field or a value that is not supported;
            the same for an option, the mask, the boundaries of documents and the dropout.
    """
    config = getattr(module.config, "sparse_config", None)
    if config is None:
        raise InvalidInput(
            f'"{NAME}" reads config.sparse_config, which is missing: set it, for example to'
            f" {_DEFAULTS}"
        )
    sizes, dense_len = _read_sparse_config(config)
    for name in ("sliding_window", "softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise InvalidInput(f'"{NAME}" has no {name}, got {options[name]}')
    if dropout or options.get("is_causal") not in (None, True):
        raise InvalidInput(
            f'"{NAME}" is causal attention without dropout, got dropout {dropout} and is_causal'
            f" {options.get('is_causal')}; set config.attention_dropout to 0"
        )
    # Under autocast, norms and rotations leave q and k in float32.
    query, key, value = (x.to(dtype_of_products(x)) for x in (query, key, value))

    def attend_to_document(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        queries, keys = q.shape[2], k.shape[2]
        if keys >= dense_len:
            output: torch.Tensor = infllm2_attention(
                q.transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                scale=scaling,
                first_query=keys - queries,
                **sizes,
            )
            return output
        mask = None
        if queries not in (1, keys):
            position = torch.arange(keys, device=q.device)
            mask = (position <= position[keys - queries :, None])[None, None]
        dense: torch.Tensor = sdpa_attention_forward(module, q, k, v, mask, scaling=scaling)[0]
        return dense

    parts = _documents(query, key, attention_mask, options)
    if parts is None:
        return attend_to_document(query, key, value), None
    outputs, past = [], key.shape[2] - query.shape[2]
    for row, start, end, is_token in parts:
        first = max(start, past)
        rows = slice(row, row + 1)
        if is_token:
            q = query[rows, :, first - past : end - past]
            document = attend_to_document(q, key[rows, :, start:end], value[rows, :, start:end])
        else:
            document = query.new_zeros(1, end - first, query.shape[1], value.shape[-1])
        outputs.append(document)
    return torch.cat(outputs, 1).unflatten(1, (query.shape[0], query.shape[2]))[0], None


def token_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor | None:
    """Return which keys are tokens, on the CPU, as a mask function of transformers.

    Args:
        batch_size: Number of rows, B.
        q_length: Number of queries.
        kv_length: Number of keys, N.
        q_offset: Position of the first query.
        mask_function: Must be transformers' causal mask, of rows or of packed documents.
        attention_mask: Padding mask [B, N], True at tokens.

    Returns:
        bool [B, N]; None if all keys are tokens. The mask is read once per forward.

    Raises:
        InvalidInput: The mask is not causal, the cache is static, or torch.compile traces padding.
    """
    compiling = torch.compiler.is_compiling()
    if not compiling and not is_causal(mask_function):
        raise InvalidInput(
            f'"{NAME}" takes causal masks, padding and packed documents, got another mask'
        )
    if isinstance(q_offset, torch.Tensor) or q_offset + q_length < kv_length:
        raise InvalidInput(
            f'"{NAME}" counts the keys of a cache, and a static cache has room for more: use a'
            " dynamic cache"
        )
    if attention_mask is None:
        return None
    if compiling:
        raise InvalidInput(f'"{NAME}" reads padding on the host: compile without attention_mask')
    mask = attention_mask.to("cpu", torch.bool)
    return None if bool(mask.all()) else mask


def _read_sparse_config(config: Mapping[str, Any]) -> tuple[dict[str, int], int]:
    """Return the sizes of the recipe, and from how many keys on it is used.

    Raises:
        InvalidInput: A field is unknown, or its value is not supported.
    """
    if unknown := sorted(set(config) - set(_DEFAULTS)):
        raise InvalidInput(f"sparse_config takes {sorted(_DEFAULTS)}, got {unknown}")
    fields = {**_DEFAULTS, **config}
    if fields.pop("use_nope"):
        raise InvalidInput(
            "sparse_config.use_nope must be false: attention implementations get rotated queries"
            " and keys only"
        )
    from_zero = {name: fields.pop(name) for name in ("init_blocks", "topk", "dense_len")}
    check_integers(
        {f"sparse_config.{n}": x for n, x in fields.items()},
        {f"sparse_config.{n}": x for n, x in from_zero.items()},
    )
    pool, stride = fields["kernel_size"], fields["kernel_stride"]
    block_size, window = fields["block_size"], fields["window_size"]
    if pool != 2 * stride or block_size % stride:
        raise InvalidInput(
            "sparse_config.kernel_size must be 2 * kernel_stride, and block_size a multiple of"
            f" kernel_stride, as in MiniCPM4; got {pool}, {stride} and {block_size}"
        )
    if window < block_size:
        raise InvalidInput(
            f"sparse_config.window_size must be at least block_size = {block_size}, got {window}"
        )
    sizes = {"pool": pool, "stride": stride, "block_size": block_size}
    sizes |= {"local_blocks": window // block_size, "topk": from_zero["topk"]}
    return sizes | {"init_blocks": from_zero["init_blocks"]}, from_zero["dense_len"]


def _rope_parameters(scaling: Mapping[str, Any] | None, theta: float) -> dict[str, Any]:
    """Return the rotary parameters of transformers for ``rope_scaling`` of MiniCPM4.

    Raises:
        InvalidInput: It is not LongRoPE with one list of factors, the only kind of MiniCPM4.
    """
    if scaling is None:
        return {"rope_type": "default", "rope_theta": theta}
    fields = dict(scaling)
    kind = fields.pop("rope_type", fields.pop("type", None))
    fields.pop("rope_theta", None)
    names = {"long_factor", "short_factor", "original_max_position_embeddings"}
    if kind != "longrope" or set(fields) != names:
        raise InvalidInput(
            f'rope_scaling must be null or of rope_type "longrope" with {sorted(names)}, got'
            f" {kind!r} with {sorted(fields)}"
        )
    if fields["long_factor"] != fields["short_factor"]:
        raise InvalidInput(
            "rope_scaling.long_factor and short_factor must be equal, as in MiniCPM4: MiniCPM and"
            " transformers change from one to the other at different lengths"
        )
    return {"rope_type": "longrope", "rope_theta": theta, **fields}


def _documents(
    query: torch.Tensor,
    key: torch.Tensor,
    is_token: torch.Tensor | None,
    options: dict[str, Any],
) -> list[tuple[int, int, int, bool]] | None:
    """Return (row, first key, end, whether they are tokens) of each document and run of padding.

    They cover the queries of all rows in order. None: every row is one document without padding.

    Raises:
        InvalidInput: Documents are packed over a cache, padding lies between tokens, or the mask
            has other axes.
    """
    batch, columns, keys = query.shape[0], query.shape[2], key.shape[2]
    if is_token is not None and is_token.shape != (batch, keys):
        raise InvalidInput(
            f'"{NAME}" takes a padding mask [B, N] = {[batch, keys]}, got attention_mask of shape'
            f" {list(is_token.shape)}"
        )
    bounds, positions = None, options.get("position_ids")
    if positions is not None and columns > 1 and not torch.compiler.is_compiling():
        positions = positions.expand(batch, -1)
        over_cache = columns < keys or options.get("use_cache")
        if over_cache and is_packed(positions, is_token):
            raise InvalidInput(
                f'"{NAME}" takes documents packed in a row (position_ids that start again) only'
                " without a cache: pass use_cache=False"
            )
        if columns == keys:
            bounds = boundaries(positions)
    check_passed_boundaries(options, bounds, batch, columns)
    if bounds is None and is_token is None:
        return None
    starts = torch.zeros(batch, keys, dtype=torch.bool, device="cpu")
    starts[:, 0] = True
    if bounds is not None:
        starts.view(-1)[bounds[:-1]] = True
    if is_token is None:
        is_token = torch.ones_like(starts)
    is_token = is_token.cpu()
    changes = is_token.diff()
    if bool((changes.long().cumsum(1).amax(1) > 1 + (~is_token[:, 0]).long()).any()):
        raise InvalidInput(f'"{NAME}" takes padding before or after the tokens of a row only')
    starts[:, 1:] |= changes
    first = starts.view(-1).nonzero().flatten().tolist()
    parts = []
    for start, end in zip(first, [*first[1:], batch * keys], strict=True):
        row, column = divmod(start, keys)
        if end - row * keys > keys - columns:
            parts.append((row, column, end - row * keys, bool(is_token[row, column])))
    return parts

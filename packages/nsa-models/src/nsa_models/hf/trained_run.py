"""Load a run of `nsa train` as a model of transformers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nsa_core.config import NSAConfig
from nsa_core.errors import InvalidInput
from nsa_models.hf.models import MODELS
from nsa_models.lm import checkpoint
from nsa_models.lm.checkpoint import Checkpoint
from nsa_models.lm.config import LMConfig

# Fields of NSAConfig that a configuration of transformers states itself.
_STATED = ("dim", "n_heads", "n_kv_heads", "head_dim", "rope_base", "qk_norm")
# Fields that change dense attention and that a dense Llama or Qwen3 does not have.
_NOT_DENSE = ("v_head_dim", "rope", "rope_frequencies", "scale")
_NORM_EPS = 1e-6  # of every norm of nsa_models.lm
_END = "<|endoftext|>"
_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
}


def from_run(path: str | Path) -> Any:
    """Load a run of `nsa train` as a model of transformers with the same logits.

    Save it with its tokenizer to use it wherever transformers reads models:
    ``from_run("run").save_pretrained("folder")`` and
    ``run_tokenizer("run").save_pretrained("folder")``.

    Args:
        path: The folder or the checkpoint of the run.

    Returns:
        A LlamaForCausalLM, or a Qwen3ForCausalLM if the run has norms of queries and keys; for a
        run with NSA, an NSALlamaForCausalLM or NSAQwen3ForCausalLM. Float32, on the CPU.

    Raises:
        InvalidInput: The checkpoint cannot be read, or its dense attention has a field that the
            dense model of transformers does not have; the message names the fields.
        BackendUnavailable: safetensors is not installed.

    Example:
        >>> model = from_run("run")  # doctest: +SKIP
        >>> model.generate(torch.tensor([[72, 105]]), max_new_tokens=20)  # doctest: +SKIP
    """
    return _model_of(checkpoint.read(path))


def dense_from_run(path: str | Path) -> Any:
    """Load a run of `nsa train --attention dense` as a model of transformers, as :func:`from_run`.

    Raises:
        InvalidInput: As :func:`from_run`, or the run has NSA.
    """
    saved = checkpoint.read(path)
    if saved.config.attention != "dense":
        raise InvalidInput(
            f"{saved.path} is not a dense model: its attention is {saved.config.attention}; load it"
            " with nsa_models.hf.from_run"
        )
    return _model_of(saved)


def fields_of_run(path: str | Path) -> dict[str, Any]:
    """Return the fields of NSAConfig of a run that are neither defaults nor of its dense model."""
    return _nsa_fields(checkpoint.read(path).config)


def _model_of(saved: Checkpoint) -> Any:
    config, has_nsa = saved.config, saved.config.attention == "nsa"
    fields = _nsa_fields(config)
    if not has_nsa and (unknown := sorted(fields.keys() & set(_NOT_DENSE))):
        settings = ", ".join(f"{name}={fields[name]!r}" for name in unknown)
        raise InvalidInput(
            f"{saved.path}: the dense models of transformers have no {settings}; convert this run"
            " with nsa train --from-dense"
        )
    nsa_config, nsa_model = MODELS["qwen3" if config.layer.qk_norm else "llama"]
    dense_model = nsa_model.__bases__[1]
    values = _shapes(config) | _tokens_of(saved)
    if has_nsa:
        model = nsa_model(nsa_config(**values, nsa=fields))
    else:
        model = dense_model(dense_model.config_class(**values))
    state = _with_their_names(saved.model().state_dict(), config)
    model.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"]})
    return model.eval()


def _nsa_fields(config: LMConfig) -> dict[str, Any]:
    layer = config.layer
    defaults = NSAConfig(layer.dim, layer.n_heads, layer.n_kv_heads, layer.head_dim)
    return {
        field.name: getattr(layer, field.name)
        for field in dataclasses.fields(layer)
        if field.name not in _STATED and getattr(layer, field.name) != getattr(defaults, field.name)
    }


def _shapes(config: LMConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.layer.dim,
        "intermediate_size": config.hidden,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.layer.n_heads,
        "num_key_value_heads": config.layer.n_kv_heads,
        "head_dim": config.layer.qk_dim,
        "rms_norm_eps": _NORM_EPS,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.layer.rope_base},
        "tie_word_embeddings": True,
    }


def _tokens_of(saved: Checkpoint) -> dict[str, Any]:
    """Return the special tokens and the length of a run, as fields of a configuration."""
    tokenizer = saved.load_tokenizer()
    end = None if tokenizer is None else tokenizer.end
    return {
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": None,
        "max_position_embeddings": int(saved.facts["data"]["length"]),
    }


def _with_their_names(state: dict[str, torch.Tensor], config: LMConfig) -> dict[str, torch.Tensor]:
    """Return the parameters of a LanguageModel under the names of transformers."""
    layer = config.layer
    q, kv = layer.n_heads * layer.qk_dim, layer.n_kv_heads * layer.qk_dim
    renamed: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if not name.startswith("blocks."):
            renamed["model." + name.replace("embed.", "embed_tokens.")] = tensor
            continue
        _, number, rest = name.split(".", 2)
        prefix = f"model.layers.{number}."
        if rest == "mlp.up.weight":
            gate, up = tensor.chunk(2)
            renamed |= {f"{prefix}mlp.gate_proj.weight": gate, f"{prefix}mlp.up_proj.weight": up}
        elif not rest.startswith("attn."):
            renamed[prefix + _NAMES[rest]] = tensor
        elif config.attention == "dense" and rest == "attn.qkv.weight":
            for part, rows in zip("qkv", tensor.split([q, kv, kv])):
                renamed[f"{prefix}self_attn.{part}_proj.weight"] = rows
        elif config.attention == "dense" and rest == "attn.out.weight":
            renamed[f"{prefix}self_attn.o_proj.weight"] = tensor
        else:
            renamed[f"{prefix}self_{rest}"] = tensor
    return renamed


def run_tokenizer(path: str | Path) -> PreTrainedTokenizerFast | None:
    """Return the tokenizer of a run of `nsa train` as one of transformers.

    It gives the ids that the run was trained on. Its token between documents is both the beginning
    and the end of a text; neither is added to a text.

    Args:
        path: The folder or the checkpoint of the run.

    Returns:
        The tokenizer; None if the run was trained on a task, which has no text.

    Raises:
        InvalidInput: The checkpoint cannot be read.
        BackendUnavailable: safetensors is not installed.
    """
    saved = checkpoint.read(path)
    if saved.tokenizer is None:
        return None
    if saved.tokenizer["kind"] == "bytes":
        tokenizer, end = _bytes(), _END
    else:
        tokenizer = Tokenizer.from_str(saved.tokenizer["json"])
        number = saved.load_tokenizer().end  # type: ignore[union-attr]  # it has a tokenizer
        end = tokenizer.id_to_token(number) or _END
    result = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=end, eos_token=end)
    return result


def _bytes() -> Tokenizer:
    """Return the tokenizer whose ids are the bytes of UTF-8; 0xFF is the end of a document."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())  # a printable character for each byte
    own = {ord(c): c for c in alphabet if ord(c) < 256}
    others = iter(c for c in alphabet if ord(c) >= 256)
    vocabulary = {own.get(byte) or next(others): byte for byte in range(255)}
    tokenizer = Tokenizer(models.BPE({**vocabulary, _END: 255}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer

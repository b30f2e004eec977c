"""from_dense: initialise an NSA model with the weights of a dense model."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

import torch

from nsa_core.errors import InvalidInput
from nsa_core.util import safetensors_io
from nsa_models.lm.checkpoint import FORMAT, read
from nsa_models.lm.config import LMConfig
from nsa_models.lm.model import LanguageModel

# Parameter names of Llama-like models in Hugging Face transformers. Their rotary embedding pairs
# the two halves of a head, as ours does.
_LLAMA = {
    r"model\.embed_tokens\.weight": "embed.weight",
    r"model\.norm\.weight": "norm.weight",
    r"model\.layers\.(\d+)\.input_layernorm\.weight": r"blocks.\1.attn_norm.weight",
    r"model\.layers\.(\d+)\.post_attention_layernorm\.weight": r"blocks.\1.mlp_norm.weight",
    r"model\.layers\.(\d+)\.self_attn\.o_proj\.weight": r"blocks.\1.attn.out.weight",
    r"model\.layers\.(\d+)\.self_attn\.([qk])_norm\.weight": r"blocks.\1.attn.\2_norm.weight",
    r"model\.layers\.(\d+)\.mlp\.down_proj\.weight": r"blocks.\1.mlp.down.weight",
}
_CONCATENATED = {"attn.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]}
_CONCATENATED["mlp.up"] = ["mlp.gate_proj", "mlp.up_proj"]


def from_dense(
    dense: LanguageModel | Mapping[str, torch.Tensor],
    config: LMConfig,
    backends: str | Mapping[str, str] | None = None,
) -> LanguageModel:
    """Build an NSA model with the weights of a dense model.

    Embeddings, norms, SwiGLU, queries and the output projection are copied. Each of the three
    branches gets a copy of the dense key and value projections. The gates and phi, whose output
    decides the selected blocks, are newly initialised, so the model needs training before use.

    Args:
        dense: A :class:`LanguageModel`, its state_dict, or the state_dict of a Llama of Hugging
            Face transformers with tied embeddings and unscaled rotary embedding.
        config: The sizes of the NSA model; ``config.layer.rope_base`` must be the base that the
            dense model was trained with.
        backends: As in :class:`nsa_core.NSAttention`.

    Raises:
        InvalidInput: A tensor is missing, unknown, or does not have the shape that ``config``
            requires; the message names all of them.
    """
    state = (
        dict(dense.state_dict())
        if isinstance(dense, LanguageModel)
        else _with_our_names(dense, config)
    )
    dense_config = dataclasses.replace(config, attention="dense")
    with torch.device("meta"):
        expected = LanguageModel(dense_config).state_dict()
    errors = [f"{name} is missing" for name in expected.keys() - state.keys()]
    errors += [f"{name} is not a parameter of the model" for name in state.keys() - expected.keys()]
    errors += [
        f"{name} must be {list(expected[name].shape)}, got {list(state[name].shape)}"
        for name in expected.keys() & state.keys()
        if expected[name].shape != state[name].shape
    ]
    if errors:
        raise InvalidInput("; ".join(sorted(errors)))
    model = LanguageModel(dataclasses.replace(config, attention="nsa"), backends)
    layer = config.layer
    q, k, v = (
        layer.n_heads * layer.qk_dim,
        layer.n_kv_heads * layer.qk_dim,
        layer.n_kv_heads * layer.v_dim,
    )
    copies = 1 if layer.shared_kv else 3
    for name in list(state):
        if name.endswith("attn.qkv.weight"):
            of_q, of_k, of_v = state[name].split([q, k, v])
            state[name] = torch.cat([of_q, *[of_k] * copies, *[of_v] * copies])
    fresh = model.state_dict()
    model.load_state_dict({name: state.get(name, fresh[name]) for name in fresh})
    return model


def read_dense(path: str | Path) -> dict[str, torch.Tensor]:
    """Read the weights of a dense model.

    Args:
        path: The folder or checkpoint of a run of `nsa train`, or a safetensors file from Hugging
            Face.

    Raises:
        InvalidInput: The file cannot be read, or its model has NSA.
        BackendUnavailable: safetensors is not installed.
    """
    path = Path(path)
    if path.is_dir() or safetensors_io.kind_of(path) == FORMAT:
        checkpoint = read(path)
        if checkpoint.config.attention != "dense":
            raise InvalidInput(
                f"{checkpoint.path} is not a dense model; its attention is"
                f" {checkpoint.config.attention}"
            )
        return dict(checkpoint.model().state_dict())
    return safetensors_io.read_tensors(path)


def _with_our_names(state: Mapping[str, torch.Tensor], config: LMConfig) -> dict[str, torch.Tensor]:
    """Return ``state`` with this library's parameter names.

    Raises:
        InvalidInput: The input and output embeddings are not tied.
    """
    renamed, remaining = {}, dict(state)
    head = remaining.pop("lm_head.weight", None)
    if head is not None and not torch.equal(
        head, remaining.get("model.embed_tokens.weight", head.new_empty(0))
    ):
        raise InvalidInput(
            "lm_head.weight differs from model.embed_tokens.weight; only tied embeddings can be"
            " converted"
        )
    for layer in range(config.n_layers):
        for ours, theirs in _CONCATENATED.items():
            names = [f"model.layers.{layer}.{name}.weight" for name in theirs]
            if all(name in remaining for name in names):
                renamed[f"blocks.{layer}.{ours}.weight"] = torch.cat(
                    [remaining.pop(name) for name in names]
                )
    for name, tensor in remaining.items():
        ours = next((re.sub(p, r, name) for p, r in _LLAMA.items() if re.fullmatch(p, name)), name)
        renamed[ours] = tensor
    return renamed

"""from_dense: an NSA model that begins where a dense one ended."""

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

# Names that Hugging Face gives the layers of Llama and its kin, whose rotary pairs are halves as
# ours are.
_LLAMA = {
    r"model\.embed_tokens\.weight": "embed.weight",
    r"model\.norm\.weight": "norm.weight",
    r"model\.layers\.(\d+)\.input_layernorm\.weight": r"blocks.\1.attn_norm.weight",
    r"model\.layers\.(\d+)\.post_attention_layernorm\.weight": r"blocks.\1.mlp_norm.weight",
    r"model\.layers\.(\d+)\.self_attn\.o_proj\.weight": r"blocks.\1.attn.out.weight",
    r"model\.layers\.(\d+)\.self_attn\.([qk])_norm\.weight": r"blocks.\1.attn.\2_norm.weight",
    r"model\.layers\.(\d+)\.mlp\.down_proj\.weight": r"blocks.\1.mlp.down.weight",
}
_JOINED = {"attn.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]}
_JOINED["mlp.up"] = ["mlp.gate_proj", "mlp.up_proj"]


def from_dense(
    dense: LanguageModel | Mapping[str, torch.Tensor],
    config: LMConfig,
    backends: str | Mapping[str, str] | None = None,
) -> LanguageModel:
    """An NSA model with the weights of a dense one: embeddings, norms, SwiGLU, queries and the
    output projection are copied, and each of the three branches gets a copy of the dense keys and
    values.

    It needs training before it is of use: the gates and phi are fresh, and what chooses the blocks,
    phi, knows nothing yet. ``dense`` is a :class:`LanguageModel`, its state_dict, or that of a
    Llama of Hugging Face's transformers with tied embeddings and no scaled rotary; ``config.layer``
    says what rotary base it was trained with.

    Raises:
        InvalidInput: a tensor is missing, left over, or of another shape than ``config`` has; all
            are named.
    """
    state = dict(dense.state_dict()) if isinstance(dense, LanguageModel) else _ours(dense, config)
    dense_config = dataclasses.replace(config, attention="dense")
    with torch.device("meta"):
        expected = LanguageModel(dense_config).state_dict()
    wrong = [f"{name} is missing" for name in expected.keys() - state.keys()]
    wrong += [f"{name} fits nowhere" for name in state.keys() - expected.keys()]
    wrong += [
        f"{name} must be {list(expected[name].shape)}, got {list(state[name].shape)}"
        for name in expected.keys() & state.keys()
        if expected[name].shape != state[name].shape
    ]
    if wrong:
        raise InvalidInput("; ".join(sorted(wrong)))
    model = LanguageModel(dataclasses.replace(config, attention="nsa"), backends)
    layer = config.layer
    q, k, v = (
        layer.n_heads * layer.qk_dim,
        layer.n_kv_heads * layer.qk_dim,
        layer.n_kv_heads * layer.v_dim,
    )
    pairs = 1 if layer.shared_kv else 3
    for name in list(state):
        if name.endswith("attn.qkv.weight"):
            of_q, of_k, of_v = state[name].split([q, k, v])
            state[name] = torch.cat([of_q, *[of_k] * pairs, *[of_v] * pairs])
    fresh = model.state_dict()
    model.load_state_dict({name: state.get(name, fresh[name]) for name in fresh})
    return model


def read_dense(path: str | Path) -> dict[str, torch.Tensor]:
    """The weights in a checkpoint of a dense model: a run's of `nsa train`, or a safetensors file
    of Hugging Face.

    Raises:
        InvalidInput: it cannot be read, or is a run's with NSA.
        BackendUnavailable: safetensors is not installed.
    """
    path = Path(path)
    if path.is_dir() or safetensors_io.kind_of(path) == FORMAT:
        kept = read(path)
        if kept.config.attention != "dense":
            raise InvalidInput(
                f"{kept.path} is no dense model; its attention is {kept.config.attention}"
            )
        return dict(kept.model().state_dict())
    return safetensors_io.read_tensors(path)


def _ours(state: Mapping[str, torch.Tensor], config: LMConfig) -> dict[str, torch.Tensor]:
    """``state`` under this library's names.

    Raises:
        InvalidInput: the output embedding is another table than the input's.
    """
    found, left = {}, dict(state)
    head = left.pop("lm_head.weight", None)
    if head is not None and not torch.equal(
        head, left.get("model.embed_tokens.weight", head.new_empty(0))
    ):
        raise InvalidInput(
            "lm_head.weight is not model.embed_tokens.weight: only tied embeddings can be taken"
            " over"
        )
    for layer in range(config.n_layers):
        for ours, theirs in _JOINED.items():
            names = [f"model.layers.{layer}.{name}.weight" for name in theirs]
            if all(name in left for name in names):
                found[f"blocks.{layer}.{ours}.weight"] = torch.cat(
                    [left.pop(name) for name in names]
                )
    for name, tensor in left.items():
        ours = next((re.sub(p, r, name) for p, r in _LLAMA.items() if re.fullmatch(p, name)), name)
        found[ours] = tensor
    return found

"""The parameters of a LanguageModel under the names of transformers.

A model folder has the tensors of nsa_llama and of dense Llama: SwiGLU's gate and up are two
tensors, as are the queries, keys and values of dense attention, which a LanguageModel joins.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import NamedTuple

import torch

from nsa_models.lm.config import ATTENTION, LMConfig
from nsa_models.lm.model import LanguageModel

_LAYER = re.compile(r"blocks\.(\d+)\.(.*)")
_NAMES = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
}
_IN_DENSE_LAYER = {"attn.out.weight": "o_proj.weight", "attn.out.bias": "o_proj.bias"}


class Part(NamedTuple):
    """Rows of a parameter, which are a tensor of the folder.

    Attributes:
        name: Name of the tensor.
        rows: Number of its rows; the parts of a parameter follow each other in it.
    """

    name: str
    rows: int


def parts(name: str, rows: int, config: LMConfig) -> list[Part]:
    """Return the tensors of the folder that make up a parameter, in their order.

    Args:
        name: Name of the parameter in a LanguageModel.
        rows: Its size along the first axis.
        config: The sizes of the model.
    """
    match = _LAYER.fullmatch(name)
    if match is None:
        return [Part(_NAMES[name], rows)]
    number, rest = match.groups()
    layer, prefix = config.layer, f"model.layers.{number}."
    if rest == "mlp.up.weight":
        return [Part(f"{prefix}mlp.{half}_proj.weight", rows // 2) for half in ("gate", "up")]
    if rest in _IN_LAYER:
        return [Part(prefix + _IN_LAYER[rest], rows)]
    if config.attention_of(int(number)) == "dense":
        prefix += "self_attn."
        if rest in _IN_DENSE_LAYER:
            return [Part(prefix + _IN_DENSE_LAYER[rest], rows)]
        _, module, kind = rest.split(".")
        if module == "qkv":
            k, v = layer.n_kv_heads * layer.qk_dim, layer.n_kv_heads * layer.v_dim
            sizes = zip("qkv", (layer.n_heads * layer.qk_dim, k, v))
            return [Part(f"{prefix}{letter}_proj.{kind}", size) for letter, size in sizes]
        return [Part(f"{prefix}{module}.{kind}", rows)]
    return [Part(f"{prefix}self_{rest}", rows)]


def split(name: str, tensor: torch.Tensor, config: LMConfig) -> dict[str, torch.Tensor]:
    """Return the tensors of the folder for a parameter, without copies."""
    own = parts(name, len(tensor), config)
    return dict(zip((p.name for p in own), tensor.split([p.rows for p in own])))


def join(name: str, config: LMConfig, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """Return a parameter from the tensors of the folder: the inverse of :func:`split`."""
    tensors = [read(part.name) for part in parts(name, 0, config)]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def shapes(config: LMConfig) -> dict[str, list[int]]:
    """Return the tensors that the folder of a model has, with their shapes; allocates none."""
    result: dict[str, list[int]] = {}
    for kind in ATTENTION:
        layers = [n for n in range(config.n_layers) if config.attention_of(n) == kind]
        with torch.device("meta"):
            one = LanguageModel(
                dataclasses.replace(config, n_layers=1, attention=kind, nsa_layers=None)
            )
        for name, parameter in one.named_parameters():
            for number in layers if _LAYER.fullmatch(name) else range(1):
                own = parts(name.replace("blocks.0.", f"blocks.{number}."), len(parameter), config)
                result |= {part.name: [part.rows, *parameter.shape[1:]] for part in own}
    return result

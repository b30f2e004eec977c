"""Inputs of a benchmark: random tensors, or the activations of a layer on a text.

Block locality changes speed: neighbouring tokens select similar blocks in a trained layer, and
unrelated blocks in random tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nsa_bench.bytemodel import ByteModel, byte_tokens, load, untrained
from nsa_bench.shapes import Shape
from nsa_core.config import NSAConfig
from nsa_core.dtypes import stats_dtype
from nsa_core.errors import InvalidInput

KINDS = ("random", "real")
REAL_DIM = 256  # width of the untrained model; no timed shape depends on it


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The leaf tensors of one problem; k and v serve all three branches."""

    q: torch.Tensor  # [B, S, Hq, Dk]
    k: torch.Tensor  # [B, S, G, Dk]
    v: torch.Tensor  # [B, S, G, Dv]
    gates: torch.Tensor  # [B, S, Hq, 3], fp32 (fp64 with float64 inputs)
    do: torch.Tensor  # [B, S, Hq, Dv]


def make_inputs(
    kind: str,
    config: NSAConfig,
    *,
    batch: int,
    length: int,
    dtype: torch.dtype,
    device: str,
    seed: int,
    text: bytes = b"",
    model: ByteModel | None = None,
) -> Inputs:
    """Create the tensors of a problem on ``device``; q, k, v and gates require a gradient.

    Args:
        kind: "random", or "real" for the activations of a model on a text.
        config: Heads, widths and block sizes.
        batch: Number of sequences.
        length: Tokens per sequence.
        dtype: Dtype of q, k, v and do; gates are fp32 (fp64 with float64).
        device: Where the tensors are created.
        seed: Seed of the random tensors and of an untrained model.
        text: The text of "real" inputs, repeated if shorter than batch * length bytes.
        model: The model of "real" inputs; None for an untrained one of width 256.

    Raises:
        InvalidInput: The kind is unknown, or "real" has no text.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(heads: int, width: int) -> torch.Tensor:
        return torch.randn(
            batch, length, heads, width, generator=generator, dtype=torch.float32, device=device
        )

    do = normal(config.n_heads, config.v_dim).to(dtype)
    if kind == "real":
        model = model or untrained(dataclasses.replace(config, dim=REAL_DIM), seed)
        with torch.no_grad():
            tokens = byte_tokens(text, batch, length, device)
            projected, gates = model.to(device).activations(tokens)
        q, k, v = projected.q, projected.k[1], projected.v[1]
    elif kind == "random":
        q, k, v = (
            normal(config.n_heads, config.qk_dim),
            normal(config.n_kv_heads, config.qk_dim),
            normal(config.n_kv_heads, config.v_dim),
        )
        gates = torch.sigmoid(normal(config.n_heads, 3))
    else:
        raise InvalidInput(f"inputs must be one of {', '.join(KINDS)}, got {kind!r}")
    q, k, v = (x.to(dtype).contiguous().requires_grad_() for x in (q, k, v))
    return Inputs(q, k, v, gates.to(stats_dtype(dtype)).contiguous().requires_grad_(), do)


class Checkpoint(NamedTuple):
    """A trained model, and its facts for a result file."""

    model: ByteModel
    facts: dict[str, Any]


def load_models(
    checkpoints: Sequence[Path], shapes: Sequence[Shape], kinds: Sequence[str]
) -> dict[str, Checkpoint]:
    """Read the trained models of real inputs, by shape name; empty without checkpoints.

    Raises:
        InvalidInput: A checkpoint cannot be read; checkpoints are given without real inputs; or a
            shape has no checkpoint, or two.
        BackendUnavailable: safetensors is not installed.
    """
    if checkpoints and "real" not in kinds:
        raise InvalidInput(
            f"checkpoints are used by real inputs only, but inputs are {', '.join(kinds)};"
            " add real to the inputs, or leave the checkpoints out"
        )
    models: dict[str, Checkpoint] = {}
    for path in checkpoints:
        model, facts = load(path)
        name = Shape.of(model.config).name
        if name in models:
            raise InvalidInput(f"{path} is a second checkpoint of shape {name}; give one per shape")
        models[name] = Checkpoint(model, {"file": path.name, **facts})
    needed = {shape.name for shape in shapes}
    if models and models.keys() != needed:
        raise InvalidInput(
            f"checkpoints have shapes {', '.join(models)}; needed: one each of {', '.join(needed)}"
        )
    return models

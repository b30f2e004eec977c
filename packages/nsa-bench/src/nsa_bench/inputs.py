"""What is timed on: random tensors, or the activations that a layer, trained or not, makes of a
text.

Block locality changes speed: neighbours of a trained layer choose alike, those of random tensors do
not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nsa_bench.bytemodel import ByteModel, load, tokens_of, untrained
from nsa_bench.shapes import Shape
from nsa_core.config import NSAConfig
from nsa_core.dtypes import stats_dtype
from nsa_core.errors import InvalidInput

KINDS = ("random", "real")
REAL_DIM = 256  # width of the untrained model: it sets no shape that is timed


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Leaves of one problem; k and v serve all three branches."""

    q: torch.Tensor  # [B, S, Hq, Dk]
    k: torch.Tensor  # [B, S, G, Dk]
    v: torch.Tensor  # [B, S, G, Dv]
    gates: torch.Tensor  # [B, S, Hq, 3], fp32 (fp64 beside fp64)
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
    """The tensors of a problem, made on ``device`` from ``seed``; q, k, v and gates require a
    gradient.

    "real": q, k, v and gates of ``model``, or of an untrained one of width 256, over the bytes of
    ``text``, repeated where it is shorter than batch * length.

    Raises:
        InvalidInput: unknown kind, or "real" without text.
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
            made = model.to(device).activations(tokens_of(text, batch, length, device))
        q, k, v, gates = made.q, made.k[1], made.v[1], made.gates
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
    """A trained model, and what a result file says about it."""

    model: ByteModel
    facts: dict[str, Any]


def load_models(
    checkpoints: Sequence[Path], shapes: Sequence[Shape], kinds: Sequence[str]
) -> dict[str, Checkpoint]:
    """Shape name -> the trained model behind its real inputs; empty without checkpoints.

    Raises:
        InvalidInput: a checkpoint cannot be read, or none is asked for; a shape has none, or two.
        BackendUnavailable: safetensors is not installed.
    """
    if checkpoints and "real" not in kinds:
        raise InvalidInput(f"a checkpoint makes real inputs, and inputs are {', '.join(kinds)}")
    found: dict[str, Checkpoint] = {}
    for path in checkpoints:
        model, facts = load(path)
        name = Shape.of(model.config).name
        if name in found:
            raise InvalidInput(f"{path} is a second checkpoint of shape {name}")
        found[name] = Checkpoint(model, {"file": path.name, **facts})
    wanted = {shape.name for shape in shapes}
    if found and found.keys() != wanted:
        raise InvalidInput(
            f"checkpoints are of shapes {', '.join(found)}; needed: one each of {', '.join(wanted)}"
        )
    return found

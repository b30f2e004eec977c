"""A language model of one NSA layer over bytes: where "real" activations come from, untrained or
from a checkpoint.

Not a model of nsa_models.lm, whose layer sees single bytes: a layer by itself, or above another
that is as new, has not learned to choose after the hundred steps that benchmarks/real_blocks.py
takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from nsa_bench.shapes import Shape
from nsa_core.config import NSAConfig
from nsa_core.errors import InvalidInput
from nsa_core.layer.module import NSAttention
from nsa_core.util import safetensors_io

# What a token knows without attention, as lower layers would tell it: the last bytes one by one,
# enough to look for an earlier occurrence of them, and the sum of the last 16 and 64, which changes
# slowly from token to token.
RECENT, BAGS = 4, (16, 64)
FORMAT = "nsa-byte-model 1"


class Activations(NamedTuple):
    """What the layer hands to its kernels."""

    q: torch.Tensor  # [B, S, Hq, Dk]
    # k_cmp [B, n_c, G, Dk], then those of sel and win [B, S, G, Dk]
    k: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    # v_cmp [B, n_c, G, Dv], then those of sel and win [B, S, G, Dv]
    v: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    gates: torch.Tensor  # [B, S, Hq, 3]


class ByteModel(nn.Module):
    """logits of the next byte = W norm(x + NSAttention(norm(x))), x the sum of embeddings of what
    precedes.

    ``backends`` is that of :class:`nsa_core.NSAttention`.
    """

    def __init__(self, config: NSAConfig, backends: str | None = None) -> None:
        super().__init__()
        self.config = config
        tables = RECENT + len(BAGS)
        self.embed = nn.Embedding(256 * tables, config.dim)
        nn.init.normal_(self.embed.weight, std=tables**-0.5)
        self.norm, self.head_norm = nn.RMSNorm(config.dim), nn.RMSNorm(config.dim)
        self.attn = NSAttention(config, backends)
        self.head = nn.Linear(config.dim, 256, bias=False)
        nn.init.normal_(self.head.weight, std=config.dim**-0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens [B, S] of 0..255 -> logits [B, S, 256] of the byte after each."""
        x = self._embedded(tokens)
        logits: torch.Tensor = self.head(self.head_norm(x + self.attn(self.norm(x))))
        return logits

    def activations(self, tokens: torch.Tensor) -> Activations:
        """Queries, keys, values and gates of the layer over tokens [B, S]."""
        x = self.norm(self._embedded(tokens))
        made = self.attn.project(x)
        k, v = (made.k_cmp, *made.k[1:]), (made.v_cmp, *made.v[1:])
        return Activations(made.q, k, v, self.attn.gate(x))

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        padded, length = F.pad(tokens, (RECENT - 1, 0)), tokens.shape[1]
        recent = [padded[:, RECENT - 1 - back :][:, :length] + 256 * back for back in range(RECENT)]
        x: torch.Tensor = self.embed(recent[0])
        for part in recent[1:]:
            x = x + self.embed(part)
        for table, width in enumerate(BAGS, RECENT):
            sums = self.embed(tokens + 256 * table).cumsum(1)
            x = x + (sums - F.pad(sums, (0, 0, width, 0))[:, :length]) * width**-0.5
        return x


def untrained(config: NSAConfig, seed: int, backends: str | None = None) -> ByteModel:
    """A model as it is before training, on the CPU; the caller's random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ByteModel(config, backends)


def tokens_of(
    text: bytes, batch: int, length: int, device: str | torch.device = "cpu"
) -> torch.Tensor:
    """The first batch * length bytes of ``text``, repeated where it is shorter: int64 [batch,
    length].

    Raises:
        InvalidInput: the text is empty.
    """
    if not text:
        raise InvalidInput("real inputs need a text, got 0 bytes")
    wanted = batch * length
    data = bytearray((text * -(-wanted // len(text)))[:wanted])
    return torch.frombuffer(data, dtype=torch.uint8).long().to(device).view(batch, length)


def save(model: ByteModel, path: Path, facts: Mapping[str, Any], force: bool = False) -> None:
    """Write the model in bf16 as safetensors, its configuration and ``facts`` (JSON) in the header.

    Raises:
        BackendUnavailable: safetensors is not installed.
        InvalidInput: the file exists and ``force`` is False.
    """
    tensors = {
        name: t.detach().to("cpu", torch.bfloat16).contiguous()
        for name, t in model.state_dict().items()
    }
    header = {"config": dataclasses.asdict(model.config), "facts": dict(facts)}
    safetensors_io.write(path, FORMAT, tensors, header, force)


def load(path: Path) -> tuple[ByteModel, dict[str, Any]]:
    """The model in a file that :func:`save` wrote, in fp32 on the CPU, and the facts beside it.
    Never unpickles.

    Raises:
        BackendUnavailable: safetensors is not installed.
        InvalidInput: the file cannot be read, or is no such model.
    """
    with safetensors_io.reading(path, FORMAT) as (header, tensors):
        config, facts = NSAConfig(**header["config"]), dict(header["facts"])
        with torch.device("meta"):
            model = ByteModel(config)
        model.load_state_dict(
            {name: tensor.float() for name, tensor in tensors.items()}, assign=True
        )
    return model, facts


def load_for(path: Path, shape: Shape) -> ByteModel:
    """As :func:`load`, for a shape that is known.

    Raises:
        InvalidInput: also where the checkpoint is of another shape.
    """
    model, _ = load(path)
    if (found := Shape.of(model.config)) != shape:
        raise InvalidInput(f"{path} is a layer of shape {found.name}, not {shape.name}")
    return model

"""A byte-level language model with one NSA layer: the source of "real" activations.

The models of nsa_models.lm embed single bytes. A single such layer, or one on top of another
untrained layer, does not learn to select blocks within the hundred steps that
benchmarks/real_blocks.py trains. This model therefore embeds the recent context of each byte.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nsa_core.config import NSAConfig
from nsa_core.errors import InvalidInput, NSAError
from nsa_core.layer.module import NSAttention
from nsa_core.layer.projection import Projected
from nsa_core.util.atomic_files import write_bytes_atomic
from nsa_core.util.extras import require_module
from nsa_core.util.text import describe_error

# The context in each token's embedding, in place of lower layers: the last RECENT bytes one by one
# (enough to search for an earlier occurrence), and the sums over the last 16 and 64 bytes (which
# change slowly from token to token).
RECENT, BAGS = 4, (16, 64)
FORMAT = "nsa-byte-model 1"


class ByteModel(nn.Module):
    """logits of the next byte = W norm(x + NSAttention(norm(x))).

    x is the sum of the embeddings of the preceding bytes (see ``RECENT`` and ``BAGS``).

    Args:
        config: The NSA layer; its width is the model's.
        backends: As in :class:`nsa_core.NSAttention`.
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
        """Map tokens [B, S] in 0..255 to logits [B, S, 256] of each next byte."""
        x = self._embedded(tokens)
        logits: torch.Tensor = self.head(self.head_norm(x + self.attn(self.norm(x))))
        return logits

    def activations(self, tokens: torch.Tensor) -> tuple[Projected, torch.Tensor]:
        """Return what the layer passes to the kernels for tokens [B, S]; gates [B, S, Hq, 3]."""
        x = self.norm(self._embedded(tokens))
        return self.attn.project(x), self.attn.gate(x)

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
    """Return a freshly initialised model on the CPU; the caller's random state is unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ByteModel(config, backends)


def byte_tokens(
    text: bytes, batch: int, length: int, device: str | torch.device = "cpu"
) -> torch.Tensor:
    """Return the first batch * length bytes of ``text`` as int64 [batch, length].

    A shorter text is repeated.

    Raises:
        InvalidInput: The text is empty.
    """
    if not text:
        raise InvalidInput("real inputs need a non-empty text, got 0 bytes")
    count = batch * length
    data = bytearray((text * -(-count // len(text)))[:count])
    return torch.frombuffer(data, dtype=torch.uint8).long().to(device).view(batch, length)


def save(model: ByteModel, path: Path, facts: Mapping[str, Any], force: bool = False) -> None:
    """Write the model's weights in bf16 as safetensors.

    The header holds the configuration and ``facts`` as JSON.

    Raises:
        BackendUnavailable: safetensors is not installed.
        InvalidInput: The file exists and ``force`` is False.
        NotWritten: The operating system refuses the write; an old file is unchanged.
    """
    tensors = {
        name: t.detach().to("cpu", torch.bfloat16).contiguous()
        for name, t in model.state_dict().items()
    }
    values = {"config": dataclasses.asdict(model.config), "facts": dict(facts)}
    header = {"format": FORMAT, **{name: json.dumps(value) for name, value in values.items()}}
    write_bytes_atomic(path, _library("safetensors.torch").save(tensors, header), force)


def load(path: Path) -> tuple[ByteModel, dict[str, Any]]:
    """Read a model that :func:`save` wrote; never unpickles.

    Returns:
        The model in fp32 on the CPU, and the facts from the header.

    Raises:
        BackendUnavailable: safetensors is not installed.
        InvalidInput: The file cannot be read, or does not hold such a model.
    """
    library = _library("safetensors")
    try:
        with library.safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            if (found := header.get("format")) != FORMAT:
                raise InvalidInput(f"{path} is no {FORMAT!r}: its header says {found!r}")
            tensors = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
        config, facts = NSAConfig(**json.loads(header["config"])), dict(json.loads(header["facts"]))
        with torch.device("meta"):
            model = ByteModel(config)
        model.load_state_dict(tensors, assign=True)
    except NSAError:
        raise
    except (
        *(OSError, KeyError, TypeError, ValueError, RuntimeError),
        library.SafetensorError,
    ) as error:
        raise InvalidInput(
            f"{path} cannot be read as a checkpoint: {describe_error(error)}"
        ) from error
    return model, facts


def _library(name: str) -> Any:
    return require_module(name, "checkpoints need", "safetensors")

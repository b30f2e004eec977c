"""What is timed on: random tensors, or the activations that a layer makes of a text. Block locality changes speed."""

from __future__ import annotations

import dataclasses

import torch

from nsa_core.config import NSAConfig
from nsa_core.errors import InvalidInput
from nsa_core.module import NSAttention
from nsa_core.ops import stats_dtype

KINDS = ("random", "real")
REAL_DIM = 256  # model width behind "real" activations: it sets no shape that is timed


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
) -> Inputs:
    """The tensors of a problem, made on ``device`` from ``seed``; q, k, v and gates require a gradient.

    "real": q, k, v and gates of an untrained NSAttention (width 256, rotary on) over the bytes of ``text``, repeated
    where it is shorter than ``length``.

    Raises:
        InvalidInput: unknown kind, or "real" without text.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(heads: int, width: int) -> torch.Tensor:
        return torch.randn(batch, length, heads, width, generator=generator, dtype=torch.float32, device=device)

    do = normal(config.n_heads, config.v_dim).to(dtype)
    if kind == "real":
        q, k, v, gates = _real(config, batch, length, device, seed, text)
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


def _real(
    config: NSAConfig, batch: int, length: int, device: str, seed: int, text: bytes
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    if not text:
        raise InvalidInput("real inputs need a text, got 0 bytes")
    wanted = batch * length
    data = (text * -(-wanted // len(text)))[:wanted]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        attn = NSAttention(dataclasses.replace(config, dim=REAL_DIM)).to(device)
        table = torch.randn(256, REAL_DIM).to(device)
        x = table[torch.frombuffer(bytearray(data), dtype=torch.uint8).long().to(device)].view(batch, length, -1)
        made = attn.project(x)
        return made.q, made.k[1], made.v[1], attn.gate(x)

"""LMConfig: the sizes of a small decoder language model, validated when it is made, and the sizes
that have a name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nsa_core.config import NSAConfig
from nsa_core.errors import InvalidInput

ATTENTION = ("nsa", "dense")


@dataclasses.dataclass(frozen=True)
class LMConfig:
    """A decoder of ``n_layers`` pre-norm blocks, attention then SwiGLU, with one table for input
    and output embedding.

    ``layer`` holds the width, the heads, and the sizes of NSA; with ``attention="dense"`` its
    heads, rotary, q/k norm and scale alone are used, by causal attention over all keys. ``mlp_dim``
    defaults to 8/3 of the width, rounded up to a multiple of 64, so that a block has as many
    parameters as one of 4 x width without a gate.

    Raises:
        InvalidInput: a field is out of range; all offending fields are named with their values.
    """

    layer: NSAConfig
    n_layers: int
    vocab_size: int = 256
    mlp_dim: int | None = None
    attention: str = "nsa"

    def __post_init__(self) -> None:
        wrong = []
        if not isinstance(self.layer, NSAConfig):
            wrong.append(f"layer must be an NSAConfig, got {type(self.layer).__name__}")
        elif self.mlp_dim is None:
            object.__setattr__(self, "mlp_dim", -(-8 * self.layer.dim // 3 // 64) * 64)
        for name, least in (("n_layers", 1), ("vocab_size", 2), ("mlp_dim", 1)):
            value = getattr(self, name)
            if value is None and name == "mlp_dim":  # layer, which it follows, is at fault
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                wrong.append(f"{name} must be an integer >= {least}, got {value!r}")
        if self.attention not in ATTENTION:
            wrong.append(f"attention must be one of {', '.join(ATTENTION)}, got {self.attention!r}")
        if wrong:
            raise InvalidInput("; ".join(wrong))

    @property
    def hidden(self) -> int:
        """Hidden units of SwiGLU."""
        assert self.mlp_dim is not None  # set in __post_init__
        return self.mlp_dim

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LMConfig:
        """Inverse of :meth:`to_dict`.

        Raises:
            InvalidInput: a field is missing, unknown, or out of range.
        """
        try:
            return cls(**{**values, "layer": NSAConfig(**values["layer"])})
        except (KeyError, TypeError) as error:
            raise InvalidInput(f"this is no configuration of a language model: {error}") from error


def _small(dim: int, heads: int, window: int) -> NSAConfig:
    return NSAConfig(
        dim=dim,
        n_heads=heads,
        n_kv_heads=heads // 2,
        compress_block_size=8,
        compress_stride=4,
        select_block_size=16,
        num_selected_blocks=4,
        window_size=window,
    )


SIZES = {
    # Trains on two CPU cores in minutes; its blocks are as many per row of 256 tokens as the large
    # sizes have per 4k.
    "tiny": LMConfig(_small(128, 4, 32), n_layers=2),
    # One layer of width 128 at the paper's block sizes: row 10 of docs/report-rows.md.
    "toy": LMConfig(NSAConfig(dim=128, n_heads=8, n_kv_heads=2), n_layers=1),
    "m7c_125m": LMConfig(NSAConfig(dim=768, n_heads=12, n_kv_heads=2, head_dim=64), n_layers=12),
}


def size(name: str, **changes: Any) -> LMConfig:
    """The configuration called ``name``, fields replaced by ``changes``.

    Raises:
        InvalidInput: no size has this name; the names are listed.
    """
    if name not in SIZES:
        raise InvalidInput(f"size must be one of {', '.join(SIZES)}, got {name!r}")
    return dataclasses.replace(SIZES[name], **changes)

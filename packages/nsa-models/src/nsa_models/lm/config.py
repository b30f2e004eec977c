"""LMConfig: the validated sizes of a small decoder language model, and the named sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nsa_core.config import NSAConfig
from nsa_core.errors import InvalidInput
from nsa_core.limits import integer_problems

ATTENTION = ("nsa", "dense")


@dataclasses.dataclass(frozen=True)
class LMConfig:
    """A decoder of pre-norm blocks (attention, then SwiGLU) with tied embeddings.

    Args:
        layer: Width, heads and NSA sizes. With ``attention="dense"`` only its heads, rotary
            embedding, q/k norm and scale are used.
        n_layers: Number of blocks.
        vocab_size: Number of token ids.
        mlp_dim: Hidden units of SwiGLU. The default is 8/3 of the width, rounded up to a multiple
            of 64: about as many parameters as an ungated MLP of 4 x width.
        attention: "nsa" or "dense".

    Raises:
        InvalidInput: A field is out of range; the message names every such field and its value.
    """

    layer: NSAConfig
    n_layers: int
    vocab_size: int = 256
    mlp_dim: int | None = None
    attention: str = "nsa"

    def __post_init__(self) -> None:
        errors: list[str] = []
        if not isinstance(self.layer, NSAConfig):
            errors.append(f"layer must be an NSAConfig, got {type(self.layer).__name__}")
        elif self.mlp_dim is None:
            object.__setattr__(self, "mlp_dim", -(-8 * self.layer.dim // 3 // 64) * 64)
        for name, minimum in (("n_layers", 1), ("vocab_size", 2), ("mlp_dim", 1)):
            # The default of mlp_dim needs a valid layer.
            optional = name == "mlp_dim"
            errors += integer_problems(name, getattr(self, name), minimum, optional=optional)
        if self.attention not in ATTENTION:
            errors.append(
                f"attention must be one of {', '.join(ATTENTION)}, got {self.attention!r}"
            )
        if errors:
            raise InvalidInput("; ".join(errors))

    @property
    def hidden(self) -> int:
        """Return the hidden units of SwiGLU."""
        assert self.mlp_dim is not None  # set in __post_init__
        return self.mlp_dim

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LMConfig:
        """Build a configuration from the values of :meth:`to_dict`.

        Raises:
            InvalidInput: A field is missing, unknown, or out of range.
        """
        try:
            return cls(**{**values, "layer": NSAConfig(**values["layer"])})
        except (KeyError, TypeError) as error:
            raise InvalidInput(
                f"the values are not the configuration of a language model: {error}"
            ) from error


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
    # Trains on two CPU cores in minutes. A row of 256 tokens has as many blocks as a row of 4k
    # tokens in the large sizes.
    "tiny": LMConfig(_small(128, 4, 32), n_layers=2),
    # One layer of width 128 at the paper's block sizes: row 10 of docs/explanation/report-rows.md.
    "toy": LMConfig(NSAConfig(dim=128, n_heads=8, n_kv_heads=2), n_layers=1),
    "m7c_125m": LMConfig(NSAConfig(dim=768, n_heads=12, n_kv_heads=2, head_dim=64), n_layers=12),
}


def size(name: str, **changes: Any) -> LMConfig:
    """Return the configuration named ``name``, with fields replaced by ``changes``.

    Raises:
        InvalidInput: The name is unknown; the message lists the names.
    """
    if name not in SIZES:
        raise InvalidInput(f"size must be one of {', '.join(SIZES)}, got {name!r}")
    return dataclasses.replace(SIZES[name], **changes)

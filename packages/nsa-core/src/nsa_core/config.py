"""NSAConfig: every choice that fixes what an NSA layer computes, validated when it is made."""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Any

from nsa_core.errors import InvalidInput
from nsa_core.layout import BlockGeometry

COMPRESS_KINDS = ("mlp", "linear", "conv", "mean", "attn_pool")
GATE_KINDS = ("linear", "mlp")


def _is_finite(value: object) -> bool:
    """Whether ``value`` is a number, of Python or numpy, and finite as a float."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def must_be_config(config: object) -> None:
    """Refuse what a caller gave as a config and is none.

    Raises:
        InvalidInput: its type, and what would work.
    """
    if not isinstance(config, NSAConfig):
        hint = ": NSAConfig(**config) makes one of a dict" * isinstance(config, dict)
        raise InvalidInput(f"config must be an NSAConfig, got {type(config).__name__}{hint}")


@dataclasses.dataclass(frozen=True)
class NSAConfig:
    """Shape and options of one NSA layer (arXiv 2502.11089; symbols l, d, l', n, w of section 3).

    ``head_dim`` defaults to dim / n_heads, ``v_head_dim`` to ``head_dim``; the fields hold the
    widths found, so that a config equals one that spells them out. ``dataclasses.replace``
    therefore keeps both when ``dim`` or ``n_heads`` changes: pass ``head_dim=None,
    v_head_dim=None`` beside it to have them anew. ``scale`` None means 1/sqrt(head_dim); 0 and
    negative scales are legal.

    Raises:
        InvalidInput: any field is out of range; all offending fields are named with their values.
    """

    dim: int
    n_heads: int
    n_kv_heads: int
    head_dim: int | None = None
    v_head_dim: int | None = None
    compress_block_size: int = 32
    compress_stride: int = 16
    select_block_size: int = 64
    num_selected_blocks: int = 16
    init_blocks: int = 1
    local_blocks: int = 2
    window_size: int = 512
    compress: str = "mlp"
    gate: str = "linear"
    rope: bool = True
    rope_base: float = 10000.0
    rope_before_compress: bool = False  # rotate k before phi instead of k_cmp at i*d after it
    qk_norm: bool = False
    shared_kv: bool = False
    scale: float | None = None
    # Named here only so that a caller who asks for them is told, by name, that NSA has no such
    # form.
    dropout: float = 0.0
    causal: bool = True

    def __post_init__(self) -> None:
        wrong: list[str] = []
        for name in ("dim", "n_heads", "n_kv_heads", "head_dim", "v_head_dim"):
            value = getattr(self, name)
            if name in ("head_dim", "v_head_dim") and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                wrong.append(f"{name} must be an integer >= 1, got {value!r}")
        for name in ("rope", "rope_before_compress", "qk_norm", "shared_kv", "causal"):
            if not isinstance(getattr(self, name), bool):
                wrong.append(f"{name} must be True or False, got {getattr(self, name)!r}")
        try:
            blocks = {f.name: getattr(self, f.name) for f in dataclasses.fields(BlockGeometry)}
            # once: torch.compile cannot trace this
            object.__setattr__(self, "_geometry", BlockGeometry(**blocks))
        except InvalidInput as error:
            wrong.append(str(error))
        if wrong:
            raise InvalidInput("; ".join(wrong))
        if self.head_dim is None:
            if self.dim % self.n_heads:
                wrong.append(
                    f"dim {self.dim} does not divide over n_heads {self.n_heads}; give head_dim"
                )
            object.__setattr__(self, "head_dim", max(1, self.dim // self.n_heads))
        if self.v_head_dim is None:
            object.__setattr__(self, "v_head_dim", self.head_dim)
        wrong += self._wrong_options()
        if wrong:
            raise InvalidInput("; ".join(wrong))
        object.__setattr__(
            self, "_values", tuple(getattr(self, f.name) for f in dataclasses.fields(self))
        )

    def _wrong_options(self) -> list[str]:
        wrong = []
        if self.n_heads % self.n_kv_heads:
            wrong.append(
                f"n_heads, n_kv_heads: {self.n_heads} query heads do not divide over"
                f" {self.n_kv_heads}"
            )
        if self.compress not in COMPRESS_KINDS:
            wrong.append(
                f"compress must be one of {', '.join(COMPRESS_KINDS)}, got {self.compress!r}"
            )
        if self.gate not in GATE_KINDS:
            wrong.append(f"gate must be one of {', '.join(GATE_KINDS)}, got {self.gate!r}")
        if self.rope and self.qk_dim % 2:
            wrong.append(
                f"head_dim must be even for rotary embeddings, got {self.head_dim}; or set"
                " rope=False"
            )
        if not (_is_finite(self.rope_base) and self.rope_base > 0):
            wrong.append(f"rope_base must be finite and > 0, a number, got {self.rope_base!r}")
        if self.scale is not None and not _is_finite(self.scale):
            wrong.append(f"scale must be finite, a number or None, got {self.scale!r}")
        if not (_is_finite(self.dropout) and self.dropout == 0):
            wrong.append(
                f"dropout is not part of NSA, got dropout={self.dropout!r}; apply it outside the"
                " layer"
            )
        if not self.causal:
            wrong.append("causal=False: NSA is defined for causal attention only")
        return wrong

    @property
    def geometry(self) -> BlockGeometry:
        """The block integers alone."""
        made: BlockGeometry = vars(self)["_geometry"]
        return made

    @property
    def values(self) -> tuple[Any, ...]:
        """Every field in order: NSAConfig(*config.values) == config."""
        values: tuple[Any, ...] = self._values  # type: ignore[attr-defined]  # set in __post_init__
        return values

    @property
    def qk_dim(self) -> int:
        """Dk: width of a query or key head."""
        assert self.head_dim is not None  # set in __post_init__
        return self.head_dim

    @property
    def v_dim(self) -> int:
        """Dv: width of a value head."""
        assert self.v_head_dim is not None  # set in __post_init__
        return self.v_head_dim

    @property
    def softmax_scale(self) -> float:
        """The scale in use: the given one or 1/sqrt(Dk)."""
        return self.qk_dim**-0.5 if self.scale is None else float(self.scale)

"""Shapes by name, and lengths: what a bench or a tuning is asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from nsa_core.config import NSAConfig
from nsa_core.errors import InvalidInput
from nsa_core.util.text import did_you_mean

NAMED = {"reports": "12/2/64", "paper": "64/4/192/128", "tiny": "4/2/32"}
PAPER_BLOCKS = (32, 16, 64, 16, 512)  # l, d, l', n, w


@dataclasses.dataclass(frozen=True)
class Shape:
    """Heads of an attention: Hq query heads over G key/value heads, widths Dk and Dv; written
    Hq/G/Dk[/Dv].
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    v_head_dim: int

    @classmethod
    def of(cls, config: NSAConfig) -> Shape:
        """The heads of a layer."""
        return cls(config.n_heads, config.n_kv_heads, config.qk_dim, config.v_dim)

    @property
    def name(self) -> str:
        """ "12/2/64", with Dv only where it differs from Dk."""
        parts = [self.n_heads, self.n_kv_heads, self.head_dim]
        return "/".join(map(str, parts + [self.v_head_dim] * (self.v_head_dim != self.head_dim)))

    def config(self, blocks: Sequence[int] = PAPER_BLOCKS) -> NSAConfig:
        """The layer that is timed: mean compression, one key/value pair for the three branches.

        Args:
            blocks: l, d, l', n, w.

        Raises:
            InvalidInput: the blocks or heads do not fit together.
        """
        if len(blocks) != 5:
            raise InvalidInput(f"blocks must be five integers l,d,l',n,w, got {list(blocks)}")
        size, stride, select, n, window = blocks
        return NSAConfig(
            dim=self.n_heads * self.head_dim,
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
            compress_block_size=size,
            compress_stride=stride,
            select_block_size=select,
            num_selected_blocks=n,
            window_size=window,
            compress="mean",
            shared_kv=True,
            rope=self.head_dim % 2 == 0,
        )


def parse_shape(text: str) -> Shape:
    """The shape that "12/2/64", "64/4/192/128" or a name ("reports", "paper", "tiny") stands for.

    Raises:
        InvalidInput: it is neither, or the heads do not divide.
    """
    parts = NAMED.get(text.strip(), text.strip()).split("/")
    if len(parts) not in (3, 4) or not all(part.isdecimal() and int(part) > 0 for part in parts):
        known = ", ".join(f"{name} ({shape})" for name, shape in NAMED.items())
        hint = did_you_mean(text, NAMED)
        raise InvalidInput(
            f"shape must be Hq/G/Dk or Hq/G/Dk/Dv or one of {known}, got {text!r}{hint}"
        )
    hq, g, dk, *dv = map(int, parts)
    if hq % g:
        raise InvalidInput(f"shape {text!r}: {hq} query heads do not divide over {g}")
    return Shape(hq, g, dk, dv[0] if dv else dk)


def parse_lengths(text: str) -> list[int]:
    """Ascending lengths: "512,2k,65536" lists them, "2k..64k" doubles from the first to the last.

    Raises:
        InvalidInput: an entry is no length, or a range is empty.
    """
    found: set[int] = set()
    for part in text.split(","):
        first, dots, last = part.partition("..")
        low = _length(first, text)
        high = _length(last, text) if dots else low
        if high < low:
            raise InvalidInput(f"lengths {part!r}: the last is below the first")
        while low <= high:
            found.add(low)
            low *= 2
    return sorted(found)


def _length(word: str, text: str) -> int:
    word = word.strip().lower()
    factor = 1024 if word.endswith("k") else 1
    digits = word.removesuffix("k")
    if not digits.isdecimal() or int(digits) < 1:
        raise InvalidInput(f"lengths must be like 512,2k,64k or 2k..64k, got {text!r}")
    return int(digits) * factor

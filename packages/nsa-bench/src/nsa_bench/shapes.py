"""Shapes and lengths, as the options of the commands accept them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from nsa_core.config import NSAConfig
from nsa_core.errors import InvalidInput
from nsa_core.limits import COUNT, as_integer, integer_problems, shown
from nsa_core.util.text import did_you_mean

NAMED = {"reports": "12/2/64", "paper": "64/4/192/128", "tiny": "4/2/32"}
PAPER_BLOCKS = (32, 16, 64, 16, 512)  # l, d, l', n, w
_FACTORS = {"": 1, "k": 1 << 10, "m": 1 << 20}


@dataclasses.dataclass(frozen=True)
class Shape:
    """The heads of an attention layer, written HEADS/KV_HEADS/WIDTH or with Dv as a fourth number.

    Attributes:
        n_heads: Query heads Hq.
        n_kv_heads: Key/value heads G.
        head_dim: Width Dk of queries and keys.
        v_head_dim: Width Dv of values.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    v_head_dim: int

    @classmethod
    def of(cls, config: NSAConfig) -> Shape:
        """Return the heads of a layer."""
        return cls(config.n_heads, config.n_kv_heads, config.qk_dim, config.v_dim)

    @property
    def name(self) -> str:
        """Return "12/2/64", or "64/4/192/128" if Dv differs from Dk."""
        parts = [self.n_heads, self.n_kv_heads, self.head_dim]
        return "/".join(map(str, parts + [self.v_head_dim] * (self.v_head_dim != self.head_dim)))

    def config(self, blocks: Sequence[int] = PAPER_BLOCKS) -> NSAConfig:
        """Return the timed layer: mean compression, one key/value pair for the three branches.

        Args:
            blocks: l, d, l', n, w.

        Raises:
            InvalidInput: The blocks and heads are not a valid configuration.
        """
        if len(blocks) != 5:
            raise InvalidInput(
                f"--blocks must be five integers l,d,l',n,w, got {','.join(map(str, blocks))}"
            )
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
    """Parse "12/2/64", "64/4/192/128" or a name ("reports", "paper", "tiny").

    Raises:
        InvalidInput: The text is not a shape, or Hq is not a multiple of G.
    """
    parts = NAMED.get(text.strip(), text.strip()).split("/")
    numbers = [as_integer(part) or 0 for part in parts]
    if len(parts) not in (3, 4) or not all(numbers):
        known = ", ".join(f"{name} ({shape})" for name, shape in NAMED.items())
        hint = did_you_mean(text, NAMED)
        raise InvalidInput(
            "--shape must be HEADS/KV_HEADS/WIDTH such as 12/2/64, with a fourth number if values"
            f" have another width, or one of {known}; got {text!r:.80}{hint}"
        )
    sizes = zip(("n_heads", "n_kv_heads", "head_dim", "v_head_dim"), numbers)
    if problems := [problem for size in sizes for problem in integer_problems(*size)]:
        raise InvalidInput(f"--shape {text!r}: {'; '.join(problems)}")
    hq, g, dk, *dv = numbers
    if hq % g:
        raise InvalidInput(
            f"--shape {text!r}: {hq} query heads do not divide over {g} kv heads;"
            " give a multiple of the kv heads"
        )
    return Shape(hq, g, dk, dv[0] if dv else dk)


def parse_length(text: str, least: int = 1) -> int:
    """Parse one number of tokens: "512", "64k" (64 * 1024) or "1M" (1024 * 1024).

    Args:
        text: Decimal digits, and k or M in either case.
        least: The smallest number that is accepted.

    Raises:
        InvalidInput: The text is no such number, or the number is not in ``least`` .. 2^31 - 1.
    """
    match = re.fullmatch("([0-9]{1,10})([km]?)", text.strip().lower())
    tokens = int(match[1]) * _FACTORS[match[2]] if match else 0
    if match is None or not least <= tokens <= COUNT:
        raise InvalidInput(
            f"{shown(text)} is not a number of tokens from {least} to {COUNT}, such as 512, 64k"
            " (65536) or 1M (1048576)"
        )
    return tokens


def parse_lengths(text: str) -> list[int]:
    """Parse lengths; return them in ascending order.

    "512,64k,1M" is a list; "2k..64k" doubles from the first length up to the last.

    Raises:
        InvalidInput: :func:`parse_length` does not accept an entry, or a range is empty.
    """
    lengths: set[int] = set()
    for part in text.split(","):
        first, dots, last = part.partition("..")
        try:
            low = parse_length(first)
            high = parse_length(last) if dots else low
        except InvalidInput as error:
            raise InvalidInput(f"--length: {error}") from error
        if high < low:
            raise InvalidInput(
                f"--length {part!r}: the last length must not be smaller than the first"
            )
        while low <= high:
            lengths.add(low)
            low *= 2
    return sorted(lengths)

"""Block geometry of NSA as integer arithmetic: how many blocks there are, who sees what, which
blocks overlap.

Symbols as in the paper (arXiv 2502.11089): l compression block, d stride, l' selection block, n
selected blocks, w window. Positions and block indices are 0-based. No torch here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from nsa_core.errors import InvalidInput


@dataclasses.dataclass(frozen=True)
class BlockGeometry:
    """The integers that fix which keys a query sees in each branch.

    Raises:
        InvalidInput: a field is outside the validity rules; every offending field is named with its
            value.
    """

    compress_block_size: int = 32  # l
    compress_stride: int = 16  # d
    select_block_size: int = 64  # l'
    num_selected_blocks: int = 16  # n
    init_blocks: int = 1
    local_blocks: int = 2
    window_size: int = 512  # w

    def __post_init__(self) -> None:
        wrong = []
        for field in dataclasses.fields(self):
            value, least = (
                getattr(self, field.name),
                0 if field.name in ("init_blocks", "local_blocks") else 1,
            )
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                wrong.append(f"{field.name} must be an integer >= {least}, got {value!r}")
        if wrong:
            raise InvalidInput("; ".join(wrong))
        size, stride, select = (
            self.compress_block_size,
            self.compress_stride,
            self.select_block_size,
        )
        if size % stride:
            wrong.append(
                f"compress_stride must divide compress_block_size, got {stride} and {size}"
            )
        if select % stride:
            wrong.append(
                f"compress_stride must divide select_block_size, got {stride} and {select}"
            )
        if size > select:
            wrong.append(
                f"compress_block_size must be <= select_block_size, got {size} and {select}"
            )
        if self.num_selected_blocks < max(1, self.init_blocks + self.local_blocks):
            wrong.append(
                "num_selected_blocks must be >= init_blocks + local_blocks, "
                f"got {self.num_selected_blocks} < {self.init_blocks} + {self.local_blocks}"
            )
        if wrong:
            raise InvalidInput("; ".join(wrong))

    def num_compressed(self, length: int) -> int:
        """Compressed tokens of a document of ``length`` tokens: max(0, floor((length - l) / d) +
        1).
        """
        return max(0, (length - self.compress_block_size) // self.compress_stride + 1)

    def max_compressed(self, total: int) -> int:
        """Rows of a packed compressed tensor over ``total`` tokens: T // d, a bound that needs no
        document lengths.
        """
        return total // self.compress_stride

    def num_select_blocks(self, length: int) -> int:
        """Selection blocks of a document, the last partial one included: ceil(length / l')."""
        return -(-length // self.select_block_size)

    def overlap_taps(self) -> list[tuple[int, int]]:
        """(i - j * l'/d, weight) of the compressed blocks i that overlap selection block j,
        ascending i.

        Eq. 9 with both indices read 1-based: weight(i, j) = |[i*d, i*d + l) cut [j*l', (j+1)*l')| /
        d.
        """
        size, stride, select = (
            self.compress_block_size,
            self.compress_stride,
            self.select_block_size,
        )
        taps = []
        for i in range(1 - size // stride, select // stride):
            overlap = min(i * stride + size, select) - max(i * stride, 0)
            taps.append((i, overlap // stride))
        return taps

    def as_ints(self) -> list[int]:
        """The fields in order, as an operator schema carries them."""
        return list(dataclasses.astuple(self))

    @classmethod
    def from_ints(cls, values: Sequence[int]) -> BlockGeometry:
        """Inverse of :meth:`as_ints`; the same object for the same integers."""
        return _geometry(*values)


@functools.lru_cache(maxsize=256, typed=True)  # typed: True is not 1 here
def _geometry(*values: int) -> BlockGeometry:
    return BlockGeometry(*values)

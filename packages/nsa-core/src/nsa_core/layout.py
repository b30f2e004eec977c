"""Block geometry of NSA in integer arithmetic: number of blocks, visibility and overlap.

The symbols are those of the paper (arXiv 2502.11089): compression block l, stride d, selection
block l', number of selected blocks n, window w. Positions and block indices are 0-based.

This module imports no torch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from nsa_core.errors import InvalidInput
from nsa_core.limits import integer_problems

_LARGEST_RATIO = 2**16  # of select_block_size and compress_stride


@dataclasses.dataclass(frozen=True)
class BlockGeometry:
    """The sizes that determine which keys a query sees in each branch.

    Attributes:
        compress_block_size: l, tokens per compression block.
        compress_stride: d, tokens between the starts of two compression blocks; divides l and l'.
        select_block_size: l', tokens per selection block; at least l.
        num_selected_blocks: n, blocks selected per token and kv head, forced blocks included; at
            least ``init_blocks + local_blocks``.
        init_blocks: number of blocks at the start of the document that are always selected.
        local_blocks: number of blocks up to the current one that are always selected.
        window_size: w, keys of the sliding window, the token itself included.

    Raises:
        InvalidInput: a field is invalid; the message names every invalid field and its value.
    """

    compress_block_size: int = 32
    compress_stride: int = 16
    select_block_size: int = 64
    num_selected_blocks: int = 16
    init_blocks: int = 1
    local_blocks: int = 2
    window_size: int = 512

    def __post_init__(self) -> None:
        problems: list[str] = []
        for field in dataclasses.fields(self):
            minimum = 0 if field.name in ("init_blocks", "local_blocks") else 1
            problems += integer_problems(field.name, getattr(self, field.name), minimum)
        if problems:
            raise InvalidInput("; ".join(problems))
        size, stride, select = (
            self.compress_block_size,
            self.compress_stride,
            self.select_block_size,
        )
        if size % stride:
            problems.append(
                f"compress_stride must divide compress_block_size, got {stride} and {size}"
            )
        if select % stride:
            problems.append(
                f"compress_stride must divide select_block_size, got {stride} and {select}"
            )
        if select > _LARGEST_RATIO * stride:  # each compressed block in it is one step of a loop
            problems.append(
                f"select_block_size must be <= {_LARGEST_RATIO} * compress_stride, got {select} and"
                f" {stride}"
            )
        if size > select:
            problems.append(
                f"compress_block_size must be <= select_block_size, got {size} and {select}"
            )
        if self.num_selected_blocks < max(1, self.init_blocks + self.local_blocks):
            problems.append(
                "num_selected_blocks must be >= init_blocks + local_blocks, "
                f"got {self.num_selected_blocks} < {self.init_blocks} + {self.local_blocks}"
            )
        if problems:
            raise InvalidInput("; ".join(problems))

    def num_compressed(self, length: int) -> int:
        """Return the number of compressed tokens of a document of ``length`` tokens.

        It is max(0, floor((length - l) / d) + 1).
        """
        blocks = (length - self.compress_block_size) // self.compress_stride + 1
        return max(0, blocks) if isinstance(length, int) else _symbolic_max(blocks)

    def max_compressed(self, total: int) -> int:
        """Return the rows of a packed compressed tensor of ``total`` tokens: T // d.

        This upper bound does not depend on the lengths of the documents.
        """
        return total // self.compress_stride

    def num_select_blocks(self, length: int) -> int:
        """Return the number of selection blocks of ``length`` tokens: ceil(length / l').

        The last block may be partial.
        """
        return -(-length // self.select_block_size)

    def overlap_weights(self) -> list[tuple[int, int]]:
        """Return the weights of the compressed blocks that overlap a selection block (Eq. 9).

        With both indices of Eq. 9 read 1-based, the weight of compressed block i in the score of
        selection block j is the number of tokens that the blocks share, divided by d:

            weight(i, j) = |[i*d, i*d + l) ∩ [j*l', (j+1)*l')| / d

        Returns:
            Pairs (i - j * l'/d, weight) in ascending i. For l=32, d=16, l'=64 they are
            (-1, 1), (0, 2), (1, 2), (2, 2), (3, 1).
        """
        size, stride, select = (
            self.compress_block_size,
            self.compress_stride,
            self.select_block_size,
        )
        weights = []
        for i in range(1 - size // stride, select // stride):
            overlap = min(i * stride + size, select) - max(i * stride, 0)
            weights.append((i, overlap // stride))
        return weights

    def as_ints(self) -> list[int]:
        """Return the fields in order, as an operator schema carries them."""
        return list(dataclasses.astuple(self))

    @classmethod
    def from_ints(cls, values: Sequence[int]) -> BlockGeometry:
        """Return the geometry with these fields; cached, so equal arguments give one object."""
        return _geometry(*values)


def _symbolic_max(blocks: Any) -> int:
    """Return max(0, blocks) of a symbolic integer of torch.export, without a guard on its value."""
    import torch

    result: int = torch.sym_max(0, blocks)
    return result


@functools.lru_cache(maxsize=256, typed=True)  # typed, so that True and 1 are distinct keys
def _geometry(*values: int) -> BlockGeometry:
    return BlockGeometry(*values)

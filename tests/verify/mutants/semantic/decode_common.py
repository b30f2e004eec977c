"""Conditions and faults that the decode forms share."""

from __future__ import annotations

from typing import Any

import torch

from semantic.common import (
    calls,
    repeat_from,
)
from semantic.dense import (
    masked_decode,
)
from semantic.model import View, mutant


def decode(slot: str, text: str, fault: Any, when: Any = None) -> Any:
    return mutant(slot, "decode", text, fault, when)


def starts(c: View) -> list[int]:
    return [int(x) for x in c.call.starts.tolist()]


def page_size(c: View) -> int:
    """Tokens of a page of the cache."""
    rows = c[c.key_name].shape[1]
    return rows * c.stride if c.slot in ("cmp", "select") else rows


def table(change: Any) -> Any:
    """The healthy form with a changed block table."""
    return calls(block_table=lambda c: change(c, c.call.block_table.clone()))


def one_table(c: View, table: torch.Tensor) -> torch.Tensor:
    """Sequences from the fourth on use the pages of the third."""
    return repeat_from(0, 3)(c, table)


def four_pages(c: View, table: torch.Tensor) -> torch.Tensor:
    """Pages from the fifth on wrap around."""
    return table[:, torch.arange(table.shape[1]) % 4]


def newest_row_masks(c: View, mask: Any) -> list[torch.Tensor]:
    """All rows of a step see what its last row sees."""

    def seen(c: View, token: Any, key: Any, index: int) -> torch.Tensor:
        return mask(c, token[-1:].expand_as(token), key, index)

    return masked_decode(c, seen)


def new_rows(c: View) -> int:
    return max(b - a for a, b in zip(starts(c), c.lengths))


def padded(c: View) -> bool:
    return any(b - a < c.tokens for a, b in zip(starts(c), c.lengths))

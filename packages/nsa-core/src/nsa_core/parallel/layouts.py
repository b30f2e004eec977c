"""Layouts: how the rows of a sequence are divided over ranks.

A sequence of T rows is cut into chunks of equal length, and a rank holds one or two of them:

    contiguous  P chunks; rank r holds chunk r
    head_tail   2 P chunks; rank r holds the chunks r and 2 P - 1 - r
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nsa_core.errors import InvalidInput

LAYOUTS = ("contiguous", "head_tail")


def check_layout(layout: object) -> None:
    """Check that ``layout`` is the name of a layout.

    Raises:
        InvalidInput: it is not; the message lists the names.
    """
    if layout not in LAYOUTS:
        raise InvalidInput(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")


def pieces_per_rank(layout: str) -> int:
    """Return the number of chunks that a rank holds."""
    return 2 if layout == "head_tail" else 1


def in_order(gathered: torch.Tensor, world: int, layout: str) -> torch.Tensor:
    """Bring rows that lie in the order of the ranks into their own order.

    Args:
        gathered: [T, ...], the rows of rank 0, then those of rank 1, and so on.
        world: number of ranks.
        layout: "head_tail" or "contiguous".

    Returns:
        [T, ...], a copy in the layout head_tail.
    """
    return _permuted(gathered, places(world, layout))


def in_rank_order(rows: torch.Tensor, world: int, layout: str) -> torch.Tensor:
    """Bring rows into the order of the ranks: the inverse of :func:`in_order`."""
    return _permuted(rows, numbers_of_ranks(world, layout))


def _permuted(rows: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Return the chunks of ``rows`` in ``order``."""
    if list(order) == list(range(len(order))):
        return rows
    chunks = rows.chunk(len(order))
    return torch.cat([chunks[k] for k in order])


def chunks_of(rank: int, world: int, layout: str) -> tuple[int, ...]:
    """Return the chunks of a rank, in the order of its rows."""
    return (rank, 2 * world - 1 - rank) if layout == "head_tail" else (rank,)


def numbers_of_ranks(world: int, layout: str) -> tuple[int, ...]:
    """Return the chunks of all ranks, in the order of the ranks."""
    return tuple([number for rank in range(world) for number in chunks_of(rank, world, layout)])


def places(world: int, layout: str) -> tuple[int, ...]:
    """Return the place of each chunk among all chunks in the order of the ranks."""
    numbers = numbers_of_ranks(world, layout)
    return tuple([numbers.index(number) for number in range(len(numbers))])

"""Rows to the left of each piece, which other ranks hold: who sends which rows where.

A query of win reads w - 1 rows before its own, and a compressed token whose last token belongs to a
piece reads l - 1 rows before the piece. Each piece is therefore extended on its left. The plan
follows from the sizes alone, so that it is the same on all ranks and costs no communication.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from nsa_core.parallel.layouts import chunks_of, pieces_per_rank


class Segment(NamedTuple):
    """Neighbouring rows that one rank sends and another one receives.

    Attributes:
        tensor: index of the tensor whose rows are sent.
        sender: the rank that holds the rows.
        receiver: the rank whose piece they extend.
        piece: index of this piece among those of the receiver.
        source: first row among the sender's rows.
        target: first row in the extended piece.
        rows: number of rows.
    """

    tensor: int
    sender: int
    receiver: int
    piece: int
    source: int
    target: int
    rows: int


@functools.lru_cache(maxsize=256)
def segments(total: int, world: int, layout: str, widths: tuple[int, ...]) -> tuple[Segment, ...]:
    """Return the segments of all ranks.

    A segment does not cross a chunk. Between two ranks, the segments lie in this order in the
    buffers of both.

    Args:
        total: number of rows, T.
        world: number of ranks.
        layout: "head_tail" or "contiguous".
        widths: for each tensor, the number of rows by which each piece is extended.
    """
    chunk = total // (world * pieces_per_rank(layout))
    owner = {
        number: (rank, index)
        for rank in range(world)
        for index, number in enumerate(chunks_of(rank, world, layout))
    }
    result = []
    for tensor, width in enumerate(widths):
        for receiver in range(world):
            for piece, extended in enumerate(chunks_of(receiver, world, layout)):
                first = extended * chunk
                row = max(0, first - width)
                while row < first:
                    number = row // chunk
                    rows = min((number + 1) * chunk, first) - row
                    sender, index = owner[number]
                    source = index * chunk + row - number * chunk
                    target = row - (first - width)
                    result.append(Segment(tensor, sender, receiver, piece, source, target, rows))
                    row += rows
    return tuple(result)


@functools.lru_cache(maxsize=256)
def halo_sides(
    total: int, world: int, rank: int, layout: str, widths: tuple[int, ...]
) -> tuple[list[Segment], list[Segment]]:
    """Return what one rank sends and what it receives, each in the order of the buffer.

    The arguments are those of :func:`segments`.
    """
    every = segments(total, world, layout, widths)
    sent = sorted((s for s in every if s.sender == rank), key=lambda s: s.receiver)  # stable
    received = sorted((s for s in every if s.receiver == rank), key=lambda s: s.sender)
    return sent, received

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


class HaloPlan(NamedTuple):
    """The segments of one rank.

    Attributes:
        sent: segments that this rank sends, in the order of the buffer.
        received: segments that it receives, in the order of the buffer.
    """

    sent: tuple[Segment, ...]
    received: tuple[Segment, ...]

    def send_sizes(self, world: int, row_sizes: tuple[int, ...]) -> list[int]:
        """Return the number of elements sent to each rank.

        Args:
            world: number of ranks.
            row_sizes: elements per row of each tensor.
        """
        receivers = [segment.receiver for segment in self.sent]
        return _sum_by_rank(receivers, self.sent_counts(row_sizes), world)

    def receive_sizes(self, world: int, row_sizes: tuple[int, ...]) -> list[int]:
        """Return the number of elements received from each rank; arguments as send_sizes."""
        senders = [segment.sender for segment in self.received]
        return _sum_by_rank(senders, self.received_counts(row_sizes), world)

    def sent_counts(self, row_sizes: tuple[int, ...]) -> list[int]:
        """Return the number of elements of each sent segment."""
        return [segment.rows * row_sizes[segment.tensor] for segment in self.sent]

    def received_counts(self, row_sizes: tuple[int, ...]) -> list[int]:
        """Return the number of elements of each received segment."""
        return [segment.rows * row_sizes[segment.tensor] for segment in self.received]


def _sum_by_rank(ranks: list[int], counts: list[int], world: int) -> list[int]:
    """Return for each of ``world`` ranks the sum of its counts."""
    sums = [0] * world
    for rank, count in zip(ranks, counts):
        sums[rank] += count
    return sums


@functools.lru_cache(maxsize=256)
def halo_plan(total: int, world: int, rank: int, layout: str, widths: tuple[int, ...]) -> HaloPlan:
    """Return the segments of one rank; arguments as :func:`segments`."""
    every = segments(total, world, layout, widths)
    sent = [s for s in every if s.sender == rank]
    received = [s for s in every if s.receiver == rank]
    return HaloPlan(
        tuple(sorted(sent, key=lambda s: s.receiver)),  # stable
        tuple(sorted(received, key=lambda s: s.sender)),
    )

"""The time on more GPUs than the machine has: the slowest rank alone, plus the collectives.

Each rank runs alone on one GPU, with its own rows and with stand-ins for the collectives. The time
of a collective is a line through those measured on this machine: a start per other rank, and
a time per received byte.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from nsa_bench.parallel.result import Traffic

METHOD = (
    "the slowest rank, each run alone on one GPU with stand-ins for the collectives, plus the"
    " collectives: a start per other rank and a time per received byte, both measured on this"
    " machine's GPUs"
)


class CollectiveTimes:
    """The time of each operator by the bytes that a rank receives.

    Args:
        measured: Collectives with their times alone.
        ranks: The number of ranks that they were measured on.
    """

    def __init__(self, measured: Iterable[Traffic], ranks: int) -> None:
        self._ranks = ranks
        self._points: dict[str, list[tuple[int, float]]] = {}
        for traffic in measured:
            if traffic.ms is not None:
                point = (traffic.received_bytes, traffic.ms)
                self._points.setdefault(traffic.op, []).append(point)

    def milliseconds(self, calls: Sequence[Traffic], ranks: int) -> float | None:
        """Return the time of ``calls`` on ``ranks`` ranks; None if an operator was not measured."""
        total = 0.0
        for call in calls:
            if call.op not in self._points:
                return None
            start, per_byte = _line(self._points[call.op])
            total += start * (ranks - 1) / (self._ranks - 1) + per_byte * call.received_bytes
        return total


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return (milliseconds of a start, milliseconds per byte), neither below 0.

    One size alone gives no start. Times at equal sizes are replaced by their median.
    """
    by_size: dict[int, list[float]] = {}
    for size, ms in points:
        by_size.setdefault(size, []).append(ms)
    sizes = sorted(by_size)
    times = [statistics.median(by_size[size]) for size in sizes]
    if len(sizes) == 1:
        return (0.0, times[0] / sizes[0]) if sizes[0] else (times[0], 0.0)
    per_byte, start = statistics.linear_regression(sizes, times)
    if per_byte < 0:
        return statistics.mean(times), 0.0
    if start < 0:
        return 0.0, times[-1] / sizes[-1]
    return start, per_byte

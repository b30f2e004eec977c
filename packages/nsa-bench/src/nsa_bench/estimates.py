"""The expected time of a call, from shorter calls of the same subject."""

from __future__ import annotations

import dataclasses
import math

from nsa_bench.cells import Cell
from nsa_bench.timing import NOT_MEASURED

# A call may take this many times its roofline floor before it needs an estimate.
SLOWDOWN = 100.0
# A call that is expected to take longer runs in a child process, which can be ended.
CHILD_MS = 300.0
# An estimate from one probe may be this many times too long; only above it a call is not tried.
PROBE_ERROR = 4.0


def probe_length(cell: Cell, device: str) -> int:
    """Return a number of tokens whose call is short and grows like the call of ``cell``.

    If the call of ``cell`` selects blocks, so does that of this number: up to n * l' tokens, causal
    attention would run in place of selection.
    """
    limit = 16384 if device.startswith("cuda") else 1024  # fewer would be launch-bound on a GPU
    short = 1 << (max(1, min(limit, cell.length // 4)).bit_length() - 1)
    block = cell.config.select_block_size
    every = cell.config.num_selected_blocks * block
    return short if cell.length <= every else max(short, min(cell.length, every + block))


class Estimates:
    """Known times of each subject, by the number of tokens."""

    def __init__(self) -> None:
        # (workload, cell of length 0) -> (length, ms) of each measured call
        self._measured: dict[tuple[str, Cell], list[tuple[int, float]]] = {}
        # (workload, cell) -> length of a call on fewer tokens, and the ms estimated from it
        self._probes: dict[tuple[str, Cell], tuple[int, float]] = {}

    def add(self, cell: Cell, key: str, time_ms: float) -> None:
        """Add a measured time."""
        self._measured.setdefault(_curve(cell, key), []).append((cell.length, time_ms))

    def add_probe(self, cell: Cell, key: str, length: int, expected_ms: float) -> None:
        """Add the estimate for ``cell`` from a call on ``length`` tokens."""
        self._probes[key, cell] = (length, expected_ms)

    def expected_ms(self, cell: Cell, key: str) -> float | None:
        """Return the expected time of a call; None if nothing is known.

        Measured times are extrapolated with their growth over the last two lengths, or with S^2
        after one.
        """
        measured = self._measured.get(_curve(cell, key))
        if measured is None:
            return self._probes.get((key, cell), (0, None))[1]
        (length, time_ms), power = measured[-1], 2.0
        if len(measured) > 1:
            earlier, earlier_ms = measured[-2]
            power = min(2.0, max(1.0, math.log(time_ms / earlier_ms) / math.log(length / earlier)))
        return float(time_ms * (cell.length / length) ** power)

    def too_long(self, cell: Cell, key: str, max_call_s: float) -> str:
        """Return why a call is not tried: it would exceed the limit; "" if it is tried."""
        expected_ms = self.expected_ms(cell, key)
        is_measured = _curve(cell, key) in self._measured
        limit_ms = max_call_s * 1e3 * (1.0 if is_measured else PROBE_ERROR)
        if expected_ms is None or expected_ms <= limit_ms:
            return ""
        source = "" if is_measured else f", judged by one of {self._probes[key, cell][0]} tokens"
        expected_s = expected_ms / 1e3
        about = f"{expected_s:.2g}" if expected_s < 10 else f"{expected_s:.0f}"
        return (
            f"{NOT_MEASURED}: a call would take about {about} s{source}, over --max-call"
            f" {max_call_s:g}"
        )


def _curve(cell: Cell, key: str) -> tuple[str, Cell]:
    return key, dataclasses.replace(cell, length=0)

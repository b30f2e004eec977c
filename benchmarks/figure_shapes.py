"""Compute the table of the core at the shapes of released models."""

from __future__ import annotations

import math
from collections.abc import Callable

from figure_pieces import PIECES
from figure_tables import PENDING, Results, digits, table, tokens

from nsa_bench.result import Measurement, read_result


def shapes(results: Results) -> str:
    """Tabulate forward + backward of NSA and the fastest dense kernel, one length per shape."""
    columns = ["heads", "tokens", "NSA, ms", "dense, ms", "speed-up"]
    rows = []
    for piece in (p for p in PIECES if p.name.startswith("shapes-")):
        file = piece.nearest(results.folder)
        measured = [m for m in read_result(file).measurements if m.phase == "both"] if file else []
        for own in (m for m in measured if m.kind == "combo"):
            beside = [m for m in measured if (m.shape, m.length) == (own.shape, own.length)]
            dense = min((m for m in beside if m.kind == "dense"), key=_ms, default=None)
            rows.append([own.shape, tokens(own.length), *_compared(own, dense)])
    return table(columns, rows or [[PENDING, *"-" * (len(columns) - 1)]])


def _ms(measurement: Measurement) -> float:
    """Return the median time; infinity if there is none."""
    return measurement.performance.median_ms if measurement.performance else math.inf


def _compared(own: Measurement, dense: Measurement | None) -> list[str]:
    times = [_ms(own), math.inf if dense is None else _ms(dense)]
    cells = [digits(ms) if math.isfinite(ms) else "-" for ms in times]
    if dense is None or not all(map(math.isfinite, times)):
        return [*cells, "-"]
    return [*cells, f"{times[1] / times[0]:.1f}x"]


SHAPES_OF_MODELS: dict[str, Callable[[Results], str]] = {"shapes": shapes}

"""Compute the table of the core at the shapes of released models."""

from __future__ import annotations

import math
from collections.abc import Callable

from figure_pieces import PIECES
from figure_tables import PENDING, Results, digits, table, tokens

from nsa_bench.result import Measurement, read_result

NAMES = {
    "dense flash-attn 4": "FlashAttention-4",
    "dense cudnn": "cuDNN",
    "dense flash": "FlashAttention-2",
}


def shapes(results: Results) -> str:
    """Tabulate forward + backward of NSA and the fastest dense kernel, one length per shape."""
    columns = ["heads", "tokens", "NSA, ms", "dense, ms", "dense kernel", "speed-up"]
    files = [p.nearest(results.folder) for p in PIECES if p.name.startswith("shapes-")]
    problems: dict[tuple[int, str], list[Measurement]] = {}
    for file in filter(None, files):
        for m in read_result(file).measurements:
            if m.phase == "both":
                problems.setdefault((m.length, m.shape), []).append(m)
    rows = []
    for (length, shape), measured in sorted(problems.items(), key=lambda item: item[0][0]):
        nsa = next((m for m in measured if m.kind == "combo"), None)
        dense = min((m for m in measured if m.kind == "dense"), key=_ms, default=None)
        if nsa is not None:
            rows.append([shape, tokens(length), *_compared(nsa, dense)])
    return table(columns, rows or [[PENDING, *"-" * (len(columns) - 1)]])


def _ms(measurement: Measurement) -> float:
    """Return the median time; infinity if there is none."""
    return measurement.performance.median_ms if measurement.performance else math.inf


def _compared(nsa: Measurement, dense: Measurement | None) -> list[str]:
    times = [_ms(nsa), math.inf if dense is None else _ms(dense)]
    cells = [digits(ms) if math.isfinite(ms) else "-" for ms in times]
    if dense is None or not all(map(math.isfinite, times)):
        return [*cells, "-", "-"]
    return [*cells, NAMES.get(dense.subject, dense.subject), f"{times[1] / times[0]:.1f}x"]


SHAPES_OF_MODELS: dict[str, Callable[[Results], str]] = {"shapes": shapes}

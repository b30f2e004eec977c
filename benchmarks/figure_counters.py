"""Compute the table of hardware counters."""

from __future__ import annotations

import json
from collections.abc import Callable

from figure_pieces import PIECES
from figure_tables import Results, digits, table

LEAST_MS = 3.0  # shorter kernels are left out


def counters(results: Results) -> str:
    """Tabulate time, use of the units, and programs per multiprocessor of each long kernel."""
    (piece,) = (piece for piece in PIECES if piece.name == "counters")
    file = piece.nearest(results.folder)
    if file is None:
        return "not measured yet"
    rows = [
        [
            " ".join(filter(None, (f"`{launch['kernel']}`", launch["branch"]))),
            digits(launch["ms"]),
            *(f"{launch[name]:.0f}%" for name in ("matrix_percent", "exp2_percent")),
            *(f"{launch[name]:.0f}%" for name in ("l2_percent", "hbm_percent")),
            f"{min(launch['programs_by_registers'], launch['programs_by_shared_memory']):.0f}",
        ]
        for launch in json.loads(file.read_text(encoding="utf-8"))["launches"]
        if launch["ms"] >= LEAST_MS
    ]
    columns = ["kernel", "ms", "matrix units", "exp2", "L2", "HBM", "programs"]
    return table(columns, rows)


COUNTERS: dict[str, Callable[[Results], str]] = {"counters": counters}

"""Compute the tables of hardware counters and of clocks under the power limit."""

from __future__ import annotations

import json
from collections.abc import Callable

from figure_pieces import PIECES, nearest
from figure_tables import Results, digits, table

LEAST_MS = 1.0  # shorter kernels are left out


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
            f"{launch['registers']:.0f}",
            f"{min(launch['programs_by_registers'], launch['programs_by_shared_memory']):.0f}",
        ]
        for launch in json.loads(file.read_text(encoding="utf-8"))["launches"]
        if launch["ms"] >= LEAST_MS
    ]
    columns = ["kernel", "ms", "matrix units", "exp2", "L2", "HBM", "registers", "programs"]
    return table(columns, rows)


def power(results: Results) -> str:
    """Tabulate time and clock of the core, back to back and with pauses."""
    file = nearest(results.folder, "power.json")
    if file is None:
        return "not measured yet"
    cells: dict[tuple[str, int], list[str]] = {}
    for row in json.loads(file.read_text(encoding="utf-8"))["rows"]:
        cell = f"{digits(row['ms'])} at {row['clock_mhz']:.0f} MHz"
        cells.setdefault((row["shape"], row["length"]), []).append(cell)
    rows = [[shape, f"{length // 1024}k", *both] for (shape, length), both in cells.items()]
    return table(["heads", "tokens", "back to back, ms", "after pauses, ms"], rows)


COUNTERS: dict[str, Callable[[Results], str]] = {"counters": counters, "power": power}

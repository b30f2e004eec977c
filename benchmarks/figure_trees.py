"""Compute the tables of two source trees from the result files of kernels/compare_trees.py."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable

from figure_pieces import nearest
from figure_tables import PENDING, Results, digits, short_device, table

FILE = "compare_trees.json"


def old_new(results: Results, rehearses: str = "") -> str:
    """Tabulate the time of each kernel and decode step in both trees.

    Args:
        results: The results of a GPU.
        rehearses: Architecture whose code the GPU ran, such as "sm80"; "" for its own.
    """
    columns = ["case and kernel", "old, ms", "new, ms", "new / old", "spread", "verdict"]
    file = nearest(results.folder, FILE, rehearses)
    if file is None:
        return table(columns, [[PENDING, *"-" * (len(columns) - 1)]])
    document = json.loads(file.read_text(encoding="utf-8"))
    columns[0] += f", on one {short_device(document['machine']['device'])}"
    rows = []
    for row in document["rows"]:
        old, new = row["old_ms"], row["new_ms"]
        cells = ["-"] * 4
        if old and new:
            cells = [digits(old), digits(new), f"{new / old:.2f}", f"{row['spread']:.1%}"]
        rows.append([row["name"], *cells, row["verdict"]])
    rows += [[case, *"-" * 4, "left out"] for case in document["left_out"]]
    return table(columns, rows)


def verdicts(results: Results, rehearses: str = "") -> str:
    """Count the rows of :func:`old_new` that are faster, and those that are slower."""
    file = nearest(results.folder, FILE, rehearses)
    if file is None:
        return PENDING
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    faster, slower = (sum(row["verdict"] == word for row in rows) for word in ("faster", "slower"))
    return f"{faster} of {len(rows)} rows are faster and {slower} slower"


TREES: dict[str, Callable[[Results], str]] = {
    "old-new": old_new,
    "old-new-a100": functools.partial(old_new, rehearses="sm80"),
    "old-new-verdicts": verdicts,
    "old-new-verdicts-a100": functools.partial(verdicts, rehearses="sm80"),
}

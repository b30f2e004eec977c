"""Compute the tables of docs/how-to/serve.md from the result of kernels/serving_decode.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from figure_pieces import nearest
from figure_tables import PENDING, Results, digits, short_device, table, tokens

DENSE = ("dense", "flash-attn")


def _read(results: Results) -> dict[str, Any]:
    """Return the result file; {} if there is none."""
    file = nearest(results.folder, "serving_decode.json")
    return json.loads(file.read_text(encoding="utf-8")) if file else {}


def device(results: Results) -> str:
    """Return the GPU of the results."""
    return short_device(_read(results).get("device", PENDING))


def steps(results: Results) -> str:
    """Tabulate a step by length and batch, beside the fastest dense attention."""
    columns = ["tokens", "sequences", "NSA, us", "NSA without a graph, us", "dense, us"]
    columns += ["dense, TB/s", "speed-up", "NSA, tokens per ms"]
    rows, result = [], _read(results)
    for cell in sorted(result.get("cells", ()), key=lambda c: (c["length"], c["batch"])):
        own, eager = cell.get("nsa"), cell.get("eager")
        dense = min((cell[name] for name in DENSE if name in cell), default=None)
        _, heads, width = map(int, result["shape"].split()[0].split("/"))
        size = 4 * cell["batch"] * cell["length"] * heads * width  # bytes of K and V in bf16
        bandwidth = f"{size / dense / 1e6:.1f}" if dense else "-"
        ratio = f"{dense / own:.1f}x" if own and dense else "-"
        rate = digits(1e3 * cell["batch"] / own) if own else "-"
        times = (digits(us) if us else "-" for us in (own, eager, dense))
        rows.append([tokens(cell["length"]), str(cell["batch"]), *times, bandwidth, ratio, rate])
    return table(columns, rows or [[PENDING, *"-" * (len(columns) - 1)]])


def prompts(results: Results) -> str:
    """Tabulate the time of a prompt, by how its tokens attend."""
    names = {
        "rows": "each token alone, ms",
        "chunks": "the tokens of a step together, ms",
        "cache": "`NSACache`, ms",
        "whole": "one call without a cache, ms",
    }
    rows = [
        [tokens(row["tokens"]), *(digits(row[name]) if name in row else "-" for name in names)]
        for row in _read(results).get("prompts", ())
    ]
    columns = ["prompt", *names.values()]
    return table(columns, rows or [[PENDING, *"-" * len(names)]])


SERVING: dict[str, Callable[[Results], str]] = {
    "serving-device": device,
    "serving-steps": steps,
    "serving-prompts": prompts,
}

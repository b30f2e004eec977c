"""Compute the tables of docs/how-to/serve.md from the result of kernels/serving_decode.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from figure_pieces import nearest
from figure_tables import PENDING, Results, digits, short_device, table, tokens


def _read(results: Results) -> dict[str, Any]:
    """Return the result file; {} if there is none."""
    file = nearest(results.folder, "serving_decode.json")
    return json.loads(file.read_text(encoding="utf-8")) if file else {}


def device(results: Results) -> str:
    """Return the GPU of the results."""
    return short_device(_read(results).get("device", PENDING))


def steps(results: Results) -> str:
    """Tabulate a step by length and batch, beside the fastest dense FlashAttention."""
    columns = ["tokens", "sequences", "NSA, us", "NSA without a graph, us", "dense, us"]
    columns += ["speed-up", "NSA, tokens per ms"]
    rows = []
    for cell in sorted(_read(results).get("cells", ()), key=lambda c: (c["length"], c["batch"])):
        own, eager = cell.get("nsa"), cell.get("eager")
        dense = min((cell[name] for name in ("dense", "flash-attn") if name in cell), default=None)
        ratio = f"{dense / own:.1f}x" if own and dense else "-"
        rate = digits(1e3 * cell["batch"] / own) if own else "-"
        times = (digits(us) if us else "-" for us in (own, eager, dense))
        rows.append([tokens(cell["length"]), str(cell["batch"]), *times, ratio, rate])
    return table(columns, rows or [[PENDING, *"-" * (len(columns) - 1)]])


def prompts(results: Results) -> str:
    """Tabulate the time of a prompt in chunks, in one call, and with each token alone."""
    names = {
        "chunks": "nsa_decode, ms",
        "cache": "`NSACache`, ms",
        "whole": "one call without a cache, ms",
        "rows": "nsa_decode with each token alone, ms",
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

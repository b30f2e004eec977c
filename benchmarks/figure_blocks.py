"""Compute the figures of block_attention from the result files of block_attention.py."""

from __future__ import annotations

import json
from typing import Any

from figure_pieces import PIECES
from figure_tables import ABSENT, Results, digits, table, tokens

FOREIGN = "dense cudnn"  # in a rehearsal it runs its kernels for the GPU at hand
Row = dict[str, Any]


def _rows(results: Results, piece_name: str) -> list[tuple[Row, float, float]]:
    """Return each timed forward + backward, and the ms of its forward and of dense attention."""
    (piece,) = (p for p in PIECES if p.name == piece_name)
    file = piece.nearest(results.folder)
    measured: list[Row] = json.loads(file.read_text())["rows"] if file else []
    measured = [row for row in measured if row["median_ms"]]
    if piece.rehearses:
        measured = [row for row in measured if row["implementation"] != FOREIGN]
    found = []
    for row in measured:
        if row["block_size"] is None or row["phase"] != "both":
            continue
        same = [r for r in measured if (r["shape"], r["S"]) == (row["shape"], row["S"])]
        (forward,) = (
            r["median_ms"]
            for r in same
            if (r["block_size"], r["phase"]) == (row["block_size"], "forward")
        )
        dense = min(
            r["median_ms"] for r in same if r["block_size"] is None and r["phase"] == "both"
        )
        found.append((row, forward, dense))
    return found


def times(results: Results) -> str:
    """Tabulate the times, and the speed-up over dense attention."""
    columns = ["tokens", "block size", "forward", "forward + backward", "speed-up"]
    rows = []
    for row, forward, dense in _rows(results, "block-attention"):
        both = row["median_ms"]
        cells = [tokens(row["S"]), str(row["block_size"])]
        rows.append([*cells, digits(forward), digits(both), f"{dense / both:.1f}x"])
    return table(columns, rows or [[ABSENT, *"-" * (len(columns) - 1)]])


def speed_up_a100(results: Results) -> str:
    """State the speed-up over FlashAttention-2 by length, with the code for the A100."""
    ratios: dict[int, list[float]] = {}
    for row, _, dense in _rows(results, "a100-block-attention"):
        ratios.setdefault(row["S"], []).append(dense / row["median_ms"])
    parts = []
    for length, each in sorted(ratios.items()):
        ends = dict.fromkeys(f"{ratio:.1f}x" for ratio in (min(each), max(each)))
        parts.append(f"{' to '.join(ends)} at {tokens(length)}")
    return ", ".join(parts) or ABSENT


def device(results: Results) -> str:
    """Return the GPU of block-attention without its vendor."""
    (piece,) = (p for p in PIECES if p.name == "block-attention")
    file = piece.nearest(results.folder)
    if file is None:
        return ABSENT
    name: str = json.loads(file.read_text())["machine"]["device"]
    return name.removeprefix("NVIDIA ").partition(" HBM")[0]


BLOCKS = {
    "block-attention-device": device,
    "block-attention": times,
    "block-attention-a100": speed_up_a100,
}

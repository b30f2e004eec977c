"""Compute the tables of block_attention from the result files of block_attention.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from figure_pieces import PIECES
from figure_tables import ABSENT, Results, digits, table, tokens

FOREIGN = "dense cudnn"  # in a rehearsal it runs its kernels for the GPU at hand


def _blocks(piece_name: str) -> Callable[[Results], str]:
    """Return a function that tabulates the times of a piece beside those of dense attention."""
    (piece,) = (p for p in PIECES if p.name == piece_name)

    def render(results: Results) -> str:
        columns = ["heads", "tokens", "block size", "forward", "forward + backward"]
        columns += ["dense, forward + backward", "speed-up"]
        file = piece.nearest(results.folder)
        if file is None:
            return table(columns, [[ABSENT, *"-" * (len(columns) - 1)]])
        measured: list[dict[str, Any]] = [
            row for row in json.loads(file.read_text())["rows"] if row["median_ms"]
        ]
        if piece.rehearses:
            measured = [row for row in measured if row["implementation"] != FOREIGN]
        rows = []
        for row in measured:
            if row["block_size"] is None or row["phase"] != "both":
                continue
            ms = {
                (other["implementation"], other["block_size"], other["phase"]): other["median_ms"]
                for other in measured
                if (other["shape"], other["S"]) == (row["shape"], row["S"])
            }
            forward = ms["block_attention", row["block_size"], "forward"]
            dense = min(
                time for (_, size, phase), time in ms.items() if not size and phase == "both"
            )
            both = row["median_ms"]
            cells = [row["shape"], tokens(row["S"]), str(row["block_size"])]
            rows.append([*cells, *map(digits, (forward, both, dense)), f"{dense / both:.1f}x"])
        return table(columns, rows)

    return render


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
    "block-attention": _blocks("block-attention"),
    "block-attention-a100": _blocks("a100-block-attention"),
}

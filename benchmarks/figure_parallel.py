"""The tables of docs/how-to/million-tokens.md, about one layer and about training.

Their result files come from scaling.py and from parallel_training.py. That of the H200 is older
than scaling.py, and has projections to more GPUs and the longest sequences too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from figure_tables import PENDING, Results, table

from nsa_bench.render.format import number
from nsa_bench.render.words import tokens
from nsa_core.util.text import one_line

FILE = "context_parallel.json"
SPEED_FILE = "parallel_speed.json"
LOSS_FILES = ("parallel_loss.json", "parallel_loss_sequence.json")
COLUMNS = ("tokens", "GPUs", "ms", "speed-up", "collectives, ms", "memory of a GPU, GiB")

SPEED_COLUMNS = ("training on", "s per step", "tokens per s", "speed-up", "memory of a GPU, GiB")
LOSS_COLUMNS = ("heads", "training on", "largest difference", "mean difference", "loss at the end")
Row = dict[str, Any]


def rows_of_times(folder: Path) -> list[list[str]]:
    """Return the rows of the table, the fastest division of each number of GPUs.

    Without a result file, one row says so.
    """
    document = _document(folder, FILE)
    if document is None:
        return [_not_yet(COLUMNS)]
    rows = [row for _, line in lines_of(document) for row in line]
    return [_cells(row) for row in sorted(rows, key=lambda row: (row["length"], row["ranks"]))]


def lines_of(document: dict[str, Any]) -> list[tuple[str, list[Row]]]:
    """Return a label and the timed rows of each number of GPUs, by ascending number.

    Several divisions over the same GPUs make one line: at each length the fastest.
    """
    lines: dict[tuple[int, bool], dict[int, Row]] = {}
    for row in document["rows"]:
        if row["performance"]:
            line = lines.setdefault((row["ranks"], _is_projection(row)), {})
            other = line.get(row["length"])
            if other is None or milliseconds(row) < milliseconds(other):
                line[row["length"]] = row
    return [
        (
            f"{ranks} GPU" + "s" * (ranks > 1) + ", projected" * projected,
            [line[length] for length in sorted(line)],
        )
        for (ranks, projected), line in sorted(lines.items())
    ]


def milliseconds(row: Row) -> float:
    """Return the median of a timed row."""
    return float(row["performance"]["median_ms"])


def _is_projection(row: Row) -> bool:
    return bool(row.get("kind") == "projection")


def longest(folder: Path) -> str:
    """Return the longest sequences in one line of text."""
    document = _document(folder, FILE)
    if document is None or "largest" not in document:
        return PENDING
    return "; ".join(map(_longest_words, document["largest"]))


def _longest_words(largest: Row) -> str:
    """State the longest sequence that a division trains."""
    start, failed = f"{largest['shape']} {largest['dtype']}, {_division(largest)}", ""
    reason = one_line(largest["reason"])
    if largest["failed_length"] is not None:
        failed = f" ({tokens(largest['failed_length'])}: {reason})"
    elif reason:
        failed = f" (the search ended early: {reason})"
    return f"{start}: the longest sequence has {tokens(largest['length'])} tokens{failed}"


def _division(row: Row) -> str:
    """Name a division: "1 GPU", or "2 GPUs, sequence, head_tail"."""
    return f"{row['ranks']} GPUs, {row['mode']}, {row['layout']}" if row["mode"] else "1 GPU"


def device(folder: Path) -> str:
    """Return the GPU of the result file."""
    document = _document(folder, FILE)
    return PENDING if document is None else str(document["environment"].get("device"))


def device_of_training(folder: Path) -> str:
    """Return the GPU of the result file of training steps."""
    document = _document(folder, SPEED_FILE)
    return PENDING if document is None else str(document["machine"]["device"])


def rows_of_speed(folder: Path) -> list[list[str]]:
    """Return the rows of the table of training steps; without a result file, one row says so."""
    document = _document(folder, SPEED_FILE)
    if document is None:
        return [_not_yet(SPEED_COLUMNS)]
    alone = document["rows"][0].get("step_ms")
    return [_speed_cells(row, alone) for row in document["rows"]]


def _speed_cells(row: dict[str, Any], alone: float | None) -> list[str]:
    """Return the cells of a row, compared with the milliseconds of a step on one GPU."""
    if "step_ms" not in row:
        return [_title(row), row["reason"], *["-"] * (len(SPEED_COLUMNS) - 2)]
    return [
        _title(row),
        number(row["step_ms"] / 1e3),
        f"{row['tokens_per_s']:,}",
        "-" if alone is None or row["gpus"] == 1 else f"{alone / row['step_ms']:.2f}x",
        number(row["peak_gib"]),
    ]


def rows_of_losses(folder: Path) -> list[list[str]]:
    """Return the rows of the table of losses; without a result file, one row says so."""
    rows = []
    for name in LOSS_FILES:
        if (document := _document(folder, name)) is not None:
            layer = document["model"]["layer"]
            heads = f"{layer['n_heads']}/{layer['n_kv_heads']}/{layer['head_dim']}"
            rows += [[heads, *_loss_cells(row)] for row in document["rows"][1:]]
    return rows or [_not_yet(LOSS_COLUMNS)]


def _loss_cells(row: dict[str, Any]) -> list[str]:
    if "losses" not in row:
        return [_title(row), row["reason"], *["-"] * (len(LOSS_COLUMNS) - 3)]
    return [
        _title(row),
        f"{row['largest_difference']:.1e}, step {row['at_step']}",
        f"{row['mean_difference']:.1e}",
        f"{row['last_loss']:.4f}",
    ]


def _title(row: dict[str, Any]) -> str:
    """Return the name of a run, with its GPUs and how context parallelism divides it."""
    if row["gpus"] == 1:
        return str(row["run"])
    mode = f" in mode {row['mode']}" if "mode" in row else ""
    return f"{row['gpus']} GPUs, {row['run']}{mode}"


def _not_yet(columns: tuple[str, ...]) -> list[str]:
    return [PENDING, *["-"] * (len(columns) - 1)]


def _document(folder: Path, name: str) -> dict[str, Any] | None:
    """Return the JSON document of a result file, or None if there is none."""
    file = _file(folder, name)
    if file is None:
        return None
    document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return document


def _file(folder: Path, name: str) -> Path | None:
    """Return a result file of ``folder``, or of another GPU; None if there is none."""
    files = [folder / name, *sorted(folder.parent.glob(f"*/{name}"))]
    return next((file for file in files if file.exists()), None)


def _cells(row: Row) -> list[str]:
    gpus = f"{row['ranks']}, {row['mode']}, {row['layout']}" if row["mode"] else "1"
    return [
        tokens(row["length"]),
        gpus + ", projection" * _is_projection(row),
        number(milliseconds(row)),
        "-" if row["speed_up"] is None else f"{row['speed_up']:.2f}x",
        "-" if row["ranks"] == 1 else number(row["communication_ms"]),
        number(max(row["peak_bytes"]) / 2**30),
    ]


TABLES: dict[str, Callable[[Results], str]] = {
    "context-parallel": lambda results: table(COLUMNS, rows_of_times(results.folder)),
    "context-parallel-device": lambda results: device(results.folder),
    "context-parallel-longest": lambda results: longest(results.folder),
    "parallel-speed": lambda results: table(SPEED_COLUMNS, rows_of_speed(results.folder)),
    "parallel-speed-device": lambda results: device_of_training(results.folder),
    "parallel-loss": lambda results: table(LOSS_COLUMNS, rows_of_losses(results.folder)),
}

"""The tables of docs/how-to/million-tokens.md, about one layer and about training.

Their result files come from scaling.py and from parallel_training.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from figure_tables import ABSENT, PENDING, Results, table

from nsa_bench.render.format import number
from nsa_bench.render.words import tokens

FILE = "context_parallel.json"
SPEED_FILE = "parallel_speed.json"
LOSS_FILES = ("parallel_loss.json", "parallel_loss_sequence.json")
COLUMNS = ("tokens", "GPUs", "ms", "speed-up", "collectives, ms", "memory of a GPU, GiB")

SPEED_COLUMNS = ("training on", "s per step", "tokens per s", "speed-up", "memory of a GPU, GiB")
Row = dict[str, Any]


def rows_of_times(folder: Path) -> list[list[str]]:
    """Return the rows of the table, the fastest division of each number of GPUs.

    Without a result file, one row says so.
    """
    document = document_of(folder, FILE)
    if document is None:
        return [_not_yet(COLUMNS)]
    rows = [row for _, line in lines_of(document) for row in line]
    return [_cells(row) for row in sorted(rows, key=lambda row: (row["length"], row["ranks"]))]


def lines_of(document: dict[str, Any]) -> list[tuple[str, list[Row]]]:
    """Return a label and the timed rows of each number of GPUs, by ascending number.

    Several divisions over the same GPUs make one line: at each length the fastest.
    """
    lines: dict[int, dict[int, Row]] = {}
    for row in document["rows"]:
        if row["performance"]:
            line = lines.setdefault(row["ranks"], {})
            other = line.get(row["length"])
            if other is None or milliseconds(row) < milliseconds(other):
                line[row["length"]] = row
    return [
        (f"{ranks} GPU" + "s" * (ranks > 1), [line[length] for length in sorted(line)])
        for ranks, line in sorted(lines.items())
    ]


def milliseconds(row: Row) -> float:
    """Return the median of a timed row."""
    return float(row["performance"]["median_ms"])


def chart(folder: Path) -> str:
    """Return the chart of the times and the memory, whose numbers are in the table."""
    if document_of(folder, FILE) is None:
        return PENDING
    words = "Two plots, time and memory of a GPU over tokens, with a line for each number of GPUs"
    return f"![{words}](../images/{Path(FILE).stem}.svg)"


def gib(row: Row) -> float:
    """Return the memory of the GPU with most."""
    return float(max(row["peak_bytes"]) / 2**30)


def device(folder: Path) -> str:
    """Return the GPU of the result file."""
    document = document_of(folder, FILE)
    return PENDING if document is None else str(document["environment"]["device"])


def device_of_training(folder: Path) -> str:
    """Return the GPU of the result file of training steps."""
    document = document_of(folder, SPEED_FILE)
    return PENDING if document is None else str(document["machine"]["device"])


def rows_of_speed(folder: Path) -> list[list[str]]:
    """Return the rows of the table of training steps; without a result file, one row says so."""
    document = document_of(folder, SPEED_FILE)
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


def losses(folder: Path) -> str:
    """Return the mean differences of losses on several GPUs and between runs on one, by heads."""
    parts = []
    for name in LOSS_FILES:
        if (document := document_of(folder, name)) is not None:
            layer = document["model"]["layer"]
            rows = [row for row in document["rows"][1:] if "losses" in row]
            divided, repeated = (
                _range([row["mean_difference"] for row in rows if (row["gpus"] > 1) == several])
                for several in (True, False)
            )
            heads = f"{layer['n_heads']}/{layer['n_kv_heads']}/{layer['head_dim']}"
            gpus = max(row["gpus"] for row in rows)
            parts.append(f"{divided} on {gpus} GPUs and {repeated} between runs on one at {heads}")
    return "; ".join(parts) or PENDING


def _range(values: list[float]) -> str:
    """Return the smallest and the largest value."""
    return f"{min(values):.5f} to {max(values):.5f}" if values else ABSENT


def _title(row: dict[str, Any]) -> str:
    """Return the name of a run, with its GPUs and how context parallelism divides it."""
    if row["gpus"] == 1:
        return str(row["run"])
    mode = f" in mode {row['mode']}" if "mode" in row else ""
    return f"{row['gpus']} GPUs, {row['run']}{mode}"


def _not_yet(columns: tuple[str, ...]) -> list[str]:
    return [PENDING, *["-"] * (len(columns) - 1)]


def document_of(folder: Path, name: str) -> dict[str, Any] | None:
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
        gpus,
        number(milliseconds(row)),
        "-" if row["speed_up"] is None else f"{row['speed_up']:.2f}x",
        "-" if row["ranks"] == 1 else number(row["communication_ms"]),
        number(gib(row)),
    ]


TABLES: dict[str, Callable[[Results], str]] = {
    "context-parallel": lambda results: table(COLUMNS, rows_of_times(results.folder)),
    "context-parallel-device": lambda results: device(results.folder),
    "context-parallel-chart": lambda results: chart(results.folder),
    "parallel-speed": lambda results: table(SPEED_COLUMNS, rows_of_speed(results.folder)),
    "parallel-speed-device": lambda results: device_of_training(results.folder),
    "parallel-loss": lambda results: losses(results.folder),
}

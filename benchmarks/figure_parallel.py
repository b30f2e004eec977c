"""The tables of docs/how-to/million-tokens.md, about one layer and about training.

Their result files come from scaling.py and from parallel_training.py.
"""

from __future__ import annotations

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


def times(results: Results) -> str:
    """Tabulate the fastest division of each number of GPUs."""
    document = results.document(FILE) or {"rows": []}
    rows = [row for _, line in lines_of(document) for row in line]
    rows.sort(key=lambda row: (row["length"], row["ranks"]))
    return table(COLUMNS, map(_cells, rows))


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


def chart(results: Results) -> str:
    """Return the chart of the times and the memory, whose numbers are in the table."""
    if results.document(FILE) is None:
        return PENDING
    words = "Two plots, time and memory of a GPU over tokens, with a line for each number of GPUs"
    return f"![{words}](../images/{Path(FILE).stem}.svg)"


def gib(row: Row) -> float:
    """Return the memory of the GPU with most."""
    return float(max(row["peak_bytes"]) / 2**30)


def _device(file: str, facts: str) -> Callable[[Results], str]:
    """Return a function for the GPU of a result file, which is in the field ``facts``."""

    def device(results: Results) -> str:
        document = results.document(file)
        return PENDING if document is None else str(document[facts]["device"])

    return device


def speed(results: Results) -> str:
    """Tabulate the training steps."""
    rows = (results.document(SPEED_FILE) or {"rows": []})["rows"]
    alone = rows[0].get("step_ms") if rows else None
    return table(SPEED_COLUMNS, [_speed_cells(row, alone) for row in rows])


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


def losses(results: Results) -> str:
    """Return the mean differences of losses on several GPUs and between runs on one, by heads."""
    parts = []
    for name in LOSS_FILES:
        if (document := results.document(name)) is not None:
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


PARALLEL: dict[str, Callable[[Results], str]] = {
    "context-parallel": times,
    "context-parallel-device": _device(FILE, "environment"),
    "context-parallel-chart": chart,
    "parallel-speed": speed,
    "parallel-speed-device": _device(SPEED_FILE, "machine"),
    "parallel-loss": losses,
}

"""The table of docs/how-to/million-tokens.md, from a result of `nsa bench --context-parallel`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from figure_tables import Results, table

from nsa_bench.parallel.result import PROJECTED, ParallelResult, Row, read_parallel_result
from nsa_bench.render.format import number
from nsa_bench.render.plots_parallel import lines_of, milliseconds
from nsa_bench.render.tables_parallel import gib, largest_words
from nsa_bench.render.words import tokens

FILE = "context_parallel.json"
NOT_YET = "not measured yet"
COLUMNS = ("tokens", "GPUs", "ms", "speed-up", "collectives, ms", "memory of a GPU, GiB")


def rows_of_times(folder: Path) -> list[list[str]]:
    """Return the rows of the table, the fastest division of each number of GPUs.

    Without a result file, one row says so.
    """
    result = _result(folder)
    if result is None:
        return [[NOT_YET, *["-"] * (len(COLUMNS) - 1)]]
    rows = [row for _, line in lines_of(result) for row in line]
    return [_cells(row) for row in sorted(rows, key=lambda row: (row.length, row.ranks))]


def longest(folder: Path) -> str:
    """Return the longest sequences in one line of text."""
    result = _result(folder)
    if result is None or not result.largest:
        return NOT_YET
    return "; ".join(map(largest_words, result.largest))


def device(folder: Path) -> str:
    """Return the GPU of the result file."""
    result = _result(folder)
    return NOT_YET if result is None else str(result.environment.get("device"))


def _result(folder: Path) -> ParallelResult | None:
    """Return the result in ``folder``, or in that of another GPU; None if there is none."""
    files = [folder / FILE, *sorted(folder.parent.glob(f"*/{FILE}"))]
    return next((read_parallel_result(file) for file in files if file.exists()), None)


def _cells(row: Row) -> list[str]:
    gpus = "1" if row.ranks == 1 else f"{row.ranks}, {row.mode}, {row.layout}"
    return [
        tokens(row.length),
        gpus + ", projection" * (row.kind == PROJECTED),
        number(milliseconds(row)),
        "-" if row.speed_up is None else f"{row.speed_up:.2f}x",
        number(row.communication_ms),
        gib(row.peak_bytes),
    ]


TABLES: dict[str, Callable[[Results], str]] = {
    "context-parallel": lambda results: table(COLUMNS, rows_of_times(results.folder)),
    "context-parallel-device": lambda results: device(results.folder),
    "context-parallel-longest": lambda results: longest(results.folder),
}

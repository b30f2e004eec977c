"""The tables and sentences of a benchmark of context parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nsa_bench.parallel.result import MEASURED, PROJECTED
from nsa_bench.render.format import Rows, number
from nsa_bench.render.words import tokens
from nsa_core.util.text import one_line

if TYPE_CHECKING:
    from nsa_bench.parallel.result import Largest, ParallelResult, Row

_COLUMNS = ("tokens", "GPUs", "mode", "layout", "ms", "x", "compute", "comm.", "in", "peak")
LEGEND = (
    "ms: forward and backward, slowest GPU; x: speed-up over one GPU; compute: the slowest GPU"
    " without collectives, ms; comm.: the collectives alone, ms; in: received by a GPU, GiB;"
    " peak: memory of a GPU, GiB"
)


def parallel_tables(result: ParallelResult) -> Iterator[Rows]:
    """Yield the measured table of each shape and dtype, and a table of projections after it."""
    for kind in (MEASURED, PROJECTED):
        rows = [row for row in result.rows if row.kind == kind]
        for problem in dict.fromkeys(row.problem for row in rows):
            shape, dtype = problem
            title = f"{shape} {dtype}, one document"
            if kind == PROJECTED:
                title += ": projection, not measured"
            own = sorted((r for r in rows if r.problem == problem), key=lambda r: r.length)
            yield title, list(_COLUMNS), [_cells(row) for row in own]


def _cells(row: Row) -> list[str]:
    where = [tokens(row.length), str(row.ranks), row.mode or "-", row.layout or "-"]
    if row.performance is None:
        return [*where, "-", "", "", "", "", ""]
    return [
        *where,
        number(row.performance.median_ms),
        number(row.speed_up),
        number(max(row.compute_ms)),
        number(row.communication_ms),
        gib(row.received_bytes) if row.ranks > 1 else "-",
        gib(row.peak_bytes),
    ]


def gib(counts: list[int]) -> str:
    """Format the largest of some numbers of bytes in GiB; "-" for none."""
    return number(max(counts) / 2**30) if counts else "-"


def parallel_summary(result: ParallelResult) -> Iterator[tuple[str, str]]:
    """Yield (style, line): the checks, cells without a time, the longest sequences."""
    good = [gate for gate in result.gates if gate.ok]
    if result.gates:
        style = "bold green" if len(good) == len(result.gates) else "bold red"
        yield style, f"{len(good)} of {len(result.gates)} checks against one GPU passed"
    for gate in result.gates:
        if not gate.ok:
            yield "bold red", f"{gate.combo}, {gate.shape} {gate.dtype}: {'; '.join(gate.failures)}"
    for name, reason in result.skipped.items():
        yield "", f"{name}: {one_line(reason)}"
    for row in result.rows:
        if row.performance is None:
            yield "", f"{division_words(row)}, {tokens(row.length)} tokens: {one_line(row.reason)}"
    if result.timed_nothing:
        divided = (row.reason for row in result.rows if row.ranks > 1 and row.kind == MEASURED)
        reasons = dict.fromkeys(map(one_line, (*divided, *result.skipped.values())))
        yield "bold red", f"NO DIVISION WAS TIMED ({'; '.join(reasons) or 'none was measured'})"
    for largest in result.largest:
        yield "", largest_words(largest)
    if result.interrupted is not None:
        left = result.interrupted
        yield "yellow", f"interrupted: {left.cells_left} of {left.cells} steps left"


def division_words(row: Row | Largest) -> str:
    """Name a division: "1 GPU", or "2 GPUs, sequence, head_tail"."""
    if row.ranks == 1:
        return "1 GPU"
    return f"{row.ranks} GPUs, {row.mode}, {row.layout}"


def largest_words(largest: Largest) -> str:
    """State the longest sequence that a division trains."""
    start = f"{largest.shape} {largest.dtype}, {division_words(largest)}"
    failed = ""
    if largest.failed_length is not None:
        failed = f" ({tokens(largest.failed_length)}: {one_line(largest.reason)})"
    elif largest.reason:
        failed = f" (the search ended early: {one_line(largest.reason)})"
    if largest.length is None:
        return f"{start}: no length fits{failed}"
    return f"{start}: the longest sequence has {tokens(largest.length)} tokens{failed}"

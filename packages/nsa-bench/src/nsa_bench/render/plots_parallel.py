"""The chart of context parallelism: time and memory against the length, a line per number of GPUs.

Lines of measured numbers of GPUs are solid, those of projected ones dashed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa_bench.parallel.result import PROJECTED
from nsa_bench.render.format import number
from nsa_bench.render.style import (
    FAINT,
    LABEL_POINTS,
    NSA_COLOURS,
    EndLabel,
    draw,
    label_ends,
    log_ticks,
    text_width,
)
from nsa_bench.render.words import tokens
from nsa_core.util.atomic_files import write_bytes_atomic

if TYPE_CHECKING:
    from nsa_bench.parallel.result import ParallelResult, Row

_LEFT, _WIDTH, _HEIGHT, _HEAD, _FOOT = 0.8, 3.9, 3.2, 0.75, 0.55  # inches
_GIB = 2**30
Line = tuple[str, list["Row"]]
Value = Callable[["Row"], "float | None"]


def save(result: ParallelResult, path: Path, kind: str, force: bool) -> None:
    """Write the chart atomically; ``kind`` is "png" or "svg"."""
    write_bytes_atomic(path, render_parallel(result, kind), force)


def render_parallel(result: ParallelResult, kind: str) -> bytes:
    """Draw time and memory of the first shape and dtype; ``kind`` is "png" or "svg"."""
    return draw(lambda: parallel_figure(result), kind)


def lines_of(result: ParallelResult) -> list[Line]:
    """Return a label and the timed rows of each number of GPUs, by ascending number.

    Several divisions over the same GPUs make one line: at each length the fastest.
    """
    timed = [row for row in result.rows if row.performance]
    problem = timed[0].problem if timed else None
    lines: dict[tuple[int, str], dict[int, Row]] = {}
    for row in timed:
        if row.problem != problem:
            continue
        line = lines.setdefault((row.ranks, row.kind), {})
        other = line.get(row.length)
        if other is None or milliseconds(row) < milliseconds(other):
            line[row.length] = row
    return [
        (_label(ranks, kind), [line[length] for length in sorted(line)])
        for (ranks, kind), line in sorted(lines.items())
    ]


def _label(ranks: int, kind: str) -> str:
    noun = "GPU" if ranks == 1 else "GPUs"
    return f"{ranks} {noun}" + ", projected" * (kind == PROJECTED)


def milliseconds(row: Row) -> float:
    """Return the median of a timed row."""
    assert row.performance is not None  # callers pass timed rows only
    return row.performance.median_ms


def _memory(row: Row) -> float | None:
    return max(row.peak_bytes) / _GIB if row.peak_bytes else None


def parallel_figure(result: ParallelResult) -> Any:
    """Return the figure with two panels."""
    from matplotlib.figure import Figure

    lines = lines_of(result)
    right = text_width([f"{label}  1,000 ms" for label, _ in lines], LABEL_POINTS) + 0.6
    panel = _LEFT + _WIDTH + right
    figure = Figure(figsize=(2 * panel, _HEAD + _HEIGHT + _FOOT))
    width, height = figure.get_size_inches()
    device = result.environment.get("device", "?")
    problem = f"{lines[0][1][0].shape}, {lines[0][1][0].dtype}" if lines else "nothing was timed"
    title = f"Forward and backward of one layer, one document, {problem}, on {device}"
    figure.text(0.25 / width, 1 - 0.2 / height, title, fontsize=12, weight="bold", va="top")
    panels: tuple[tuple[str, str, Value], ...] = (
        ("Time", "ms", milliseconds),
        ("Memory of a GPU", "GiB", _memory),
    )
    for index, (heading, unit, value) in enumerate(panels):
        place = (index * panel + _LEFT, _FOOT, _WIDTH, _HEIGHT)
        axes = figure.add_axes(
            (place[0] / width, place[1] / height, place[2] / width, place[3] / height)
        )
        axes.set_title(heading)
        _panel(axes, lines, unit, value)
    return figure


def _panel(axes: Any, lines: Sequence[Line], unit: str, value: Value) -> None:
    points = [
        (label, [(row.length, v) for row in rows if (v := value(row)) is not None], rows[0].kind)
        for label, rows in lines
    ]
    points = [line for line in points if line[1]]
    if not points:
        axes.text(0.5, 0.5, "not measured", ha="center", va="center", color=FAINT)
        axes.set_xticks([])
        axes.set_yticks([])
        return
    values = [v for _, line, _ in points for _, v in line]
    lengths = sorted({length for _, line, _ in points for length, _ in line})
    _set_scales(axes, lengths, min(values) / 1.4, max(values) * 1.4, unit)
    ends = []
    for index, (label, line, kind) in enumerate(points):
        colour = NSA_COLOURS[index % len(NSA_COLOURS)]
        dashes = (0, (4, 2)) if kind == PROJECTED else "-"
        xs, ys = zip(*line)
        axes.plot(xs, ys, linestyle=dashes, marker="o", ms=4, color=colour, lw=2)
        where = "" if xs[-1] == lengths[-1] else f" at {tokens(xs[-1])}"
        text = f"{label}  {number(ys[-1])} {unit}{where}"
        ends.append(EndLabel(text, colour, (xs[-1], ys[-1]), ys[-1]))
    label_ends(axes, ends)


def _set_scales(axes: Any, lengths: list[int], low: float, high: float, unit: str) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

    margin = (lengths[-1] / lengths[0]) ** 0.04 if len(lengths) > 1 else 2.0
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel=unit)
    axes.set_xlim(lengths[0] / margin, lengths[-1] * margin)
    axes.set_ylim(low, high)
    axes.set_xticks(lengths, [tokens(length) for length in lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(FixedLocator(log_ticks(low, high)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid()

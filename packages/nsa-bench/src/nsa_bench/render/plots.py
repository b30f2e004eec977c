"""Plots of a benchmark result: time over length with crossovers, time per branch, roofline.

matplotlib is imported when a plot is draw.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa_bench.render.format import number
from nsa_bench.render.plots_decode import decode_figure
from nsa_bench.render.style import BRANCH_COLOURS, colours_of, draw
from nsa_core.util.atomic_files import write_bytes_atomic

if TYPE_CHECKING:
    from nsa_bench.result import Measurement, Result

_MARKERS = {
    "compress": "P",
    "cmp": "s",
    "select": "D",
    "sel": "^",
    "win": "v",
    "combine": "X",
    "total": "o",
    "dense": "*",
    "rival": "p",
}


def save(result: Result, path: Path, kind: str, force: bool) -> None:
    """Write the figure atomically; ``kind`` is "png" or "svg"."""
    write_bytes_atomic(path, render(result, kind), force)


def render(result: Result, kind: str) -> bytes:
    """Draw the figure, with one row per shape, dtype and kind of inputs."""
    return draw(lambda: _figure(result), kind)


def _figure(result: Result) -> Any:
    from matplotlib.figure import Figure

    if any(m.phase == "decode" for m in result.measurements):
        return decode_figure(result)
    rows = list(dict.fromkeys((m.shape, m.dtype, m.inputs) for m in result.measurements))
    phases = list(dict.fromkeys(m.phase for m in result.measurements))
    columns = len(phases) + 2
    figure = Figure(figsize=(4.9 * columns, 4.6 * max(1, len(rows)) + 1.0), layout="constrained")
    grid = figure.subplots(max(1, len(rows)), columns, squeeze=False)
    for axes in () if rows else grid.flat:  # the run was interrupted before its first cell
        _draw_empty(axes)
    colours = colours_of(result)
    for axes, row in zip(grid, rows):
        measurements = [m for m in result.measurements if (m.shape, m.dtype, m.inputs) == row]
        title = f"{row[0]} {row[1]}, {row[2]} inputs"
        for panel, phase in zip(axes, phases):
            _over_length(panel, [m for m in measurements if m.phase == phase], result, colours)
            panel.set_title(f"{title}: {phase}")
        _stacked(axes[-2], [m for m in measurements if m.parts and m.performance])
        _roofline(axes[-1], [m for m in measurements if m.performance], result, colours)
    figure.suptitle(f"nsa bench on {result.environment.get('device', '?')}")
    return figure


def _tokens(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def _draw_empty(axes: Any) -> None:
    axes.text(
        0.5, 0.5, "no figure", ha="center", va="center", transform=axes.transAxes, color="#888888"
    )
    axes.set_xticks([])
    axes.set_yticks([])


def _over_length(
    axes: Any, measurements: list[Measurement], result: Result, colours: dict[str, str]
) -> None:
    """Plot medians with quartiles over length, and a dotted line at each crossover."""
    from matplotlib.ticker import NullLocator

    timed = [m for m in measurements if m.performance]
    if not timed:
        return _draw_empty(axes)
    for subject in dict.fromkeys(m.subject for m in timed):
        points = sorted((m for m in timed if m.subject == subject), key=lambda m: m.length)
        lengths = [m.length for m in points]
        times = [p for m in points if (p := m.performance)]
        dashed = {"dense": "--", "rival": "-."}.get(points[0].kind, "-")
        axes.plot(
            lengths,
            [t.median_ms for t in times],
            dashed,
            marker="o",
            ms=4,
            color=colours[subject],
            label=subject,
        )
        low, high = [t.q1_ms for t in times], [t.q3_ms for t in times]
        axes.fill_between(lengths, low, high, color=colours[subject], alpha=0.15, lw=0)
    measured = sorted({m.length for m in timed})
    for crossover in result.crossovers:
        if (
            (crossover.shape, crossover.dtype, crossover.inputs, crossover.phase, crossover.batch)
            == timed[0].series
            and crossover.length
            and crossover.length > measured[0]
        ):
            label = f"{crossover.subject} overtakes dense: {crossover.length} tokens"
            axes.axvline(
                crossover.length,
                ls=":",
                color=colours.get(crossover.subject, "#000000"),
                label=label,
            )
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms per call (median, quartiles)")
    axes.set_xticks(measured, [_tokens(n) for n in measured])
    # The y axis keeps its minor ticks: a range within one decade has no other labels.
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False, ncols=2)


def _stacked(axes: Any, measurements: list[Measurement]) -> None:
    """Plot each kernel's time over the whole call's time at the longest length."""
    if not measurements:
        return _draw_empty(axes)
    longest = max(m.length for m in measurements)
    bars = [m for m in measurements if m.length == longest]
    widest = 1.0
    for row, m in enumerate(bars):
        assert m.performance is not None  # the caller passes timed measurements only
        left = 0.0
        for name, colour in BRANCH_COLOURS.items():
            part = m.parts.get(name)
            width = (
                part.performance.median_ms / m.performance.median_ms
                if part and part.performance
                else 0.0
            )
            axes.barh(
                row,
                width,
                left=left,
                color=colour,
                height=0.6,
                label=name if row == 0 else None,
            )
            left += width
        widest = max(widest, left)
        axes.text(
            max(left, 1.0) + 0.02,
            row,
            f"{number(m.performance.median_ms)} ms",
            va="center",
            fontsize=8,
        )
    axes.axvline(1.0, color="black", lw=1.5, label="whole call")
    names = [f"{m.subject}\n{m.phase}" for m in bars]
    axes.set_yticks(range(len(bars)), names, fontsize=8)
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set_xlim(0, widest * 1.3)
    axes.set(
        xlabel="time of each kernel alone / time of the whole call",
        title=f"time per branch at {_tokens(longest)} tokens",
    )
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False, ncols=4)


def _roofline(
    axes: Any, measurements: list[Measurement], result: Result, colours: dict[str, str]
) -> None:
    """Plot achieved rate over arithmetic intensity, under the machine's roofline.

    The points are those of the first phase at the longest length.
    """
    if not measurements:
        return _draw_empty(axes)
    phase, longest = measurements[0].phase, max(m.length for m in measurements)
    points = []
    for m in (m for m in measurements if m.phase == phase and m.length == longest):
        assert m.performance is not None  # the caller passes timed measurements only
        kind = "total" if m.kind == "combo" else m.kind
        points.append((m.subject, kind, m.flops, m.bytes, m.performance.median_ms))
        for name, part in m.parts.items():
            if part.performance and part.flops:
                points.append((m.subject, name, part.flops, part.bytes, part.performance.median_ms))
    if not points:
        return _draw_empty(axes)
    intensities = [flops / byte_count for _, _, flops, byte_count, _ in points]
    peaks = result.peaks[measurements[0].dtype]
    ridge = peaks.flops_per_s / peaks.bytes_per_s
    low, high = min(intensities) / 3, max(*intensities, ridge) * 3
    roof = [(x, min(peaks.flops_per_s, x * peaks.bytes_per_s) / 1e12) for x in (low, ridge, high)]
    axes.plot(*zip(*roof), color="#444444", lw=1.2)
    for subject, name, flops, byte_count, time_ms in points:
        rate, x = flops / time_ms / 1e9, flops / byte_count
        axes.plot(
            [x], [rate], ls="", marker=_MARKERS[name], ms=8, color=colours[subject], alpha=0.85
        )
    for name in dict.fromkeys(name for _, name, *_ in points):
        axes.plot([], [], ls="", marker=_MARKERS[name], color="#444444", label=name)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="operations per byte that must move",
        ylabel="TFLOP/s of counted work",
    )
    axes.set_title(f"roofline, {phase} at {_tokens(longest)} tokens (same colours as left)")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False, ncols=4)

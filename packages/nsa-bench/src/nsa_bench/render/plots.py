"""Static plots of a benchmark result, as PNG or SVG: one panel per question.

For each problem of prefill: the time against the length in each phase, the parts of a call, and
the distance to the hardware's limit. For decode: the time of each step and its slots. matplotlib is
imported when a plot is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nsa_bench.render.panel import Panel, add_axes, no_figure
from nsa_bench.render.plots_decode import steps_panel
from nsa_bench.render.plots_length import length_panel
from nsa_bench.render.plots_parts import limits_panel, parts_panel
from nsa_bench.render.style import FAINT, Look, draw, looks_of
from nsa_bench.render.words import problem_words, shape_words
from nsa_bench.result import Measurement, Result
from nsa_core.util.atomic_files import write_bytes_atomic

# Inches.
_LEFT, _AXES_WIDTH, _HEADING, _TITLE, _TOP, _BELOW = 0.8, 4.4, 0.6, 0.3, 0.6, 0.7
_COLUMNS = 2


def save(result: Result, path: Path, kind: str, force: bool) -> None:
    """Write the figure atomically; ``kind`` is "png" or "svg"."""
    write_bytes_atomic(path, render(result, kind), force)


def render(result: Result, kind: str) -> bytes:
    """Draw all panels of the result; ``kind`` is "png" or "svg"."""
    return draw(lambda: result_figure(result), kind)


def result_figure(result: Result) -> Any:
    """Return the figure with all panels, two beside each other."""
    from matplotlib.figure import Figure

    groups = panel_groups(result)
    panels = [panel for _, group in groups for panel in group]
    columns = min(_COLUMNS, max((len(group) for _, group in groups), default=1))
    width = _AXES_WIDTH + max((panel.left + panel.right for panel in panels), default=_LEFT)
    rows = [
        (heading * (start == 0), group[start : start + columns])
        for heading, group in groups
        for start in range(0, len(group), columns)
    ]
    heights = [_HEADING * bool(heading) + max(map(_height, row)) for heading, row in rows] or [1.0]
    y = height = _TOP + sum(heights)
    figure = Figure(figsize=(width * columns, height))
    title = f"nsa bench on {result.environment.get('device', '?')}"
    title += ": NSA in colour, dense attention and other libraries in grey"
    x = 0.25 / figure.get_figwidth()
    figure.text(x, 1 - 0.25 / height, title, fontsize=15, weight="bold", va="top")
    y -= _TOP
    for heading, row in rows:
        if heading:
            place = (x, (y - 0.3) / height)
            figure.text(*place, heading, fontsize=12.5, color=FAINT, va="top")
            y -= _HEADING
        for column, panel in enumerate(row):
            top = y - _TITLE - panel.above
            axes = add_axes(
                figure,
                column * width + panel.left,
                top - panel.height,
                width - panel.left - panel.right,
                panel.height,
            )
            axes.set_gid(panel.kind)
            panel.draw(axes, False)
            axes.set_title(panel.title, pad=4 + 72 * panel.above)
        y -= max(map(_height, row))
    if not rows:  # nothing was timed, or the run was interrupted before its first cell
        reasons = [m.reason for m in result.measurements]
        no_figure(add_axes(figure, _LEFT, 0.2, _AXES_WIDTH, 0.7), *reasons[:1])
    return figure


def _height(panel: Panel) -> float:
    """Return the inches of a panel with its title and axis."""
    return _TITLE + panel.above + panel.height + _BELOW


def panel_groups(result: Result) -> list[tuple[str, list[Panel]]]:
    """Return the heading and the panels of each problem that was timed, in the order of the run."""
    looks = looks_of(result)
    groups: dict[tuple[object, ...], list[Measurement]] = {}
    for m in result.measurements:
        batch = None if m.phase == "decode" else m.batch  # steps of all batches are one panel
        groups.setdefault((m.shape, m.dtype, m.inputs, batch), []).append(m)
    return [
        (
            f"{problem_words(measurements[0])} ({shape_words(measurements[0].shape)})",
            list(_panels(measurements, result, looks)),
        )
        for measurements in groups.values()
        if any(m.performance for m in measurements)
    ]


def _panels(
    measurements: list[Measurement], result: Result, looks: dict[str, Look]
) -> Iterator[Panel]:
    is_decode = measurements[0].phase == "decode"
    if is_decode:
        yield steps_panel(measurements, looks)
    else:
        for phase in dict.fromkeys(m.phase for m in measurements):
            yield length_panel([m for m in measurements if m.phase == phase], result, looks)
    if with_parts := [m for m in measurements if m.timed_parts]:
        yield parts_panel(with_parts, result)
    timed = [m for m in measurements if m.performance and m.floor_fraction is not None]
    if timed and not is_decode:
        yield limits_panel(timed, result, looks)

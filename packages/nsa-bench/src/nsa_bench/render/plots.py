"""Static plots of a benchmark result, as PNG or SVG: one panel per question.

For each problem: the time against the length in each phase, the parts of a call, and the distance
to the hardware's limit. matplotlib is imported when a plot is drawn.
"""

from __future__ import annotations

import dataclasses
import itertools
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa_bench.render.plots_decode import decode_figure
from nsa_bench.render.plots_length import end_labels, time_against_length
from nsa_bench.render.plots_parts import efficiency_cell, limits_panel, parts_bars, parts_panel
from nsa_bench.render.style import FAINT, LABEL_POINTS, draw, looks_of, text_width
from nsa_bench.render.words import label, phase_words, problem_words, shape_words, tokens
from nsa_core.errors import InvalidInput
from nsa_core.util.atomic_files import write_bytes_atomic

if TYPE_CHECKING:
    from nsa_bench.render.style import Look
    from nsa_bench.result import Measurement, Result

# Inches. A panel has its axis labels on the left and its lines' labels on the right.
_LEFT, _AXES_WIDTH, _AXES_HEIGHT, _ROW, _HEADING, _TOP = 0.8, 4.4, 3.0, 4.1, 0.85, 0.6
_COLUMNS = 2
_NOTE_LINE, _NOTE_LETTERS = 0.17, 14.0  # inches of a line, letters of an inch


def save(result: Result, path: Path, kind: str, force: bool) -> None:
    """Write the figure atomically; ``kind`` is "png" or "svg"."""
    write_bytes_atomic(path, render(result, kind), force)


def render(result: Result, kind: str) -> bytes:
    """Draw all panels of the result; ``kind`` is "png" or "svg"."""
    return draw(lambda: result_figure(result), kind)


@dataclasses.dataclass(frozen=True)
class LengthPanel:
    """A panel of :func:`render_length_panels`: time against length at one shape.

    Attributes:
        result: A result of `nsa bench`, such as `read_result(Path("core.json"))`.
        shape: One of its shapes, such as "64/4/128".
        phase: forward, backward or both.
        inputs: random or real.
        subjects: The subjects to draw, such as ("auto", "dense cudnn"); None draws all.
        title: The title; None writes the phase and the shape.
        note: A sentence below the axes; None writes nothing.
    """

    result: Result
    shape: str
    phase: str = "both"
    inputs: str = "random"
    subjects: Sequence[str] | None = None
    title: str | None = None
    note: str | None = None


def render_length_panels(
    panels: Sequence[LengthPanel], kind: str, *, heading: str | None = None
) -> bytes:
    """Draw panels side by side; a subject has the same colour and dash in each.

    Args:
        panels: The panels, from left to right.
        kind: "png" or "svg".
        heading: A line above the panels; None writes nothing.

    Raises:
        InvalidInput: There is no panel, or a result has no time of a panel's problem or subject.
    """
    if not panels:
        raise InvalidInput("panels: expected at least one panel, got none")
    drawn = [_measurements_of(panel) for panel in panels]
    everything = dataclasses.replace(
        panels[0].result, measurements=[m for p in panels for m in p.result.measurements]
    )

    def figure() -> Any:
        from matplotlib.figure import Figure

        looks, width = looks_of(everything), 5.0 if len(panels) == 1 else 3.3
        widths = [_LEFT + width + _labels_width(measurements) for measurements in drawn]
        notes = [
            textwrap.wrap(panel.note or "", int(each * _NOTE_LETTERS))
            for panel, each in zip(panels, widths)
        ]
        bottom = 0.55 + _NOTE_LINE * max(map(len, notes))
        height = bottom + 3.65 + (0.3 if heading else 0.0)
        sheet = Figure(figsize=(sum(widths), height))
        if heading:
            x = _LEFT / sum(widths)
            sheet.text(x, 1 - 0.15 / height, heading, fontsize=11.5, weight="bold", va="top")
        for index, (panel, measurements) in enumerate(zip(panels, drawn)):
            left = sum(widths[:index])
            axes = _axes(sheet, left + _LEFT, bottom, width, 3.3)
            time_against_length(axes, measurements, panel.result.crossovers, looks)
            words = f"{phase_words(panel.phase)}, {shape_words(panel.shape)}"
            axes.set_title(panel.title or words)
            x, y = (left + _LEFT) / sum(widths), (bottom - 0.55) / height
            sheet.text(x, y, "\n".join(notes[index]), fontsize=8.5, color=FAINT, va="top")
        return sheet

    return draw(figure, kind)


def _measurements_of(panel: LengthPanel) -> list[Measurement]:
    """Return the timed measurements that a panel draws.

    Raises:
        InvalidInput: The result has no time of the problem or of a subject.
    """
    problem, timed = (panel.shape, panel.phase, panel.inputs), panel.result.measurements
    measurements = [m for m in timed if (m.shape, m.phase, m.inputs) == problem and m.performance]
    measured = dict.fromkeys(m.subject for m in measurements)
    if not measurements:
        problems = dict.fromkeys(f"{m.shape} {m.phase} {m.inputs}" for m in timed if m.performance)
        raise InvalidInput(
            f"shape {panel.shape!r}, phase {panel.phase!r}, inputs {panel.inputs!r}: the result has"
            f" no time of this problem; it has {', '.join(problems)}"
        )
    if unknown := [subject for subject in panel.subjects or () if subject not in measured]:
        raise InvalidInput(
            f"subjects: {', '.join(map(repr, unknown))} has no time; choose from"
            f" {', '.join(map(repr, measured))}"
        )
    return [m for m in measurements if panel.subjects is None or m.subject in panel.subjects]


def result_figure(result: Result) -> Any:
    """Return the figure with all panels."""
    from matplotlib.figure import Figure

    if any(m.phase == "decode" for m in result.measurements):
        return decode_figure(result)
    groups = problem_groups(result)
    right = _labels_width([m for m in result.measurements if m.performance])
    bar_names = names_width(result.measurements)
    panel = _LEFT + _AXES_WIDTH + right
    rows = [list(_rows(measurements)) for measurements in groups]
    columns = max((len(row) for row in itertools.chain(*rows)), default=1)
    height = _TOP + sum(_HEADING + _ROW * len(group) for group in rows) + (not rows)
    figure = Figure(figsize=(panel * columns, height))
    looks, device = looks_of(result), result.environment.get("device", "?")
    figure.text(
        0.25 / figure.get_figwidth(),
        1 - 0.25 / height,
        f"nsa bench on {device}: NSA in colour, dense attention and other libraries in grey",
        fontsize=15,
        weight="bold",
        va="top",
    )
    y = height - _TOP
    for group, measurements in zip(rows, groups):
        heading = f"{problem_words(measurements[0])} ({shape_words(measurements[0].shape)})"
        figure.text(
            0.25 / figure.get_figwidth(),
            (y - 0.3) / height,
            heading,
            fontsize=12.5,
            color=FAINT,
            va="top",
        )
        y -= _HEADING
        for row in group:
            for column, (kind, chosen) in enumerate(row):
                names = _LEFT if kind == "time" else bar_names
                width = _AXES_WIDTH if kind == "time" else panel - bar_names - 0.6
                bottom = y - _AXES_HEIGHT - 0.4
                axes = _axes(figure, column * panel + names, bottom, width, _AXES_HEIGHT)
                axes.set_gid(kind)
                draw_panel(axes, kind, chosen, result, looks)
                above = 22 if kind == "parts" else None  # room for the names of the branches
                axes.set_title(panel_title(kind, chosen), pad=above)
            y -= _ROW
    if not rows:  # the run was interrupted before its first cell
        no_figure(_axes(figure, _LEFT, 0.2, _AXES_WIDTH, 0.7))
    return figure


def problem_groups(result: Result) -> list[list[Measurement]]:
    """Return the measurements of each shape, dtype, inputs and batch."""
    groups: dict[tuple[str, str, str, int], list[Measurement]] = {}
    for m in result.measurements:
        groups.setdefault((m.shape, m.dtype, m.inputs, m.batch), []).append(m)
    return list(groups.values())


def panels(measurements: list[Measurement]) -> list[tuple[str, list[Measurement]]]:
    """Return the panels of a problem, as (kind, measurements) for :func:`draw_panel`."""
    phases = dict.fromkeys(m.phase for m in measurements)
    kinds = [("time", [m for m in measurements if m.phase == phase]) for phase in phases]
    if with_parts := [m for m in measurements if m.timed_parts]:
        kinds.append(("parts", with_parts))
    if timed := [m for m in measurements if m.performance and m.floor_fraction is not None]:
        kinds.append(("limits", timed))
    return kinds


def _rows(measurements: list[Measurement]) -> Iterator[list[tuple[str, list[Measurement]]]]:
    """Yield the panels of a problem in rows."""
    for start in range(0, len(kinds := panels(measurements)), _COLUMNS):
        yield kinds[start : start + _COLUMNS]


def draw_panel(
    axes: Any,
    kind: str,
    measurements: list[Measurement],
    result: Result,
    looks: dict[str, Look],
    *,
    legend: bool = False,
) -> None:
    """Draw a panel; ``legend`` is that of :func:`time_against_length`."""
    if kind == "parts":
        parts_panel(axes, measurements, result)
    elif kind == "limits":
        limits_panel(axes, measurements, result, looks)
    elif timed := [m for m in measurements if m.performance]:
        time_against_length(axes, timed, result.crossovers, looks, legend=legend)
    else:
        no_figure(axes, measurements[0].reason)


def panel_title(kind: str, measurements: list[Measurement]) -> str:
    """Return the title of :func:`draw_panel`."""
    if kind == "time":
        return phase_words(measurements[0].phase)
    if kind == "parts":
        return f"Time per branch at {tokens(parts_bars(measurements)[0].length)} tokens"
    m = efficiency_cell(measurements)[0]
    return f"Hardware efficiency, {phase_words(m.phase).lower()}, {tokens(m.length)} tokens"


def names_width(measurements: Sequence[Measurement]) -> float:
    """Return the room in inches for the names left of bars."""
    phases = [phase_words(m.phase) for m in measurements if m.timed_parts]
    return 0.3 + text_width([*map(label, measurements), *phases], LABEL_POINTS)


def no_figure(axes: Any, reason: str = "") -> None:
    """State in an empty panel that nothing was timed, and why."""
    text = "\n".join(["no figure", *textwrap.wrap(reason, 40)])
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, color=FAINT)
    axes.set_xticks([])
    axes.set_yticks([])


def _labels_width(measurements: list[Measurement]) -> float:
    """Return the room in inches for labels right of the axes."""
    series = dict.fromkeys(m.series for m in measurements)
    labels = [end_labels([m for m in measurements if m.series == s]).values() for s in series]
    return max(1.6, text_width(list(itertools.chain(*labels)), LABEL_POINTS) + 0.55)


def _axes(figure: Any, left: float, bottom: float, width: float, height: float) -> Any:
    """Add axes at a place in inches."""
    x, y = figure.get_size_inches()
    return figure.add_axes((left / x, bottom / y, width / x, height / y))

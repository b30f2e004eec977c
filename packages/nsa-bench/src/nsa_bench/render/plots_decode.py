"""The figure of a decode benchmark: the time of a step, and each slot's share of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nsa_bench.render.format import number
from nsa_bench.render.plots_parts import stacked_bars
from nsa_bench.render.style import FAINT, INK, SOLID, log_ticks, looks_of
from nsa_bench.render.words import cell_words, label, problem_words, tokens
from nsa_bench.result import EAGER, UNFUSED

if TYPE_CHECKING:
    from nsa_bench.render.style import Look
    from nsa_bench.result import Measurement, Result

_ROW, _LEFT, _TIMES, _NUMBERS, _SHARES, _SHARES_LEFT = 0.27, 2.6, 5.0, 2.0, 4.2, 0.95  # inches
_ABOVE, _BELOW, _TOP = 0.85, 0.62, 0.65

SHARES_TITLE = "Time per slot"

Cell = tuple[int, int]  # sequences, tokens in the cache


def decode_figure(result: Result) -> Any:
    """Draw one row per shape, dtype and kind of cache: times on the left, shares on the right."""
    from matplotlib.figure import Figure

    groups = decode_groups(result)
    heights = [rows_height(measurements) for measurements in groups]
    width = _LEFT + _TIMES + _NUMBERS + _SHARES_LEFT + _SHARES + 0.3
    height = _TOP + sum(heights) + len(heights) * (_ABOVE + _BELOW)
    figure = Figure(figsize=(width, height))
    figure.text(
        0.25 / width,
        1 - 0.25 / height,
        f"nsa bench on {result.environment.get('device', '?')}: one decode step",
        fontsize=15,
        weight="bold",
        va="top",
    )
    looks, y = looks_of(result), height - _TOP
    for measurements, group_height in zip(groups, heights):
        bottom = (y - _ABOVE - group_height) / height
        box = (_LEFT / width, bottom, _TIMES / width, group_height / height)
        axes = figure.add_axes(box, gid="times")
        times_panel(axes, measurements, looks)
        title = f"Time of a step, {problem_words(measurements[0])}"
        axes.set_title(title, x=(0.25 - _LEFT) / _TIMES, pad=34)
        if with_parts := [m for m in measurements if m.timed_parts]:
            shares_height = min(group_height, bars_height(with_parts))
            left = _LEFT + _TIMES + _NUMBERS + _SHARES_LEFT
            box = (
                left / width,
                bottom + (group_height - shares_height) / height,
                _SHARES / width,
                shares_height / height,
            )
            shares = figure.add_axes(box, gid="shares")
            shares_panel(shares, with_parts, result)
            shares.set_title(SHARES_TITLE, pad=22)
        y -= _ABOVE + group_height + _BELOW
    return figure


def decode_groups(result: Result) -> list[list[Measurement]]:
    """Return the measurements of each shape, dtype and kind of cache."""
    groups: dict[tuple[str, str, str], list[Measurement]] = {}
    for m in result.measurements:
        groups.setdefault((m.shape, m.dtype, m.inputs), []).append(m)
    return list(groups.values())


def rows_height(measurements: list[Measurement]) -> float:
    """Return the inches that :func:`times_panel` needs."""
    return max(3, sum(len(rows) + 1 for rows in step_rows(measurements).values())) * _ROW


def bars_height(measurements: list[Measurement]) -> float:
    """Return the inches that :func:`shares_panel` needs."""
    return 0.5 * len(measurements) + 0.2


def shares_panel(axes: Any, measurements: list[Measurement], result: Result) -> None:
    """Draw the share of each slot in the steps that were run slot by slot."""
    names = [
        f"{label(m).removesuffix(UNFUSED)}\n{m.batch} x {tokens(m.length)}" for m in measurements
    ]
    stacked_bars(axes, measurements, names, result)
    axes.set_xlabel("time of each slot / time of the step run slot by slot (line)")


def step_rows(
    measurements: list[Measurement],
) -> dict[Cell, list[tuple[Measurement, Measurement | None]]]:
    """Return the timed subjects of each cell, each with the same subject timed eagerly or None."""
    cells: dict[Cell, list[tuple[Measurement, Measurement | None]]] = {}
    timed = {(m.batch, m.length, m.subject): m for m in measurements if m.performance}
    for (batch, length, subject), m in timed.items():
        if not subject.endswith(EAGER):
            eager = timed.get((batch, length, subject + EAGER))
            cells.setdefault((batch, length), []).append((m, eager))
        elif (batch, length, subject.removesuffix(EAGER)) not in timed:
            cells.setdefault((batch, length), []).append((m, None))
    return cells


def times_panel(
    axes: Any,
    measurements: list[Measurement],
    looks: dict[str, Look],
    *,
    eager_numbers: bool = True,
) -> None:
    """Draw a dot per subject, a ring for its eager time, a mark at its floor, and its numbers."""
    cells = step_rows(measurements)
    position, ticks, headings = 0, [], []
    values = []
    for rows in cells.values():
        headings.append(position)
        ticks.append((position, cell_words(rows[0][0])))
        position += 1
        for m, eager in rows:
            values += _dots(axes, position, m, eager, looks[m.subject], eager_numbers)
            ticks.append((position, label(m)))
            position += 1
    if not values:
        axes.text(0.5, 0.5, "no figure", ha="center", va="center", transform=axes.transAxes)
        axes.set(xticks=[], yticks=[])
        return
    axes.set_yticks([y for y, _ in ticks], [text for _, text in ticks], fontsize=8.5)
    for text, (y, _) in zip(axes.get_yticklabels(), ticks):
        text.set_weight("bold" if y in headings else "normal")
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(position - 0.4, -0.6)
    _time_scale(axes, min(values), max(values))
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    has_eager = any(eager for rows in cells.values() for _, eager in rows)
    ring = "     ○ launched from Python, without a graph" if has_eager else ""
    key = f"● step{ring}\n| least time for its bytes and operations"
    at_left = (0.25 / axes.figure.get_figwidth(), 1), ("figure fraction", "axes fraction")
    axes.annotate(key, at_left[0], xycoords=at_left[1], fontsize=8.5, color=FAINT, va="bottom")
    axes.set_xlabel("milliseconds per step")


def _dots(
    axes: Any, y: int, m: Measurement, eager: Measurement | None, look: Look, eager_numbers: bool
) -> list[float]:
    """Draw one row; return the values that the axis must show."""
    assert m.performance is not None  # as selected
    value = m.performance.median_ms
    values, text = [value], f"{number(value)} ms"
    axes.plot([value], [y], look.marker, ms=7, color=look.colour, zorder=3, gid="step")
    if eager is not None and eager.performance is not None:
        slow = eager.performance.median_ms
        axes.plot([value, slow], [y, y], "-", color=look.colour, lw=1, alpha=0.6, zorder=2)
        axes.plot(
            [slow],
            [y],
            look.marker,
            ms=6.5,
            mfc="white",
            mec=look.colour,
            mew=1.4,
            zorder=2.5,
            gid="eager",
        )
        values.append(slow)
        text += f", eager {number(slow)}" if eager_numbers else ""
    if m.kind != "layer":
        axes.plot([m.floor_ms] * 2, [y - 0.32, y + 0.32], color=INK, lw=1.5, gid="floor")
        values.append(m.floor_ms)
    axes.annotate(
        text,
        (1.0, y),
        (8, 0),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        va="center",
        fontsize=8.5,
        color=look.colour if look.linestyle == SOLID else FAINT,
        annotation_clip=False,
        gid="numbers",
    )
    return values


def _time_scale(axes: Any, low: float, high: float) -> None:
    """Set a log axis of times with plain numbers."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    low, high = low / 1.35, high * 1.35
    axes.set(xscale="log")
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(FixedLocator(log_ticks(low, high)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))

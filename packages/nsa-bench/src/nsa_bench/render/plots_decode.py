"""The panel of a decode benchmark: the time of each step."""

from __future__ import annotations

from typing import Any

from nsa_bench.render.format import number
from nsa_bench.render.panel import KEY_ROOM, Panel, names_width, set_names
from nsa_bench.render.style import FAINT, INK, SOLID, Look, log_ticks, set_ticks
from nsa_bench.render.words import cell_words, label
from nsa_bench.result import EAGER, Measurement

_ROW = 0.27  # inches
_LABEL_ROOM = 16  # characters of the labels of times, beside each other

# The name of a row, its measurement and the same subject timed eagerly; a heading has neither.
Row = tuple[str, "Measurement | None", "Measurement | None"]


def steps_panel(measurements: list[Measurement], looks: dict[str, Look]) -> Panel:
    """Return the panel of the times of steps: a row per subject below a heading per cell."""
    rows = _rows(measurements)
    where, lines = "", []
    for name, m, eager in rows:
        if m is None:
            where = name
        else:
            lines.append(f"{where}: {name} {_numbers(m, eager)}")

    def draw(axes: Any, in_page: bool) -> None:
        _draw_steps(axes, rows, looks, eager_numbers=not in_page)

    names = [name for name, *_ in rows]
    return Panel(
        "steps",
        "Time of a step",
        "; ".join(lines),
        draw,
        names_width(names) + 0.1,  # headings are bold, and therefore wider
        max(3, len(rows)) * _ROW,
        KEY_ROOM,
        right=2.0,
        page_right=0.85,
    )


def _rows(measurements: list[Measurement]) -> list[Row]:
    """Return the rows of each cell: its heading, then its timed subjects."""
    rows: list[Row] = []
    timed = {(m.batch, m.length, m.subject): m for m in measurements if m.performance}
    for cell in dict.fromkeys((m.batch, m.length) for m in timed.values()):
        of_cell = {m.subject: m for key, m in timed.items() if key[:2] == cell}
        rows.append((cell_words(next(iter(of_cell.values()))), None, None))
        for subject, m in of_cell.items():
            if not subject.endswith(EAGER):
                rows.append((label(m), m, of_cell.get(subject + EAGER)))
            elif subject.removesuffix(EAGER) not in of_cell:
                rows.append((label(m), m, None))
    return rows


def _numbers(m: Measurement, eager: Measurement | None) -> str:
    """Return "1.2 ms, eager 3.4 ms"."""
    times = [
        f"{word}{number(each.median_ms)} ms" for word, each in (("", m), ("eager ", eager)) if each
    ]
    return ", ".join(times)


def _draw_steps(axes: Any, rows: list[Row], looks: dict[str, Look], *, eager_numbers: bool) -> None:
    """Draw a dot per subject, a ring for its eager time, a mark at its floor, and its numbers."""
    values: list[float] = []
    for row, (_, m, eager) in enumerate(rows):
        if m is not None:
            values += _draw_row(axes, row, m, eager, looks[m.subject])
            text = _numbers(m, eager if eager_numbers else None)
            look = looks[m.subject]
            axes.annotate(
                text,
                (1.0, row),
                (8, 0),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                va="center",
                fontsize=8.5,
                color=look.colour if look.linestyle == SOLID else FAINT,
                annotation_clip=False,
                gid="numbers",
            )
    set_names(axes, [name for name, *_ in rows], 8.5)
    for text, (_, m, _) in zip(axes.get_yticklabels(), rows):
        text.set_weight("bold" if m is None else "normal")
    _time_scale(axes, min(values), max(values))
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    has_eager = any(eager for *_, eager in rows)
    ring = "     ○ launched from Python, without a graph" if has_eager else ""
    key = f"● step{ring}\n| least time for its bytes and operations"
    left = 0.25 / axes.figure.get_figwidth()
    axes.annotate(
        key,
        (left, 1),
        xycoords=("figure fraction", "axes fraction"),
        fontsize=8.5,
        color=FAINT,
        va="bottom",
    )
    axes.set_xlabel("milliseconds per step")


def _draw_row(
    axes: Any, y: int, m: Measurement, eager: Measurement | None, look: Look
) -> list[float]:
    """Draw the marks of one row; return the values that the axis must show."""
    values = [m.median_ms]
    axes.plot(values, [y], look.marker, ms=7, color=look.colour, zorder=3, gid="step")
    if eager is not None:
        values.append(eager.median_ms)
        axes.plot(values, [y, y], "-", color=look.colour, lw=1, alpha=0.6, zorder=2)
        ring: Any = {"mfc": "white", "mec": look.colour, "mew": 1.4, "zorder": 2.5}
        axes.plot(values[1:], [y], look.marker, ms=6.5, gid="eager", **ring)
    if m.kind != "layer":
        axes.plot([m.floor_ms] * 2, [y - 0.32, y + 0.32], color=INK, lw=1.5, gid="floor")
        values.append(m.floor_ms)
    return values


def _time_scale(axes: Any, low: float, high: float) -> None:
    """Set a log axis of times with plain numbers."""
    from matplotlib.ticker import NullLocator

    low, high = low / 1.35, high * 1.35
    axes.set(xscale="log")
    axes.set_xlim(low, high)
    ticks = log_ticks(low, high)
    is_wide = sum(len(f"{tick:g}") for tick in ticks) > _LABEL_ROOM
    set_ticks(axes.xaxis, ticks[:: 1 + is_wide])
    axes.xaxis.set_minor_locator(NullLocator())

"""The interactive charts of the page: Plotly figures, one pair per problem and phase.

A reader chooses the shape, dtype, inputs and phase; the page then shows the time against the length
(for decode: the time of a step) and the time per branch. Names are escaped, because Plotly reads
some HTML in texts. Plotly is imported when a chart is made.
"""

from __future__ import annotations

import dataclasses
import html
import json
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from nsa_bench.render.format import number
from nsa_bench.render.plots_decode import step_rows
from nsa_bench.render.plots_length import crossover_marks, curves, fastest_dense, milliseconds_of
from nsa_bench.render.style import BRANCH_COLOURS, FAINT, log_ticks, looks_of
from nsa_bench.render.words import (
    cell_words,
    label,
    phase_words,
    problem_words,
    shape_words,
    tokens,
)

if TYPE_CHECKING:
    from nsa_bench.render.style import Look
    from nsa_bench.result import Measurement, Result

_BAR, _MARGINS = 30, 120  # pixels
_MARK = 0.13  # height of the sentence of a crossover, as a fraction of the range of times
_NARROW = 0.08  # a segment below this share of the axis has no text of its own


@dataclasses.dataclass(frozen=True)
class Chart:
    """One choice of the page.

    Attributes:
        title: The phase and the problem.
        choice: The value of each chooser, in words: shape, dtype, inputs, batch and phase.
        time: The figure of times; None if nothing was timed.
        parts: The figure of times per branch; None if no kernel was timed alone.
    """

    title: str
    choice: dict[str, str]
    time: dict[str, Any] | None
    parts: dict[str, Any] | None


def charts(result: Result) -> list[Chart]:
    """Return a chart per shape, dtype, inputs, batch and phase, in the order of the run."""
    return list(_charts(result))


def _charts(result: Result) -> Iterator[Chart]:
    looks = looks_of(result)
    groups: dict[tuple[str, ...], list[Measurement]] = {}
    for m in result.measurements:
        batch = "" if m.phase == "decode" else str(m.batch)
        groups.setdefault((m.shape, m.dtype, m.inputs, batch, m.phase), []).append(m)
    for (shape, dtype, inputs, batch, phase), measurements in groups.items():
        words = shape_words(shape)
        choice = {
            "shape": shape if words == shape else f"{shape}: {words}",
            "dtype": dtype,
            "cache" if phase == "decode" else "inputs": inputs,
            "batch": batch,
            "phase": phase_words(phase),
        }
        timed = [m for m in measurements if m.performance]
        if phase == "decode":
            time = _step_figure(timed, looks) if timed else None
        else:
            time = _length_figure(timed, result, looks) if timed else None
        with_parts = [m for m in timed if m.timed_parts]
        title = f"{phase_words(phase)}: {problem_words(measurements[0])}"
        yield Chart(title, choice, time, _parts_figure(with_parts, result) if with_parts else None)


def plotly_script() -> str:
    """Return the source of plotly.js that the Python package plotly holds."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def _figure(traces: list[dict[str, Any]], layout: dict[str, Any]) -> dict[str, Any]:
    """Check a figure with Plotly, and return it as plain JSON values."""
    import plotly.graph_objects as go

    common: dict[str, Any] = {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 13},
        "hoverlabel": {"align": "left"},
        "dragmode": False,
        "hovermode": "closest",
    }
    figure = go.Figure(data=traces, layout=common | layout, skip_invalid=False)
    document: dict[str, Any] = json.loads(figure.to_json())
    document["layout"].pop("template", None)  # defaults that repeat in each figure
    return document


def _hover(m: Measurement, fastest: str | None = None) -> str:
    """Return the text beside the pointer: the subject, its length, time, quartiles and ratio."""
    p = m.performance
    assert p is not None  # callers pass timed measurements only
    where = cell_words(m) if m.phase == "decode" else f"{tokens(m.length)} tokens"
    lines = [
        f"<b>{html.escape(label(m))}</b>",
        where,
        f"<b>{number(p.median_ms)} ms</b> (quartiles {number(p.q1_ms)} to {number(p.q3_ms)})",
    ]
    if p.eager is not None:
        lines.append(f"{number(p.eager_ms)} ms eager")
    if m.subject == fastest:
        lines.append("the fastest dense kernel")
    elif m.ratio_to_dense is not None and m.ratio_to_dense >= 1:
        lines.append(f"{number(m.ratio_to_dense)} times as fast as dense")
    elif m.ratio_to_dense:
        lines.append(f"{number(1 / m.ratio_to_dense)} times the time of dense")
    if m.floor_fraction is not None:
        lines.append(f"{m.floor_fraction:.0%} of the measured peak rate")
    return "<br>".join(lines)


def _length_figure(
    measurements: list[Measurement], result: Result, looks: dict[str, Look]
) -> dict[str, Any]:
    """Return the time of each subject against the length, with a mark at each crossover."""
    fastest = fastest_dense(measurements)
    traces: list[dict[str, Any]] = []
    lines = curves(measurements)
    for subject, points in lines.items():
        look = looks[subject]
        width = 2.2 if subject == fastest else look.width
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": html.escape(label(points[0])),
                "legendgroup": html.escape(subject),
                "x": [m.length for m in points],
                "y": [milliseconds_of(m) for m in points],
                "text": [_hover(m, fastest) for m in points],
                "hovertemplate": "%{text}<extra></extra>",
                "line": {"color": look.colour, "dash": look.dash, "width": width},
                "marker": {"symbol": look.marker, "size": 8 if look.dash == "solid" else 5},
            }
        )
    lengths = sorted({m.length for m in measurements})
    times = [milliseconds_of(m) for m in measurements]
    marks = crossover_marks(measurements, result.crossovers)
    spread = max(math.log10(max(times) / min(times)), 0.3)
    low = math.log10(min(times)) - spread * (0.06 + _MARK * len(marks))
    high = math.log10(max(times)) + spread * 0.06
    for row, (crossover, length, value, sentence) in enumerate(marks):
        foot = 10 ** (low + spread * (0.06 + _MARK * row))
        is_left = math.log(length / lengths[0]) <= 0.5 * math.log(lengths[-1] / lengths[0])
        text = html.escape(f"NSA {crossover.subject}: {sentence}" if len(marks) > 1 else sentence)
        # Two lines fit on a phone; the spaces keep them off the dotted line.
        text = "<br>".join(
            f"&nbsp;{line}&nbsp;" for line in text.replace(" dense ", " dense\n").split("\n")
        )
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers+text",
                "name": "crossover",
                "meta": "crossover",
                "showlegend": False,
                "legendgroup": html.escape(crossover.subject),
                "x": [length, length],
                "y": [value, foot],
                "text": ["", f"<b>{text}</b>"],
                "textposition": "middle right" if is_left else "middle left",
                "textfont": {"color": looks[crossover.subject].colour},
                "cliponaxis": False,
                "hoverinfo": "skip",
                "line": {"color": looks[crossover.subject].colour, "dash": "dot", "width": 1.5},
                "marker": {
                    "symbol": "circle-open",
                    "size": [15, 0],
                    "line": {"width": 2.5},
                    "color": looks[crossover.subject].colour,
                },
            }
        )
    step = (lengths[-1] / lengths[0]) ** 0.05 if len(lengths) > 1 else 2.0
    layout = {
        "height": 500,
        "margin": {"l": 64, "r": 12, "t": 12, "b": 60},
        "legend": {"orientation": "h", "y": -0.14, "yanchor": "top", "x": 0},
        "xaxis": {
            "type": "log",
            "title": {"text": "tokens", "standoff": 8},
            "tickvals": lengths,
            "ticktext": [tokens(n) for n in lengths],
            "range": [math.log10(lengths[0] / step), math.log10(lengths[-1] * step)],
        },
        "yaxis": _time_axis(low, high, "milliseconds per call"),
    }
    return _figure(traces, layout)


def _time_axis(low: float, high: float, title: str) -> dict[str, Any]:
    """Return a log axis; ``low`` and ``high`` are decimal logarithms of milliseconds."""
    ticks = log_ticks(10**low, 10**high)
    return {
        "type": "log",
        "title": {"text": title, "standoff": 8},
        "range": [low, high],
        "tickvals": ticks,
        "ticktext": [f"{tick:g}" for tick in ticks],
    }


def _step_figure(measurements: list[Measurement], looks: dict[str, Look]) -> dict[str, Any]:
    """Return the times of a decode step: a row per cell and subject."""
    names: list[str] = []
    steps: list[tuple[str, Measurement, bool]] = []
    for rows in step_rows(measurements).values():
        cell = f"<b>{cell_words(rows[0][0])}</b>"
        names.append(cell)
        for m, eager in rows:
            # Rows need unique names; the cell's number of invisible spaces makes them so.
            names.append(html.escape(label(m)) + "\u200b" * sum(n[:3] == "<b>" for n in names))
            steps.append((names[-1], m, False))
            steps += [(names[-1], eager, True)] if eager is not None else []
    traces: list[dict[str, Any]] = []
    for is_eager, name, symbol in ((False, "step", ""), (True, "launched from Python", "-open")):
        chosen = [(row, m) for row, m, eager in steps if eager == is_eager]
        if chosen:
            traces.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": name,
                    "x": [milliseconds_of(m) for _, m in chosen],
                    "y": [row for row, _ in chosen],
                    "text": [_hover(m) for _, m in chosen],
                    "hovertemplate": "%{text}<extra></extra>",
                    "marker": {
                        "size": 11,
                        "symbol": [looks[m.subject].marker + symbol for _, m in chosen],
                        "color": [looks[m.subject].colour for _, m in chosen],
                        "line": {"width": 2 if is_eager else 0},
                    },
                }
            )
    floors = [(row, m) for row, m, eager in steps if not eager and m.kind != "layer"]
    traces.append(
        {
            "type": "scatter",
            "mode": "markers",
            "name": "least time for its bytes and operations",
            "x": [m.floor_ms for _, m in floors],
            "y": [row for row, _ in floors],
            "text": [f"least time: {number(m.floor_ms)} ms" for _, m in floors],
            "hovertemplate": "%{text}<extra></extra>",
            "marker": {
                "size": 12,
                "symbol": "line-ns-open",
                "color": FAINT,
                "line": {"width": 2.5},
            },
        }
    )
    values = [x for trace in traces for x in trace["x"]]
    layout = {
        "height": _MARGINS + 24 * len(names),
        "margin": {"l": 10, "r": 12, "t": 12, "b": 60},
        "legend": {"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0},
        "xaxis": _time_axis(
            math.log10(min(values) / 1.3), math.log10(max(values) * 1.3), "milliseconds per step"
        ),
        "yaxis": {
            "type": "category",
            "categoryorder": "array",
            "categoryarray": names[::-1],
            "range": [-0.6, len(names) - 0.4],
            "tickvals": list(range(len(names))),
            "ticktext": names[::-1],
            "automargin": True,
        },
    }
    return _figure(traces, layout)


def _parts_figure(measurements: Sequence[Measurement], result: Result) -> dict[str, Any]:
    """Return stacked bars: the time of each kernel over the time of the whole call.

    A call whose parts are no shares has the reason in place of a bar.
    """
    is_decode = measurements[0].phase == "decode"
    rows = [
        html.escape(label(m))
        + ", "
        + (cell_words(m) if is_decode else f"{tokens(m.length)} tokens")
        for m in measurements
    ]
    shares = [result.shares(m) for m in measurements]
    branches = [name for name in BRANCH_COLOURS if any(name in each for each in shares)]
    widest = max(1.0, *(sum(each.values()) for each in shares))
    traces: list[dict[str, Any]] = []
    for name in branches:
        chosen = [
            (row, m, each[name]) for row, m, each in zip(rows, measurements, shares) if name in each
        ]
        texts = []
        for _, m, _ in chosen:
            part = m.parts[name]
            assert part.performance is not None  # it has a share
            texts.append(
                f"<b>{name}</b> ({html.escape(part.backend)})<br>"
                f"{number(part.performance.median_ms)} ms of {number(milliseconds_of(m))} ms"
            )
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "x": [100 * share for *_, share in chosen],
                "y": [row for row, *_ in chosen],
                "hovertext": texts,
                "hovertemplate": "%{hovertext}<extra></extra>",
                "text": [
                    f"{share:.0%}" if share > _NARROW * widest else "" for *_, share in chosen
                ],
                "textposition": "inside",
                "insidetextanchor": "middle",
                "textangle": 0,
                "constraintext": "none",
                "marker": {"color": BRANCH_COLOURS[name]},
            }
        )
    reasons = [(row, result.not_comparable(m)) for row, m in zip(rows, measurements)]
    if reasons := [(row, reason) for row, reason in reasons if reason]:
        traces.append(
            {
                "type": "scatter",
                "mode": "text",
                "name": "not comparable",
                "showlegend": False,
                "x": [0] * len(reasons),
                "y": [row for row, _ in reasons],
                "text": [f"not comparable: {html.escape(reason)}" for _, reason in reasons],
                "textposition": "middle right",
                "hoverinfo": "skip",
            }
        )
    layout = {
        "height": _MARGINS + _BAR * len(rows),
        "barmode": "stack",
        "bargap": 0.25,
        "margin": {"l": 10, "r": 12, "t": 12, "b": 60},
        "legend": {
            "orientation": "h",
            "y": 1.0,
            "yanchor": "bottom",
            "x": 0,
            "traceorder": "normal",
        },
        "xaxis": {
            "title": {"text": "kernel alone / whole call (line at 100%)", "standoff": 8},
            "range": [0, 104 * widest],
            "ticksuffix": "%",
        },
        "yaxis": {
            "type": "category",
            "categoryorder": "array",
            "categoryarray": list(dict.fromkeys(rows))[::-1],
            "automargin": True,
        },
        "shapes": [
            {
                "type": "line",
                "x0": 100,
                "x1": 100,
                "y0": 0,
                "y1": 1,
                "yref": "paper",
                "line": {"color": FAINT, "width": 1.5},
            }
        ],
    }
    return _figure(traces, layout)

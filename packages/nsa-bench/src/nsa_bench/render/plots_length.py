"""The panel of time against length: a line per subject, labelled at its end, with crossovers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from nsa_bench.render.format import number
from nsa_bench.render.panel import Panel, no_figure
from nsa_bench.render.style import (
    INK,
    LABEL_POINTS,
    SOLID,
    EndLabel,
    Look,
    label_ends,
    log_ticks,
    set_ticks,
    text_width,
)
from nsa_bench.render.words import crossover_words, label, phase_words, tokens
from nsa_bench.result import Crossover, Measurement, Result

_ROW = 0.075  # height of a sentence about a crossover, as a fraction of the axes
_LEFT, _HEIGHT = 0.65, 2.8  # inches


def length_panel(measurements: list[Measurement], result: Result, looks: dict[str, Look]) -> Panel:
    """Return the panel of a problem and phase: its times over the length, and its crossovers."""
    timed, reason = [m for m in measurements if m.performance], measurements[0].reason
    labels = list(end_labels(measurements).values())
    marks = crossover_marks(measurements, result.crossovers)
    lines = [*labels, *(f"NSA {crossover.subject} is {why}" for crossover, _, _, why in marks)]

    def draw(axes: Any, in_page: bool) -> None:
        if timed:
            time_against_length(axes, timed, result.crossovers, looks, legend=in_page)
        else:
            no_figure(axes, reason)

    return Panel(
        "time",
        phase_words(measurements[0].phase),
        "; ".join(lines) or reason,
        draw,
        _LEFT,
        _HEIGHT,
        labels=labels,
        right=max(1.6, text_width(labels, LABEL_POINTS) + 0.55),
    )


def curves(measurements: Sequence[Measurement]) -> dict[str, list[Measurement]]:
    """Return the timed measurements of each subject by ascending length."""
    by_subject: dict[str, list[Measurement]] = {}
    for m in sorted(measurements, key=lambda m: m.length):
        if m.performance is not None:
            by_subject.setdefault(m.subject, []).append(m)
    return by_subject


def end_labels(measurements: Sequence[Measurement]) -> dict[str, str]:
    """Return each subject's label, with its time at its longest length."""
    longest = max((m.length for m in measurements), default=0)
    labels = {}
    for subject, points in curves(measurements).items():
        last = points[-1]
        where = "" if last.length == longest else f" at {tokens(last.length)}"
        labels[subject] = f"{label(last)}  {number(last.median_ms)} ms{where}"
    return labels


def fastest_dense(measurements: Sequence[Measurement]) -> str | None:
    """Return the dense kernel that is fastest at the longest length; None if there is none."""
    dense = [m for m in measurements if m.kind == "dense" and m.performance]
    return min(dense, key=lambda m: (-m.length, m.median_ms)).subject if dense else None


def value_at(points: Sequence[Measurement], length: int) -> float:
    """Return the time at a length, interpolated or extrapolated on log-log axes."""
    if len(points) == 1:
        return points[0].median_ms
    pairs = list(itertools.pairwise(points))
    low, high = next((p for p in pairs if p[1].length >= length), pairs[-1])
    share = math.log(length / low.length) / math.log(high.length / low.length)
    growth = high.median_ms / low.median_ms
    return low.median_ms * math.pow(growth, share)


def crossover_marks(
    measurements: Sequence[Measurement], crossovers: Sequence[Crossover]
) -> list[tuple[Crossover, int, float, str]]:
    """Return (crossover, length, time at it, sentence) of each combination that has a crossover.

    The length is the crossover's, or the shortest measured one if the combination is faster at
    every length.
    """
    marks = []
    for crossover in crossovers:
        own = [m for m in measurements if m.series == crossover.series]
        points = curves(own).get(crossover.subject)
        if crossover.length is None or not points:
            continue
        sentence = crossover_words(crossover, points[0].length)
        marks.append((crossover, crossover.length, value_at(points, crossover.length), sentence))
    return marks


def time_against_length(
    axes: Any,
    measurements: list[Measurement],
    crossovers: Sequence[Crossover],
    looks: dict[str, Look],
    *,
    legend: bool = False,
) -> None:
    """Draw medians with quartiles over the length, a label for each line, and crossovers.

    Args:
        axes: Axes whose place in the figure does not change later, so that labels stay apart.
        measurements: Timed measurements of one shape, dtype, kind of inputs, phase and batch.
        crossovers: The result's crossovers; those of other problems are ignored.
        looks: A look per subject.
        legend: Write the labels below the axes instead of at the lines' ends, for a narrow figure.
    """
    labels = end_labels(measurements)
    lines, rival = curves(measurements), fastest_dense(measurements)
    for subject, points in lines.items():
        look, lengths = looks[subject], [m.length for m in points]
        times = [p for m in points if (p := m.performance)]
        axes.plot(
            lengths,
            [t.median_ms for t in times],
            linestyle=look.linestyle,
            marker=look.marker,
            ms=4.5 if look.linestyle == SOLID else 3,
            color=look.colour,
            lw=2.0 if subject == rival else look.width,
            zorder=3 if look.linestyle == SOLID else 2,
            label=labels[subject],
        )
        low, high = [t.q1_ms for t in times], [t.q3_ms for t in times]
        axes.fill_between(lengths, low, high, color=look.colour, alpha=0.15, lw=0)
    marks = crossover_marks(measurements, crossovers)
    _set_scales(axes, measurements, len(marks))
    if legend:
        place: Any = {"loc": "upper left", "bbox_to_anchor": (-0.02, -0.14), "handlelength": 3.2}
        axes.legend(frameon=False, fontsize=LABEL_POINTS, **place)
    else:
        label_ends(axes, _ends(lines, looks, labels))
    for row, (crossover, length, value, sentence) in enumerate(marks):
        subject = f"NSA {crossover.subject}: " if len(marks) > 1 else ""
        bottom = 0.02 + _ROW * row
        _mark(axes, (length, value), looks[crossover.subject].colour, subject + sentence, bottom)


def _set_scales(axes: Any, measurements: list[Measurement], rows: int) -> None:
    """Set log axes with labelled ticks, and room below the lines for ``rows`` sentences."""
    from matplotlib.ticker import NullFormatter, NullLocator

    lengths = sorted({m.length for m in measurements})
    times = [m.median_ms for m in measurements]
    factor = (lengths[-1] / lengths[0]) ** 0.04 if len(lengths) > 1 else 2.0
    decades = max(math.log10(max(times) / min(times)), 0.3)
    room = 0.06 + _ROW * rows
    low = min(times) / 10 ** (decades * room / (0.94 - room))
    high = max(times) * 10 ** (decades * 0.06 / (0.94 - room))
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="milliseconds per call")
    axes.set_xlim(lengths[0] / factor, lengths[-1] * factor)
    axes.set_ylim(low, high)
    step = -(-len(lengths) // 8)  # at most eight labels
    ticks = lengths[::-1][::step][::-1]  # the longest length has a label
    axes.set_xticks(ticks, [tokens(n) for n in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    set_ticks(axes.yaxis, log_ticks(low, high))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid()


def _ends(
    lines: dict[str, list[Measurement]], looks: dict[str, Look], texts: dict[str, str]
) -> list[EndLabel]:
    """Return the labels; one stands where its line ends, or would end at the longest length."""
    longest = max(points[-1].length for points in lines.values())
    rival = fastest_dense([m for points in lines.values() for m in points])
    return [
        EndLabel(
            texts[subject],
            INK if subject == rival else looks[subject].colour,
            (points[-1].length, points[-1].median_ms),
            value_at(points, longest),
            is_bold=looks[subject].linestyle == SOLID,
        )
        for subject, points in lines.items()
    ]


def _mark(axes: Any, point: tuple[float, float], colour: str, sentence: str, bottom: float) -> None:
    """Draw a ring at the crossover, a line down from it, and its sentence at the line's foot."""
    length, value = point
    low, high = map(math.log, axes.get_ylim())
    foot = math.exp(low + (bottom + 0.07) * (high - low))
    axes.plot([length] * 2, [foot, value], ls=":", color=colour, lw=1.3, zorder=1)
    axes.plot(
        [length], [value], "o", ms=9, mfc="none", mec=colour, mew=1.8, zorder=4, gid="crossover"
    )
    left, right = map(math.log, axes.get_xlim())
    x = (math.log(length) - left) / (right - left)
    inches = axes.get_window_extent().width / axes.figure.dpi
    half = 1.2 * text_width([sentence], 9) / inches / 2  # bold text is wider
    axes.text(
        min(max(x, half + 0.01), 0.99 - half),
        bottom,
        sentence,
        transform=axes.transAxes,
        ha="center",
        va="bottom",
        fontsize=9,
        weight="bold",
        color=colour,
        gid="crossover",
    )

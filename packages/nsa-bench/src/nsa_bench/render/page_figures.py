"""The figures of the page: each panel of the plots as SVG, with a title and a description.

A figure is narrow enough for a phone, and its texts stay texts. Its colours are variables of the
page, which has others in the dark.
"""

from __future__ import annotations

import functools
import html
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from nsa_bench.render.format import number
from nsa_bench.render.plots import draw_panel, names_width, panel_title, panels, problem_groups
from nsa_bench.render.plots_decode import (
    SHARES_TITLE,
    bars_height,
    decode_groups,
    rows_height,
    shares_panel,
    step_rows,
    times_panel,
)
from nsa_bench.render.plots_length import crossover_marks, end_labels
from nsa_bench.render.plots_parts import efficiency_bars, parts_bars
from nsa_bench.render.style import DARK_COLOURS, draw, looks_of
from nsa_bench.render.words import (
    base_subject,
    cell_words,
    label,
    phase_words,
    problem_words,
    shape_words,
)

if TYPE_CHECKING:
    from nsa_bench.render.style import Look
    from nsa_bench.result import Measurement, Result

_WIDTH, _HEIGHT, _ABOVE, _KEY, _BELOW, _RIGHT = 5.0, 2.8, 0.1, 0.4, 0.65, 0.15  # inches
_LABEL = 0.185  # inches of a line of the legend
_NUMBERS = 0.85  # inches right of the axes of a decode step


class PageFigure(NamedTuple):
    """A figure of the page; ``svg`` is an element with ``title`` and ``description`` inside."""

    title: str
    description: str
    svg: str


def page_figures(result: Result) -> Iterator[tuple[str, list[PageFigure]]]:
    """Yield a heading and the figures of each problem that was timed, in the order of the run."""
    is_decode = any(m.phase == "decode" for m in result.measurements)
    groups = decode_groups(result) if is_decode else problem_groups(result)
    for index, measurements in enumerate(groups):
        if not any(m.performance for m in measurements):
            continue
        first = measurements[0]
        figures = _steps(measurements, result) if is_decode else _panels(measurements, result)
        yield (
            f"{problem_words(first)} ({shape_words(first.shape)})",
            [
                PageFigure(title, text, _inline(make, f"f{index}-{number}", title, text))
                for number, (title, text, make) in enumerate(figures)
            ],
        )


_Made = tuple[str, str, Callable[[], Any]]  # title, description, function that draws the figure


def _panels(measurements: list[Measurement], result: Result) -> Iterator[_Made]:
    looks = looks_of(result)
    for kind, chosen in panels(measurements):
        left, height, below = names_width(chosen), _HEIGHT, _BELOW
        if kind == "time":
            labels = end_labels(chosen)
            left, below = 0.65, _BELOW + _LABEL * len(labels)
            marks = crossover_marks(chosen, result.crossovers)
            lines = [*labels.values(), *(f"NSA {c.subject} is {why}" for c, _, _, why in marks)]
        elif kind == "parts":
            bars = parts_bars(chosen)
            height = max(1.2, bars_height(bars))
            lines = [*_shares(bars, result)]
        else:
            lines = [
                f"{name.strip()} {share:.0%}" for name, share, _ in efficiency_bars(chosen, looks)
            ]
        fill = functools.partial(_fill, kind, chosen, result, looks)
        box = (left, below, _WIDTH - left - _RIGHT, height)
        yield (
            panel_title(kind, chosen),
            "; ".join(lines) or chosen[0].reason,
            functools.partial(_figure, box, fill, _KEY if kind == "parts" else _ABOVE),
        )


def _fill(
    kind: str, chosen: list[Measurement], result: Result, looks: dict[str, Look], axes: Any
) -> None:
    draw_panel(axes, kind, chosen, result, looks, legend=True)


def _steps(measurements: list[Measurement], result: Result) -> Iterator[_Made]:
    looks = looks_of(result)
    lines = [
        f"{cell_words(m)}: {label(m)} {number(m.performance.median_ms)} ms"
        + (
            f", eager {number(eager.performance.median_ms)} ms"
            if eager and eager.performance
            else ""
        )
        for rows in step_rows(measurements).values()
        for m, eager in rows
        if m.performance
    ]
    left = names_width(measurements)
    box = (left, _BELOW, _WIDTH - left - _NUMBERS, rows_height(measurements))
    yield (
        "Time of a step",
        "; ".join(lines),
        lambda: _figure(
            box, lambda axes: times_panel(axes, measurements, looks, eager_numbers=False)
        ),
    )
    if bars := [m for m in measurements if m.timed_parts]:
        left = names_width([m for m in bars if m.subject == base_subject(m.subject)])
        box_of_bars = (left, _BELOW, _WIDTH - left - _RIGHT, bars_height(bars))
        yield (
            SHARES_TITLE,
            "; ".join(_shares(bars, result)),
            lambda: _figure(box_of_bars, lambda axes: shares_panel(axes, bars, result)),
        )


def _shares(bars: list[Measurement], result: Result) -> Iterator[str]:
    for m in bars:
        where = cell_words(m) if m.phase == "decode" else phase_words(m.phase)
        shares = ", ".join(f"{name} {share:.0%}" for name, share in result.shares(m).items())
        yield f"{label(m)}, {where}: {shares or result.not_comparable(m)}"


def _figure(
    box: tuple[float, float, float, float], fill: Callable[[Any], None], above: float = _KEY
) -> Any:
    """Return a figure with one axes, whose place in inches is ``box``: left, bottom, size."""
    from matplotlib.figure import Figure

    left, bottom, width, height = box
    size = (_WIDTH, bottom + height + above)
    figure = Figure(figsize=size)
    fill(figure.add_axes((left / size[0], bottom / size[1], width / size[0], height / size[1])))
    return figure


def _inline(make: Callable[[], Any], name: str, title: str, description: str) -> str:
    """Draw a figure as an SVG element; ids begin with ``name``, so that a page may hold several."""
    text = draw(make, "svg", in_page=True).decode()
    text = re.sub(r"<!--.*?-->|<style.*?</style>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r"<[^>]*>", lambda tag: _short(tag[0]), text)
    text = re.sub(r">\s+<", "><", text)
    text = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", text)
    for colour in DARK_COLOURS:
        text = text.replace(colour, f"var(--c{colour[1:]})")
    opening, _, rest = text.partition(">")
    opening = re.sub(r' (width|height)="[^"]*"', "", opening)
    ids = f"{name}-title {name}-text"
    words = (
        f'<title id="{name}-title">{html.escape(title)}</title>'
        f'<desc id="{name}-text">{html.escape(description)}</desc>'
    )
    return f'{opening} role="img" aria-labelledby="{ids}">{words}{rest}'


def _short(tag: str) -> str:
    """Return a tag without what the page states or nothing refers to, numbers with two digits."""
    if tag.startswith("<g "):
        tag = re.sub(r' id="[^"]*"', "", tag)
    tag = re.sub(r" font-family: [^;\"]*;?| transform=\"rotate\(-0 [^\"]*\"", "", tag)
    return re.sub(r"(\.\d\d)\d+", r"\1", re.sub(r"\s+", " ", tag))

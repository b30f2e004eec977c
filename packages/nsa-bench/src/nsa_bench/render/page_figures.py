"""The figures of the page: each panel of the plots as SVG, with a title and a description.

A figure is narrow enough for a phone, and its texts stay texts. Its colours are variables of the
page, which has others in the dark.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import Any

from nsa_bench.render.panel import Panel, add_axes
from nsa_bench.render.plots import panel_groups
from nsa_bench.render.style import DARK_COLOURS, draw
from nsa_bench.result import Result

# Inches. A figure with names so long that the axes would be narrower than the least is wider.
_WIDTH, _LEAST_AXES, _BELOW = 5.0, 1.5, 0.65
_LABEL = 0.185  # inches of a line of the legend


def page_figures(result: Result) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield the heading of each problem that was timed, and (title, SVG element) of its panels."""
    for index, (heading, panels) in enumerate(panel_groups(result)):
        yield (
            heading,
            [
                (panel.title, _inline(panel, f"f{index}-{number}"))
                for number, panel in enumerate(panels)
            ],
        )


def _figure(panel: Panel) -> Any:
    """Return a figure of one panel."""
    from matplotlib.figure import Figure

    below = _BELOW + _LABEL * len(panel.labels)
    beside = panel.left + panel.page_right
    width = max(_WIDTH - beside, _LEAST_AXES)
    figure = Figure(figsize=(beside + width, below + panel.height + panel.above))
    panel.draw(add_axes(figure, panel.left, below, width, panel.height), True)
    return figure


def _inline(panel: Panel, name: str) -> str:
    """Draw a panel as an SVG element; ids begin with ``name``, so that a page may hold several."""
    text = draw(lambda: _figure(panel), "svg", in_page=True).decode()
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
        f'<title id="{name}-title">{html.escape(panel.title)}</title>'
        f'<desc id="{name}-text">{html.escape(panel.description)}</desc>'
    )
    return f'{opening} role="img" aria-labelledby="{ids}">{words}{rest}'


def _short(tag: str) -> str:
    """Return a tag without what the page states or nothing refers to, numbers with two digits."""
    if tag.startswith("<g "):
        tag = re.sub(r' id="[^"]*"', "", tag)
    tag = re.sub(r" font-family: [^;\"]*;?| transform=\"rotate\(-0 [^\"]*\"", "", tag)
    return re.sub(r"(\.\d\d)\d+", r"\1", re.sub(r"\s+", " ", tag))

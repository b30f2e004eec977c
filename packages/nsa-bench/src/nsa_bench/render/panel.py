"""A panel of the figures: what it shows, and the room that it needs."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from nsa_bench.render.style import FAINT, LABEL_POINTS, text_width

KEY_ROOM = 0.4  # inches above the axes for a key


@dataclasses.dataclass(frozen=True)
class Panel:
    """A panel, which stands beside others in a plot and alone on a page; sizes are in inches.

    Attributes:
        kind: time, parts, limits or steps.
        title: Its title.
        description: Its values in words.
        draw: Draws in the axes; the second argument is whether they stand on a page, which is
            narrow.
        left: Room for names left of the axes.
        height: Height of the axes.
        above: Room above the axes, for a key.
        labels: Labels of lines, which stand right of the axes in a plot and below them on a page.
        right: Room right of the axes in a plot.
        page_right: The same on a page.
    """

    kind: str
    title: str
    description: str
    draw: Callable[[Any, bool], None]
    left: float
    height: float
    above: float = 0.1
    labels: Sequence[str] = ()
    right: float = 0.6
    page_right: float = 0.15


def names_width(names: Sequence[str]) -> float:
    """Return the room in inches for names left of the axes; a name may have several lines."""
    return 0.3 + text_width([line for name in names for line in name.split("\n")], LABEL_POINTS)


def add_axes(figure: Any, left: float, bottom: float, width: float, height: float) -> Any:
    """Add axes at a place in inches."""
    x, y = figure.get_size_inches()
    return figure.add_axes((left / x, bottom / y, width / x, height / y))


def no_figure(axes: Any, reason: str = "") -> None:
    """State in an empty panel that nothing was timed, and why."""
    text = "\n".join(["no figure", *textwrap.wrap(reason, 40)])
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, color=FAINT)
    axes.set_xticks([])
    axes.set_yticks([])


def set_names(axes: Any, names: Sequence[str], points: float) -> None:
    """Write the names of rows left of the axes, the first row at the top."""
    axes.set_yticks(range(len(names)), names, fontsize=points)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(names) - 0.45, -0.6)


def set_shares(axes: Any, limit: float) -> None:
    """Set an axis of shares up to ``limit``; a line marks 100 %."""
    axes.set_xlim(0, limit)
    axes.axvline(1.0, color=FAINT, lw=1.1, zorder=0.5)
    ticks = [0, 0.25, 0.5, 0.75, 1.0]
    axes.set_xticks(ticks, [f"{tick:.0%}" for tick in ticks])

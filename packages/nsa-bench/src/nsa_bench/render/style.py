"""The look of plots: colours and dashes of subjects, label positions, drawing as PNG or SVG.

Each colour has a contrast of at least 3 to a white and to a dark page, and hues are told apart by
colour-blind readers. NSA has hues; dense attention and other libraries have greys, which differ in
their dashes. matplotlib is imported when a figure is drawn.
"""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Callable, Sequence
from typing import Any

from nsa_bench.render.words import base_subject
from nsa_bench.result import Result
from nsa_core.util.extras import require_module

NSA_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#c5639c", "#a6611a")
GREYS = ("#666666", "#808080", "#949494")
LABEL_POINTS = 8.5
INK, FAINT, _GRID, _PAPER = "#1f2328", "#6b7280", "#d7dbe0", "#ffffff"
# The same colours on a dark page. Text on a light bar is black, which has no other colour there.
DARK_COLOURS = {
    INK: "#e6e9ed",
    FAINT: "#9aa4af",
    _GRID: "#363c44",
    _PAPER: "#14171a",
    "#0072b2": "#58a6ff",
    "#d55e00": "#f0883e",
    "#009e73": "#3fb98a",
    "#c5639c": "#db8abb",
    "#a6611a": "#c99a63",
    "#666666": "#8b949e",
    "#808080": "#a8b0b9",
    "#949494": "#c2c9d0",
}
BRANCH_COLOURS = {
    "compress": "#949494",
    "cmp": "#0072b2",
    "select": "#e69f00",
    "sel": "#d55e00",
    "causal": "#a6611a",
    "win": "#009e73",
    "combine": "#cc79a7",
}
SOLID = "-"
_DASHES = (
    (0, (4, 2)),
    (0, (1, 1.6)),
    (0, (5, 2, 1, 2)),
    (0, (8, 2.5)),
    (0, (8, 2, 1, 2, 1, 2)),
)
_MARKERS = "osD^p"
DPI, _PALETTE_SIZE = 110, 128

_STYLE: Any = {
    "svg.hashsalt": "nsa",
    "text.parse_math": False,  # a name may have a dollar sign
    "svg.fonttype": "path",
    "font.size": 9,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "axes.grid.axis": "both",
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
}
# A page's fonts are narrower than the one that matplotlib lays out with, so text fits.
_IN_PAGE: Any = {"svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"]}


@dataclasses.dataclass(frozen=True)
class Look:
    """The colour, line style, marker and width of a subject's line, as matplotlib takes them."""

    colour: str
    linestyle: Any = SOLID
    marker: str = "o"
    width: float = 1.3


def plot_style(*, in_page: bool = False) -> Any:
    """Return a context manager that sets the fonts, colours and grid of our plots."""
    import matplotlib as mpl

    return mpl.rc_context(_STYLE | _IN_PAGE if in_page else _STYLE)


def draw(make: Callable[[], Any], kind: str, *, in_page: bool = False) -> bytes:
    """Return the figure that ``make`` creates, as png or svg.

    ``in_page`` leaves out the background of an svg and its metadata, and keeps its text as text.
    """
    require_module("matplotlib", "plots need", "nsa-cli[plot]")
    with plot_style(in_page=in_page):
        figure = make()
        buffer = io.BytesIO()
        no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type") if in_page else ("Date",))
        figure.savefig(
            buffer,
            format=kind,
            dpi=DPI,
            metadata=no_metadata if kind == "svg" else None,
            transparent=in_page,
        )
    return buffer.getvalue() if kind == "svg" else _with_palette(buffer)


def _with_palette(png: io.BytesIO) -> bytes:
    """Reduce the image to a palette: a quarter of the bytes; lines and text look the same."""
    from PIL import Image  # a dependency of matplotlib

    reduced = io.BytesIO()
    with Image.open(png) as picture:
        picture.convert("RGB").quantize(_PALETTE_SIZE).save(reduced, format="PNG", optimize=True)
    return reduced.getvalue()


def looks_of(result: Result) -> dict[str, Look]:
    """Return a look per subject: hues for NSA, greys with different dashes for all others.

    The variants of a combination in a decode result share its hue.
    """
    looks: dict[str, Look] = {}
    names: dict[bool, list[str]] = {True: [], False: []}  # whether it is NSA -> names
    for m in result.measurements:
        is_nsa, base = m.kind in ("combo", "layer"), base_subject(m.subject)
        if base not in names[is_nsa]:
            names[is_nsa].append(base)
        index = names[is_nsa].index(base)
        if is_nsa:
            marker = _MARKERS[index % len(_MARKERS)]
            looks[m.subject] = Look(NSA_COLOURS[index % len(NSA_COLOURS)], SOLID, marker, 2.4)
        else:
            looks[m.subject] = Look(GREYS[index % len(GREYS)], _DASHES[index % len(_DASHES)])
    return looks


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move label positions apart, as little as possible in sum of squares.

    Args:
        wanted: The position that each label would have if it were alone.
        gap: The least distance between two labels.
        low: The lowest position.
        high: The highest position; labels pass it if they do not fit between the two.

    Returns:
        The positions, in the order of ``wanted``.
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    # Without its rank times the gap, a position must only not decrease: isotonic regression, by
    # merging neighbours that violate the order into their mean.
    groups: list[tuple[float, int]] = []
    for rank, index in enumerate(order):
        mean, count = wanted[index] - rank * gap, 1
        while groups and groups[-1][0] > mean:
            other, size = groups.pop()
            mean, count = (mean * count + other * size) / (count + size), count + size
        groups.append((mean, count))
    ceiling = max(low, high - (len(wanted) - 1) * gap)
    means = [min(max(mean, low), ceiling) for mean, count in groups for _ in range(count)]
    positions = [0.0] * len(wanted)
    for rank, index in enumerate(order):
        positions[index] = means[rank] + rank * gap
    return positions


@dataclasses.dataclass(frozen=True)
class EndLabel:
    """A label right of the axes, at the end of a line.

    Attributes:
        text: The label.
        colour: Its colour.
        point: The last point of the line, in data coordinates.
        height: The y coordinate at which the label stands if it has room.
        is_bold: Whether the text is bold.
    """

    text: str
    colour: str
    point: tuple[float, float]
    height: float
    is_bold: bool = False


def label_ends(axes: Any, labels: Sequence[EndLabel]) -> None:
    """Write labels in a column right of the axes, apart from each other, with lines to their ends.

    The limits and the place of the axes must not change later.
    """
    to_axes = axes.transData + axes.transAxes.inverted()
    wanted = [float(to_axes.transform((e.point[0], e.height))[1]) for e in labels]
    inches = axes.get_window_extent().height / axes.figure.dpi
    gap = LABEL_POINTS * 1.45 / 72 / inches
    for end, y in zip(labels, spread(wanted, gap, gap / 2, 1.0)):
        axes.annotate(
            end.text,
            end.point,
            (1.045, y),
            textcoords="axes fraction",
            va="center",
            fontsize=LABEL_POINTS,
            color=end.colour,
            weight="bold" if end.is_bold else "normal",
            annotation_clip=False,
            gid="end label",
            arrowprops={
                "arrowstyle": "-",
                "color": end.colour,
                "lw": 0.6,
                "alpha": 0.6,
                "shrinkA": 1,
                "shrinkB": 3,
                "relpos": (0, 0.5),
            },
        )


def log_ticks(low: float, high: float) -> list[float]:
    """Return the ticks of a log axis, at least four if possible.

    They are powers of ten, in a shorter range also twice and five times, and then all digits.
    """
    ticks: list[float] = []
    for steps in ("1", "125", "123456789"):
        exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [float(f"{step}e{exponent}") for exponent in exponents for step in steps]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) >= 4:
            break
    return ticks


def set_ticks(axis: Any, ticks: Sequence[float]) -> None:
    """Set the ticks of a log axis, with plain numbers."""
    from matplotlib.ticker import FixedLocator, FuncFormatter

    axis.set_major_locator(FixedLocator(ticks))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def text_width(texts: Sequence[str], points: float) -> float:
    """Return the width of the widest text in inches."""
    from matplotlib.textpath import TextPath

    return max(
        (TextPath((0, 0), t, size=points).get_extents().x1 / 72 for t in {*texts} if t), default=0.0
    )

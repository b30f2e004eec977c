"""Colours of subjects and branches, and drawing of figures as PNG or SVG.

matplotlib is imported when a figure is draw.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nsa_core.errors import BackendUnavailable

if TYPE_CHECKING:
    from nsa_bench.result import Result

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8c510a", "#56b4e9", "#6a3d9a", "#b15928")
_GREYS = ("#222222", "#666666", "#999999", "#bbbbbb")
_DPI, _PALETTE_SIZE = 100, 96
BRANCH_COLOURS = {
    "compress": "#bdbdbd",
    "cmp": "#0072b2",
    "select": "#e69f00",
    "sel": "#d55e00",
    "win": "#009e73",
    "combine": "#cc79a7",
}


def need_matplotlib() -> None:
    """Check that matplotlib is installed, before any measurement starts.

    Raises:
        BackendUnavailable: It is not; the message has the install command.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise BackendUnavailable(
            "plots need matplotlib, which is not installed; pip install 'nsa-cli[plot]'"
        )


def draw(make: Callable[[], Any], kind: str) -> bytes:
    """Return the figure that ``make`` creates, as png or svg."""
    need_matplotlib()
    import matplotlib as mpl

    style: Any = {
        "svg.hashsalt": "nsa",
        "svg.fonttype": "path",
        "font.size": 9,
        "axes.titlesize": 10,
    }
    with mpl.rc_context(style):
        figure = make()
        buffer = io.BytesIO()
        figure.savefig(
            buffer, format=kind, dpi=_DPI, metadata={"Date": None} if kind == "svg" else None
        )
    return buffer.getvalue() if kind == "svg" else _with_palette(buffer)


def _with_palette(png: io.BytesIO) -> bytes:
    """Reduce the image to a palette: a quarter of the bytes; lines and text look the same."""
    from PIL import Image  # a dependency of matplotlib

    reduced = io.BytesIO()
    with Image.open(png) as picture:
        picture.convert("RGB").quantize(_PALETTE_SIZE).save(reduced, format="PNG", optimize=True)
    return reduced.getvalue()


def colours_of(result: Result) -> dict[str, str]:
    """Return a colour per subject: hues for combinations, greys for baselines."""
    names: dict[str, list[str]] = {"combo": [], "dense": [], "layer": [], "rival": []}
    for m in result.measurements:
        if m.subject not in names[m.kind]:
            names[m.kind].append(m.subject)
    colours = {
        name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names["combo"] + names["layer"])
    }
    return colours | {
        name: _GREYS[i % len(_GREYS)] for i, name in enumerate(names["dense"] + names["rival"])
    }

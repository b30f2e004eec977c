"""Colours of subjects and branches, and figures turned into files. Loads matplotlib lazily."""

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
_DPI, _COLOURS_KEPT = 100, 96
BRANCH_COLOURS = {
    "compress": "#bdbdbd",
    "cmp": "#0072b2",
    "select": "#e69f00",
    "sel": "#d55e00",
    "win": "#009e73",
    "combine": "#cc79a7",
}


def need_matplotlib() -> None:
    """Refuse, before any work is done, where there is no matplotlib.

    Raises:
        BackendUnavailable: with what to type.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise BackendUnavailable(
            "plots need matplotlib, which is not installed; pip install 'nsa-cli[plot]'"
        )


def drawn(make: Callable[[], Any], kind: str) -> bytes:
    """The figure that ``make`` returns, as png or svg."""
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
    return buffer.getvalue() if kind == "svg" else _small(buffer)


def _small(png: io.BytesIO) -> bytes:
    """The picture with a palette: a quarter of the bytes, and lines and text look the same."""
    from PIL import Image  # matplotlib needs it too

    reduced = io.BytesIO()
    with Image.open(png) as picture:
        picture.convert("RGB").quantize(_COLOURS_KEPT).save(reduced, format="PNG", optimize=True)
    return reduced.getvalue()


def colours_of(result: Result) -> dict[str, str]:
    """A colour for each subject: hues for combinations, greys for dense kernels."""
    names: dict[str, list[str]] = {"combo": [], "dense": [], "layer": [], "rival": []}
    for m in result.measurements:
        if m.subject not in names[m.kind]:
            names[m.kind].append(m.subject)
    found = {
        name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names["combo"] + names["layer"])
    }
    return found | {
        name: _GREYS[i % len(_GREYS)] for i, name in enumerate(names["dense"] + names["rival"])
    }

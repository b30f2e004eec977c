"""Figures of an inspection, as PNG or SVG: one layer in detail, and all layers.

matplotlib is imported when a figure is drawn.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nsa_bench.render.style import BRANCH_COLOURS, DPI, draw, spread
from nsa_core.contract import BRANCHES
from nsa_models.inspect.collect import CHOSEN, FORCED, MISSED, Inspection, LayerInspection
from nsa_models.inspect.findings import UNTRAINED, headline, shares

# In the order of the kinds of cells. They differ in lightness too, for readers who see no hue.
CELL_COLOURS = ("#ffffff", "#f3efe8", "#a6cee3", "#8f8f8f", BRANCH_COLOURS["sel"])
_CELL_NAMES = {
    CHOSEN: "chosen by the layer",
    FORCED: "always selected: first and nearest blocks",
    MISSED: "missed: dense attention reads it more",
}
_INK, _FAINT, _WARNING = "#222222", "#777777", "#b30000"
_BEST, _RANDOM = "#333333", "#8f8f8f"
_WIDTH = 1600 / DPI  # inches: 1600 pixels
_FONTS = {
    "font.size": 13,
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "xtick.color": _FAINT,
    "ytick.color": _FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 14,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
}
MAX_HEADS = 2  # kv heads of the detailed figure
_MAX_MAPS = 4  # maps per layer in the figure of all layers


def detail(inspection: Inspection, layer: int, kind: str) -> bytes:
    """Draw one layer: its maps of blocks, its gates, and its share of dense attention.

    Args:
        inspection: The inspection.
        layer: Index of the layer.
        kind: "png" or "svg".

    Returns:
        The content of the file; the same inspection gives the same bytes.
    """
    return _drawn(lambda: _detail(inspection, layer), kind)


def overview(inspection: Inspection, kind: str) -> bytes:
    """Draw all layers, a row per layer: maps, gates and share of dense attention."""
    return _drawn(lambda: _overview(inspection), kind)


def _drawn(make: Callable[[], Any], kind: str) -> bytes:
    def make_with_fonts() -> Any:
        import matplotlib as mpl

        fonts: Any = _FONTS
        with mpl.rc_context(fonts):
            return make()

    return draw(make_with_fonts, kind)


def _detail(inspection: Inspection, index: int) -> Any:
    from matplotlib.figure import Figure

    layer, heads = inspection.layers[index], _clearest_heads(inspection.layers[index])
    figure = Figure(figsize=(_WIDTH, 12.4))
    title, sentence = headline(inspection, index)
    _header(figure, title, sentence, inspection)
    grid = figure.subplots(
        3,
        len(heads),
        squeeze=False,
        sharex=True,
        gridspec_kw={
            "height_ratios": (5.2, 2, 2),
            "left": 0.07,
            "right": 0.885,
            "top": 0.83,
            "bottom": 0.085,
            "wspace": 0.4,
            "hspace": 0.24,
        },
    )
    for column, head in enumerate(heads):
        first = column == 0
        map_axes, gate_axes, mass_axes = grid[:, column]
        map_axes.set_title(f"Blocks that each query reads, kv head {head}", pad=10)
        _map(map_axes, layer, head)
        _legend(map_axes)
        gate_axes.set_title("Gates of the branches")
        _gates(gate_axes, layer, head)
        mass_axes.set_title("Dense attention inside the selected blocks")
        _mass(mass_axes, layer, head)
        mass_axes.set_xlabel("position of the query (tokens)")
        if first:
            map_axes.set_ylabel("position of the block (tokens)")
            gate_axes.set_ylabel("gate")
            mass_axes.set_ylabel("share")
    _footer(figure, inspection, layer, heads)
    return figure


def _overview(inspection: Inspection) -> Any:
    from matplotlib.figure import Figure

    layers = inspection.layers
    heads = min(_MAX_MAPS, max(layer.config.n_kv_heads for layer in layers))
    height = 2.6 + 2.7 * len(layers)
    figure = Figure(figsize=(_WIDTH, height))
    _header(figure, *headline(inspection), inspection)
    edges = {"top": 1 - 1.95 / height, "bottom": 0.95 / height, "hspace": 0.28}
    split = 0.07 + 0.83 * heads / (heads + 3.2)
    maps = figure.add_gridspec(len(layers), heads, left=0.07, right=split, wspace=0.3, **edges)
    lines = figure.add_gridspec(len(layers), 2, left=split + 0.06, right=0.9, wspace=0.55, **edges)
    cells = [
        [*(maps[row, column] for column in range(heads)), lines[row, 0], lines[row, 1]]
        for row in range(len(layers))
    ]
    grid = [[figure.add_subplot(cell) for cell in row] for row in cells]
    for index, (layer, row) in enumerate(zip(layers, grid)):
        for head, axes in enumerate(row[:heads]):
            if head < layer.config.n_kv_heads:
                _map(axes, layer, head)
                axes.set_xticks([0, len(layer.blocks)])
                axes.set_yticks([0, len(layer.blocks)])
            else:
                axes.set_axis_off()
        _gates(row[-2], layer, None)
        _mass(row[-1], layer, None)
        row[0].set_ylabel(f"layer {layer.number}", fontweight="bold", fontsize=14, color=_INK)
        if index == 0:
            for head, axes in enumerate(row[:heads]):
                axes.set_title(f"blocks, kv head {head}")
            row[-2].set_title("gates")
            row[-1].set_title("share of dense attention")
        if index + 1 == len(layers):
            for axes in row:
                axes.set_xlabel("query (tokens)")
    for place, (kind, name) in zip((0.03, 0.2, 0.52), _CELL_NAMES.items()):
        figure.text(place, 0.12 / height, "■", color=CELL_COLOURS[kind], fontsize=14)
        figure.text(place + 0.014, 0.13 / height, name, color=_FAINT, fontsize=12)
    return figure


def _clearest_heads(layer: LayerInspection) -> list[int]:
    """Return the kv heads whose choice gains most over a random one, in their order."""
    heads = range(layer.config.n_kv_heads)
    return sorted(sorted(heads, key=lambda head: -shares(layer, head).gain)[:MAX_HEADS])


def _header(figure: Any, title: str, sentence: str, inspection: Inspection) -> None:
    inch = 1 / figure.get_figheight()
    figure.text(0.03, 1 - 0.32 * inch, title, fontsize=24, fontweight="bold", color=_INK, va="top")
    figure.text(
        0.03,
        1 - 0.82 * inch,
        sentence,
        fontsize=16,
        color=_INK,
        va="top",
    )
    length, total = len(inspection.tokens), inspection.total_tokens
    part = f"{length:,} tokens" if length == total else f"the first {length:,} of {total:,} tokens"
    warning = "" if inspection.trained else f"{UNTRAINED} · "
    about = f"{warning}{inspection.source}, {part} · {inspection.weights}"
    colour = _WARNING if warning else _FAINT
    figure.text(
        0.03, 1 - 1.2 * inch, textwrap.shorten(about, 135, placeholder="…"), color=colour, va="top"
    )


def _footer(
    figure: Any, inspection: Inspection, layer: LayerInspection, heads: Sequence[int]
) -> None:
    config = layer.config
    text = (
        f"A query selects {config.num_selected_blocks} blocks of"
        f" {config.select_block_size} tokens ({config.init_blocks} first and"
        f" {config.local_blocks} nearest always). Lines: means over a"
        " block; numbers: over queries with a choice."
    )
    if len(heads) < config.n_kv_heads:
        text += f" Shown: {len(heads)} of {config.n_kv_heads} kv heads."
    figure.text(0.03, 0.02, text, fontsize=12, color=_FAINT)


def _map(axes: Any, layer: LayerInspection, head: int) -> None:
    from matplotlib.colors import ListedColormap

    cells = layer.cells()[head]
    queries, keys = cells.shape[1], cells.shape[0] * layer.config.select_block_size
    axes.imshow(
        cells.numpy(),
        cmap=ListedColormap(CELL_COLOURS),
        vmin=-0.5,
        vmax=len(CELL_COLOURS) - 0.5,
        origin="lower",
        aspect="auto",
        interpolation="none",
        extent=(0, queries, 0, keys),
    )
    axes.set(xlim=(0, queries), ylim=(0, keys))


def _legend(axes: Any) -> None:
    """Name the colours in the empty triangle of the future."""
    for row, (kind, name) in enumerate(_CELL_NAMES.items()):
        y = 0.95 - 0.062 * row
        box = {"transform": axes.transAxes, "va": "center"}
        axes.text(0.02, y, "■", color=CELL_COLOURS[kind], fontsize=16, **box)
        axes.text(0.07, y, name, color=_INK, fontsize=12.5, **box)


def _gates(axes: Any, layer: LayerInspection, head: int | None) -> None:
    gates = layer.group_gates()
    gates = gates.mean(1) if head is None else gates[:, head]
    lines = [(name, gates[:, i], BRANCH_COLOURS[name], "-") for i, name in enumerate(BRANCHES)]
    _lines(axes, layer, lines, "{:.2f}")


def _mass(axes: Any, layer: LayerInspection, head: int | None) -> None:
    mass = [layer.mass.best, layer.mass.selected, layer.mass.random]
    best, selected, random = (x.mean(1) if head is None else x[:, head] for x in mass)
    axes.fill_between(
        range(len(selected)),
        _smooth(random, layer),
        _smooth(selected, layer),
        color=CELL_COLOURS[CHOSEN],
        alpha=0.15,
        lw=0,
    )
    lines = [
        ("best", best, _BEST, ":"),
        ("selected", selected, CELL_COLOURS[CHOSEN], "-"),
        ("random", random, _RANDOM, "--"),
    ]
    _lines(axes, layer, lines, "{:.0%}")
    axes.set_yticks((0, 0.5, 1), ("0%", "50%", "100%"))


def _lines(
    axes: Any,
    layer: LayerInspection,
    lines: Sequence[tuple[str, torch.Tensor, str, str]],
    form: str,
) -> None:
    """Draw running means over the text; each line's name and mean stand at its end."""
    length, rows = len(layer.blocks), slice(layer.first_choice, None)
    axes.set(xlim=(0, length), ylim=(0, 1.02), yticks=(0, 0.5, 1))
    axes.grid(axis="y", color="#e5e5e5", lw=0.8)
    ends = []
    for name, values, colour, style in lines:
        smooth = _smooth(values, layer)
        axes.plot(range(length), smooth, style, color=colour, lw=2)
        ends.append((smooth[-1], f"{name} {form.format(float(values[rows].mean()))}", colour))
    gap = 1.02 * 17 / (axes.get_window_extent().height * 72 / axes.figure.dpi)
    for y, (_, label, colour) in zip(spread([end for end, *_ in ends], gap, 0.0, 1.0), ends):
        axes.annotate(
            label,
            (length, y),
            (8, 0),
            textcoords="offset points",
            color=colour,
            va="center",
            annotation_clip=False,
        )


def _smooth(values: torch.Tensor, layer: LayerInspection) -> list[float]:
    """Return the mean of each value and those before it, over at most one block of tokens."""
    size = layer.config.select_block_size
    total = torch.nn.functional.pad(values.double().cumsum(0), (1, 0))
    end = torch.arange(1, len(values) + 1)
    first = (end - size).clamp(min=0)
    means: list[float] = ((total[end] - total[first]) / (end - first)).tolist()
    return means

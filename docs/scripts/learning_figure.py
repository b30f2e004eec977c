"""Draw the plots of docs/explanation/learning.md and docs/how-to/minimax-m3.md.

    python docs/scripts/learning_figure.py docs/images

If the GPU has no result file, that of another GPU is drawn; without any, the plot is left
out, as on the page. The results of the study lie in benchmarks/study/results.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from nsa_bench.render.style import INK, NSA_COLOURS, EndLabel, draw, label_ends
from nsa_bench.render.words import tokens as length_words

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"
RESULTS = BENCHMARKS / "results"
sys.path.insert(0, str(BENCHMARKS))
from figure_learning import IMAGES, LARGE, MINIMAX, MODEL, SMALL, groups_of  # noqa: E402
from figure_pieces import PUBLISHED, nearest  # noqa: E402
from pandas import concat  # noqa: E402
from report import positions, scale_of_tokens  # noqa: E402

NSA, DENSE = NSA_COLOURS[0], "#808080"
DENSE_ARM = "dense, wide MLP"  # has as many parameters as NSA
COLOURS = {
    "dense": DENSE,
    "NSA": NSA,
    "NSA, shared K/V, means": NSA_COLOURS[2],
}
SHORT = {  # labels beside the curves
    **{DENSE_ARM: "dense", "NSA, means": "NSA"},  # of the large arms
    "NSA, shared K/V, means": "shared, means",
}
# Inches: left margin, width, right margin for labels, bottom margin, height and top margin.
_LEFT, _WIDTH, _RIGHT, _BOTTOM, _HEIGHT, _TOP = 0.75, 2.6, 1.5, 0.6, 2.1, 0.45
Panel = Callable[[Any], None]


def panels(*draw_panels: Panel) -> Any:
    """Return a figure with panels in one column, to be legible on a phone."""
    from matplotlib.figure import Figure

    row = _BOTTOM + _HEIGHT + _TOP
    width, height = _LEFT + _WIDTH + _RIGHT, len(draw_panels) * row
    figure = Figure(figsize=(width, height))
    for index, draw_panel in enumerate(draw_panels):
        bottom = (len(draw_panels) - 1 - index) * row + _BOTTOM
        box = (_LEFT / width, bottom / height, _WIDTH / width, _HEIGHT / height)
        axes = figure.add_axes(box)
        draw_panel(axes)
        axes.grid()
    return figure


def lines(axes: Any, curves: list[tuple[str, str, list[tuple[float, float]]]], kind: str) -> None:
    """Draw curves (name, colour, points) with their last values as labels."""
    ends = []
    for name, colour, points in curves:
        style: Any = {"marker": "o", "ms": 3.5, "lw": 1.7}
        if len(points) > 40:  # equal curves: the first one is wide, to be seen
            style = {"lw": 1.3 if ends else 4.5, "alpha": 1.0 if ends else 0.5}
        axes.plot(*zip(*points), color=colour, **style)
        last = points[-1]
        label = f"{SHORT.get(name, name.removeprefix('NSA, '))}  {last[1]:{kind}}"
        ends.append(EndLabel(label, colour, last, last[1]))
    axes.autoscale_view()
    label_ends(axes, ends)


def model_figure(groups: list[Any]) -> Any:
    """Return the losses of the converted model over tokens, and recalled values, at each length."""

    def losses(group: Any) -> Panel:
        def draw_panel(axes: Any) -> None:
            axes.set(xlabel="tokens, millions", ylabel="nats per token")
            axes.set_title(f"Held-out loss, rows of {length_words(group.plan['row'])}")
            curves = group.curves().dropna().T.groupby("arm").mean().T
            axes.axhline(curves[group.base].iloc[0], ls=":", lw=1.2, color=INK)
            millions = curves.index / 1e6
            scale_of_tokens(axes, millions[-1])
            lines(
                axes, [(arm, COLOURS[arm], [*zip(millions, curves[arm])]) for arm in curves], ".3f"
            )

        return draw_panel

    def recall(group: Any) -> Panel:
        def draw_panel(axes: Any) -> None:
            axes.set(xlabel="distance, tokens", ylabel="right answers", ylim=(0, 1))
            axes.set_title(f"Recalled values, rows of {length_words(group.plan['row'])}")
            values = group.recall_by_distance()["key_value"]
            shares = values.groupby(["arm", "distance"]).mean()
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(lambda value, _: length_words(int(value)))
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
            curves = [(a, COLOURS[a], [*shares[a].items()]) for a in shares.index.unique("arm")]
            lines(axes, curves, ".0%")

        return draw_panel

    return panels(*map(losses, groups), *map(recall, groups))


def trained_figure(group: Any, arms: list[str]) -> Any:
    """Return the losses of arms over tokens, and their differences to the first by position.

    Lines and dots are means over seeds; bars reach from the lowest seed to the highest.
    """
    colours = dict(zip(arms, (DENSE, *NSA_COLOURS)))

    def losses(axes: Any) -> None:
        axes.set(xlabel="tokens, millions", ylabel="nats per token")
        axes.set_title(f"Held-out loss, rows of {length_words(group.plan['row'])}")
        curves = group.curves().dropna()
        # At first, all losses fall alike and fill the picture.
        curves = curves[len(curves) // 3 :].T.groupby("arm").mean().T
        millions = curves.index / 1e6
        lines(axes, [(arm, colours[arm], [*zip(millions, curves[arm])]) for arm in arms], ".3f")

    def above(axes: Any) -> None:
        axes.set(xlabel="position in the row, tokens", ylabel="nats per token")
        axes.set_title("Above dense, by position")
        rows = [positions(group.final["by_position"])]
        for _, entries in group.longer():  # only the last half goes beyond shorter rows
            entries = entries.set_index(["arm", "seed"])
            rows.append(positions(entries["by_position"]).iloc[:, -1:])
        differences = group.above_base(concat(rows, axis=1))
        for number, arm in enumerate(arms[1:]):
            own, colour = differences.loc[arm], colours[arm]
            shift = 0.3 * (number - (len(arms) - 2) / 2)
            places = [place + shift for place in range(own.shape[1])]
            axes.vlines(places, own.min(), own.max(), color=colour, lw=2.2, alpha=0.55)
            axes.plot(places, own.mean(), "o", color=colour, ms=4.5)
        axes.set_xticks(range(differences.shape[1]), differences.columns)
        axes.axhline(0, lw=1.2, color=INK)
        axes.tick_params(axis="x", labelsize="small")

    return panels(losses, above)


def minimax_figure(document: Any) -> Any:
    """Return the losses of both implementations, and the differences of the others to "eager"."""
    eager = document["eager"]["loss"]

    def losses(axes: Any) -> None:
        axes.set(xlabel="step", ylabel="nats per byte")
        axes.set_title("Training loss")
        curves = [
            (name, colour, list(enumerate(document[name]["loss"], 1)))
            for name, colour in (("eager", DENSE), ("nsa_blocks", NSA))
        ]
        lines(axes, curves, ".3f")

    def differences(axes: Any) -> None:
        axes.set(xlabel="step", ylabel="nats per byte", yscale="log")
        axes.set_title("Difference to eager")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0e}")
        axes.axhline(document["limit"], ls=":", lw=1.2, color=INK)
        shown = (("control", DENSE), ("nsa_blocks", NSA), ("nsa_blocks_replayed", NSA_COLOURS[2]))
        ends = []
        for name, colour in shown:
            values = [abs(a - b) for a, b in zip(eager, document[name]["loss"])]
            points = [(step, v) for step, v in enumerate(values, 1) if v]  # a log axis has no 0
            if points:
                axes.plot(*zip(*points), ".", ms=3.5, color=colour)
                label = name.removeprefix("nsa_blocks_")
                ends.append(EndLabel(label, colour, points[-1], points[-1][1]))
        axes.autoscale_view()
        label_ends(axes, ends)

    return panels(losses, differences)


def main() -> None:
    """Write the plots into the folder that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS / PUBLISHED)
    options = parser.parse_args()
    path = nearest(options.results, MINIMAX)
    small, large, model = (groups_of(options.results, names) for names in (SMALL, LARGE, MODEL))
    figures = {
        SMALL: (small, lambda: trained_figure(small[0], [DENSE_ARM, "NSA", "window alone"])),
        LARGE: (large, lambda: trained_figure(large[0], [DENSE_ARM, "NSA, means"])),
        MODEL: (model, lambda: model_figure(model)),
        MINIMAX: (path, lambda: minimax_figure(json.loads(path.read_text(encoding="utf-8")))),
    }
    for source, (found, figure) in figures.items():
        if found:
            (options.folder / IMAGES[source]).write_bytes(draw(figure, "svg"))
        else:
            print(f"{IMAGES[source]}: not drawn, it has no result files")


if __name__ == "__main__":
    main()

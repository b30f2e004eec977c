"""Draw the chart of README.md and docs/index.md: speed and quality, NSA and dense attention.

    python docs/scripts/readme_figure.py docs/images

The left panel has the times of one shape: NSA and the fastest dense kernel of the same run. The
right panel has the final losses by position of two arms of benchmarks/study with as many
parameters: dots are means over seeds, bars reach from the lowest to the highest.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
from typing import Any

from nsa_bench.render.style import GREYS, NSA_COLOURS, draw, log_ticks, set_ticks

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from figure_pieces import PUBLISHED  # noqa: E402
from figure_recipes import GROUP_SHAPE, pairs, published  # noqa: E402
from figure_tables import Results, gpu, tokens  # noqa: E402

RESULTS = Results(BENCHMARKS / "results" / PUBLISHED)
STUDY = BENCHMARKS / "study" / "results"
ARMS = {"NSA": "nsa", "dense": "dense_wide"}
LOOKS: dict[str, Any] = {
    "NSA": {"color": NSA_COLOURS[0], "lw": 2.6, "marker": "o", "ms": 4.5},
    "dense": {"color": GREYS[0], "lw": 1.8, "marker": "s", "ms": 4, "ls": (0, (4, 2))},
}


def times() -> dict[str, dict[int, float]]:
    """Return the ms of NSA and of the fastest dense kernel, by length."""
    measured = (cell for cell in pairs(published(RESULTS)) if cell[0].shape == GROUP_SHAPE)
    cells = sorted((own.length, own.median_ms, dense.median_ms) for own, dense in measured)
    return {
        "NSA": {length: own for length, own, _ in cells},
        "dense": {length: dense for length, _, dense in cells},
    }


def losses() -> dict[str, dict[str, list[float]]]:
    """Return the final held-out losses of all seeds, by range of positions: "4-8k"."""
    curves: dict[str, dict[str, list[float]]] = {}
    for name, arm in ARMS.items():
        curve = curves.setdefault(name, {})
        for file in sorted(STUDY.glob(f"{arm}-seed*.json")):
            document = json.loads(file.read_text(encoding="utf-8"))
            for part in document["evaluations"][-1]["by_position"]:
                title = f"{part['first'] // 1024}-{tokens(part['last'])}"
                curve.setdefault(title, []).append(part["loss"])
    return curves


def speed_panel(axes: Any) -> None:
    """Draw the times against the length."""
    curves = times()
    for name, curve in curves.items():
        axes.plot([*curve], [*curve.values()], **LOOKS[name])
    longest = max(curves["NSA"])
    own, dense = (curves[name][longest] for name in ("NSA", "dense"))
    axes.set(xscale="log", yscale="log", xlabel="tokens", xlim=(1700, longest * 1.3))
    axes.set_title(f"Speed: ms, forward + backward\n{GROUP_SHAPE}, bf16, one {gpu(RESULTS)}")
    lengths = [2048 << n for n in range(20) if 2048 << n <= longest]
    axes.set_xticks(lengths, [tokens(length) for length in lengths])
    axes.minorticks_off()
    set_ticks(axes.yaxis, log_ticks(*axes.get_ylim()))
    label(axes, "dense", (0.75, 0.93), f"FlashAttention-4 {dense:.0f} ms")
    label(axes, "NSA", (0.98, 0.3), f"NSA {own:.0f} ms,\n{dense / own:.1f}x as fast")


def quality_panel(axes: Any) -> None:
    """Draw the held-out losses of a model by position; bars reach over all seeds."""
    curves = losses()
    for (name, curve), shift in zip(curves.items(), (-0.08, 0.08)):
        places = [n + shift for n in range(len(curve))]
        axes.plot(places, [*map(statistics.fmean, curve.values())], **LOOKS[name])
        ends = [*map(min, curve.values())], [*map(max, curve.values())]
        axes.vlines(places, *ends, color=LOOKS[name]["color"], lw=2.2, alpha=0.55)
    axes.set_xticks(range(len(curve)), [*curve])
    axes.set(xlabel="position in the row, tokens")
    seeds = len(next(iter(curve.values())))
    axes.set_title(f"Quality: held-out loss, nats\n30 M parameters, {seeds} seeds")
    label(axes, "dense", (0.62, 0.85), "dense")
    label(axes, "NSA", (0.1, 0.3), "NSA", "left")


def label(
    axes: Any, name: str, place: tuple[float, float], text: str, align: str = "right"
) -> None:
    """Write a label in the colour of a line; ``place`` is in parts of the axes."""
    look = {"color": LOOKS[name]["color"], "weight": "bold", "size": 10}
    axes.text(*place, text, ha=align, va="center", transform=axes.transAxes, **look)


def chart() -> bytes:
    """Return the chart as SVG."""

    def figure() -> Any:
        from matplotlib.figure import Figure

        sheet = Figure(figsize=(6.4, 3.1), layout="constrained")
        for axes, panel in zip(sheet.subplots(1, 2), (speed_panel, quality_panel)):
            axes.tick_params(labelsize=10)
            axes.xaxis.label.set_size(10.5)
            panel(axes)
            axes.grid()
        return sheet

    return draw(figure, "svg")


def main() -> None:
    """Write speed_and_quality.svg into the folder that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    (parser.parse_args().folder / "speed_and_quality.svg").write_bytes(chart())


if __name__ == "__main__":
    main()

"""Draw the plot of docs/how-to/million-tokens.md: time and memory of one layer, by number of GPUs.

python docs/scripts/scaling_figure.py docs/images
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from nsa_bench.render.format import number
from nsa_bench.render.style import NSA_COLOURS, EndLabel, draw, label_ends
from nsa_bench.render.words import tokens

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
from figure_parallel import FILE, gib, lines_of, milliseconds  # noqa: E402
from figure_pieces import PUBLISHED  # noqa: E402
from figure_tables import Results  # noqa: E402

Row = dict[str, Any]


def figure(document: dict[str, Any]) -> Any:
    """Return the figure with a panel for the time and one for the memory."""
    from matplotlib.figure import Figure

    result = Figure(figsize=(5.2, 6.8))  # small enough to be read on a phone
    result.subplots_adjust(left=0.13, right=0.58, hspace=0.42, bottom=0.07, top=0.87)
    row = document["rows"][0]
    title = f"Forward and backward of one layer of one document\n{row['shape']}, {row['dtype']}"
    result.suptitle(f"{title}, on {document['environment']['device']}", x=0.02, ha="left")
    panels = zip(result.subplots(2, 1), (("Time", "ms"), ("Memory of a GPU", "GiB")))
    for (axes, words), value in zip(panels, (milliseconds, gib)):
        panel(axes, lines_of(document), words, value)
    return result


def panel(
    axes: Any,
    lines: list[tuple[str, list[Row]]],
    words: tuple[str, str],
    value: Callable[..., float],
) -> None:
    """Draw the lines of one panel; ``words`` are its title and its unit."""
    from matplotlib.ticker import LogLocator

    title, unit = words
    lengths = sorted({row["length"] for _, rows in lines for row in rows})
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel=unit)
    axes.set_title(title)
    ends = []
    for colour, (label, rows) in zip(NSA_COLOURS, lines):
        points = [(row["length"], value(row)) for row in rows]
        axes.plot(*zip(*points), marker="o", ms=4, lw=2, color=colour)
        length, last = points[-1]
        where = "" if length == lengths[-1] else f" at {tokens(length)}"
        text = f"{label}  {number(last)} {unit}{where}"
        ends.append(EndLabel(text, colour, points[-1], last))
    axes.set_xticks(lengths, [tokens(length) for length in lengths])
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda tick, _: f"{tick:g}")
    axes.grid()
    label_ends(axes, ends)


def main() -> None:
    """Write the plot into the folder that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    folder = parser.parse_args().folder
    document = Results(BENCHMARKS / "results" / PUBLISHED).document(FILE)
    assert document is not None  # the repository has a result file
    name = pathlib.Path(FILE).with_suffix(".svg")
    (folder / name).write_bytes(draw(lambda: figure(document), "svg"))


if __name__ == "__main__":
    main()

"""Draw the two figures of docs/start/concepts.md.

python docs/scripts/concept_figures.py docs/images
"""

from __future__ import annotations

import argparse
import pathlib

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

# blue, vermilion and green of Okabe and Ito: told apart with every kind of colour vision
CMP, SEL, WIN, GREY = "#0072b2", "#d55e00", "#009e73", "#d9d9d9"
STYLE = {
    "svg.hashsalt": "nsa",
    "svg.fonttype": "path",
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def draw_branches() -> plt.Figure:
    """Draw which keys one query reads in each branch, on a sequence of 48 tokens."""
    tokens, block, stride, select, window = 48, 8, 4, 8, 10
    query = tokens - 1
    figure, axes = plt.subplots(4, 1, figsize=(5.6, 3.7), sharex=True)
    rows: list[tuple[Axes, str, str]] = [
        (axes[0], "dense", "every key"),
        (axes[1], "cmp", "one compressed key per block: the whole past, coarsely"),
        (axes[2], "sel", "all keys of a few blocks, chosen by their scores in cmp"),
        (axes[3], "win", "the last keys, exactly"),
    ]
    for axis, name, text in rows:
        axis.set_ylim(0, 1.5)
        axis.set_yticks([])
        axis.spines["left"].set_visible(False)
        axis.text(-0.6, 0.45, name, ha="right", va="center", weight="bold")
        axis.text(0, 1.12, text, va="center", color="#333333")
    for token in range(tokens):
        axes[0].bar(token + 0.5, 0.8, 0.84, color="#777777")
        axes[2].bar(token + 0.5, 0.8, 0.84, color=SEL if token // select in (0, 2, 5) else GREY)
        axes[3].bar(token + 0.5, 0.8, 0.84, color=WIN if token > query - window else GREY)
    starts = range(0, tokens - block + 1, stride)
    for index, start in enumerate(starts):
        axes[1].barh(0.6 - 0.4 * (index % 2), block - 0.3, 0.3, start + 0.15, color=CMP)
    for axis in axes[:-1]:
        axis.tick_params(bottom=False)
    axes[-1].set_xlim(0, tokens)
    axes[-1].set_xticks([0.5, query + 0.5], ["first token", "the query"])
    for label, side in zip(axes[-1].get_xticklabels(), ("left", "right")):
        label.set_horizontalalignment(side)
    figure.subplots_adjust(left=0.12, right=0.99, top=0.98, bottom=0.1, hspace=0.15)
    return figure


def draw_keys_read() -> plt.Figure:
    """Draw how many keys one query reads with the paper's sizes (Table 4), over the length."""
    lengths = [8192, 16384, 32768, 65536]
    figure, axis = plt.subplots(figsize=(5.6, 3.7))
    for row, length in enumerate(lengths):
        parts = [(length // 16, CMP), (16 * 64, SEL), (512, WIN)]
        read = sum(keys for keys, _ in parts)
        axis.barh(row - 0.19, length, 0.34, color="#777777")
        left = 0
        for keys, colour in parts:
            axis.barh(row + 0.19, keys, 0.34, left, color=colour)
            left += keys
        axis.text(length + 500, row - 0.19, f"dense: {length:,}", va="center", color="#555555")
        text = f"NSA: {read:,}, {length / read:.1f} times fewer"
        axis.text(read + 500, row + 0.19, text, va="center", weight="bold")
    axis.set_yticks(range(4), [f"{length // 1024}k tokens" for length in lengths])
    axis.tick_params(left=False)
    axis.invert_yaxis()
    axis.set_xlim(0, 92000)
    axis.set_xticks([])
    axis.spines[["left", "bottom"]].set_visible(False)
    names = [("cmp: 1/16", CMP), ("sel: 1,024", SEL), ("win: 512", WIN)]
    for row, (name, colour) in enumerate(names):
        axis.text(91500, 0.1 + 0.34 * row, name, color=colour, weight="bold", ha="right")
    axis.set_title("Keys that one query reads", loc="left", weight="bold")
    figure.subplots_adjust(left=0.17, right=0.99, top=0.9, bottom=0.03)
    return figure


FIGURES = {"branches": draw_branches, "keys_read": draw_keys_read}


def main() -> None:
    """Write every figure as SVG into the folder that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    folder = parser.parse_args().folder
    with mpl.rc_context(STYLE):
        for name, draw in FIGURES.items():
            draw().savefig(folder / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()

"""Panels about the inside of a call: its time per branch, and its distance to the hardware."""

from __future__ import annotations

import textwrap
from typing import Any

from nsa_bench.render.format import number
from nsa_bench.render.panel import KEY_ROOM, Panel, names_width, set_names, set_shares
from nsa_bench.render.style import BRANCH_COLOURS, FAINT, Look
from nsa_bench.render.words import cell_words, fastest_combination, label, phase_words, tokens
from nsa_bench.result import UNFUSED, Measurement, Result

_DARK_TEXT = {"compress", "select", "combine"}  # branches with a light colour
_NARROW = 0.09  # a segment below this share of the axis has no text of its own
_LIMITS_HEIGHT = 2.8  # inches


def parts_panel(measurements: list[Measurement], result: Result) -> Panel:
    """Return the panel of the time per branch: a stacked bar of each call or step.

    Args:
        measurements: Measurements with timed parts. Of prefill, those of the longest length are
            shown.
        result: Their result.
    """
    is_decode = measurements[0].phase == "decode"
    longest = max(m.length for m in measurements)
    bars = [m for m in measurements if is_decode or m.length == longest]
    if is_decode:
        names = [f"{label(m).removesuffix(UNFUSED)}\n{m.batch} x {tokens(m.length)}" for m in bars]
        title, part, whole = "Time per slot", "slot", "step run slot by slot"
    else:
        names = [f"{label(m)}\n{phase_words(m.phase)}" for m in bars]
        title, part, whole = f"Time per branch at {tokens(longest)} tokens", "kernel", "whole call"

    def draw(axes: Any, in_page: bool) -> None:
        stacked_bars(axes, bars, names, result)
        axes.set_xlabel(f"time of each {part} / time of the {whole} (line)")

    lines = []
    for m in bars:
        where = cell_words(m) if is_decode else phase_words(m.phase)
        shares = ", ".join(f"{name} {share:.0%}" for name, share in result.shares(m).items())
        lines.append(f"{label(m)}, {where}: {shares or result.not_comparable(m)}")
    height = max(1.2, 0.5 * len(bars) + 0.2)
    return Panel("parts", title, "; ".join(lines), draw, names_width(names), height, KEY_ROOM)


def stacked_bars(axes: Any, bars: list[Measurement], names: list[str], result: Result) -> None:
    """Draw the shares of each measurement as one bar, with a key of the branches above.

    A measurement whose parts are no shares has the reason in place of a bar.
    """
    shares = [result.shares(m) for m in bars]
    ends = [max(1.0, sum(each.values())) for each in shares]
    limit = max(ends) * 1.3
    for row, m in enumerate(bars):
        left = 0.0
        if reason := result.not_comparable(m):
            text = textwrap.fill(f"not comparable: {reason}", 48)
            axes.text(0.01, row, text, va="center", fontsize=7, color=FAINT, gid="reason")
        for name, share in shares[row].items():
            colour, ink = BRANCH_COLOURS[name], "black" if name in _DARK_TEXT else "white"
            bar = axes.barh(
                row, share, left=left, color=colour, height=0.62, edgecolor="white", lw=0.8
            )
            if share > _NARROW * limit:
                axes.bar_label(bar, [f"{share:.0%}"], label_type="center", fontsize=7.5, color=ink)
            left += share
        total = f"{number(m.median_ms)} ms"
        axes.text(ends[row] + 0.02 * limit, row, total, va="center", fontsize=8, gid="total")
    set_names(axes, names, 8)
    set_shares(axes, limit)
    axes.grid(visible=False)
    _key(axes, [name for name in BRANCH_COLOURS if any(name in each for each in shares)])


def _key(axes: Any, names: list[str]) -> None:
    """Write the names of the branches in their colours in one row above the axes."""
    from matplotlib.patches import Patch

    axes.legend(
        handles=[Patch(color=BRANCH_COLOURS[name], label=name) for name in names],
        loc="lower left",
        bbox_to_anchor=(-0.02, 0.985),
        ncols=len(names),
        frameon=False,
        fontsize=8,
        handlelength=0.9,
        handleheight=0.9,
        handletextpad=0.35,
        columnspacing=0.9,
        borderaxespad=0.1,
    )


def limits_panel(measurements: list[Measurement], result: Result, looks: dict[str, Look]) -> Panel:
    """Return the panel of how close each kernel comes to the least time for its work.

    The bars are those of the first phase with timed kernels at the longest length: the fastest
    combination, its kernels, dense attention and other libraries.
    """
    phase = next((m.phase for m in measurements if m.parts), measurements[0].phase)
    longest = max(m.length for m in measurements if m.phase == phase)
    cell = [m for m in measurements if (m.phase, m.length) == (phase, longest)]
    bars = _efficiency_bars(cell, looks)
    peaks, names = result.peaks[cell[0].dtype], [name for name, *_ in bars]

    def draw(axes: Any, in_page: bool) -> None:
        for row, (_, share, colour) in enumerate(bars):
            axes.barh(row, share, color=colour, height=0.66)
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
            axes.text(share + 0.015, row, f"{share:.0%}", va="center", fontsize=8, bbox=box)
        set_names(axes, names, 8)
        set_shares(axes, 1.12 * max([1.0, *(share for _, share, _ in bars)]))
        axes.set_xlabel(
            f"time at the measured peak rates\n({peaks.flops_per_s / 1e12:.0f} TFLOP/s,"
            f" {peaks.bytes_per_s / 1e9:.0f} GB/s) / measured time",
            fontsize=8.5,
        )

    return Panel(
        "limits",
        f"Hardware efficiency, {phase_words(phase).lower()}, {tokens(longest)} tokens",
        "; ".join(f"{name.strip()} {share:.0%}" for name, share, _ in bars),
        draw,
        names_width(names),
        _LIMITS_HEIGHT,
    )


def _efficiency_bars(
    cell: list[Measurement], looks: dict[str, Look]
) -> list[tuple[str, float, str]]:
    """Return (name, share of the peak rate, colour) of each bar of :func:`limits_panel`."""
    best = fastest_combination(cell)
    bars: list[tuple[str, float | None, str]] = []
    if best is not None and best.floor_fraction is not None:
        bars.append((label(best), best.floor_fraction, looks[best.subject].colour))
        bars += [
            (f"   {name}", part.floor_fraction, BRANCH_COLOURS[name])
            for name, part in best.parts.items()
        ]
    bars += [
        (label(m), m.floor_fraction, looks[m.subject].colour)
        for m in cell
        if m.kind in ("dense", "rival")
    ]
    return [(name, share, colour) for name, share, colour in bars if share is not None]

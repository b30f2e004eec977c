"""Panels about the inside of a call: its time per branch, and its distance to the hardware."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from nsa_bench.render.format import number
from nsa_bench.render.style import BRANCH_COLOURS, FAINT, INK
from nsa_bench.render.words import fastest_combination, label, phase_words

if TYPE_CHECKING:
    from nsa_bench.render.style import Look
    from nsa_bench.result import Measurement, Result

_DARK_TEXT = {"compress", "select", "combine"}  # branches with a light colour
_NARROW = 0.09  # a segment below this share of the axis has no text of its own


def parts_panel(axes: Any, measurements: list[Measurement], result: Result) -> None:
    """Draw each call as a stacked bar: the time of each kernel over the time of the whole call.

    Args:
        axes: The axes to draw in.
        measurements: Measurements with timed parts; those of the longest length are drawn.
        result: Their result.
    """
    bars = parts_bars(measurements)
    names = [f"{label(m)}\n{phase_words(m.phase)}" for m in bars]
    stacked_bars(axes, bars, names, result)


def parts_bars(measurements: list[Measurement]) -> list[Measurement]:
    """Return the measurements of the longest length."""
    longest = max(m.length for m in measurements)
    return [m for m in measurements if m.length == longest]


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
            axes.barh(
                row,
                share,
                left=left,
                color=BRANCH_COLOURS[name],
                height=0.62,
                edgecolor="white",
                lw=0.8,
            )
            if share > _NARROW * limit:
                axes.text(
                    left + share / 2,
                    row,
                    f"{share:.0%}",
                    ha="center",
                    va="center",
                    fontsize=7.5,
                    color="black" if name in _DARK_TEXT else "white",
                )
            left += share
        assert m.performance is not None  # the caller passes timed measurements only
        axes.text(
            ends[row] + 0.02 * limit,
            row,
            f"{number(m.performance.median_ms)} ms",
            va="center",
            fontsize=8,
            gid="total",
        )
    axes.axvline(1.0, color=INK, lw=1.2, zorder=0.5)
    axes.set_yticks(range(len(bars)), names, fontsize=8)
    axes.set_ylim(len(bars) - 0.5, -0.6)
    axes.set_xlim(0, limit)
    ticks = [0, 0.25, 0.5, 0.75, 1.0]
    axes.set_xticks(ticks, [f"{tick:.0%}" for tick in ticks])
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)
    axes.set_xlabel("time of each kernel / time of the whole call (line)")
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


def limits_panel(
    axes: Any, measurements: list[Measurement], result: Result, looks: dict[str, Look]
) -> None:
    """Draw how close each kernel comes to the least time for its operations and bytes.

    The bars are those of the first phase with timed kernels at the longest length: the fastest
    combination, its kernels, dense attention and other libraries.
    """
    cell = efficiency_cell(measurements)
    bars = efficiency_bars(measurements, looks)
    for row, (_, share, colour) in enumerate(bars):
        axes.barh(row, share, color=colour, height=0.66)
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
        axes.text(share + 0.015, row, f"{share:.0%}", va="center", fontsize=8, bbox=box)
    peaks = result.peaks[cell[0].dtype]
    axes.set_yticks(range(len(bars)), [name for name, *_ in bars], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    widest = max([1.0, *(share for _, share, _ in bars)])
    axes.set_xlim(0, widest * 1.12)
    axes.axvline(1.0, color=FAINT, lw=1, zorder=0.5)
    ticks = [0, 0.25, 0.5, 0.75, 1.0]
    axes.set_xticks(ticks, [f"{tick:.0%}" for tick in ticks])
    axes.set_xlabel(
        f"time at the measured peak rates ({peaks.flops_per_s / 1e12:.0f} TFLOP/s,"
        f" {peaks.bytes_per_s / 1e9:.0f} GB/s)\n/ measured time",
        fontsize=8.5,
    )


def efficiency_cell(measurements: list[Measurement]) -> list[Measurement]:
    """Return the first phase with timed kernels, at the longest length."""
    phase = next((m.phase for m in measurements if m.parts), measurements[0].phase)
    longest = max(m.length for m in measurements if m.phase == phase)
    return [m for m in measurements if (m.phase, m.length) == (phase, longest)]


def efficiency_bars(
    measurements: list[Measurement], looks: dict[str, Look]
) -> list[tuple[str, float, str]]:
    """Return (name, share of the peak rate, colour) of each bar of :func:`limits_panel`."""
    cell = efficiency_cell(measurements)
    best = fastest_combination(cell)
    bars: list[tuple[str, float, str]] = []
    if best is not None and best.floor_fraction is not None:
        bars.append((label(best), best.floor_fraction, looks[best.subject].colour))
        bars += [
            (f"   {name}", part.floor_fraction, BRANCH_COLOURS[name])
            for name, part in best.parts.items()
            if part.floor_fraction is not None
        ]
    bars += [
        (label(m), m.floor_fraction, looks[m.subject].colour)
        for m in cell
        if m.kind in ("dense", "rival") and m.floor_fraction is not None
    ]
    return bars

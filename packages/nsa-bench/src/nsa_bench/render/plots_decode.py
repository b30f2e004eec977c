"""The figure of a decode bench: the time of a step by subject and cell, and each slot's share of
it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nsa_bench.render.format import number
from nsa_bench.render.style import BRANCH_COLOURS, colours_of

if TYPE_CHECKING:
    from nsa_bench.result import Measurement, Result


def decode_figure(result: Result) -> Any:
    """A row per shape, dtype and kind of cache: times at the left, shares at the right."""
    from matplotlib.figure import Figure

    groups: dict[tuple[str, str, str], list[Measurement]] = {}
    for m in result.measurements:
        groups.setdefault((m.shape, m.dtype, m.inputs), []).append(m)
    bars = [sum(m.performance is not None for m in found) for found in groups.values()]
    heights = [1.2 + 0.24 * max(4, count) for count in bars]
    figure = Figure(figsize=(13, sum(heights) + 0.6), layout="constrained")
    grid = figure.subplots(len(groups), 2, squeeze=False, height_ratios=heights)
    colours = colours_of(result)
    for axes, height, (group, found) in zip(grid, heights, groups.items()):
        _times(axes[0], [m for m in found if m.performance], colours)
        axes[0].set_title(f"{group[0]} {group[1]}: a step (cache: {group[2]})")
        if shared := [m for m in found if m.shares]:
            _shares(axes[1], shared, below=0.6 / height)
        else:
            axes[1].set_axis_off()
    figure.suptitle(f"nsa bench --phase decode on {result.environment.get('device', '?')}")
    return figure


def _where(m: Measurement) -> str:
    return f"B={m.batch} S={m.length}"


def _times(axes: Any, found: list[Measurement], colours: dict[str, str]) -> None:
    """A bar per cell and subject, cells apart, with the byte floor of the step as a mark in it."""
    place, ticks = 0.0, []
    cells = list(dict.fromkeys(_where(m) for m in found))
    for cell in cells:
        for m in (m for m in found if _where(m) == cell):
            assert m.performance is not None  # the caller's choice
            p = m.performance
            axes.barh(place, p.median_ms, color=colours[m.subject], height=0.8, alpha=0.9)
            right = p.median_ms
            if m.kind != "layer":
                axes.plot([m.floor_ms] * 2, [place - 0.4, place + 0.4], color="black", lw=1.5)
                # a dense kernel sits on its floor: the number stands behind both
                right = max(right, m.floor_ms)
            axes.text(right * 1.08, place, f"{number(p.median_ms)} ms", va="center", fontsize=8)
            ticks.append((place, f"{m.subject}  {cell}"))
            place += 1
        place += 0.6
    axes.set_yticks([at for at, _ in ticks], [label for _, label in ticks], fontsize=8)
    axes.set_ylim(place, -0.8)
    axes.set(
        xscale="log", xlabel="ms per step (median; black: the floor of its bytes and operations)"
    )
    low, high = axes.get_xlim()
    axes.set_xlim(low, high * (high / low) ** 0.15)  # room for the numbers
    axes.grid(alpha=0.25, axis="x")


def _shares(axes: Any, found: list[Measurement], below: float) -> None:
    """Each slot's share of the step by its slots, a bar per cell; the legend ``below`` the axes, in
    their height.
    """
    for height, m in enumerate(found):
        left = 0.0
        for name, share in m.shares.items():
            label = name if height == 0 else None
            axes.barh(height, share, left=left, color=BRANCH_COLOURS[name], height=0.6, label=label)
            left += share
        # not across the line at 1
        axes.text(max(left, 1.0) + 0.02, height, f"{left:.0%}", va="center", fontsize=8)
    axes.axvline(1.0, color="black", lw=1.2, label="step by its slots")
    axes.set_yticks(range(len(found)), [f"{m.subject}  {_where(m)}" for m in found], fontsize=8)
    axes.set_ylim(len(found) - 0.3, -0.7)
    axes.set_xlim(0, max([1.0, *(sum(m.shares.values()) for m in found)]) * 1.25)
    axes.set(xlabel="time of each slot over that of the step by its slots", title="shares")
    axes.legend(
        fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -below), frameon=False, ncols=3
    )

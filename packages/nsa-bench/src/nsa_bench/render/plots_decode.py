"""The figure of a decode benchmark: the time of a step, and each slot's share of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nsa_bench.render.format import number
from nsa_bench.render.style import BRANCH_COLOURS, colours_of

if TYPE_CHECKING:
    from nsa_bench.result import Measurement, Result


def decode_figure(result: Result) -> Any:
    """Draw one row per shape, dtype and kind of cache: times on the left, shares on the right."""
    from matplotlib.figure import Figure

    groups: dict[tuple[str, str, str], list[Measurement]] = {}
    for m in result.measurements:
        groups.setdefault((m.shape, m.dtype, m.inputs), []).append(m)
    bars = [
        sum(m.performance is not None for m in measurements) for measurements in groups.values()
    ]
    heights = [1.2 + 0.24 * max(4, bar_count) for bar_count in bars]
    figure = Figure(figsize=(13, sum(heights) + 0.6), layout="constrained")
    grid = figure.subplots(len(groups), 2, squeeze=False, height_ratios=heights)
    colours = colours_of(result)
    for axes, height, (group, measurements) in zip(grid, heights, groups.items()):
        _times(axes[0], [m for m in measurements if m.performance], colours)
        axes[0].set_title(f"{group[0]} {group[1]}: one step (cache: {group[2]})")
        if with_shares := [m for m in measurements if m.shares]:
            _shares(axes[1], with_shares, below=0.6 / height)
        else:
            axes[1].set_axis_off()
    figure.suptitle(f"nsa bench --phase decode on {result.environment.get('device', '?')}")
    return figure


def _cell_label(m: Measurement) -> str:
    return f"B={m.batch} S={m.length}"


def _times(axes: Any, measurements: list[Measurement], colours: dict[str, str]) -> None:
    """Plot one bar per cell and subject, with a mark at the step's floor; cells are separated."""
    position, ticks = 0.0, []
    cells = list(dict.fromkeys(_cell_label(m) for m in measurements))
    for cell in cells:
        for m in (m for m in measurements if _cell_label(m) == cell):
            assert m.performance is not None  # the caller passes timed measurements only
            p = m.performance
            axes.barh(position, p.median_ms, color=colours[m.subject], height=0.8, alpha=0.9)
            right = p.median_ms
            if m.kind != "layer":
                axes.plot([m.floor_ms] * 2, [position - 0.4, position + 0.4], color="black", lw=1.5)
                # A dense kernel is close to its floor, so the number goes right of both.
                right = max(right, m.floor_ms)
            axes.text(right * 1.08, position, f"{number(p.median_ms)} ms", va="center", fontsize=8)
            ticks.append((position, f"{m.subject}  {cell}"))
            position += 1
        position += 0.6
    axes.set_yticks([y for y, _ in ticks], [label for _, label in ticks], fontsize=8)
    axes.set_ylim(position, -0.8)
    axes.set(xscale="log", xlabel="ms per step (median; black: floor of its bytes and operations)")
    low, high = axes.get_xlim()
    axes.set_xlim(low, high * (high / low) ** 0.15)  # room for the numbers
    axes.grid(alpha=0.25, axis="x")


def _shares(axes: Any, measurements: list[Measurement], below: float) -> None:
    """Plot each slot's share of the unfused step, one bar per cell.

    ``below`` is the distance of the legend below the axes, as a fraction of their height.
    """
    for height, m in enumerate(measurements):
        left = 0.0
        for name, share in m.shares.items():
            label = name if height == 0 else None
            axes.barh(height, share, left=left, color=BRANCH_COLOURS[name], height=0.6, label=label)
            left += share
        # The number goes right of the line at 1.
        axes.text(max(left, 1.0) + 0.02, height, f"{left:.0%}", va="center", fontsize=8)
    axes.axvline(1.0, color="black", lw=1.2, label="step, slot by slot")
    axes.set_yticks(
        range(len(measurements)),
        [f"{m.subject}  {_cell_label(m)}" for m in measurements],
        fontsize=8,
    )
    axes.set_ylim(len(measurements) - 0.3, -0.7)
    axes.set_xlim(0, max([1.0, *(sum(m.shares.values()) for m in measurements)]) * 1.25)
    axes.set(xlabel="time of each slot / time of the step run slot by slot", title="shares")
    axes.legend(
        fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -below), frameon=False, ncols=3
    )

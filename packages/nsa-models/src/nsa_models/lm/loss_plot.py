"""The plot of a training run: losses over tokens, and the mass of the selected blocks.

matplotlib is imported when the plot is drawn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nsa_bench.render.style import FAINT, NSA_COLOURS, EndLabel, draw, label_ends

_LEFT, _WIDTH, _RIGHT, _BOTTOM, _HEIGHT, _TOP = 0.8, 4.2, 1.95, 0.6, 3.1, 0.85  # inches


def save(out: Path, path: Path, kind: str, force: bool) -> None:
    """Write the figure of the log in ``out`` atomically; ``kind`` is "png" or "svg"."""
    from nsa_core.util.atomic_files import write_bytes_atomic
    from nsa_models.lm import log

    header, records = log.read_log(out / log.FILE)
    write_bytes_atomic(path, draw(lambda: _figure(header, records), kind), force)


def _figure(header: dict[str, Any], records: list[dict[str, Any]]) -> Any:
    from matplotlib.figure import Figure

    with_mass = [r for r in records if "selected_mass" in r]
    panels = [_losses, _mass] if with_mass else [_losses]
    panel = _LEFT + _WIDTH + _RIGHT
    figure = Figure(figsize=(panel * len(panels), _BOTTOM + _HEIGHT + _TOP))
    width, height = figure.get_size_inches()
    for column, draw_panel in enumerate(panels):
        left = column * panel + _LEFT
        box = (left / width, _BOTTOM / height, _WIDTH / width, _HEIGHT / height)
        draw_panel(figure.add_axes(box), header, records if draw_panel is _losses else with_mass)
    model = header["model"]
    description = (
        f"{model['n_layers']} layers of {model['layer']['dim']}, {model['attention']} attention,"
        f" {header['data']['data']}, {header['device']}"
    )
    figure.text(0.15 / width, 1 - 0.15 / height, description, color=FAINT, va="top")
    return figure


def _losses(axes: Any, header: dict[str, Any], records: list[dict[str, Any]]) -> None:
    per_step = header["train"]["batch"] * header["data"]["length"]
    ends = []
    for name, label, colour in (
        ("loss", "training step", "#949494"),
        ("held_out_loss", "held out", NSA_COLOURS[0]),
    ):
        points = [(r["step"] * per_step, r[name]) for r in records if name in r]
        if not points:
            continue
        is_held_out = name == "held_out_loss"
        axes.plot(
            *zip(*points),
            "o-" if is_held_out else "-",
            ms=4,
            lw=2 if is_held_out else 1,
            color=colour,
        )
        text = f"{label}  {points[-1][1]:.3g}"
        ends.append(EndLabel(text, colour, points[-1], points[-1][1], is_held_out))
    axes.set(xlabel="training tokens", ylabel="loss, nats per token")
    axes.set_title("Loss against training tokens")
    axes.xaxis.set_major_formatter(lambda value, _: _count(value))
    axes.grid()
    axes.autoscale_view()
    label_ends(axes, ends)


def _mass(axes: Any, header: dict[str, Any], records: list[dict[str, Any]]) -> None:
    """Draw the dense probability inside the selected blocks, beside that inside random ones."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    layers, ends = len(records[0]["selected_mass"]), []
    numbers = header["model"].get("nsa_layers") or range(layers)
    for layer in range(layers):
        colour = to_hex(colormaps["cividis"](0.8 * layer / max(1, layers - 1)))
        points = [(r["step"], r["selected_mass"][layer]) for r in records]
        axes.plot(*zip(*points), "o-", ms=4, lw=1.6, color=colour)
        text = f"layer {numbers[layer]}: {points[-1][1]:.0%}"
        random = [(r["step"], r["random_mass"][layer]) for r in records]
        axes.plot(*zip(*random), "--", lw=1.4, color=colour)
        text += f", random {random[-1][1]:.0%}"
        ends.append(EndLabel(text, colour, points[-1], points[-1][1]))
    axes.set(xlabel="step", ylabel="share of dense probability", ylim=(0, 1))
    axes.set_title("Dense attention inside selected and random blocks")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.grid()
    label_ends(axes, ends)


def _count(value: float) -> str:
    """Write a number of training tokens: "1.5M", "20k", "512"."""
    for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:g}{letter}"
    return f"{value:g}"

"""The plot of a training run: losses over tokens, and the mass of the selected blocks.

matplotlib is imported when the plot is drawn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nsa_bench.render.style import draw


def save(out: Path, path: Path, kind: str, force: bool) -> None:
    """Write the figure of the log in ``out`` atomically; ``kind`` is "png" or "svg"."""
    from nsa_core.util.atomic_files import write_bytes_atomic
    from nsa_models.lm import log

    header, records = log.read_log(out / log.FILE)
    write_bytes_atomic(path, draw(lambda: _figure(header, records), kind), force)


def _figure(header: dict[str, Any], records: list[dict[str, Any]]) -> Any:
    from matplotlib.figure import Figure

    with_mass = [r for r in records if "selected_mass" in r]
    figure = Figure(figsize=(5.6 * (1 + bool(with_mass)), 4.2), layout="constrained")
    axes = figure.subplots(1, 1 + bool(with_mass), squeeze=False)[0]
    _losses(axes[0], header, records)
    if with_mass:
        _mass(axes[1], with_mass)
    model = header["model"]
    description = (
        f"{model['n_layers']} layers of {model['layer']['dim']}, {model['attention']} attention"
    )
    figure.suptitle(f"nsa train on {header['device']}: {description}, {header['data']['data']}")
    return figure


def _losses(axes: Any, header: dict[str, Any], records: list[dict[str, Any]]) -> None:
    per_step = header["train"]["batch"] * header["data"]["length"]
    for name, style, colour in (("loss", "-", "#999999"), ("held_out_loss", "o-", "#0072b2")):
        with_loss = [r for r in records if name in r]
        label = {"loss": "training, one step", "held_out_loss": "held out"}[name]
        axes.plot(
            [r["step"] * per_step for r in with_loss],
            [r[name] for r in with_loss],
            style,
            ms=4,
            lw=1,
            color=colour,
            label=label,
        )
    axes.set(xlabel="tokens", ylabel="nats per token")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)


def _mass(axes: Any, records: list[dict[str, Any]]) -> None:
    steps = [r["step"] for r in records]
    for layer in range(len(records[0]["selected_mass"])):
        axes.plot(
            steps,
            [r["selected_mass"][layer] for r in records],
            "o-",
            ms=4,
            lw=1,
            label=f"layer {layer}",
        )
    keys = [sum(r["selected_keys"]) / len(r["selected_keys"]) for r in records]
    axes.plot(steps, keys, "--", lw=1, color="#444444", label="share of the keys")
    axes.set(xlabel="step", ylabel="share of dense probability in selected blocks", ylim=(0, 1))
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=8)

"""Findings: a layer's means, and what a picture shows in sentences."""

from __future__ import annotations

from typing import NamedTuple

import torch

from nsa_core.contract import BRANCHES
from nsa_core.util.text import one_line
from nsa_models.inspect.collect import CHOSEN, FUTURE, Inspection, LayerInspection

UNTRAINED = "Untrained weights: this shows the mechanism, not learning."
_EXCERPT = 36  # characters
CHANCE = 0.01  # a gain over random blocks of less than a percent is no finding


class Shares(NamedTuple):
    """Means over kv heads and over the queries that have a choice; see RowMass."""

    selected: float
    random: float
    best: float
    keys: float

    @property
    def gain(self) -> float:
        """Share of dense attention's probability that the choice gains over a random one."""
        return self.selected - self.random


def shares(layer: LayerInspection, head: int | None = None) -> Shares:
    """Average the shares of a layer over kv heads, or for one kv head."""
    heads = slice(None) if head is None else slice(head, head + 1)
    mass, rows = layer.mass, slice(layer.first_choice, None)
    return Shares(
        *(float(x[rows, heads].mean()) for x in (mass.selected, mass.random, mass.best, mass.keys))
    )


def clearest_layer(inspection: Inspection) -> int:
    """Return the index of the layer whose choice gains most over a random one."""
    gains = [shares(layer).gain for layer in inspection.layers]
    return gains.index(max(gains))


def headline(inspection: Inspection, layer: int | None = None) -> tuple[str, str]:
    """Return the finding of one layer, or of all: a title and a sentence that puts it in context.

    Args:
        inspection: The inspection.
        layer: Index of the layer; None averages over all layers.
    """
    if layer is None:
        subject = "The selection"
        every = [shares(one) for one in inspection.layers]
        s = Shares(*(sum(values) / len(every) for values in zip(*every)))
    else:
        one = inspection.layers[layer]
        subject, s = f"Layer {one.number}", shares(one)
    reads = f"reads {s.keys:.0%} of the keys and keeps {s.selected:.0%} of dense attention"
    others = f"random blocks would keep {s.random:.0%}, the best ones {s.best:.0%}."
    if s.gain > CHANCE:
        title = f"{subject} {reads}"
        sentence = f"With the same number of blocks, {others}"
    else:
        title = (
            f"{subject} is no better than random"
            if layer is None
            else (f"{subject} chooses its blocks no better than at random")
        )
        sentence = f"It {reads}; {others}"
    return title, sentence


def sentences(inspection: Inspection) -> list[str]:
    """Return three findings: the share of dense attention, the gates, and the most-read block."""
    index = clearest_layer(inspection)
    layer, s = inspection.layers[index], shares(inspection.layers[index])
    points = round(100 * s.selected) - round(100 * s.random)  # as the percentages show it
    unit = "point" if points == 1 else "points"
    choice = f"Layer {layer.number} gains {points} {unit} over random blocks"
    if s.gain <= CHANCE:
        choice = (
            f"No layer gains over random blocks by more than a point; layer {layer.number} comes"
            " closest"
        )
    gates = {n: f"{gate:.2f}" for n, gate in zip(BRANCHES, layer.gates.mean((0, 1)).tolist())}
    largest = " and ".join(name for name in BRANCHES if gates[name] == max(gates.values()))
    names = ", ".join(f"{name} {gate}" for name, gate in gates.items())
    return [
        f"{choice}: its blocks hold {s.selected:.0%} of dense attention's probability in"
        f" {s.keys:.0%} of the keys, random ones {s.random:.0%}, the best possible ones"
        f" {s.best:.0%}.",
        f"Its gates weight {largest} most: {names} on average.",
        _most_read(inspection, index),
    ]


def _most_read(inspection: Inspection, index: int) -> str:
    layer = inspection.layers[index]
    cells, size = layer.cells(), layer.config.select_block_size
    # Queries that may choose a block: those that see it and for which it is not forced.
    chosen = (cells == CHOSEN).sum(-1)
    distance = layer.config.local_blocks * size
    able = torch.stack(
        [(cells[:, b, b * size + distance :] != FUTURE).sum(-1) for b in range(cells.shape[1])], 1
    )
    share = chosen / able.clamp(min=1)
    share[:, : layer.config.init_blocks] = 0
    share[able < 2 * size] = 0  # too few queries to count
    if not share.any():
        return f"No query of layer {layer.number} chooses a block that is not forced."
    head, block = divmod(int(share.argmax()), share.shape[1])
    excerpt = block_text(inspection, block * size, (block + 1) * size)
    return (
        f"Its most-read block is at tokens {block * size} to {(block + 1) * size - 1},"
        f" {excerpt!r}: {share[head, block]:.0%} of the later queries choose it in kv head {head}."
    )


def block_text(inspection: Inspection, first: int, end: int) -> str:
    """Return the text of tokens ``first`` to ``end - 1`` on one line, shortened."""
    text = one_line("".join(s.text for s in inspection.spans if first <= s.first < end))
    return text if len(text) <= _EXCERPT else f"{text[: _EXCERPT - 1]}…"

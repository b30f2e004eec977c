"""Compute the table of gains in README.md, and the recipes for models of three sizes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator

from figure_kernels import A100_SUBJECTS, a100_times
from figure_pieces import BACKEND_SHAPES, SHAPES
from figure_tables import PENDING, Results, digits, table
from figure_training import fastest_modes

from nsa_bench.render.words import tokens
from nsa_bench.result import Measurement, Result

LENGTHS = tuple(1024 * n for n in (2, 8, 16, 32, 64, 128))
GROUP_SHAPE, GROUPS = "64/4/128", 4  # every model of the recipes has groups of this kind
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Model:
    """The sizes of a model with 16 query heads of width 128 for each key/value head.

    Attributes:
        name: Its name in the table.
        parameters: Number of parameters.
        layers: Number of layers.
        dim: Width of the residual stream.
        hidden: Width of the MLP.
        groups: Key/value heads.
    """

    name: str
    parameters: float
    layers: int
    dim: int
    hidden: int
    groups: int


MODELS = (
    Model("1B", 1.2e9, 16, 2048, 8192, 1),
    Model("8B", 8.0e9, 32, 4096, 14336, 2),
    Model("70B", 70e9, 80, 8192, 28672, 4),
)
RECIPE_LENGTHS = tuple(1024 * n for n in (32, 128, 1024))
PARAMETER_BYTES = 2 + 2 + 4 + 8  # bf16, its gradient, the fp32 copy, both moments of Adam
CHECKPOINT_BYTES = 2  # of a token, layer and channel: the layer's input in bf16, which is kept
MLP_BYTES = 3 * 2 * 2  # of a token and hidden channel: gate, up and product in bf16, with gradients
GPU_BYTES = 72 * GIB  # of 80 GB; the rest is for buffers of collectives and the allocator


def published(results: Results) -> list[Result]:
    """Return the results of the core by shape and length."""
    own = [f"core_{shape.replace('/', '_')}.json" for shape in SHAPES]
    own += [f"backends_{shape.replace('/', '_')}.json" for shape in BACKEND_SHAPES]
    return [*map(results.bench, own), *results.of_pieces("shapes-")]


def pairs(runs: Iterable[Result]) -> Iterator[tuple[Measurement, Measurement]]:
    """Yield the core and the fastest dense kernel of the same run, on random inputs.

    The cells are forward and backward, of every shape and length; of a cell in several runs, the
    first counts.
    """
    seen = set()
    for run in runs:
        timed = [
            m
            for m in run.measurements
            if (m.phase, m.inputs) == ("both", "random") and m.performance
        ]
        for own in (m for m in timed if m.subject == "auto"):
            cell = own.shape, own.length
            dense = [m for m in timed if m.kind == "dense" and (m.shape, m.length) == cell]
            if dense and cell not in seen:
                seen.add(cell)
                yield own, min(dense, key=lambda m: m.median_ms)


def use(results: Results) -> str:
    """Tabulate by length how many times as fast as dense attention NSA is, and its memory."""
    measured = [*pairs(published(results))]
    older = a100_times(results)
    modes = fastest_modes(results)
    rows = []
    for length in LENGTHS:
        at = [pair for pair in measured if pair[0].length == length]
        speed = [dense.median_ms / own.median_ms for own, dense in at]
        memory = [(own.peak_memory_bytes or 0) / (d.peak_memory_bytes or 1) for own, d in at]
        cells = [cell for (_, n), cell in older.items() if n == length]
        ratios = [
            _fastest(cell, "dense FlashAttention-2") / _fastest(cell, "NSA") for cell in cells
        ]
        nsa, dense = (modes[kind].get((length, 1)) for kind in ("nsa", "dense"))
        training = [nsa["tokens_per_s"] / dense["tokens_per_s"]] if nsa and dense else []
        columns = (speed, ratios, training, _decode(results, length), memory)
        rows.append([tokens(length), *map(_range, columns)])
    columns = ["tokens", "attention", "attention, kernels compiled for sm_80", "training"]
    return table([*columns, "decoding", "memory of a call"], rows)


def _fastest(cell: dict[str, float], title: str) -> float:
    return min(cell[s] for s in A100_SUBJECTS[title] if s in cell)


def _decode(results: Results, length: int) -> list[float]:
    """Return how many times as fast the attention of a decode step is, at the shape of recipes."""
    timed = [
        m
        for m in results.bench("decode.json").measurements
        if (m.shape, m.length) == (GROUP_SHAPE, length) and m.performance
    ]
    dense = [m.median_ms for m in timed if m.kind == "dense"]
    return [min(dense) / m.median_ms for m in timed if m.subject == "auto" and dense]


def _range(values: list[float]) -> str:
    """Format the lowest and the highest ratio: "2.5x to 2.9x"."""
    if not values:
        return "-"
    ends = dict.fromkeys(f"{value:.1f}x" for value in (min(values), max(values)))
    return " to ".join(ends)


def group_times(results: Results) -> tuple[tuple[float, float], float, float]:
    """Return what a group of 16 query heads of width 128 costs, forward and backward.

    Returns:
        Two factors (a, b) of the ms of NSA, a S + b S^2 for S tokens; the ms of dense attention
        over S^2; the peak bytes of NSA over S. All are from 32k and 64k tokens.
    """
    cells = pairs(published(results))
    measured = {own.length: (own, d) for own, d in cells if own.shape == GROUP_SHAPE}
    (short, _), (long, dense) = measured[32768], measured[65536]
    slopes = [m.median_ms / m.length / GROUPS for m in (short, long)]
    square = (slopes[1] - slopes[0]) / (long.length - short.length)
    linear = slopes[0] - square * short.length
    memory = (long.peak_memory_bytes or 0) / long.length / GROUPS
    return (linear, square), dense.median_ms / long.length**2 / GROUPS, memory


def nsa_ms(results: Results, groups: int, length: int) -> float:
    """Return the estimated ms of forward and backward of one layer's attention."""
    (linear, square), _, _ = group_times(results)
    return groups * (linear * length + square * length**2)


def recipes(results: Results) -> str:
    """Tabulate time and memory of three models by length."""
    _, dense, memory = group_times(results)
    rows = []
    for model in MODELS:
        for length in RECIPE_LENGTHS:
            own = nsa_ms(results, model.groups, length)
            other = dense * model.groups * length**2
            call = memory * model.groups * length
            per_layer = max(call, MLP_BYTES * model.hidden * length)  # attention or MLP
            checkpoints = CHECKPOINT_BYTES * model.dim * model.layers * length
            total = PARAMETER_BYTES * model.parameters + checkpoints + per_layer
            gpus = 2 ** math.ceil(math.log2(total / GPU_BYTES)) if total > GPU_BYTES else 1
            times = [_duration(t * model.layers) for t in (own, other)]
            sizes = [f"{total / GIB:,.0f}", str(gpus)]
            rows.append([model.name, tokens(length), *times, f"{other / own:.1f}x", *sizes])
    columns = ["model", "tokens", "NSA", "dense", "speed-up", "training, GiB", "GPUs of 80 GB"]
    return table(columns, rows)


def _duration(milliseconds: float) -> str:
    """Format a time: "627 ms", "1.81 s", "30.8 min"."""
    if milliseconds < 1000:
        return f"{digits(milliseconds)} ms"
    seconds = milliseconds / 1000
    return f"{digits(seconds)} s" if seconds < 600 else f"{digits(seconds / 60)} min"


def recipe_check(results: Results) -> str:
    """Return estimated and measured ms at the only measured cell of another number of groups."""
    for own, _ in pairs(published(results)):
        if own.shape == "16/1/128":
            estimate = digits(nsa_ms(results, 1, own.length))
            return f"{estimate} ms estimated and {digits(own.median_ms)} ms measured"
    return PENDING


RECIPES: dict[str, Callable[[Results], str]] = {
    "use": use,
    "recipes": recipes,
    "recipe-check": recipe_check,
}

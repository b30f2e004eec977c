"""Compute the tables and values about training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from figure_tables import Results, fixed, short_device, table, tokens

RECOMPUTE_FILE = "train_recompute.json"
_ONE = {"section": "throughput", "S": 2048, "mode": "compile+graph"}


def train(results: Results) -> str:
    """Tabulate thousands of tokens per second of NSA and dense attention, by length and batch.

    Each has its fastest mode.
    """
    best = fastest_modes(results)
    shapes = sorted(best["nsa"].keys() & best["dense"].keys())
    speed = {
        name: [best[name][shape]["tokens_per_s"] for shape in shapes] for name in ("nsa", "dense")
    }
    columns = ["tokens x batch", *(f"{tokens(length)} x {batch}" for length, batch in shapes)]
    return table(
        columns,
        [
            ["NSA", *(f"{n / 1e3:.1f}" for n in speed["nsa"])],
            ["dense", *(f"{n / 1e3:.1f}" for n in speed["dense"])],
            ["ratio", *(f"{a / b:.2f}x" for a, b in zip(speed["nsa"], speed["dense"]))],
        ],
    )


def fastest_modes(results: Results) -> dict[str, dict[tuple[int, int], dict[str, Any]]]:
    """Return the row of the fastest mode, by attention and (length, batch)."""
    best: dict[str, dict[tuple[int, int], dict[str, Any]]] = {"nsa": {}, "dense": {}}
    measured = [row for row in results.rows("train.json") if "tokens_per_s" in row]
    for row in sorted(measured, key=lambda row: float(row["tokens_per_s"])):
        best[row["attention"]][row["S"], row["B"]] = row
    return best


def _fastest_at_2k(attention: str, batch: int) -> Callable[[Results], str]:
    """Return a function for the speed at 2048 tokens in the fastest mode."""
    return lambda results: _thousand(fastest_modes(results)[attention][2048, batch]["tokens_per_s"])


def recompute_price(results: Results) -> str:
    """Return by how much recompute=True slows a training step down, by tokens and batch."""
    losses = [
        f"{1 - of['recompute']['tokens_per_s'] / of['nsa']['tokens_per_s']:.0%} at {tokens(length)}"
        + f" x {batch}"
        for (length, batch), of in _recompute_cells(results)
    ]
    return ", ".join(losses)


def _recompute_cells(
    results: Results,
) -> list[tuple[tuple[int, int], dict[str, dict[str, Any]]]]:
    """Return the rows of each (length, batch): "nsa", "recompute" and "dense"."""
    cells: dict[tuple[int, int], dict[str, dict[str, Any]]] = {}
    for row in results.rows(RECOMPUTE_FILE):
        if "tokens_per_s" in row:
            kind = "recompute" if "recompute" in row["mode"].split("+") else row["attention"]
            cells.setdefault((row["S"], row["B"]), {})[kind] = row
    return sorted(cells.items())


def train_crossover(results: Results) -> str:
    """Return the length from which NSA trains faster at batch 1."""
    (row,) = (r for r in results.rows("train.json") if "crossover" in r)
    length = row["crossover"]
    return "no measured length" if length is None else f"about {length / 1024:.1f}k tokens"


def _memory(results: Results) -> dict[str, Any]:
    """Return the result of train-memory, of the GPU of the results or else of another one."""
    document = results.document("train_memory.json")
    if document is None:
        raise FileNotFoundError("no folder of results has train_memory.json")
    return document


def train_memory_gpu(results: Results) -> str:
    """Return the GPU of train-memory."""
    return short_device(_memory(results)["machine"]["device"])


def train_memory(results: Results) -> str:
    """Tabulate the peak memory of a training step in GiB at batch 1, by length."""
    rows = _memory(results)["rows"]
    measured = [r for r in rows if r.get("B") == 1 and "peak_gib" in r]
    lengths = sorted({r["S"] for r in measured})
    peak = {(r["attention"], _mode(r), r["S"]): f"{r['peak_gib']:.1f}" for r in measured}
    kinds = {
        ("nsa", "eager"): "NSA",
        ("nsa", "recompute"): "NSA, recompute=True",
        ("dense", "eager"): "dense",
    }
    rows = [
        [title, *(peak.get((*kind, n), "-") for n in lengths)]
        for kind, title in kinds.items()
        if any((*kind, n) in peak for n in lengths)
    ]
    return table(["tokens", *(tokens(n) for n in lengths)], rows)


def _mode(row: dict[str, Any]) -> str:
    """Return the mode of a row; rows of older files have none, and are eager."""
    mode: str = row.get("mode", "eager")
    return mode


def _memory_rows(results: Results, attention: str) -> list[dict[str, Any]]:
    """Return the rows of train-memory in eager steps without recompute."""
    rows = _memory(results)["rows"]
    return [r for r in rows if r.get("attention") == attention and _mode(r) == "eager"]


def _peak(length: int, batch: int) -> Callable[[Results], str]:
    """Return a function for the peak memory of a step with NSA, in GiB."""

    def render(results: Results) -> str:
        rows = _memory_rows(results, "nsa")
        peaks = [r["peak_gib"] for r in rows if (r.get("S"), r.get("B")) == (length, batch)]
        return f"{peaks[0]:.1f}"

    return render


def _train_value(
    file: str, field: str, form: Callable[[float], str], **facts: Any
) -> Callable[[Results], str]:
    return lambda results: form(results.train(file, **facts)[field])


def _thousand(value: float) -> str:
    return f"{value / 1e3:.1f}k"


def _layers(mode: str, form: Callable[[float], str]) -> Callable[[Results], str]:
    return lambda results: ", ".join(
        form(r["ms"])
        for r in results.rows("train_layers.json")
        if r.get("mode") == mode and "ms" in r
    )


def _largest_batch(results: Results) -> str:
    """Return the largest batch of 2048-token rows within 80 GiB, with its peak memory."""
    rows = _memory_rows(results, "nsa")
    (largest,) = (r["largest_B_in_80_GiB"] for r in rows if "largest_B_in_80_GiB" in r)
    peaks = [r["peak_gib"] for r in rows if (r.get("S"), r.get("B")) == (2048, largest)]
    return f"B={largest} ({peaks[0]:.1f} GiB)"


def _slope(results: Results) -> str:
    """Return the slope of NSA's activation memory over length, on log-log axes."""
    (slope,) = (r["slope_in_S"] for r in _memory_rows(results, "nsa") if "slope_in_S" in r)
    return f"{slope:.3f}"


def _most_growth(results: Results) -> str:
    """Return the largest memory growth over the steps, in bytes."""
    return str(max(r["grown_bytes"] for r in results.rows("train_stall.json") if "median_ms" in r))


def _worst_stall(results: Results) -> str:
    """Return the largest ratio of a step time's 99th percentile to its median."""
    ratios = [r["p99_over_median"] for r in results.rows("train_stall.json") if "median_ms" in r]
    return f"{max(ratios):.3f}"


TRAINING: dict[str, Callable[[Results], str]] = {
    "train": train,
    "train-crossover": train_crossover,
    "train-memory": train_memory,
    "train-memory-gpu": train_memory_gpu,
    "recompute-price": recompute_price,
    "row-10-eager": _train_value("train_toy.json", "tokens_per_s", _thousand, mode="eager"),
    "row-10-graph": _train_value("train_toy.json", "tokens_per_s", _thousand, mode="compile+graph"),
    "row-11-step": _train_value("train.json", "step_ms", fixed(1), attention="nsa", B=1, **_ONE),
    "row-12-nsa-1": _fastest_at_2k("nsa", 1),
    "row-12-nsa-8": _fastest_at_2k("nsa", 8),
    "row-12-dense-1": _fastest_at_2k("dense", 1),
    "row-12-dense-8": _fastest_at_2k("dense", 8),
    "row-13-peak-2k": _peak(2048, 1),
    "row-13-peak-16": _peak(2048, 16),
    "row-13-largest": _largest_batch,
    "row-13-slope": _slope,
    "row-21-eager": _layers("eager", fixed(1)),
    "row-21-graph": _layers("graph", fixed(2)),
    "row-23-512": _train_value("train_stall.json", "median_ms", fixed(1), S=512, B=2),
    "row-23-2k": _train_value("train_stall.json", "median_ms", fixed(1), S=2048, B=1),
    "row-23-p99": _worst_stall,
    "row-23-grown": _most_growth,
    "row-23-2k-2": _train_value("train_stall.json", "median_ms", fixed(1), S=2048, B=2),
}

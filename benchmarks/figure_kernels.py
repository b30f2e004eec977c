"""Compute the figures of kernels: heads of models, blocks, serving, counters, and the A100 path.

A file comes from the GPU of the results, or else from another one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from figure_pieces import nearest
from figure_tables import ABSENT, PENDING, Results, digits, short_device, table, tokens

from nsa_bench.result import Measurement

DENSE_KERNELS = {
    "dense flash-attn 4": "FlashAttention-4",
    "dense cudnn": "cuDNN",
    "dense flash": "FlashAttention-2",
}
# Subjects of the core with code for sm_80, by title; a cell has the fastest one.
A100_SUBJECTS = {
    "NSA": ("auto", "triton"),
    "dense FlashAttention-2": ("dense flash-attn", "dense flash"),
    "sfnsa": ("sfnsa NSA",),
    "xunhao": ("xunhao NSA",),
}
A100 = "sm80"  # code of the A100, which a newer GPU ran
FOREIGN = "dense cudnn"  # in a rehearsal it runs its kernels for the GPU at hand
LEAST_MS = 3.0  # shorter kernels are left out of the counters
Row = dict[str, Any]


def shapes(results: Results) -> str:
    """Tabulate forward + backward of NSA and the fastest dense kernel, one length per shape."""
    problems: dict[tuple[int, str], list[Measurement]] = {}
    for m in (m for result in results.of_pieces("shapes-") for m in result.measurements):
        if m.phase == "both":
            problems.setdefault((m.length, m.shape), []).append(m)
    rows = []
    for (length, shape), measured in sorted(problems.items(), key=lambda item: item[0][0]):
        nsa = next((m for m in measured if m.kind == "combo"), None)
        dense = min((m for m in measured if m.kind == "dense"), key=_ms, default=None)
        if nsa is not None:
            rows.append([shape, tokens(length), *_compared(nsa, dense)])
    return table(["heads", "tokens", "NSA, ms", "dense, ms", "dense kernel", "speed-up"], rows)


def _ms(measurement: Measurement) -> float:
    """Return the median time; infinity if there is none."""
    return measurement.performance.median_ms if measurement.performance else math.inf


def _compared(nsa: Measurement, dense: Measurement | None) -> list[str]:
    times = [_ms(nsa), math.inf if dense is None else _ms(dense)]
    cells = [digits(ms) if math.isfinite(ms) else "-" for ms in times]
    if dense is None or not all(map(math.isfinite, times)):
        return [*cells, "-", "-"]
    name = DENSE_KERNELS.get(dense.subject, dense.subject)
    return [*cells, name, f"{times[1] / times[0]:.1f}x"]


def a100_times(results: Results) -> dict[tuple[str, int], dict[str, float]]:
    """Return (heads, tokens) -> subject -> ms of forward and backward on random inputs."""
    times: dict[tuple[str, int], dict[str, float]] = {}
    for m in (m for result in results.of_pieces("a100-core-") for m in result.measurements):
        if (m.phase, m.inputs) == ("both", "random") and m.performance:
            times.setdefault((m.shape, m.length), {})[m.subject] = m.performance.median_ms
    return times


def a100_core(results: Results) -> str:
    """Tabulate forward + backward of NSA, dense FlashAttention-2 and rivals on random inputs."""
    rows = []
    for (shape, length), cells in sorted(a100_times(results).items()):
        times = [[cells[s] for s in subjects if s in cells] for subjects in A100_SUBJECTS.values()]
        rows.append([shape, tokens(length), *(digits(min(ms)) if ms else "-" for ms in times)])
    return table(["heads", "tokens", *A100_SUBJECTS], rows)


def a100_decode(results: Results) -> str:
    """Return the range of a decode step's time over that with the code for the same GPU."""
    file = nearest(results.folder, "a100_decode.json", A100)
    if file is None:
        return PENDING
    own = file.parent.with_name(file.parent.name.removesuffix(f"_as_{A100}")) / "decode.json"
    own_ms, ms = (_steps(results, each) for each in (own, file))
    ratios = [ms[problem] / own_ms[problem] for problem in ms.keys() & own_ms.keys()]
    return f"{min(ratios):.2f} to {max(ratios):.2f} times" if ratios else PENDING


def _steps(results: Results, file: Path) -> dict[tuple[str, int, int], float]:
    """Return the ms of the step that `auto` chooses, by (shape, sequences, tokens)."""
    measurements = results.bench(file).measurements if file.exists() else []
    return {
        (m.shape, m.batch, m.length): m.performance.median_ms
        for m in measurements
        if m.subject == "auto" and m.performance
    }


def _block_rows(rows: list[Row]) -> list[tuple[Row, float, float]]:
    """Return each timed forward + backward, and the ms of its forward and of dense attention."""
    measured = [row for row in rows if row["median_ms"]]
    times = []
    for row in measured:
        if row["block_size"] is None or row["phase"] != "both":
            continue
        same = [r for r in measured if (r["shape"], r["S"]) == (row["shape"], row["S"])]
        (forward,) = (
            r["median_ms"]
            for r in same
            if (r["block_size"], r["phase"]) == (row["block_size"], "forward")
        )
        dense = min(
            r["median_ms"] for r in same if r["block_size"] is None and r["phase"] == "both"
        )
        times.append((row, forward, dense))
    return times


def block_attention(results: Results) -> str:
    """Tabulate the times of block_attention, and the speed-up over dense attention."""
    rows = []
    document = results.document("block_attention.json") or {"rows": []}
    for row, forward, dense in _block_rows(document["rows"]):
        both = row["median_ms"]
        cells = [tokens(row["S"]), str(row["block_size"])]
        rows.append([*cells, digits(forward), digits(both), f"{dense / both:.1f}x"])
    return table(["tokens", "block size", "forward", "forward + backward", "speed-up"], rows)


def block_attention_device(results: Results) -> str:
    """Return the GPU of block_attention."""
    document = results.document("block_attention.json")
    return short_device(document["machine"]["device"]) if document else PENDING


def block_attention_a100(results: Results) -> str:
    """State the speed-up over FlashAttention-2 by length, with the code for the A100."""
    document = results.document("blocks.json", A100) or {"rows": []}
    measured = [row for row in document["rows"] if row["implementation"] != FOREIGN]
    ratios: dict[int, list[float]] = {}
    for row, _, dense in _block_rows(measured):
        ratios.setdefault(row["S"], []).append(dense / row["median_ms"])
    parts = []
    for length, each in sorted(ratios.items()):
        ends = dict.fromkeys(f"{ratio:.1f}x" for ratio in (min(each), max(each)))
        parts.append(f"{' to '.join(ends)} at {tokens(length)}")
    return ", ".join(parts) or ABSENT


def serving_device(results: Results) -> str:
    """Return the GPU of the results of serving."""
    document = results.document("serving_decode.json")
    return short_device(document["device"]) if document else PENDING


def serving_steps(results: Results) -> str:
    """Tabulate a step by length and batch, beside the fastest dense attention."""
    columns = ["tokens", "sequences", "NSA, us", "NSA without a graph, us", "dense, us"]
    columns += ["dense, TB/s", "speed-up", "NSA, tokens per ms"]
    rows, document = [], results.document("serving_decode.json") or {"cells": []}
    for cell in sorted(document["cells"], key=lambda c: (c["length"], c["batch"])):
        own, eager = cell.get("nsa"), cell.get("eager")
        dense = min((cell[n] for n in ("dense", "flash-attn") if n in cell), default=None)
        _, heads, width = map(int, document["shape"].split()[0].split("/"))
        size = 4 * cell["batch"] * cell["length"] * heads * width  # bytes of K and V in bf16
        bandwidth = f"{size / dense / 1e6:.1f}" if dense else "-"
        ratio = f"{dense / own:.1f}x" if own and dense else "-"
        rate = digits(1e3 * cell["batch"] / own) if own else "-"
        times = (digits(us) if us else "-" for us in (own, eager, dense))
        rows.append([tokens(cell["length"]), str(cell["batch"]), *times, bandwidth, ratio, rate])
    return table(columns, rows)


def serving_prompts(results: Results) -> str:
    """Tabulate the time of a prompt, by how its tokens attend."""
    names = {
        "rows": "each token alone, ms",
        "chunks": "the tokens of a step together, ms",
        "cache": "`NSACache`, ms",
        "whole": "one call without a cache, ms",
    }
    document = results.document("serving_decode.json") or {"prompts": []}
    rows = [
        [tokens(row["tokens"]), *(digits(row[name]) if name in row else "-" for name in names)]
        for row in document["prompts"]
    ]
    return table(["prompt", *names.values()], rows)


def counters(results: Results) -> str:
    """Tabulate time, use of the units, and programs per multiprocessor of each long kernel."""
    document = results.document("counters.json") or {"launches": []}
    rows = [
        [
            " ".join(filter(None, (f"`{launch['kernel']}`", launch["branch"]))),
            digits(launch["ms"]),
            *(f"{launch[name]:.0f}%" for name in ("matrix_percent", "exp2_percent")),
            *(f"{launch[name]:.0f}%" for name in ("l2_percent", "hbm_percent")),
            f"{min(launch['programs_by_registers'], launch['programs_by_shared_memory']):.0f}",
        ]
        for launch in document["launches"]
        if launch["ms"] >= LEAST_MS
    ]
    return table(["kernel", "ms", "matrix units", "exp2", "L2", "HBM", "programs"], rows)


KERNELS: dict[str, Callable[[Results], str]] = {
    "shapes": shapes,
    "a100": a100_core,
    "a100-decode": a100_decode,
    "block-attention": block_attention,
    "block-attention-device": block_attention_device,
    "block-attention-a100": block_attention_a100,
    "serving-device": serving_device,
    "serving-steps": serving_steps,
    "serving-prompts": serving_prompts,
    "counters": counters,
}

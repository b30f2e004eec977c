"""The table of a decode result, and notes that explain it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nsa_bench.render.format import Rows, milliseconds, number, percent, size
from nsa_bench.timing import spread_of_repeats
from nsa_core.contract import SLOTS

if TYPE_CHECKING:
    from nsa_bench.result import Measurement, Result


def decode_rows(result: Result) -> Iterator[Rows]:
    """Yield one table per shape, dtype and kind of cache, with one row per cell and subject."""
    measurements = [m for m in result.measurements if m.phase == "decode"]
    for group in dict.fromkeys((m.shape, m.dtype, m.inputs) for m in measurements):
        title = f"{group[0]} {group[1]}, decode step, cache: {group[2]}"
        columns = [
            *("batch", "tokens", "subject", "ms", "q1 ms", "q3 ms", "CV %", "x dense"),
            *("% of floor", "TB/s", "MiB"),
            *(f"{slot} ms" for slot in SLOTS),
            *(f"{slot} %" for slot in SLOTS),
            "sum %",
        ]
        rows = [m for m in measurements if (m.shape, m.dtype, m.inputs) == group]
        yield title, columns, [_row(m, result.shares(m)) for m in rows]


def _row(m: Measurement, shares: dict[str, float]) -> list[str]:
    cell, p = [str(m.batch), str(m.length), m.subject], m.performance
    if p is None:
        return [*cell, "-", *[""] * (2 * len(SLOTS) + 8)]  # the summary states the reason
    timed = m.timed_parts
    times = [milliseconds(timed.get(slot)) if timed else "" for slot in SLOTS]
    none = "-" if timed else ""  # the summary states the reason
    fractions = [f"{shares[slot]:.0%}"[:-1] if slot in shares else none for slot in SLOTS]
    return [
        *cell,
        *(number(time_ms) for time_ms in (p.median_ms, p.q1_ms, p.q3_ms)),
        percent(spread_of_repeats(p)),
        number(m.ratio_to_dense),
        percent(m.floor_fraction),
        "-" if m.kind == "layer" else number(m.bytes / p.median_ms / 1e9),
        size(m.peak_memory_bytes),
        *times,
        *fractions,
        f"{sum(shares.values()):.0%}"[:-1] if shares else none,
    ]


def decode_notes(result: Result) -> Iterator[str]:
    """Yield sentences that explain the table."""
    if any(m.subject.endswith(", slots one by one") for m in result.measurements):
        yield (
            "slots one by one: the step run slot by slot. The step itself is fused, so its parts"
            " cannot be timed."
        )
    steps = [m for m in result.measurements if m.phase == "decode"]
    methods = {
        part.performance.method for m in steps for part in m.parts.values() if part.performance
    }
    within = {method for method in methods if method.startswith("within")}
    if within:
        yield (
            "slots: timed within a step; on a GPU, the time of a graph up to a slot minus that of"
            " the graph up to the slot before. %: share of the step."
        )
    if methods - within:  # older result files, which time each slot alone
        yield (
            "slots: each timed alone, with its own start and end, so their sum may exceed the time"
            " of the step. %: share of the step."
        )
    yield "CV %: standard deviation of 5 repeats over their mean."
    yield "TB/s: bytes that a step must move, over its time."
    yield (
        "layer step: attn(x, cache=cache) of a default layer with these heads, including"
        " projections and cache appends."
    )

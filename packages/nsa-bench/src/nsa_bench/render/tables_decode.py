"""The table of a decode result, and notes that explain it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nsa_bench.render.format import Rows, milliseconds, number, size
from nsa_bench.timing import spread_of_repeats
from nsa_core.contract import SLOTS

if TYPE_CHECKING:
    from nsa_bench.result import Measurement, Result


def decode_rows(result: Result) -> Iterator[Rows]:
    """Yield one table per shape, dtype and kind of cache, with one row per cell and subject."""
    measurements = [m for m in result.measurements if m.phase == "decode"]
    for group in dict.fromkeys((m.shape, m.dtype, m.inputs) for m in measurements):
        title = (
            f"{group[0]} {group[1]}, one step (cache: {group[2]}): median ms, and each slot's share"
            " of the step"
        )
        columns = [
            "B x tokens",
            "subject",
            "ms",
            "q1..q3",
            "CV",
            *SLOTS,
            "sum",
            "x dense",
            "TB/s",
            "of floor",
            "MiB",
        ]
        rows = [m for m in measurements if (m.shape, m.dtype, m.inputs) == group]
        yield title, columns, [_row(m) for m in rows]


def _row(m: Measurement) -> list[str]:
    cell, p = f"{m.batch} x {m.length}", m.performance
    if p is None:
        return [cell, m.subject, "-", *[""] * (len(SLOTS) + 7)]  # the summary states the reason
    spread = spread_of_repeats(p)
    shares = m.shares
    parts = [
        f"{milliseconds(m.parts[s].performance)} ({shares[s]:.0%})" if s in shares else ""
        for s in SLOTS
    ]
    rate = "-" if m.kind == "layer" else number(m.bytes / p.median_ms / 1e9)
    return [
        cell,
        m.subject,
        number(p.median_ms),
        f"{number(p.q1_ms)}..{number(p.q3_ms)}",
        "-" if spread is None else f"{spread:.1%}",
        *parts,
        f"{sum(shares.values()):.0%}" if shares else "",
        number(m.ratio_to_dense),
        rate,
        "-" if m.floor_fraction is None else f"{m.floor_fraction:.1%}",
        size(m.peak_memory_bytes),
    ]


def decode_notes(result: Result) -> Iterator[str]:
    """Yield sentences that explain the table."""
    if any(m.subject.endswith(", slots one by one") for m in result.measurements):
        yield (
            "shares: of the step run slot by slot; the step itself is fused, so its parts cannot be"
            " timed separately"
        )
    steps = [m for m in result.measurements if m.phase == "decode"]
    methods = {
        part.performance.method for m in steps for part in m.parts.values() if part.performance
    }
    within = {method for method in methods if method.startswith("within")}
    if within:
        yield (
            "slots: timed within a step; on a GPU, the time of a graph up to a slot minus that of"
            " the graph up to the slot before"
        )
    if methods - within:  # older result files, which time each slot alone
        yield (
            "slots: each timed alone, with its own start and end, so their sum may exceed the time"
            " of the step"
        )
    yield (
        "CV: standard deviation of 5 repeats over their mean; TB/s: bytes that a step must move,"
        " over its time"
    )
    yield (
        "layer step: attn(x, cache=cache) of a default layer with these heads, including"
        " projections and cache appends"
    )

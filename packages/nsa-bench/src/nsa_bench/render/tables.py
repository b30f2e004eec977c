"""The tables of a benchmark result, and of the changes between two results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from nsa_bench.render.format import Rows, milliseconds, number, size
from nsa_bench.render.tables_decode import decode_rows
from nsa_core.contract import SLOTS
from nsa_core.util.text import one_line

if TYPE_CHECKING:
    from nsa_bench.compare import Change
    from nsa_bench.result import Measurement, Result
    from nsa_bench.roofline import Peaks

_PARTS = ("compress", *SLOTS)


def tables(result: Result) -> list[Rows]:
    """Return all tables: the combinations, then the measurements."""
    return [_combos(result), *rows_of(result)]


def rows_of(result: Result) -> Iterator[Rows]:
    """Yield one table per shape, dtype, kind of inputs and phase."""
    if any(m.phase == "decode" for m in result.measurements):
        yield from decode_rows(result)
        return
    all_series = list(dict.fromkeys(m.series for m in result.measurements))
    for series in sorted(all_series, key=lambda s: (s[0], s[1], s[2])):
        shape, dtype, inputs, phase, batch = series
        title = (
            f"{shape} {dtype}, {phase}, batch {batch}, {inputs} inputs: ms per call (median of all"
            " samples)"
        )
        measurements = [m for m in result.measurements if m.series == series]
        has_graphs = any(m.performance and m.performance.eager for m in measurements)
        eager = ["eager"] * has_graphs
        columns = [
            "tokens",
            "subject",
            "total",
            "q1..q3",
            *eager,
            *_PARTS,
            "x dense",
            "of floor",
            "MiB",
        ]
        rows = sorted(measurements, key=lambda m: (m.length, m.kind, m.subject))
        yield title, columns, [_row(m, result.peaks[dtype], has_graphs) for m in rows]


def _row(m: Measurement, peaks: Peaks, has_graphs: bool) -> list[str]:
    if m.performance is None:
        # The summary states the reason.
        return [
            str(m.length),
            m.subject,
            "-",
            *[""] * (len(_PARTS) + 4 + has_graphs),
        ]
    p = m.performance
    eager = [number(p.eager_ms)] * has_graphs
    parts = [_part(m, name) for name in _PARTS] if m.kind == "combo" else [""] * len(_PARTS)
    bound = "ops" if m.flops / peaks.flops_per_s > m.bytes / peaks.bytes_per_s else "bytes"
    share = "-" if m.floor_fraction is None else f"{m.floor_fraction:.1%} {bound}"
    return [
        str(m.length),
        m.subject,
        number(p.median_ms),
        f"{number(p.q1_ms)}..{number(p.q3_ms)}",
        *eager,
        *parts,
        number(m.ratio_to_dense),
        share,
        size(m.peak_memory_bytes),
    ]


def _part(m: Measurement, name: str) -> str:
    return milliseconds(m.parts[name].performance) if name in m.parts else "-"


def _combos(result: Result) -> Rows:
    gates: dict[str, list[str]] = {}
    for gate in result.gates:
        gates.setdefault(gate.combo, []).append(
            "ok" if gate.ok else f"FAILED on {gate.shape} {gate.dtype}"
        )
    cells = [
        [
            name,
            *(one_line(backends.get(slot, "-")) for slot in SLOTS),
            "; ".join(dict.fromkeys(gates.get(name, ["-"]))),
        ]
        for name, backends in result.combos.items()
    ]
    return "Combinations", ["combination", *SLOTS, "correct"], cells


def changes_rows(changes: Sequence[Change]) -> Rows:
    """Return the table of changes between two results."""
    columns, cells = ["subject", "problem", "part", "old ms", "new ms", "new/old", "verdict"], []
    for change in changes:
        _, subject, shape, dtype, inputs, phase, _, length, part = change.key
        problem = f"{shape} {dtype} {inputs} {phase} S={length}"
        values = [number(change.old_ms), number(change.new_ms), number(change.ratio)]
        verdict = f"{change.verdict} ({one_line(change.note)})" if change.note else change.verdict
        cells.append([one_line(subject), problem, part, *values, verdict])
    return "", columns, cells

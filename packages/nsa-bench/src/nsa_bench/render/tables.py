"""The tables of a benchmark result, and of the changes between two results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from nsa_bench.render.format import Rows, milliseconds, number, percent, size
from nsa_bench.render.tables_decode import decode_rows
from nsa_bench.roofline import PARTS
from nsa_core.contract import SLOTS
from nsa_core.util.text import one_line

if TYPE_CHECKING:
    from nsa_bench.compare import Change
    from nsa_bench.result import Measurement, Result
    from nsa_bench.roofline import Peaks


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
        title = f"{shape} {dtype}, {phase}, batch {batch}, {inputs} inputs"
        measurements = [m for m in result.measurements if m.series == series]
        has_graphs = any(m.performance and m.performance.eager for m in measurements)
        parts = [name for name in PARTS if any(name in m.parts for m in measurements)]
        columns = [
            *("tokens", "subject", "ms", "q1 ms", "q3 ms"),
            *["eager ms"] * has_graphs,
            *("x dense", "% of floor", "bound", "MiB"),
            *(f"{name} ms" for name in parts),
        ]
        rows = sorted(measurements, key=lambda m: (m.length, m.kind, m.subject))
        yield title, columns, [_row(m, result.peaks[dtype], has_graphs, parts) for m in rows]


def _row(m: Measurement, peaks: Peaks, has_graphs: bool, parts: Sequence[str]) -> list[str]:
    if m.performance is None:
        # The summary states the reason.
        return [str(m.length), m.subject, "-", *[""] * (len(parts) + 6 + has_graphs)]
    p = m.performance
    bound = "ops" if m.flops / peaks.flops_per_s > m.bytes / peaks.bytes_per_s else "bytes"
    return [
        str(m.length),
        m.subject,
        *(number(time_ms) for time_ms in (p.median_ms, p.q1_ms, p.q3_ms)),
        *[number(p.eager_ms)] * has_graphs,
        number(m.ratio_to_dense),
        percent(m.floor_fraction),
        "-" if m.floor_fraction is None else bound,
        size(m.peak_memory_bytes),
        *(_part(m, name) if m.kind == "combo" else "" for name in parts),
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
        [name, _backends(backends), "; ".join(dict.fromkeys(gates.get(name, ["-"])))]
        for name, backends in result.combos.items()
    ]
    return "Combinations", ["combination", "backends", "correct"], cells


def _backends(versions: Mapping[str, str]) -> str:
    """Return the backend of each slot: "triton 0.1.0", or "sdpa 0.1.0: cmp; triton 0.1.0: sel"."""
    slots: dict[str, list[str]] = {}
    for slot in SLOTS:
        slots.setdefault(one_line(versions.get(slot, "-")), []).append(slot)
    if len(slots) == 1:
        return next(iter(slots))
    return "; ".join(f"{backend}: {', '.join(names)}" for backend, names in slots.items())


def changes_tables(changes: Sequence[Change]) -> list[Rows]:
    """Return the changes between two results: one table per shape, dtype, inputs and phase."""
    cells_by_problem: dict[str, list[list[str]]] = {}
    for change in changes:
        _, subject, shape, dtype, inputs, phase, batch, length, part = change.key
        problem = f"{shape} {dtype}, {phase}, batch {batch}, {inputs} inputs"
        values = [number(change.old_ms), number(change.new_ms), number(change.ratio)]
        cells_by_problem.setdefault(problem, []).append(
            [str(length), one_line(subject), part, *values, change.verdict, one_line(change.note)]
        )
    columns = ["tokens", "subject", "part", "old ms", "new ms", "new/old", "verdict", "note"]
    tables = []
    for problem, cells in cells_by_problem.items():
        if any(row[-1] for row in cells):
            tables.append((problem, columns, cells))
        else:
            tables.append((problem, columns[:-1], [row[:-1] for row in cells]))
    return tables

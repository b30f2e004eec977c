"""The tables of a benchmark result, and of the changes between two results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from nsa_bench.render.format import Rows, milliseconds, number, percent, size
from nsa_bench.roofline import PARTS
from nsa_bench.timing import spread_of_repeats
from nsa_core.contract import SLOTS

if TYPE_CHECKING:
    from nsa_bench.compare import Change
    from nsa_bench.result import Measurement, Result

_COLUMNS = (
    *("batch", "tokens", "subject", "ms", "q1 ms", "q3 ms", "eager ms", "CV %", "x dense"),
    *("% of floor", "bound", "GB/s", "MiB"),
    *(f"{name} ms" for name in PARTS),
    *(f"{name} %" for name in (*SLOTS, "sum")),
)


def tables(result: Result) -> list[Rows]:
    """Return all tables: the combinations, then the measurements."""
    return [_combos(result), *rows_of(result)]


def rows_of(result: Result) -> Iterator[Rows]:
    """Yield one table per shape, dtype, kind of inputs and phase, without empty columns."""
    groups: dict[str, list[Measurement]] = {}
    for m in sorted(result.measurements, key=_order):
        if m.phase == "decode":
            title = f"{m.shape} {m.dtype}, decode step, cache: {m.inputs}"
        else:
            title = f"{m.shape} {m.dtype}, {m.phase}, batch {m.batch}, {m.inputs} inputs"
        groups.setdefault(title, []).append(m)
    for title, measurements in groups.items():
        rows = [_cells(m, result) for m in measurements]
        if not any(m.performance and m.performance.eager for m in measurements):
            rows = [{**row, "eager ms": ""} for row in rows]
        columns = [name for name in _COLUMNS if any(row.get(name) for row in rows)]
        # A whole call has a mark in place of a time that another call of the table has.
        absent = dict.fromkeys((f"{name} ms" for name in PARTS), "-")
        rows = [
            {**absent, **row} if m.kind == "combo" and m.performance and m.parts else row
            for m, row in zip(measurements, rows)
        ]
        yield title, columns, [[row.get(name, "") for name in columns] for row in rows]


def _order(m: Measurement) -> tuple[str | int, ...]:
    """Return the key that sorts rows by problem, length and subject, but leaves those of decode."""
    if m.phase == "decode":
        return ()
    return (m.shape, m.dtype, m.inputs, m.length, m.kind, m.subject)


def _cells(m: Measurement, result: Result) -> dict[str, str]:
    """Return the cells of a measurement by column. If it has no time, the summary states why."""
    is_decode, p = m.phase == "decode", m.performance
    cells = {"batch": str(m.batch)} if is_decode else {}
    cells |= {"tokens": str(m.length), "subject": m.subject, "ms": milliseconds(p)}
    if p is None:
        return cells
    times = m.timed_parts if is_decode else {n: part.performance for n, part in m.parts.items()}
    cells |= {
        "q1 ms": number(p.q1_ms),
        "q3 ms": number(p.q3_ms),
        "x dense": number(m.ratio_to_dense),
        "% of floor": percent(m.floor_fraction),
        "MiB": size(m.peak_memory_bytes),
        **{f"{name} ms": milliseconds(time) for name, time in times.items()},
    }
    if not is_decode:
        peaks = result.peaks[m.dtype]
        bound = "ops" if m.flops / peaks.flops_per_s > m.bytes / peaks.bytes_per_s else "bytes"
        bound = "-" if m.floor_fraction is None else bound
        return cells | {"eager ms": number(p.eager_ms), "bound": bound}
    cells["CV %"] = percent(spread_of_repeats(p))
    cells["GB/s"] = "-" if m.kind == "layer" else number(m.bytes / p.median_ms / 1e6)
    if shares := result.shares(m) if times else {}:
        shares |= {"sum": sum(shares.values())}
        cells |= {
            f"{name} %": f"{shares[name]:.0%}"[:-1] if name in shares else "-"
            for name in (*SLOTS, "sum")
        }
    return cells


def _combos(result: Result) -> Rows:
    cells = []
    for name, backends in result.combos.items():
        # "auto", and "auto, 12/2/64 bfloat16 from 32768 tokens on" with other backends
        verdicts = [
            "ok" if gate.ok else f"FAILED on {gate.shape} {gate.dtype}"
            for gate in result.gates
            if f"{name}, ".startswith(f"{gate.combo}, ")
        ]
        cells.append([name, _backends(backends), "; ".join(dict.fromkeys(verdicts)) or "-"])
    return "Combinations", ["combination", "backends", "correct"], cells


def _backends(versions: Mapping[str, str]) -> str:
    """Return the backend of each slot: "triton 0.1.0", or "sdpa 0.1.0: cmp; triton 0.1.0: sel"."""
    slots: dict[str, list[str]] = {}
    for slot in SLOTS:
        slots.setdefault(versions.get(slot, "-"), []).append(slot)
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
            [length, subject, part, *values, change.verdict, change.note]
        )
    columns = ["tokens", "subject", "part", "old ms", "new ms", "new/old", "verdict", "note"]
    tables = []
    for problem, cells in cells_by_problem.items():
        if any(row[-1] for row in cells):
            tables.append((problem, columns, cells))
        else:
            tables.append((problem, columns[:-1], [row[:-1] for row in cells]))
    return tables

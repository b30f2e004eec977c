"""Tables, the summary and the self-contained HTML page of a bench result."""

from __future__ import annotations

import base64
import html
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from nsa_cli import output
from nsa_core.contract import SLOTS

if TYPE_CHECKING:
    from rich.table import Table

    from nsa_bench.compare import Change
    from nsa_bench.result import Measurement, Result
    from nsa_bench.roofline import Peaks
    from nsa_bench.timing import Performance

Rows = tuple[str, list[str], list[list[str]]]  # title, columns, cells
_MISSING = "yellow"  # style of a line that says why figures are missing
_PARTS = ("compress", *SLOTS)


def milliseconds(performance: Performance | None) -> str:
    """ "1.23" for a median of 1.23 ms; "-" where there is none."""
    return "-" if performance is None else number(performance.median_ms)


def number(value: float | None) -> str:
    """Three significant digits, never in exponent form; "-" for None."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def size(count: int | None) -> str:
    """Bytes in MiB."""
    return "-" if count is None else number(count / 2**20)


def rows_of(result: Result) -> Iterator[Rows]:
    """A table per shape, dtype, kind of inputs and phase."""
    if any(m.phase == "decode" for m in result.measurements):
        from nsa_cli.bench_decode import decode_rows

        yield from decode_rows(result)
        return
    problems = list(dict.fromkeys(m.problem for m in result.measurements))
    for problem in sorted(problems, key=lambda p: (p[0], p[1], p[2])):
        shape, dtype, inputs, phase, batch = problem
        title = f"{shape} {dtype}, {phase}, batch {batch}, {inputs} inputs: ms per call (median of all samples)"
        found = [m for m in result.measurements if m.problem == problem]
        graphs = any(m.performance and m.performance.eager for m in found)
        eager = ["eager"] * graphs
        columns = ["tokens", "subject", "total", "q1..q3", *eager, *_PARTS, "x dense", "of floor", "MiB"]
        rows = sorted(found, key=lambda m: (m.length, m.kind, m.subject))
        yield title, columns, [_row(m, result.peaks[dtype], graphs) for m in rows]


def _row(m: Measurement, peaks: Peaks, graphs: bool) -> list[str]:
    if m.performance is None:
        return [str(m.length), m.subject, "-", *[""] * (len(_PARTS) + 4 + graphs)]  # the summary says why
    p = m.performance
    eager = [number(p.eager_ms)] * graphs
    parts = [_part(m, name) for name in _PARTS] if m.kind == "combo" else [""] * len(_PARTS)
    bound = "ops" if m.flops / peaks.flops_per_s > m.bytes / peaks.bytes_per_s else "bytes"
    share = "-" if m.floor_fraction is None else f"{m.floor_fraction:.1%} {bound}"
    return [
        str(m.length), m.subject, number(p.median_ms), f"{number(p.q1_ms)}..{number(p.q3_ms)}", *eager, *parts,
        number(m.ratio_to_dense), share, size(m.peak_memory_bytes),
    ]  # fmt: skip


def _part(m: Measurement, name: str) -> str:
    return milliseconds(m.parts[name].performance) if name in m.parts else "-"


def tables(result: Result) -> list[Table]:
    """What is printed: the combinations, then the figures."""
    made = []
    for title, columns, cells in [_combos(result), *rows_of(result)]:
        table = output.plain_table(*columns)
        table.title, table.title_justify = title, "left"
        for cell in cells:
            table.add_row(*cell)
        made.append(table)
    return made


def _combos(result: Result) -> Rows:
    gates: dict[str, list[str]] = {}
    for gate in result.gates:
        gates.setdefault(gate.combo, []).append("ok" if gate.ok else f"FAILED on {gate.shape} {gate.dtype}")
    cells = [
        [
            name,
            *(output.one_line(who.get(slot, "-")) for slot in SLOTS),
            "; ".join(dict.fromkeys(gates.get(name, ["-"]))),
        ]
        for name, who in result.combos.items()
    ]
    return "Combinations", ["combination", *SLOTS, "correct"], cells


def summary(result: Result) -> Iterator[tuple[str, str]]:
    """(style, line): failures, what did not run, crossovers, and how it was measured."""
    for gate in result.gates:
        for failure in gate.failures[:5]:
            yield (
                "red",
                f"NOT CORRECT {gate.combo}, {gate.shape} {gate.dtype} ({gate.case}): {output.one_line(failure)}",
            )
    for name, reason in result.skipped.items():
        yield "", f"{name}: not available: {output.one_line(reason)}"
    for text in _with_reasons(result, lambda performance, reason: reason):
        yield _MISSING, f"no figure: {text}"
    for text in _with_reasons(result, lambda performance, reason: performance.not_captured if performance else ""):
        yield "", f"not captured, its figure holds the host's launches too: {text}"
    for found in result.crossovers:
        yield "", f"{found.subject}, {found.shape} {found.dtype} {found.inputs}, {found.phase}: {found.sentence}"
    if any(m.phase == "decode" for m in result.measurements):
        from nsa_cli.bench_decode import decode_notes

        yield from (("", line) for line in decode_notes(result))
    where = result.environment.get("device", "?")
    rates = "; ".join(
        f"{dtype} {peaks.flops_per_s / 1e12:.3g} TFLOP/s, {peaks.bytes_per_s / 1e9:.4g} GB/s"
        for dtype, peaks in result.peaks.items()
    )
    if rates:
        yield "", f"peak rates measured: {rates}"
    yield (
        "",
        "of floor: the least time for the counted operations (ops) or bytes, whichever is longer, over the time; "
        "x dense: fastest dense time over this one",
    )
    if any(m.performance and m.performance.eager for m in result.measurements):
        yield "", "eager: the same call as Python launches it; total is of a CUDA graph where the two differ"
    methods = sorted({m.performance.method for m in result.measurements if m.performance})
    known = result.settings.get("methods", {})
    how = "; ".join(str(known.get(name, name)) for name in methods) or "nothing was timed"
    line = f"{where}, {result.settings.get('threads')} CPU thread(s), {how}; {result.seconds:.0f} s"
    failed = sum(not gate.ok for gate in result.gates)
    if result.interrupted is not None:
        cut, red = result.interrupted, f"{failed} of {len(result.gates)} gate(s) judged so far red"
        yield "bold red", f"INTERRUPTED by {cut.signal}, {cut.cells_left} of {cut.cells} cells left, {red}: {line}"
    elif result.failed:
        yield "bold red", f"FAILED ({failed} gate(s) red): {line}"
    else:
        yield "bold green", f"{len(result.gates)} gate(s) passed: {line}"


def _with_reasons(result: Result, reason_of: Callable[[Performance | None, str], str]) -> Iterator[str]:
    """A line per reason that ``reason_of`` finds in a figure and the reason it is missing, with all that have it."""
    found: dict[tuple[str, ...], list[int]] = {}
    for m in result.measurements:
        reasons = {m.subject: reason_of(m.performance, m.reason)}
        reasons |= {f"{m.subject}, {n} alone": reason_of(part.performance, part.reason) for n, part in m.parts.items()}
        for subject, reason in reasons.items():
            if reason:
                found.setdefault((subject, m.shape, m.dtype, m.inputs, m.phase, reason), []).append(m.length)
    together: dict[tuple[str, str], list[str]] = {}
    for (subject, shape, dtype, inputs, phase, reason), lengths in found.items():
        tokens = ", ".join(map(str, lengths))
        together.setdefault((f"{shape} {dtype} {inputs}, {phase}, {tokens} tokens", reason), []).append(subject)
    for (what, reason), subjects in together.items():
        yield f"{'; '.join(subjects)}, {what}: {reason}"


def changes_table(changes: Sequence[Change]) -> Table:
    """What differs between two results."""
    made = output.plain_table("subject", "problem", "part", "old ms", "new ms", "new/old", "verdict")
    for change in changes:
        _, subject, shape, dtype, inputs, phase, _, length, part = change.key
        where = f"{shape} {dtype} {inputs} {phase} S={length}"
        values = [number(change.old_ms), number(change.new_ms), number(change.ratio)]
        verdict = f"{change.verdict} ({output.one_line(change.note)})" if change.note else change.verdict
        made.add_row(output.one_line(subject), where, part, *values, verdict)
    return made


_STYLE = """body{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:1400px;padding:0 1em;color:#1a1a1a}
table{border-collapse:collapse;margin:0 0 2em;font-size:13px}td,th{padding:3px 9px;text-align:right;
border-bottom:1px solid #ddd}td:nth-child(-n+2),th:nth-child(-n+2){text-align:left}caption{text-align:left;
font-weight:600;padding:6px 0}img{max-width:100%}.scroll{overflow-x:auto}pre{overflow-x:auto;background:#f6f6f6;
padding:1em}"""


def page(result: Result) -> str:
    """The report as one HTML file: no script, nothing loaded from elsewhere."""
    import json

    from nsa_bench.render.plots import render

    picture = base64.b64encode(render(result, "png")).decode()
    told = list(summary(result))
    lines = "".join(f"<li>{html.escape(line)}</li>" for style, line in told if style != _MISSING)
    missing = "".join(f"<li>{html.escape(line)}</li>" for style, line in told if style == _MISSING)
    body = "".join(_html_table(rows) for rows in [_combos(result), *rows_of(result)])
    facts = {"environment": result.environment, "settings": result.settings}
    gaps = f"<h2>Figures that are missing</h2><ul>{missing}</ul>" if missing else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>nsa bench</title><style>{_STYLE}</style>'
        f"</head><body><h1>nsa bench</h1><ul>{lines}</ul>"
        f'<img alt="Plots of the tables below" src="data:image/png;base64,{picture}">{body}'
        f"{gaps}<h2>Machine and settings</h2><pre>{html.escape(json.dumps(facts, indent=1))}</pre></body></html>\n"
    )


def _html_table(rows: Rows) -> str:
    title, columns, cells = rows
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in cell) + "</tr>" for cell in cells)
    return (
        f'<div class="scroll"><table><caption>{html.escape(title)}</caption><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )

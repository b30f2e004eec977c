"""What a bench result says in sentences: failures, what is missing and why, crossovers, how it was
measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from nsa_bench.render.tables_decode import decode_notes
from nsa_core.util.text import one_line

if TYPE_CHECKING:
    from nsa_bench.result import Result
    from nsa_bench.timing import Performance

MISSING = "yellow"  # style of a line that says why figures are missing


def summary(result: Result) -> Iterator[tuple[str, str]]:
    """(style, line): failures, what did not run, crossovers, and how it was measured."""
    for gate in result.gates:
        for failure in gate.failures[:5]:
            yield (
                "red",
                (
                    f"NOT CORRECT {gate.combo}, {gate.shape} {gate.dtype} ({gate.case}):"
                    f" {one_line(failure)}"
                ),
            )
    for name, reason in result.skipped.items():
        yield "", f"{name}: not available: {one_line(reason)}"
    for text in _with_reasons(result, lambda performance, reason: reason):
        yield MISSING, f"no figure: {text}"
    for text in _with_reasons(
        result, lambda performance, reason: performance.not_captured if performance else ""
    ):
        yield "", f"not captured, its figure holds the host's launches too: {text}"
    for found in result.crossovers:
        yield (
            "",
            (
                f"{found.subject}, {found.shape} {found.dtype} {found.inputs}, {found.phase}:"
                f" {found.sentence}"
            ),
        )
    if any(m.phase == "decode" for m in result.measurements):
        yield from (("", line) for line in decode_notes(result))
    yield from (("", line) for line in _notes(result))
    yield _verdict(result)


def _notes(result: Result) -> Iterator[str]:
    """What the tables' columns mean, and the machine's measured rates."""
    rates = "; ".join(
        f"{dtype} {peaks.flops_per_s / 1e12:.3g} TFLOP/s, {peaks.bytes_per_s / 1e9:.4g} GB/s"
        for dtype, peaks in result.peaks.items()
    )
    if rates:
        yield f"peak rates measured: {rates}"
    yield (
        "of floor: the least time for the counted operations (ops) or bytes, whichever is"
        " longer, over the time; x dense: fastest dense time over this one"
    )
    if any(m.performance and m.performance.eager for m in result.measurements):
        yield (
            "eager: the same call as Python launches it; total is of a CUDA graph where the two"
            " differ"
        )


def _verdict(result: Result) -> tuple[str, str]:
    """The last line, with its style: whether every gate passed, and how times were taken."""
    methods = sorted({m.performance.method for m in result.measurements if m.performance})
    known = result.settings.get("methods", {})
    how = "; ".join(str(known.get(name, name)) for name in methods) or "nothing was timed"
    where, threads = result.environment.get("device", "?"), result.settings.get("threads")
    line = f"{where}, {threads} CPU thread(s), {how}; {result.seconds:.0f} s"
    failed = sum(not gate.ok for gate in result.gates)
    if result.interrupted is not None:
        cut = result.interrupted
        left = f"{cut.cells_left} of {cut.cells} cells left"
        red = f"{failed} of {len(result.gates)} gate(s) judged so far red"
        return "bold red", f"INTERRUPTED by {cut.signal}, {left}, {red}: {line}"
    if result.failed:
        return "bold red", f"FAILED ({failed} gate(s) red): {line}"
    return "bold green", f"{len(result.gates)} gate(s) passed: {line}"


def _with_reasons(
    result: Result, reason_of: Callable[[Performance | None, str], str]
) -> Iterator[str]:
    """A line per reason that ``reason_of`` finds in a figure and the reason it is missing, with all
    that have it.
    """
    found: dict[tuple[str, ...], list[int]] = {}
    for m in result.measurements:
        reasons = {m.subject: reason_of(m.performance, m.reason)}
        reasons |= {
            f"{m.subject}, {n} alone": reason_of(part.performance, part.reason)
            for n, part in m.parts.items()
        }
        for subject, reason in reasons.items():
            if reason:
                found.setdefault((subject, m.shape, m.dtype, m.inputs, m.phase, reason), []).append(
                    m.length
                )
    together: dict[tuple[str, str], list[str]] = {}
    for (subject, shape, dtype, inputs, phase, reason), lengths in found.items():
        tokens = ", ".join(map(str, lengths))
        together.setdefault(
            (f"{shape} {dtype} {inputs}, {phase}, {tokens} tokens", reason), []
        ).append(subject)
    for (what, reason), subjects in together.items():
        yield f"{'; '.join(subjects)}, {what}: {reason}"

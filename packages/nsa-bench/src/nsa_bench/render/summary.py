"""The summary of a benchmark result: failures, missing times, crossovers, and the method."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nsa_bench.result import Measurement, Result
    from nsa_bench.timing import Performance

MISSING = "yellow"  # style of a line about missing times


def summary(result: Result) -> Iterator[tuple[str, str]]:
    """Yield (style, line): the legend of the tables, faults, crossovers, and the verdict.

    The answers come last, next to the prompt of a terminal.
    """
    if any(m.phase == "decode" for m in result.measurements):
        yield from (("", line) for line in _decode_notes(result))
    yield from (("", line) for line in _notes(result))
    for gate in result.gates:
        for failure in gate.failures[:5]:
            yield (
                "red",
                f"NOT CORRECT {gate.combo}, {gate.shape} {gate.dtype} ({gate.case}): {failure}",
            )
    for name, reason in result.skipped.items():
        yield "", f"{name}: not available: {reason}"
    for text in _with_reasons(result, lambda performance, reason: reason):
        yield MISSING, f"no figure: {text}"
    for text in _with_reasons(
        result, lambda performance, reason: performance.not_captured if performance else ""
    ):
        yield "", f"not captured, so its time includes host launches: {text}"
    for text in _grouped((m, m.subject, result.not_comparable(m)) for m in result.measurements):
        yield "", f"not comparable: the parts of {text}"
    for c in result.crossovers:
        yield "", f"{c.subject}, {c.shape} {c.dtype} {c.inputs}, {c.phase}: {c.sentence}"
    yield _verdict(result)


def _decode_notes(result: Result) -> Iterator[str]:
    """Yield sentences that explain the table."""
    if any(m.subject.endswith(", slots one by one") for m in result.measurements):
        yield (
            "slots one by one: the step run slot by slot. The step itself is fused, so its parts"
            " cannot be timed."
        )
    if any(part.performance for m in result.measurements for part in m.parts.values()):
        yield (
            "slots: timed within a step; on a GPU, the time of a graph up to a slot minus that of"
            " the graph up to the slot before. %: share of the step."
        )
    yield "CV %: standard deviation of 5 repeats over their mean."
    yield "GB/s: bytes that a step must move, over its time."
    yield (
        "layer step: attn(x, cache=cache) of a default layer with these heads, including"
        " projections and cache appends."
    )


def _notes(result: Result) -> Iterator[str]:
    """Explain the columns of the tables and state the measured peak rates."""
    rates = "; ".join(
        f"{dtype} {peaks.flops_per_s / 1e12:.3g} TFLOP/s, {peaks.bytes_per_s / 1e9:.4g} GB/s"
        for dtype, peaks in result.peaks.items()
    )
    if rates:
        yield f"peak rates measured: {rates}"
    yield "ms: median of all samples; q1 and q3: their quartiles."
    if any(m.timed_parts and m.phase != "decode" for m in result.measurements):
        yield from _notes_on_parts(result)
    yield "x dense: fastest dense time over this time."
    floor = (
        "% of floor: time of the counted operations or bytes at the measured peak rates, whichever"
        " is longer, over the measured time."
    )
    if any(m.phase != "decode" for m in result.measurements):
        floor += " bound: the longer one."
    yield floor
    if any(m.performance and m.performance.eager for m in result.measurements):
        yield (
            "eager: the same call launched from Python. Where the two differ, ms is the time of a"
            " CUDA graph."
        )


def _notes_on_parts(result: Result) -> Iterator[str]:
    """Explain the columns of the parts, and state what they add up to."""
    sums: dict[tuple[str, ...], list[float]] = {}
    for m in result.measurements:
        shares = result.shares(m)
        if shares and len(shares) == len(m.parts) and m.phase != "decode":
            key = (m.subject, f"{m.shape} {m.dtype} {m.inputs}, {m.phase}")
            sums.setdefault(key, []).append(sum(shares.values()))
    for (subject, problem), totals in sums.items():
        bounds = dict.fromkeys(f"{total:.0%}"[:-1] for total in (min(totals), max(totals)))
        yield f"parts of {subject}, {problem}: together {' to '.join(bounds)} % of ms"
    yield (
        "parts: each kernel timed alone. Together they differ from ms where kernels run side by"
        " side, where caches help one of the two, and by the work between the kernels."
    )
    if any("causal" in m.parts for m in result.measurements):
        yield (
            "causal: in a sequence of at most n * l' tokens, every token selects all its blocks:"
            " selection does not run, and causal attention takes the place of select and sel."
        )


def _verdict(result: Result) -> tuple[str, str]:
    """Return (style, last line): whether every gate passed, and the timing methods."""
    methods = sorted({m.performance.method for m in result.measurements if m.performance})
    known = result.settings.get("methods", {})
    how = "; ".join(known.get(name, name) for name in methods) or "nothing was timed"
    device, threads = result.environment.get("device", "?"), result.settings.get("threads")
    noun = "thread" if threads == 1 else "threads"
    line = f"{device}, {threads} CPU {noun}, {how}; {result.seconds:.0f} s"
    reasons = dict.fromkeys(m.reason for m in result.measurements if m.kind == "combo")
    why = "; ".join(reasons) or "no backend is ready"
    untimed = f"NO COMBINATION WAS TIMED ({why}); " if result.timed_nothing else ""
    failed, checks = sum(not gate.ok for gate in result.gates), len(result.gates)
    if result.interrupted is not None:
        cut = result.interrupted
        left = f"{cut.cells_left} of {cut.cells} cells left"
        red = f"{failed} of {checks} correctness checks failed so far"
        return "bold red", f"INTERRUPTED by {cut.signal}, {left}, {red}: {line}"
    if result.failed:
        return "bold red", f"{untimed}FAILED {failed} of {checks} correctness checks: {line}"
    passed = f"{checks} of {checks} correctness checks passed" if checks else "nothing was checked"
    return "bold red" if untimed else "bold green", f"{untimed}{passed}: {line}"


def _with_reasons(
    result: Result, reason_of: Callable[[Performance | None, str], str]
) -> Iterator[str]:
    """Return one line per reason, with every subject that has it.

    ``reason_of(performance, reason)`` returns the reason of one time, or "".
    """
    entries = []
    for m in result.measurements:
        entries.append((m, m.subject, reason_of(m.performance, m.reason)))
        for name, part in m.parts.items():
            reason = reason_of(part.performance, part.reason)
            entries.append((m, f"{m.subject}, {name} alone", reason))
    return _grouped(entries)


def _grouped(entries: Iterable[tuple[Measurement, str, str]]) -> Iterator[str]:
    """Yield one line per reason, from triples of a measurement, a subject and its reason or ""."""
    lengths_by_reason: dict[tuple[str, ...], list[int]] = {}
    for m, subject, reason in entries:
        if reason:
            key = (subject, m.shape, m.dtype, m.inputs, m.phase, reason)
            lengths_by_reason.setdefault(key, []).append(m.length)
    subjects_by_reason: dict[tuple[str, str], list[str]] = {}
    for (subject, shape, dtype, inputs, phase, reason), lengths in lengths_by_reason.items():
        tokens = ", ".join(map(str, lengths))
        problem = f"{shape} {dtype} {inputs}, {phase}, {tokens} tokens"
        subjects_by_reason.setdefault((problem, reason), []).append(subject)
    for (problem, reason), subjects in subjects_by_reason.items():
        yield f"{'; '.join(subjects)}, {problem}: {reason}"

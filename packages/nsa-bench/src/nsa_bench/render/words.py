"""Words of plots and pages: token counts, shapes, phases, subjects, crossovers and headlines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nsa_bench.render.format import number
from nsa_bench.result import DECODE_SUFFIXES, EAGER, Crossover, Measurement, Result

PHASES = {
    "forward": "Forward",
    "backward": "Backward",
    "both": "Forward and backward",
    "decode": "One decode step",
}
_MEGA, _KILO = 1 << 20, 1 << 10


def tokens(count: int) -> str:
    """Write a measured number of tokens exactly: "512", "8k" for 8192, "1M", "40000"."""
    for unit, letter in ((_MEGA, "M"), (_KILO, "k")):
        if count >= unit and count % unit == 0:
            return f"{count // unit}{letter}"
    return str(count)


def about_tokens(count: int) -> str:
    """Write an interpolated number of tokens with one decimal: "9.3k" for 9515."""
    exact = tokens(count)
    return f"{count / _KILO:.1f}k" if exact.isdigit() and count >= _KILO else exact


def phase_words(phase: str) -> str:
    """Write "both" as "Forward and backward"; an unknown phase stays as it is."""
    return PHASES.get(phase, phase)


def shape_words(shape: str) -> str:
    """Write "64/4/192/128" as "64 query heads, 4 key/value heads, head width 192 (values 128)"."""
    parts = shape.split("/")
    if len(parts) not in (3, 4) or not all(part.isdigit() for part in parts):
        return shape
    values = f" (values {parts[3]})" if len(parts) == 4 else ""
    return f"{parts[0]} query heads, {parts[1]} key/value heads, head width {parts[2]}{values}"


def problem_words(m: Measurement) -> str:
    """Name the problem without its phase and length: "64/4/128, bfloat16, random inputs"."""
    if m.phase == "decode":
        return f"{m.shape}, {m.dtype}, cache: {m.inputs}"
    batch = f", batch {m.batch}" if m.batch != 1 else ""
    return f"{m.shape}, {m.dtype}, {m.inputs} inputs{batch}"


def cell_words(m: Measurement) -> str:
    """Name a decode cell: "256 sequences of 8k tokens"."""
    noun = "sequence" if m.batch == 1 else "sequences"
    return f"{m.batch} {noun} of {tokens(m.length)} tokens"


def base_subject(subject: str) -> str:
    """Return a subject without the suffixes of decode: "auto" for "auto, layer step, eager"."""
    for suffix in DECODE_SUFFIXES:
        subject = subject.replace(suffix, "")
    return subject


def label(m: Measurement) -> str:
    """Name a subject for a reader who knows no backend: "NSA auto", "dense cudnn"."""
    return f"NSA {m.subject}" if m.kind in ("combo", "layer") else m.subject


def crossover_words(crossover: Crossover, shortest: int) -> str:
    """Say from which length the combination is faster; "" if it never is.

    ``shortest`` is the shortest measured length, which is no crossover but a lower bound.
    """
    if crossover.length is None:
        return ""
    if crossover.length <= shortest:
        return "faster than dense at every length"
    return f"faster than dense from {about_tokens(crossover.length)} tokens"


def fastest_combination(measurements: Sequence[Measurement]) -> Measurement | None:
    """Return the combination with the highest ratio to dense attention at the longest length."""
    candidates = [
        m
        for m in measurements
        if m.kind == "combo" and m.ratio_to_dense is not None and not m.subject.endswith(EAGER)
    ]
    if not candidates:
        return None
    longest = max(m.length for m in candidates)
    return max(
        (m for m in candidates if m.length == longest), key=lambda m: m.ratio_to_dense or 0.0
    )


def headlines(result: Result) -> Iterator[str]:
    """Yield the verdict in sentences: per phase the range of crossovers and the highest ratio."""
    for phase in dict.fromkeys(m.phase for m in result.measurements):
        measurements = [m for m in result.measurements if m.phase == phase]
        best = fastest_combination(measurements)
        if phase == "decode":
            yield from _decode_headlines(measurements)
        elif best is not None:
            yield _headline(result, best, measurements)


def _headline(result: Result, best: Measurement, measurements: list[Measurement]) -> str:
    own = [m for m in measurements if m.subject == best.subject and m.ratio_to_dense is not None]
    problems = {m.series for m in own}
    lengths = sorted(
        c.length
        for c in result.crossovers
        if c.subject == best.subject and c.series in problems and c.length is not None
    )
    assert best.ratio_to_dense is not None  # as selected
    at_best = f"at {tokens(best.length)} tokens ({problem_words(best)})"
    start = f"{phase_words(best.phase)}: {label(best)}"
    if not lengths:
        slower = number(1 / best.ratio_to_dense)
        return f"{start} is slower than dense attention, {slower} times its time {at_best}."
    # A combination that is faster at every length may be faster below the shortest one, too.
    bound = " or less" if lengths[0] == min(m.length for m in own) else ""
    first, last = about_tokens(lengths[0]) + bound, about_tokens(lengths[-1])
    where = f"from {first} tokens on"
    if lengths[0] != lengths[-1]:
        where = f"from {first} to {last} tokens on, depending on the problem"
    some = f" in {len(lengths)} of {len(problems)} problems" if len(lengths) < len(problems) else ""
    return (
        f"{start} is faster than dense attention {where}{some}; it is"
        f" {number(best.ratio_to_dense)} times as fast {at_best}."
    )


def _decode_headlines(measurements: list[Measurement]) -> Iterator[str]:
    for cell in dict.fromkeys((m.series, m.length) for m in measurements):
        best = fastest_combination([m for m in measurements if (m.series, m.length) == cell])
        if best is None or best.performance is None or best.ratio_to_dense is None:
            continue
        ratio = best.ratio_to_dense
        verdict = (
            f"{number(ratio)} times as fast as"
            if ratio >= 1
            else f"{number(1 / ratio)} times the time of"
        )
        yield (
            f"{cell_words(best)} ({best.shape}): a step of {label(best)} takes"
            f" {number(best.performance.median_ms)} ms, {verdict} dense attention."
        )

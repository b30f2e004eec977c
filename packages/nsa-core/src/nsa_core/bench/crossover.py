"""The length from which a combination is faster than the fastest dense kernel of the same run."""

from __future__ import annotations

import math
from collections.abc import Sequence

from nsa_core.bench.result import Crossover, Measurement, Problem


def fastest_dense(measurements: Sequence[Measurement]) -> dict[tuple[Problem, int], Measurement]:
    """Per (problem, length) the dense kernel with the lowest median."""
    best: dict[tuple[Problem, int], Measurement] = {}
    for m in measurements:
        if m.kind == "dense" and m.performance is not None:
            key = (m.problem, m.length)
            rival = best.get(key)
            if rival is None or rival.performance is None or m.performance.median_ms < rival.performance.median_ms:
                best[key] = m
    return best


def crossovers(measurements: Sequence[Measurement]) -> list[Crossover]:
    """One per combination and problem."""
    dense = fastest_dense(measurements)
    curves: dict[tuple[str, Problem], list[Measurement]] = {}
    for m in measurements:
        if m.kind == "combo":
            curves.setdefault((m.subject, m.problem), []).append(m)
    found = []
    for (subject, problem), points in curves.items():
        pairs = []
        for m in sorted(points, key=lambda m: m.length):
            rival = dense.get((problem, m.length))
            if m.performance is not None and rival is not None and rival.performance is not None:
                pairs.append((m.length, m.performance.median_ms / rival.performance.median_ms))
        length, sentence = crossing(pairs)
        found.append(Crossover(subject, *problem, length, sentence))
    return found


def crossing(pairs: Sequence[tuple[int, float]]) -> tuple[int | None, str]:
    """(length, sentence) for ascending (length, own time / dense time).

    The length after which every measured ratio is below 1, interpolated on log-log axes between the two measured
    lengths around it; None where the longest ratio is not below 1, or nothing was measured.
    """
    if not pairs:
        return None, "not known: no length where both were measured"
    last, ratio = pairs[-1]
    if ratio >= 1:
        return None, f"dense is faster up to {last} tokens ({_times(ratio)} times as fast at {last})"
    slower = [index for index, (_, r) in enumerate(pairs) if r >= 1]
    if not slower:
        return pairs[0][0], f"faster than dense at every measured length, from {pairs[0][0]} tokens"
    (low, above), (high, below) = pairs[slower[-1]], pairs[slower[-1] + 1]
    share = math.log(above) / (math.log(above) - math.log(below))
    length = round(low * (high / low) ** share)
    return length, f"faster than dense from about {length} tokens (between {low} and {high})"


def _times(ratio: float) -> str:
    return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.2g}"

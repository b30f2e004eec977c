"""The length from which a combination is faster than the fastest dense kernel of the same run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from nsa_bench.result import Crossover, Measurement, Series
from nsa_bench.timing import Performance

Took = Callable[[Performance], float]


def crossovers(measurements: Sequence[Measurement]) -> list[Crossover]:
    """One per combination and series."""
    curves: dict[tuple[str, Series], list[Measurement]] = {}
    for m in measurements:
        if m.kind == "combo":
            curves.setdefault((m.subject, m.series), []).append(m)
    by_method, eagerly = (_fastest_dense(measurements, took) for took in (_median, _eager))
    found = []
    for (subject, series), points in curves.items():
        length, sentence = crossing(_pairs(points, by_method, _median))
        eager_length, eager = crossing(_pairs(points, eagerly, _eager))
        if eager != sentence:
            sentence += f"; without CUDA graphs {eager}"
        found.append(Crossover(subject, *series, length, sentence, eager_length))
    return found


def _median(performance: Performance) -> float:
    return performance.median_ms


def _eager(performance: Performance) -> float:
    return performance.eager_ms


def _fastest_dense(
    measurements: Sequence[Measurement], took: Took
) -> dict[tuple[Series, int], float]:
    """Per (series, length) the time of the fastest dense kernel."""
    best: dict[tuple[Series, int], float] = {}
    for m in measurements:
        if m.kind == "dense" and m.performance is not None:
            key = (m.series, m.length)
            best[key] = min(took(m.performance), best.get(key, math.inf))
    return best


def _pairs(
    points: Sequence[Measurement], dense: Mapping[tuple[Series, int], float], took: Took
) -> list[tuple[int, float]]:
    """(length, own time over the fastest dense one's) of what both have a figure of, ascending."""
    return [
        (m.length, took(m.performance) / dense[m.series, m.length])
        for m in sorted(points, key=lambda m: m.length)
        if m.performance is not None and (m.series, m.length) in dense
    ]


def crossing(pairs: Sequence[tuple[int, float]]) -> tuple[int | None, str]:
    """(length, sentence) for ascending (length, own time / dense time).

    The length after which every measured ratio is below 1, interpolated on log-log axes between the
    two measured lengths around it; None where the longest ratio is not below 1, or nothing was
    measured.
    """
    if not pairs:
        return None, "not known: no length where both were measured"
    last, ratio = pairs[-1]
    if ratio >= 1:
        return (
            None,
            f"dense is faster up to {last} tokens ({_times(ratio)} times as fast at {last})",
        )
    slower = [index for index, (_, r) in enumerate(pairs) if r >= 1]
    if not slower:
        return pairs[0][0], f"faster than dense at every measured length, from {pairs[0][0]} tokens"
    (low, above), (high, below) = pairs[slower[-1]], pairs[slower[-1] + 1]
    share = math.log(above) / (math.log(above) - math.log(below))
    length = round(low * (high / low) ** share)
    return length, f"faster than dense from about {length} tokens (between {low} and {high})"


def _times(ratio: float) -> str:
    return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.2g}"

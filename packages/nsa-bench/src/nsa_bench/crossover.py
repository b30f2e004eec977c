"""Crossover: the length from which a combination beats the run's fastest dense kernel."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence

from nsa_bench.render.format import number
from nsa_bench.result import Crossover, Measurement, Series
from nsa_bench.timing import Performance

TimeOf = Callable[[Performance], float]  # the time to compare, in ms
_median: TimeOf = operator.attrgetter("median_ms")
_eager: TimeOf = operator.attrgetter("eager_ms")


def crossovers(measurements: Sequence[Measurement]) -> list[Crossover]:
    """Return one crossover per combination and series."""
    curves: dict[tuple[str, Series], list[Measurement]] = {}
    dense: dict[tuple[Series, int], list[Performance]] = {}
    for m in measurements:
        if m.kind == "combo":
            curves.setdefault((m.subject, m.series), []).append(m)
        elif m.kind == "dense" and m.performance is not None:
            dense.setdefault((m.series, m.length), []).append(m.performance)

    def pairs(points: Sequence[Measurement], time_of: TimeOf) -> list[tuple[int, float]]:
        """Return (length, own time / fastest dense time) by length, where both were timed."""
        return [
            (m.length, time_of(m.performance) / min(map(time_of, dense[m.series, m.length])))
            for m in sorted(points, key=lambda m: m.length)
            if m.performance is not None and (m.series, m.length) in dense
        ]

    result = []
    for (subject, series), points in curves.items():
        length, sentence = crossing(pairs(points, _median))
        eager_length, eager_sentence = crossing(pairs(points, _eager))
        if eager_sentence != sentence:
            sentence += f"; without CUDA graphs {eager_sentence}"
        result.append(Crossover(subject, *series, length, sentence, eager_length))
    return result


def crossing(pairs: Sequence[tuple[int, float]]) -> tuple[int | None, str]:
    """Find where the ratio of own time to dense time falls below 1 for good.

    Args:
        pairs: (length, own time / dense time), by ascending length.

    Returns:
        The length after which every measured ratio is below 1, interpolated on log-log axes between
        its two measured neighbours, and a sentence. The length is None if the ratio at the longest
        length is not below 1, or if nothing was measured.
    """
    if not pairs:
        return None, "whether it is faster than dense is not known: no length has both times"
    last, ratio = pairs[-1]
    slower = [index for index, (_, r) in enumerate(pairs) if r >= 1]
    if ratio >= 1:
        where = f"at {last} tokens"
        if len(slower) == len(pairs) > 1:
            where = f"at every measured length, up to {last} tokens"
        return None, f"dense is faster {where} ({number(ratio)} times as fast there)"
    if not slower:
        return pairs[0][0], f"faster than dense at every measured length, from {pairs[0][0]} tokens"
    (low, above), (high, below) = pairs[slower[-1]], pairs[slower[-1] + 1]
    share = math.log(above) / (math.log(above) - math.log(below))
    length = round(low * (high / low) ** share)
    return length, f"faster than dense from about {length} tokens (between {low} and {high})"

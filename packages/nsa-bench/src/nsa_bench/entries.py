"""Turn outcomes into entries of a result file, with their floors and ratios to dense attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from nsa_bench.result import Measurement, Part, backends_at
from nsa_bench.roofline import Cost, Peaks
from nsa_bench.timing import Outcome
from nsa_core.plan.plan import Plan


def part(backend: str, outcome: Outcome, cost: Cost, peaks: Peaks) -> Part:
    """Return the entry of one kernel of a combination."""
    performance = outcome.performance
    share = peaks.floor_ms(cost) / performance.median_ms if performance else None
    return Part(backend, performance, outcome.reason, cost.flops, cost.bytes, share)


def measurement(
    kind: str, outcome: Outcome, cost: Cost, peaks: Peaks, **fields: Any
) -> Measurement:
    """Return the entry of one subject; ``fields`` describe the problem.

    A layer gets no share of the floor, because ``cost`` leaves out its projections.
    """
    performance, floor = outcome.performance, peaks.floor_ms(cost)
    return Measurement(
        kind=kind,
        performance=performance,
        reason=outcome.reason,
        peak_memory_bytes=outcome.peak_bytes if performance else None,
        flops=cost.flops,
        bytes=cost.bytes,
        floor_ms=floor,
        floor_fraction=floor / performance.median_ms if performance and kind != "layer" else None,
        ratio_to_dense=None,
        **fields,
    )


def add_dense_ratios(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Fill in the ratio to the cell's fastest dense kernel, if one was timed."""
    dense = [m.performance.median_ms for m in measurements if m.kind == "dense" and m.performance]
    return [
        (
            dataclasses.replace(m, ratio_to_dense=min(dense) / m.performance.median_ms)
            if dense and m.performance and m.kind != "layer"
            else m
        )
        for m in measurements
    ]


def record_backends(
    combos: dict[str, dict[str, str]], name: str, plan: Plan, where: str, length: int | None = None
) -> None:
    """Record the backends of a plan under ``name``.

    If other backends are already recorded under that name, use "name, where" as the key.

    Args:
        combos: The records; this adds to them.
        name: Name of the combination.
        plan: Its plan.
        where: The problem.
        length: The number of tokens from which on the plan is used; None for all. Call this in
            ascending order of lengths.
    """
    backends = {slot: f"{choice.backend} {choice.version}" for slot, choice in plan.choices.items()}
    backends |= {form: f"{kernel.backend}, fused" for form, kernel in plan.fused.items()}
    first, key = combos.setdefault(name, backends), f"{name}, {where}"
    if (backends_at(combos, key, length or 0) or first) != backends:
        combos[key + f" from {length} tokens on" * bool(length)] = backends

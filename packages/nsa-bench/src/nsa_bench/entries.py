"""Outcomes as the entries of a result file: beside the floor of what they compute, and beside dense
attention.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from nsa_bench.result import Measurement, Part
from nsa_bench.roofline import Cost, Peaks
from nsa_bench.timing import Outcome
from nsa_core.dispatch.plan import Plan


def part(backend: str, outcome: Outcome, cost: Cost, peaks: Peaks) -> Part:
    """One kernel of a combination."""
    found = outcome.performance
    share = peaks.floor_ms(cost) / found.median_ms if found else None
    return Part(backend, found, outcome.reason, cost.flops, cost.bytes, share)


def measurement(
    kind: str, outcome: Outcome, cost: Cost, peaks: Peaks, **fields: Any
) -> Measurement:
    """A subject's entry; ``fields`` are those that say what was measured. A layer does more than
    ``cost`` counts.
    """
    found, floor = outcome.performance, peaks.floor_ms(cost)
    return Measurement(
        kind=kind,
        performance=found,
        reason=outcome.reason,
        peak_memory_bytes=outcome.peak_bytes if found else None,
        flops=cost.flops,
        bytes=cost.bytes,
        floor_ms=floor,
        floor_fraction=floor / found.median_ms if found and kind != "layer" else None,
        ratio_to_dense=None,
        **fields,
    )


def beside_dense(made: Sequence[Measurement]) -> list[Measurement]:
    """The measurements of one cell with their ratio to its fastest dense kernel, where it has
    one.
    """
    dense = [m.performance.median_ms for m in made if m.kind == "dense" and m.performance]
    return [
        (
            dataclasses.replace(m, ratio_to_dense=min(dense) / m.performance.median_ms)
            if dense and m.performance and m.kind != "layer"
            else m
        )
        for m in made
    ]


def note_combo(combos: dict[str, dict[str, str]], name: str, plan: Plan, where: str) -> None:
    """Put who runs what under the combination's name; under "name, where" if others do there than
    did before.
    """
    who = {slot: f"{choice.backend} {choice.version}" for slot, choice in plan.choices.items()}
    who |= {form: f"{kernel.backend}, fused" for form, kernel in plan.fused.items()}
    if combos.setdefault(name, who) != who:
        combos[f"{name}, {where}"] = who

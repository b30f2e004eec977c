"""Draw the cases, decode steps and histories of a preset from their covering designs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nsa_core.contract import SLOTS
from nsa_verify.drawn.caches.draw import history_design, pool_design
from nsa_verify.drawn.design import Design
from nsa_verify.drawn.function_levels import FUNCTIONS, function_design
from nsa_verify.drawn.line import Drawn
from nsa_verify.drawn.partial_levels import PARTIAL_SLOTS, partial_design
from nsa_verify.drawn.slot_levels import slot_design
from nsa_verify.drawn.step_levels import block_step_design, step_design

PARTIAL = tuple(f"partial {slot}" for slot in PARTIAL_SLOTS)
STEPS = ("decode", "block_attention_decode")
DESIGNS: Mapping[str, Callable[[str, Sequence[str]], Design]] = {
    **{name: functools.partial(function_design, name) for name in FUNCTIONS},
    **{slot: functools.partial(slot_design, slot) for slot in SLOTS},
    **{f"partial {slot}": functools.partial(partial_design, slot) for slot in PARTIAL_SLOTS},
    "decode": step_design,
    "block_attention_decode": block_step_design,
    "cache": history_design,
    "nsa_decode": pool_design,
}


def draw(
    name: str, preset: str, dtypes: Sequence[str], *, seed: int = 0, count: int | None = None
) -> Sequence[Any]:
    """Return what the design of a name describes, such as the cases of a slot.

    Args:
        name: A kind of line, or "partial" and a slot: cases whose queries begin inside a sequence.
        preset: "quick" (every pair of values), "full" (more values, and triples of those that
            interact) or "interpreter".
        dtypes: Names of the dtypes.
        seed: Seed of the design and of the random numbers.
        count: Number of cases; None takes the whole design.
    """
    return _draw(name, preset, tuple(dtypes), seed, count)


@functools.lru_cache(maxsize=64)  # a design takes a second, and tests ask for it often
def _draw(
    name: str, preset: str, dtypes: tuple[str, ...], seed: int, count: int | None
) -> tuple[Drawn, ...]:
    return tuple(DESIGNS[name](preset, dtypes).draw(seed, count))

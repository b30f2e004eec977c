"""Decode steps: named problems of sequences of different lengths, and the presets of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from nsa_core.config import NSAConfig
from nsa_verify.problems.cases import FREE, PAPER, SMALL, TINY, Case, config_of

ODD = (16, 8, 48, 4, 20)  # l, d, l', n, w: l'/d is no power of two


@dataclasses.dataclass(frozen=True)
class Step:
    """One decode step of several sequences.

    Attributes:
        case: Configuration and data source. Its batch and lengths are replaced by those below.
        lengths: Tokens of each sequence after the step.
        new: New tokens of each sequence in this step, at most ``rows``.
        rows: Rows per sequence. Rows beyond the new tokens are padding.
        page_size: Tokens per page of the sel cache; None uses one page per sequence.
        spare_ring: Rows of the ring of win beyond the required ones; None is 3 with pages, else 0.
        wide_gates: Whether gates are from -2 to 3 instead of from 0 to 1.
        strided: Whether starts and lengths have gaps between their entries, and the block table is
            transposed.
        exchanges: As in :func:`nsa_verify.judge.selection.judge_selection`.
    """

    case: Case
    lengths: tuple[int, ...]
    new: tuple[int, ...]
    rows: int = 1
    page_size: int | None = None
    spare_ring: int | None = None
    wide_gates: bool = False
    strided: bool = False
    exchanges: int = 0


def step_of(
    name: str,
    config: NSAConfig,
    lengths: tuple[int, ...],
    new: int | tuple[int, ...] = 1,
    page_size: int | None = None,
    sharpness: float = 1.0,
) -> Step:
    """Return a step with as many rows as the sequence with the most new tokens has.

    Args:
        name: Name in reports.
        config: Layer configuration.
        lengths: Tokens of each sequence after the step.
        new: New tokens of each sequence; an integer stands for that many in every sequence, or all
            tokens of a shorter one.
        page_size: Tokens per page of the sel cache; None uses one page per sequence.
        sharpness: Factor on q.
    """
    if isinstance(new, int):
        new = tuple(min(new, length) for length in lengths)
    return Step(Case(name, config, (), sharpness=sharpness), lengths, new, max(new), page_size)


def quick_steps() -> tuple[Step, ...]:
    """Return the steps of the quick preset.

    They have one or several new tokens, different lengths around the edges of blocks and windows,
    and run with and without pages.
    """
    tiny, small = config_of(4, 2, 16, 16, TINY), config_of(12, 2, 64, 64, SMALL)
    one_head = config_of(2, 2, 16, 16, TINY)
    narrow_values = config_of(3, 1, 32, 16, TINY)
    free = config_of(4, 2, 16, 16, TINY, **FREE)
    ragged = (1, 7, 8, 15, 16, 17, 23, 24, 25, 64, 77)
    return (
        step_of("one token", tiny, ragged),
        step_of("one token, pages", tiny, ragged, page_size=16),
        step_of("five tokens, some absent", tiny, (5, 8, 31, 40, 0, 66), (5, 0, 3, 5, 0, 1), 32),
        step_of("reports 12/2/64", small, (150, 133, 149, 164, 96, 127), 5, 64),
        step_of("a chunk", tiny, (21, 10, 75), 10, 16),
        step_of("h=20", config_of(20, 1, 24, 16, ODD), (196, 48, 64, 97), 3, 48),
        step_of("h=3, Dk != Dv", narrow_values, (70, 20, 33, 9), 2),
        step_of("nothing forced", free, (70, 33, 90, 65, 49, 81, 17, 96)),
        step_of("h=1", one_head, (90, 33, 64, 21, 48, 12, 80, 35)),
        step_of("large scores", one_head, (70, 9, 24, 33), (2, 2, 1, 2), sharpness=30.0),
    )


def full_steps() -> tuple[Step, ...]:
    """Return the steps of the full preset.

    It adds the paper's block sizes around their edges, and steps at the end of long caches.
    """
    reports, small = config_of(12, 2, 64, 64, PAPER), config_of(12, 2, 64, 64, SMALL)
    paper, wide_values = config_of(16, 1, 192, 128, PAPER), config_of(7, 1, 16, 24, TINY)
    edges = (1, 31, 32, 33, 63, 64, 65, 127, 511, 512, 513, 1025)
    return (
        *quick_steps(),
        step_of("real blocks", reports, edges, 4, 128),
        step_of("real blocks, eight tokens", reports, (1100, 40, 515, 700), (8, 8, 3, 8), 64),
        step_of("long cache", reports, (4096, 4033, 3000, 2049), 8, 128),
        # Sharpness below 1: an fp32 product of 192 terms has an error of about 16 units of 2^-24. A
        # row with few compressed tokens, one of which dominates, is scaled by the error of that
        # score. At sharpness 1 this biases a head by 2.2 units where the bias rule allows 1.9, also
        # in the fp32 arithmetic of the reference.
        step_of("paper 16/1 192/128", paper, (1100, 513, 640, 597), 8, 64, sharpness=0.5),
        step_of("MQA h=64", config_of(64, 1, 16, 16, TINY), (65, 30, 48, 17), (2, 1, 2, 2), 16),
        step_of("h=7, Dv > Dk", wide_values, (64, 17, 33, 80, 49, 25), page_size=32),
        step_of(
            "large scores 12/2/64", small, (150, 133, 64, 127), (3, 1, 2, 3), 64, sharpness=100.0
        ),
    )


def interpreter_steps() -> tuple[Step, ...]:
    """Return the steps for interpreted kernels.

    They have a page edge, a sequence shorter than l, a ring that has wrapped around, and padding.
    """
    tiny = config_of(2, 1, 16, 16, (8, 4, 16, 3, 12))
    odd = config_of(3, 1, 16, 16, (8, 4, 16, 3, 5), **FREE)
    return (
        step_of("interpreted step", tiny, (70, 16, 5, 33, 49, 77), page_size=16),
        step_of("interpreted step, three tokens", tiny, (33, 3, 21, 60), (3, 3, 0, 2), 32),
        step_of("interpreted step, nothing forced", odd, (65, 17, 80, 50)),
    )


STEPS: dict[str, Callable[[], tuple[Step, ...]]] = {
    "quick": quick_steps,
    "full": full_steps,
    "interpreter": interpreter_steps,
}

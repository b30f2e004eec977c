"""Points: the cases and decode steps of the conformance suite, with the requests for them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from nsa_core.contract import DTYPES, Request
from nsa_core.plan.candidates import request_of
from nsa_verify.drawn.draw import draw
from nsa_verify.drawn.jobs import case_edges, step_edges
from nsa_verify.problems.cases import Case, config_of
from nsa_verify.problems.steps import Step, step_of


@dataclasses.dataclass(frozen=True)
class Point:
    """A case or a decode step, and the options of the request for it.

    Attributes:
        case: The case.
        dtype: Name of the dtype of q, k and v.
        deterministic: Whether the request requires deterministic kernels.
        step: The decode step; None: the point is the prefill of ``case``.
    """

    case: Case
    dtype: str = "float32"
    deterministic: bool = False
    step: Step | None = None

    def request(
        self,
        slot: str,
        device: str,
        capability: tuple[int, int] | None,
        needs_grad: bool = False,
        sized: bool = True,
    ) -> Request:
        """Return the request that a plan makes for ``slot``.

        With ``sized``, it states batch and seq_len.
        """
        case, step, fields = self.case, self.step, dict[str, Any]()
        if step is None:
            sizes = (1 if case.packed else case.batch, case.tokens)
            fields = {"varlen": case.packed, "needs_grad": needs_grad}
        else:
            sizes = (len(step.lengths), max(step.lengths))
            fields = {"phase": "decode", "page_size": step.page_size}
        batch, seq_len = sizes if sized else (None, None)
        return request_of(
            case.config,
            slot,
            dtype=self.dtype,
            device=device,
            capability=capability,
            deterministic=self.deterministic,
            batch=batch,
            seq_len=seq_len,
            **fields,
        )


_CONFIG = config_of(4, 2, 16, 16, (8, 4, 16, 3, 24), init_blocks=1, local_blocks=1, rope=False)
TWO_SEQUENCES = Point(Case("two sequences", _CONFIG, (61,), batch=2))
_MANY = step_of("many sequences", _CONFIG, (61,) * 64)  # many granules of an allocator
MANY_SEQUENCES = Point(_MANY.case, step=_MANY)


@functools.cache
def points_of(slot: str) -> tuple[Point, ...]:
    """Return the cases of ``slot``, and the decode steps, of the quick preset.

    Every second one requires deterministic kernels.
    """
    cases = (*draw(slot, "quick", DTYPES), *case_edges(slot))
    steps = (*draw("decode", "quick", DTYPES), *step_edges())
    points = [(x.case(str(x)), x.dtype, None) for x in cases]
    points += [(step.case, x.dtype, step) for x in steps for step in [x.step()]]
    return tuple(
        Point(case, dtype, number % 2 == 1, step)
        for number, (case, dtype, step) in enumerate(points)
    )

"""Results of a slot's kernel: o, lse and gradients, and the oracle's verdict on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from nsa_core.layout import BlockGeometry
from nsa_verify.drawn.verdicts import MIN_ROWS
from nsa_verify.judge.slot import judge_slot
from nsa_verify.judge.tensor import LIMITS
from nsa_verify.problems.slot_runs import run_kernel


class _Documents(NamedTuple):
    cu_seqlens: Tensor | None
    max_seqlen: Any


def results_of(
    kernel: Any,
    inputs: Mapping[str, Tensor],
    do: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    first_query: int | None = None,
) -> dict[str, Tensor]:
    """Return o, lse and the gradient "dx" of each differentiable input x."""
    return run_kernel(kernel, inputs, do, _Documents(cu_seqlens, max_seqlen), first_query).outputs


def assert_slot_correct(
    slot: str,
    inputs: Mapping[str, Tensor],
    outputs: Mapping[str, Tensor],
    geometry: BlockGeometry,
    scale: float,
    **options: Any,
) -> None:
    """Check every output with :func:`nsa_verify.judge.slot.judge_slot`, which has the options.

    The bias counts from MIN_ROWS sampled rows on: of one row, the reference itself exceeds it in
    2 % of the cases, because the rounding of a probability multiplies a whole row of dv.
    """
    verdicts = judge_slot(slot, inputs, outputs, geometry, scale, **options)
    wrong = {name: verdict.why for name, verdict in verdicts.items() if not verdict}
    rows, limits = options.get("rows"), LIMITS[next(iter(inputs.values())).dtype]
    if rows is not None and len(rows) < MIN_ROWS:
        for name in wrong.keys() - {"lse"}:
            if verdicts[name].row <= limits.row and verdicts[name].elem <= limits.elem:
                del wrong[name]
    assert not wrong, (slot, wrong)

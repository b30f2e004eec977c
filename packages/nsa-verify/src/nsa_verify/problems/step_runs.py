"""Runs of the decode forms of a plan on one step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nsa_core.plan.plan import Plan
from nsa_verify.problems.combination import Combination
from nsa_verify.problems.step_data import StepData
from nsa_verify.problems.steps import Step

Results = dict[str, tuple[torch.Tensor, ...]]  # slot -> (o, lse), or (blocks,) of select
DECODE_SLOTS = ("cmp", "select", "sel", "win")


def decode_inputs(slot: str, data: StepData, upstream: Results) -> tuple[torch.Tensor, ...]:
    """Return the inputs of a decode form: tensors of the step and results of earlier slots."""
    s = data.stores
    if slot == "cmp":
        return data.q, s["k_cmp"], s["v_cmp"]
    if slot == "select":
        return data.q, s["k_cmp"], upstream["cmp"][1]
    if slot == "sel":
        return data.q, s["k_sel"], s["v_sel"], upstream["select"][0]
    return data.q, s["k_win"], s["v_win"]


def run_step(
    plan: Plan, data: StepData, slots: Sequence[str] = DECODE_SLOTS, results: Results | None = None
) -> Results:
    """Run the decode forms of ``slots`` once, in the order of the data flow.

    Args:
        plan: A plan for decoding.
        data: Tensors of the step.
        slots: Slots to run.
        results: Results of the slots before them.
    """
    results = dict(results or {})
    for slot in slots:
        result = getattr(plan, slot)(*decode_inputs(slot, data, results), call=data.call)
        results[slot] = (result,) if isinstance(result, torch.Tensor) else tuple(result)
    return results


def decode_plan(
    combination: Combination, step: Step, dtype: torch.dtype, *, deterministic: bool = False
) -> Plan:
    """Plan ``step`` with the backends of ``combination``.

    Raises:
        NSAError: As :meth:`Combination.plan`.
    """
    return combination.plan(
        step.case.config,
        dtype,
        needs_grad=False,
        phase="decode",
        page_size=step.page_size,
        deterministic=deterministic,
    )

"""Checks of decode forms without a golden result: equal bits, and the backend that ran.

Decode parity covers reads outside the sequences, which hold NaN, and padding rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from nsa_core.dtypes import dtype_name
from nsa_core.plan.plan import Plan
from nsa_core.torch_ops.backend_call import record_dispatch
from nsa_verify.checks.calls import DECODE, may_call
from nsa_verify.checks.decode_parity import (
    DECODE_SLOTS,
    Results,
    Step,
    StepData,
    decode_inputs,
    decode_plan,
    judge_step,
    run_step,
    step_data,
)
from nsa_verify.problems.combination import Combination, spec_of
from nsa_verify.problems.findings import Finding, same_bits

_NAMES = {"select": ("blocks",)}


def _same_results(
    check: str,
    step: Step,
    dtype: torch.dtype,
    actual: Results,
    expected: Results,
    slots: tuple[str, ...] = DECODE_SLOTS,
) -> Iterator[Finding]:
    """Compare the results of ``slots`` bit for bit."""
    for slot in slots:
        for name, x, y in zip(_NAMES.get(slot, ("o", "lse")), actual[slot], expected[slot]):
            yield same_bits(check, slot, step.case, dtype, name, x, y)


@may_call(*DECODE)
def ties(combination: Combination, step: Step, dtype: torch.dtype) -> Iterator[Finding]:
    """Check that equal scores select the lowest blocks; zero queries make all scores equal."""
    data = step_data(step, dtype, combination.device)
    data = dataclasses.replace(data, q=data.q * 0, dense={**data.dense, "q": data.dense["q"] * 0})
    results = run_step(decode_plan(combination, step, dtype), data)
    for finding in judge_step(step, dtype, data, results, DECODE_SLOTS):
        yield dataclasses.replace(finding, check="decode ties")


@may_call(*DECODE)
def run_to_run(combination: Combination, step: Step, dtype: torch.dtype) -> Iterator[Finding]:
    """Check that three runs have equal bits.

    This holds for slots declared deterministic, and for every slot under ``deterministic=True``.
    """
    data = step_data(step, dtype, combination.device)
    for required in (False, True):
        plan = decode_plan(combination, step, dtype, deterministic=required)
        declared = tuple(
            s
            for s in DECODE_SLOTS
            if required or spec_of(combination, plan, s).slots[s].deterministic
        )
        for slot in (s for s in DECODE_SLOTS if s not in declared):
            detail = f"{plan.choices[slot].backend} does not declare {slot} deterministic"
            yield Finding(
                "decode run to run",
                slot,
                step.case.name,
                dtype_name(dtype),
                "as declared",
                None,
                detail=detail,
            )
        first, *others = [run_step(plan, data) for _ in range(3)]
        for other in others:
            yield from _same_results("decode run to run", step, dtype, other, first, declared)


@may_call(*DECODE)
def page_order(combination: Combination, step: Step, dtype: torch.dtype) -> Iterator[Finding]:
    """Check that the order of pages does not change the bits."""
    plan = decode_plan(combination, step, dtype, deterministic=True)
    first, other = (
        run_step(plan, step_data(step, dtype, combination.device, order)) for order in (0, 1)
    )
    yield from _same_results("decode page order", step, dtype, other, first)


@may_call(*DECODE)
def replayed(combination: Combination, step: Step, dtype: torch.dtype) -> Iterator[Finding]:
    """Check a second call with new lengths in the same tensors, as in a CUDA graph replay.

    It must give the bits of a first call with these lengths.
    """
    plan = decode_plan(combination, step, dtype, deterministic=True)
    used, fresh = (step_data(step, dtype, combination.device) for _ in range(2))
    run_step(plan, used)
    # Each sequence has one token fewer. If all its tokens are new, the step has one row fewer.
    lengths = (used.call.lengths - 1).clamp(min=0)
    starts = (used.call.starts - 1).clamp(min=0)
    used.call.lengths.copy_(lengths)
    used.call.starts.copy_(starts)
    fresh = dataclasses.replace(
        fresh, call=dataclasses.replace(fresh.call, lengths=lengths, starts=starts)
    )
    yield from _same_results(
        "decode replay", step, dtype, run_step(plan, used), run_step(plan, fresh)
    )


@may_call(*DECODE)
def inputs_untouched(combination: Combination, step: Step, dtype: torch.dtype) -> Iterator[Finding]:
    """Check that no decode form writes to the cache, the queries or the tensors of the call."""
    data = step_data(step, dtype, combination.device)
    inputs = _tensors(data)
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    run_step(decode_plan(combination, step, dtype), data)
    for name, tensor in inputs.items():
        yield same_bits("decode inputs untouched", "", step.case, dtype, name, tensor, before[name])


def _tensors(data: StepData) -> dict[str, torch.Tensor]:
    call = {name: getattr(data.call, name) for name in ("starts", "lengths", "block_table")}
    return {"q": data.q, **data.stores, **call}


@may_call(*DECODE)
def dispatch(combination: Combination, step: Step, dtype: torch.dtype) -> Iterator[Finding]:
    """Check that the requested decode forms ran, by the dispatch record and by a profile."""
    data, plan = step_data(step, dtype, combination.device), decode_plan(combination, step, dtype)
    with record_dispatch() as trace:
        results = run_step(plan, data)
    for slot in DECODE_SLOTS:
        requested = combination.backends.get(slot, plan.choices[slot].backend)
        ran = {(r.backend, r.direction) for r in trace if r.slot == slot}
        names = (
            ", ".join(f"{backend} ({direction})" for backend, direction in sorted(ran)) or "nothing"
        )
        detail = f"asked {requested} (decode), ran {names}"
        ok = ran == {(requested, "decode")}
        yield Finding(
            "decode dispatch", slot, step.case.name, dtype_name(dtype), "record", ok, detail=detail
        )
        yield _profiled(combination, plan, slot, step, dtype, data, results)


def _profiled(
    combination: Combination,
    plan: Plan,
    slot: str,
    step: Step,
    dtype: torch.dtype,
    data: StepData,
    results: Results,
) -> Finding:
    """Check that a profile shows an event name that the backend declares as evidence."""
    evidence = spec_of(combination, plan, slot).slots[slot].evidence
    common = ("decode dispatch", slot, step.case.name, dtype_name(dtype), "profile")
    if not evidence:
        return Finding(*common, None, detail="no evidence declared")
    with torch.profiler.profile() as profile:
        getattr(plan, slot)(*decode_inputs(slot, data, results), call=data.call)
    events = sorted(
        {event.key for event in profile.key_averages() if any(e in event.key for e in evidence)}
    )
    detail = (
        f"profile shows {events[0]}" if events else f"profile shows none of {', '.join(evidence)}"
    )
    return Finding(*common, bool(events), detail=detail)

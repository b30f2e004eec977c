"""Checks of decode forms beside parity: what must keep its bits, and who ran.

Memory that no sequence owns is NaN in every step's data, padding rows are judged by parity: neither
has a check here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from nsa_core.dispatch.plan import Plan
from nsa_core.dtypes import dtype_name
from nsa_core.torch_ops.slot_op import record_dispatch
from nsa_verify.checks.decode_parity import (
    DECODE_SLOTS,
    Results,
    Step,
    StepData,
    decode_plan,
    judge_step,
    received,
    run_step,
    step_data,
)
from nsa_verify.combination import Combination, spec_of
from nsa_verify.findings import Finding, same_bits

_NAMES = {"select": ("blocks",)}


def _same(
    check: str,
    step: Step,
    dtype: torch.dtype,
    got: Results,
    want: Results,
    slots: tuple[str, ...] = DECODE_SLOTS,
) -> Iterator[Finding]:
    for slot in slots:
        for name, one, other in zip(_NAMES.get(slot, ("o", "lse")), got[slot], want[slot]):
            yield same_bits(check, slot, step.case, dtype, name, one, other)


def ties(combination: Combination, step: Step, dtype: torch.dtype) -> Iterator[Finding]:
    """Queries of 0 give every visible compressed token the same score: the lowest blocks are
    chosen.
    """
    data = step_data(step, dtype, combination.device)
    data = dataclasses.replace(data, q=data.q * 0, whole={**data.whole, "q": data.whole["q"] * 0})
    results = run_step(decode_plan(combination, step, dtype), data)
    for finding in judge_step(step, dtype, data, results, DECODE_SLOTS):
        yield dataclasses.replace(finding, check="decode ties")


def run_to_run(combination: Combination, step: Step, dtype: torch.dtype) -> Iterator[Finding]:
    """Three runs have the same bits: as declared, and in every slot when it is demanded."""
    data = step_data(step, dtype, combination.device)
    for demanded in (False, True):
        plan = decode_plan(combination, step, dtype, deterministic=demanded)
        declared = tuple(
            s
            for s in DECODE_SLOTS
            if demanded or spec_of(combination, plan, s).slots[s].deterministic
        )
        for slot in (s for s in DECODE_SLOTS if s not in declared):
            said = f"{plan.choices[slot].backend} does not declare {slot} deterministic"
            yield Finding(
                "decode run to run",
                slot,
                step.case.name,
                dtype_name(dtype),
                "as declared",
                None,
                detail=said,
            )
        first, *others = [run_step(plan, data) for _ in range(3)]
        for other in others:
            yield from _same("decode run to run", step, dtype, other, first, declared)


def page_order(combination: Combination, step: Step, dtype: torch.dtype) -> Iterator[Finding]:
    """The same sequences in pages of another order: the same bits."""
    plan = decode_plan(combination, step, dtype, deterministic=True)
    first, other = (
        run_step(plan, step_data(step, dtype, combination.device, order)) for order in (0, 1)
    )
    yield from _same("decode page order", step, dtype, other, first)


def replayed(combination: Combination, step: Step, dtype: torch.dtype) -> Iterator[Finding]:
    """New numbers in the same tensors, as a CUDA graph is replayed: the bits of a fresh call with
    those numbers.
    """
    plan = decode_plan(combination, step, dtype, deterministic=True)
    used, fresh = (step_data(step, dtype, combination.device) for _ in range(2))
    run_step(plan, used)
    # One token fewer each; where a sequence has but this step's own, its step now brings fewer
    # rows.
    lengths = (used.call.lengths - 1).clamp(min=0)
    starts = (used.call.starts - 1).clamp(min=0)
    used.call.lengths.copy_(lengths)
    used.call.starts.copy_(starts)
    fresh = dataclasses.replace(
        fresh, call=dataclasses.replace(fresh.call, lengths=lengths, starts=starts)
    )
    yield from _same("decode replay", step, dtype, run_step(plan, used), run_step(plan, fresh))


def inputs_untouched(combination: Combination, step: Step, dtype: torch.dtype) -> Iterator[Finding]:
    """No decode form writes to the cache, the queries or the call's tensors."""
    data = step_data(step, dtype, combination.device)
    given = _tensors(data)
    before = {name: tensor.clone() for name, tensor in given.items()}
    run_step(decode_plan(combination, step, dtype), data)
    for name, tensor in given.items():
        yield same_bits("decode inputs untouched", "", step.case, dtype, name, tensor, before[name])


def _tensors(data: StepData) -> dict[str, torch.Tensor]:
    call = {name: getattr(data.call, name) for name in ("starts", "lengths", "block_table")}
    return {"q": data.q, **data.stores, **call}


def dispatch(combination: Combination, step: Step, dtype: torch.dtype) -> Iterator[Finding]:
    """The decode form that ran is the one that was asked for: by the plan's own record, and by a
    profile.
    """
    data, plan = step_data(step, dtype, combination.device), decode_plan(combination, step, dtype)
    with record_dispatch() as trace:
        results = run_step(plan, data)
    for slot in DECODE_SLOTS:
        asked = combination.backends.get(slot, plan.choices[slot].backend)
        ran = {(r.backend, r.direction) for r in trace if r.slot == slot}
        said = (
            ", ".join(f"{backend} ({direction})" for backend, direction in sorted(ran)) or "nothing"
        )
        detail = f"asked {asked} (decode), ran {said}"
        ok = ran == {(asked, "decode")}
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
    evidence = spec_of(combination, plan, slot).slots[slot].evidence
    common = ("decode dispatch", slot, step.case.name, dtype_name(dtype), "profile")
    if not evidence:
        return Finding(*common, None, detail="no evidence declared")
    with torch.profiler.profile() as profile:
        getattr(plan, slot)(*received(slot, data, results), call=data.call)
    found = sorted(
        {event.key for event in profile.key_averages() if any(e in event.key for e in evidence)}
    )
    detail = (
        f"profile shows {found[0]}" if found else f"profile shows none of {', '.join(evidence)}"
    )
    return Finding(*common, bool(found), detail=detail)

"""Checks of decode forms without a golden result: equal bits, and the backend that ran.

Decode parity covers reads outside the sequences, which hold NaN, and padding rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import torch

from nsa_core.torch_ops.backend_call import record_dispatch
from nsa_verify.checks.decode_parity import judge_step
from nsa_verify.checks.under_test import StepUnderTest, step_check
from nsa_verify.problems.findings import Finding
from nsa_verify.problems.step_data import step_data
from nsa_verify.problems.step_runs import DECODE_SLOTS, Results, run_step


def _named(results: Results, slot: str) -> dict[str, torch.Tensor]:
    return dict(zip(("blocks",) if slot == "select" else ("o", "lse"), results[slot]))


def _same_results(
    subject: StepUnderTest, runs: Sequence[Results], slots: Sequence[str] = DECODE_SLOTS
) -> Iterator[Finding]:
    """Compare the results of ``slots`` in all runs with those of the first, bit for bit."""
    for slot in slots:
        yield from subject.equal_runs(slot, [_named(results, slot) for results in runs])


@step_check("decode ties")
def ties(subject: StepUnderTest) -> Iterator[Finding]:
    """Check that equal scores select the lowest blocks; zero queries make all scores equal."""
    data = subject.data
    data = dataclasses.replace(data, q=data.q * 0, dense={**data.dense, "q": data.dense["q"] * 0})
    results = run_step(subject.plan(), data)
    yield from judge_step(
        subject.step, subject.dtype, data, results, DECODE_SLOTS, check=subject.check
    )


@step_check("decode run to run")
def run_to_run(subject: StepUnderTest) -> Iterator[Finding]:
    """Check that three runs have equal bits.

    This holds for slots declared deterministic, and for every slot under ``deterministic=True``.
    """
    for required in (False, True):
        plan = subject.plan(deterministic=required)
        runs = [run_step(plan, subject.data) for _ in range(3)]
        for slot in DECODE_SLOTS:
            if required or subject.is_deterministic(plan, slot):
                yield from _same_results(subject, runs, (slot,))
            else:
                yield subject.not_deterministic(plan, slot)


@step_check("decode page order")
def page_order(subject: StepUnderTest) -> Iterator[Finding]:
    """Check that the order of pages does not change the bits."""
    plan, device = subject.plan(deterministic=True), subject.combination.device
    orders = [step_data(subject.step, subject.dtype, device, order) for order in (0, 1)]
    yield from _same_results(subject, [run_step(plan, data) for data in orders])


@step_check("decode replay")
def replayed(subject: StepUnderTest) -> Iterator[Finding]:
    """Check a second call with new lengths in the same tensors, as in a CUDA graph replay.

    It must give the bits of a first call with these lengths.
    """
    plan, used = subject.plan(deterministic=True), subject.data
    run_step(plan, used)
    # Each sequence has one token fewer. If all its tokens are new, the step has one row fewer.
    lengths = (used.call.lengths - 1).clamp(min=0)
    starts = (used.call.starts - 1).clamp(min=0)
    used.call.lengths.copy_(lengths)
    used.call.starts.copy_(starts)
    fresh = step_data(subject.step, subject.dtype, subject.combination.device)
    call = dataclasses.replace(fresh.call, lengths=lengths, starts=starts)
    fresh = dataclasses.replace(fresh, call=call)
    again = run_step(plan, used)
    yield from _same_results(subject, [run_step(plan, fresh), again])


@step_check("decode dispatch")
def dispatch(subject: StepUnderTest) -> Iterator[Finding]:
    """Check that the requested decode forms ran, by the dispatch record and by a profile."""
    data, plan = subject.data, subject.plan()
    with record_dispatch() as trace:
        results = run_step(plan, data)
    for slot in DECODE_SLOTS:
        requested = subject.combination.backends.get(slot, plan.choices[slot].backend)
        ran = {(r.backend, r.direction) for r in trace if r.slot == slot}
        names = [f"{backend} ({direction})" for backend, direction in sorted(ran)]
        detail = f"asked {requested} (decode), ran {', '.join(names) or 'nothing'}"
        yield subject.finding(slot, "record", ran == {(requested, "decode")}, detail=detail)
        again = functools.partial(run_step, plan, data, (slot,), results)
        yield subject.profiled(plan, slot, again)

"""Each check declares the functions that it calls: the others run if one of these hangs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fused_toy
from nsa_backend_sdpa.plugin import nsa_register_backends as sdpa
from nsa_core.contract import SLOTS
from nsa_core.dispatch.registry import Registry
from nsa_core.torch_ops.slot_op import record_dispatch
from nsa_verify.checks.calls import CORE, DECODE, EVERY, PREFILL, calls_of, may_call
from nsa_verify.combination import Combination
from nsa_verify.run import suite

# sdpa has no fused forms, so that these calls are declared only.
FUSED = {("step", "decode"), ("append", "decode"), ("gates", "decode")}


JOBS = suite.jobs("quick", [torch.float32], text=None, cases_per_slot=2)
NARROW = {job.name for job in JOBS if len(calls_of(job.check)) < len(DECODE)}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in NARROW else pytest.mark.slow)
        for name in dict.fromkeys(job.name for job in JOBS)
    ],
)
def test_a_check_calls_what_it_declares(name: str) -> None:
    jobs = [job for job in JOBS if job.name == name]
    calls = calls_of(jobs[0].check)
    # Some checks of the core run only for backends with a fused backward, which sdpa has not. The
    # check without a declaration has no backward.
    fused = CORE in calls and calls != EVERY
    combination = Combination(
        {}, "cpu", Registry(()).with_backend(fused_toy.spec() if fused else sdpa())
    )
    declared, called = calls - FUSED - (set() if fused else {CORE}), set()
    for number, job in enumerate(jobs):
        if number >= 2 and called == declared:  # the first cases have no compressed token
            break
        with record_dispatch() as trace:
            assert not any(finding.ok is False for finding in job.run(combination))
        called |= {(r.slot, "decode" if r.direction == "decode" else "prefill") for r in trace}
    assert called == declared


def test_a_check_without_a_declaration_may_call_every_function() -> None:
    def check(*arguments: Any) -> None: ...

    assert calls_of(check) == EVERY == {*PREFILL, CORE, *DECODE} | FUSED
    assert {slot for slot, _ in PREFILL} == {*SLOTS}
    assert calls_of(may_call(("win", "decode"))(check)) == {("win", "decode")}

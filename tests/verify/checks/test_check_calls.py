"""Each check declares the functions that it calls: the others run if one of these hangs."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch

import fused_toy
from nsa_core.contract import SLOTS
from nsa_core.plan.registry import Registry
from nsa_core.torch_ops.backend_call import record_dispatch
from nsa_verify.checks.calls import CORE, DECODE, EVERY, PREFILL, calls_of, may_call
from nsa_verify.problems.combination import Combination
from nsa_verify.run import suite

# sdpa has no fused forms, so that these calls are declared only.
FUSED = {(form, "decode") for form in ("step", "append", "gates", "compress")}


@functools.cache
def jobs_by_name() -> dict[str, list[suite.Job]]:
    """Return the jobs of each check; they take seconds to draw."""
    jobs: dict[str, list[suite.Job]] = {}
    for job in suite.jobs("quick", [torch.float32], text=None, cases_per_slot=2):
        jobs.setdefault(job.name, []).append(job)
    return jobs


def is_narrow(name: str) -> bool:
    """Return whether a check declares fewer functions than a decode step has."""
    return len(calls_of(jobs_by_name()[name][0].check)) < len(DECODE)


@pytest.mark.slow
def test_narrow_checks_call_what_they_declare() -> None:
    names = [*filter(is_narrow, jobs_by_name())]
    assert len(names) >= 10
    for name in names:
        assert_calls_are_declared(name)


@pytest.mark.slow
def test_wide_checks_call_what_they_declare() -> None:
    names = [*itertools.filterfalse(is_narrow, jobs_by_name())]
    assert len(names) >= 10
    for name in names:
        assert_calls_are_declared(name)


def assert_calls_are_declared(name: str) -> None:
    """Run the jobs of a check until they have called all that it declares."""
    jobs = jobs_by_name()[name]
    calls = calls_of(jobs[0].check)
    # sdpa with a fused backward, which checks of the core need
    combination = Combination({}, "cpu", Registry(()).with_backend(fused_toy.spec()))
    # The check without a declaration has no backward.
    declared, called = calls - FUSED - ({CORE} if calls == EVERY else set()), set()
    for number, job in enumerate(jobs):
        if number >= 2 and called == declared:  # the first cases have no compressed token
            break
        with record_dispatch() as trace:
            assert not any(finding.ok is False for finding in job.run(combination))
        called |= {(r.slot, "decode" if r.direction == "decode" else "prefill") for r in trace}
    assert called == declared, name


def test_a_check_without_a_declaration_may_call_every_function() -> None:
    def check(*arguments: Any) -> None: ...

    assert calls_of(check) == EVERY == {*PREFILL, CORE, *DECODE} | FUSED
    assert {slot for slot, _ in PREFILL} == {*SLOTS}
    assert calls_of(may_call(("win", "decode"))(check)) == {("win", "decode")}

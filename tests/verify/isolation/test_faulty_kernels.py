"""Whatever a kernel does becomes a failed row with its reason, and the other rows still run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import pytest
import torch

from faulty_kernels import BEHAVIOURS, CRASHES, ERRORS, FIRST_LENGTH, STATES, own_signals
from nsa_backend_sdpa.plugin import nsa_register_backends as sdpa
from nsa_core.dispatch.registry import Registry
from nsa_verify import cases
from nsa_verify.checks import slots
from nsa_verify.combination import Combination
from nsa_verify.findings import Finding
from nsa_verify.isolation.children import call_in_child
from nsa_verify.isolation.global_state import GlobalState
from nsa_verify.run import suite
from nsa_verify.run.runner import run_jobs


@pytest.fixture(scope="module")
def combination() -> Combination:
    return combination_of("faulty_kernels:accept")


def combination_of(probe: str) -> Combination:
    win = dataclasses.replace(sdpa().slots["win"], forward="faulty_kernels:forward")
    spec = dataclasses.replace(sdpa(), name="faulty", slots={"win": win}, probe=probe, fused={})
    return Combination(
        {"win": "faulty"}, "cpu", Registry(()).with_backend(sdpa()).with_backend(spec)
    )


def jobs_of(names: Iterable[str]) -> list[suite.Job]:
    base = cases.Case("", cases.config_of(2, 1, 8, 8, (8, 4, 8, 3, 8)), ())
    lengths = {name: FIRST_LENGTH + index for index, name in enumerate(BEHAVIOURS)}
    return [
        suite.Job(
            "parity",
            slots.parity,
            dataclasses.replace(base, name=name, lengths=(lengths[name],)),
            torch.float32,
        )
        for name in names
    ]


def reasons(findings: list[list[Finding]]) -> dict[str, str]:
    """Return case -> the reason of its failed rows, "" if none failed."""
    return {
        finding.case: next((f.detail for f in job if f.ok is False), "")
        for job in findings
        for finding in job[:1]
    }


def assert_reasons(actual: dict[str, str], behaviours: dict[str, tuple[object, str]]) -> None:
    assert actual.keys() == behaviours.keys()
    wrong = {
        name: actual[name]
        for name, (_, expected) in behaviours.items()
        if expected not in actual[name] or bool(expected) != bool(actual[name])
    }
    assert not wrong
    named = [n for n, (_, expected) in behaviours.items() if expected and n != "out of memory"]
    unnamed = [
        n for n in named if n not in CRASHES and "'faulty', slot 'win', forward" not in actual[n]
    ]
    assert not unnamed


def test_a_faulty_kernel_is_a_failed_row_in_this_process(combination) -> None:
    before = GlobalState()
    behaviours = {n: b for n, b in (ERRORS | STATES).items() if not n.startswith("prints")}
    # Python's own handler of SIGINT is installed: a KeyboardInterrupt counts as a Ctrl-C here.
    del behaviours["KeyboardInterrupt"]
    (findings,) = run_jobs([combination], jobs_of(behaviours)).findings
    assert_reasons(reasons(findings), behaviours)
    assert before.restore() == []


def test_a_faulty_kernel_is_a_failed_row_in_a_worker(combination, capfd) -> None:
    behaviours = {name: b for name, b in BEHAVIOURS.items() if name != "hang"}  # a slow test below
    (findings,) = run_jobs([combination], jobs_of(behaviours), job_limit_s=60).findings
    assert_reasons(reasons(findings), behaviours)
    assert capfd.readouterr() == ("", "")


def test_a_probe_that_disturbs_its_process_fails_a_row() -> None:
    disturbing = combination_of("faulty_kernels:disturb")
    (findings,) = run_jobs([disturbing], jobs_of(["healthy"] * 2), job_limit_s=60).findings
    for job in findings:
        assert [f.detail for f in job if f.ok is False] == [
            "a backend outside of its kernels' calls: it closed file descriptor 2 (standard error);"
            " it sent SIGTERM to its own process"
        ]
        assert any(f.ok for f in job)


def test_a_signal_of_another_process_is_not_the_kernels() -> None:
    assert call_in_child(own_signals, limit_s=60, doing="in a test") == [[], ["SIGTERM"]]


@pytest.mark.slow
def test_a_combination_that_hangs_in_three_cases_is_not_run_further(combination) -> None:
    hang, fine = jobs_of(["hang", "healthy"])
    first, again, second, third = (
        dataclasses.replace(hang, case=dataclasses.replace(hang.case, name=f"case {number}"))
        for number in (1, 1, 2, 3)
    )
    jobs = [first, again, fine, second, third, dataclasses.replace(fine, name="last")]
    healthy = Combination({}, "cpu", Registry(()).with_backend(sdpa()))
    faulty, ours = run_jobs([combination, healthy], jobs, job_limit_s=2).findings
    hung = "did not end within 2 s"
    assert [job[0].detail for job in faulty] == [
        *(hung, f"not run: a check of this case {hung}", "", hung, hung),
        f"not run: a check of 3 cases {hung}",
    ]
    assert all(f.ok for job in ours for f in job)
    assert len(ours) == len(jobs)

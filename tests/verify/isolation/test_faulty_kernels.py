"""Whatever a kernel does becomes a failed row with its reason, and the other rows still run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import killers
import pytest
import torch

from faulty_kernels import (
    BEHAVIOURS,
    ERRORS,
    FIRST_LENGTH,
    HANG,
    IN_CHILD,
    breaks_the_gpu_and_is_unavailable,
)
from nsa_backend_sdpa.plugin import nsa_register_backends as sdpa
from nsa_core.plan.loading import load_spec
from nsa_core.plan.registry import Registry
from nsa_core.util.child import Child
from nsa_core.util.global_state import GlobalState
from nsa_verify.checks import decode_parity, slots
from nsa_verify.drawn import jobs as drawn_jobs
from nsa_verify.drawn.jobs import OnDrawn
from nsa_verify.drawn.line import Drawn
from nsa_verify.drawn.parser import parse
from nsa_verify.drawn.shrink import ShrinkBudget
from nsa_verify.isolation import call_guard, gpu_context
from nsa_verify.problems import cases, steps
from nsa_verify.problems.combination import Combination
from nsa_verify.problems.findings import Finding
from nsa_verify.run import suite
from nsa_verify.run.runner import run_jobs


def combination_of(probe: str = "accept", **entry: object) -> Combination:
    win = dataclasses.replace(sdpa().slots["win"], forward="faulty_kernels:forward")
    spec = dataclasses.replace(
        sdpa(), name="faulty", slots={"win": win}, probe=f"faulty_kernels:{probe}", fused={}
    )
    faulty = dataclasses.replace(load_spec(spec, "1.0", "toy"), **entry)
    registry = Registry((*Registry().with_backend(sdpa()).entries, faulty))
    return Combination({"win": "faulty"}, "cpu", registry)


@pytest.fixture
def combination() -> Combination:
    """A faulty backend that runs in this process."""
    return combination_of()


@pytest.fixture
def in_child() -> Combination:
    """A faulty backend that runs in child processes."""
    return combination_of(child=Child("plugin 'faulty'"))


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
    at_fault = "'faulty', slot 'win', forward"
    assert not [n for n in named if "GPU" not in n and at_fault not in actual[n]]
    for name, (_, expected) in behaviours.items():  # the reason contains ``expected``, see above
        killers.expect("behaviour of a kernel", name, expected)


def test_a_faulty_kernel_is_a_failed_row_in_this_process(combination) -> None:
    before = GlobalState()
    (findings,) = run_jobs([combination], jobs_of(ERRORS)).findings
    assert_reasons(reasons(findings), ERRORS)
    assert before.restore() == []


def test_a_faulty_kernel_is_a_failed_row_in_a_child(in_child, capfd) -> None:
    behaviours = {"healthy": ERRORS["healthy"], "directory": ERRORS["directory"], **IN_CHILD}
    healthy = Combination({}, "cpu", Registry().with_backend(sdpa()))
    findings, ours = run_jobs([in_child, healthy], jobs_of(behaviours), job_limit_s=60).findings
    assert_reasons(reasons(findings), behaviours)
    assert all(f.ok for job in ours for f in job)
    assert capfd.readouterr() == ("", "")


def test_two_workers_give_the_same_rows(in_child) -> None:
    behaviours = {name: (ERRORS | IN_CHILD)[name] for name in ("healthy", "segfault", "draws")}
    healthy = Combination({}, "cpu", Registry().with_backend(sdpa()))
    findings, ours = run_jobs([in_child, healthy], jobs_of(behaviours), processes=2).findings
    assert_reasons(reasons(findings), behaviours)
    assert [job[0].case for job in findings] == [*behaviours]
    assert all(f.ok for job in ours for f in job)


def test_without_workers_the_checks_after_a_broken_gpu_name_its_cause(
    combination, monkeypatch
) -> None:
    monkeypatch.setattr(gpu_context, "gpu_error", gpu_context.gpu_error)  # restored at the end
    jobs = jobs_of(["healthy", "breaks the GPU", "healthy"])
    healthy, broken, after = run_jobs([combination], jobs).findings[0]
    assert all(f.ok for f in healthy)
    assert broken[-1].detail == (
        "a kernel made the GPU unusable: AcceleratorError: CUDA error: misaligned address"
    )
    assert [f.detail for f in after] == [
        "not run: the check parity, breaks the GPU, float32, made the GPU unusable in this process;"
        " set processes=2 (--jobs 2)"
    ]


def test_a_child_with_a_broken_gpu_is_replaced(in_child) -> None:
    first, second, third, healthy = jobs_of(
        ["breaks the GPU", "healthy", "breaks the GPU and raises", "healthy"]
    )
    broken = dataclasses.replace(healthy, check=breaks_the_gpu_and_is_unavailable)
    jobs = [first, second, third, second, broken, healthy]
    (findings,) = run_jobs([in_child], jobs, job_limit_s=60).findings
    assert [sum(f.ok is False for f in job) for job in findings] == [1, 0, 1, 0, 1, 0]
    assert [f.detail for f in findings[4]] == ["BackendUnavailable: no"]


@pytest.mark.parametrize("line", ["win tokens=60", "decode n=3", "cache batch=2 step=5,0 step=1,1"])
def test_nothing_is_shrunk_on_a_broken_gpu(line, combination, monkeypatch) -> None:
    """Every smaller case would fail, and the finding would not name the kernel any more."""
    judged = []

    def judge(combination: Combination, drawn: Drawn) -> list[Finding]:
        judged.append(str(drawn))
        return [drawn.findings.finding(drawn.slot, "run", False)]

    monkeypatch.setattr(gpu_context, "gpu_error", lambda: "CUDA error: misaligned address")
    monkeypatch.setattr(drawn_jobs, "judge", judge)
    (finding,) = OnDrawn(parse(line), ShrinkBudget())(combination, None, None)
    assert (finding.ok, finding.case) == (False, line)
    assert judged == [line]


def test_a_case_whose_kernel_is_not_called_any_more_is_not_shrunk(combination, monkeypatch) -> None:
    """Every smaller case would fail, and its line would not repeat the hang."""
    line, where = "win w=3 tokens=9", ("faulty", "win", "forward")
    monkeypatch.setattr(call_guard, "_refused", {where: "it did not end within 5 s in 3 checks"})
    with call_guard.guarded_calls():
        findings = list(OnDrawn(parse(line), ShrinkBudget())(combination, None, None))
    assert {(f.ok, f.case) for f in findings} == {(False, line)}
    assert "not called: it did not end" in findings[0].detail


@pytest.mark.parametrize(
    "advice", ["Search for `cudaErrorMisalignedAddress' in", "CUDA kernel errors might be"]
)
def test_an_error_of_the_gpu_is_found_only_where_the_gpu_is_in_use(advice, monkeypatch) -> None:
    def fail() -> None:
        raise RuntimeError(f"CUDA error: misaligned address\n{advice} ...")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    assert gpu_context.gpu_error() == ""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert gpu_context.gpu_error() == "RuntimeError: CUDA error: misaligned address"
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert gpu_context.gpu_error() == ""


def test_a_probe_that_changes_the_state_fails_a_row() -> None:
    moving = combination_of("accept_elsewhere", child=Child())
    (findings,) = run_jobs([moving], jobs_of(["healthy"] * 2), job_limit_s=60).findings
    for job in findings:
        assert [f.detail for f in job if f.ok is False] == [
            "loading plugin faulty changed the working directory"
        ]
        assert any(f.ok for f in job)


@pytest.mark.slow
def test_after_three_hangs_of_a_function_it_is_not_called_again(in_child) -> None:
    hang, fine = jobs_of([*HANG, "healthy"])
    # It calls sel only, on a case in which win hangs.
    other = dataclasses.replace(hang, name="any blocks", check=slots.any_blocks)
    combine = next(job for job in generated() if job.name == "generated combine")
    last = dataclasses.replace(fine, name="last")
    jobs = [hang, other, fine, hang, hang, last, other, combine, decode_job()]
    healthy = Combination({}, "cpu", Registry().with_backend(sdpa()))
    faulty, ours = run_jobs([in_child, healthy], jobs, job_limit_s=5).findings
    where = "backend 'faulty', slot 'win', forward: "
    hung = f"{where}did not end within 5 s in this check"
    assert [next((f.detail for f in job if f.ok is False), "") for job in faulty] == [
        *(hung, "", "", hung, hung),
        f"{where}not called: it did not end within 5 s in 3 checks",
        *("", "", ""),
    ]
    assert all(f.ok for job in ours for f in job)
    assert len(ours) == len(jobs)
    assert BEHAVIOURS["hang"][1] in hung
    killers.expect("behaviour of a kernel", "hang", BEHAVIOURS["hang"][1])


def generated() -> list[suite.Job]:
    return drawn_jobs.case_jobs("quick", [torch.float32], 0, 3, suite.Job)


def decode_job() -> suite.Job:
    step = steps.quick_steps()[0]
    check = suite.OnStep(decode_parity.decode_parity, step)
    return suite.Job("decode", check, step.case, torch.float32)

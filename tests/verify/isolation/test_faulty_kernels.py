"""Whatever a kernel does becomes a failed row with its reason, and the other rows still run."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable

import killers
import pytest
import torch

from faulty_kernels import (
    BEHAVIOURS,
    CRASHES,
    ERRORS,
    FIRST_LENGTH,
    STATES,
    breaks_the_gpu_and_is_unavailable,
    own_signals,
)
from nsa_backend_sdpa.plugin import nsa_register_backends as sdpa
from nsa_core.errors import BackendUnavailable
from nsa_core.plan.registry import Registry
from nsa_verify.checks import decode_parity, histories, slots
from nsa_verify.generated import jobs as generated_jobs
from nsa_verify.generated.shrink import OnGenerated, ShrinkBudget
from nsa_verify.histories.history import History, parse_history
from nsa_verify.histories.replay import Failure, Fault
from nsa_verify.isolation import gpu_context
from nsa_verify.isolation.children import call_in_child
from nsa_verify.isolation.global_state import KernelState
from nsa_verify.problems import cases, steps
from nsa_verify.problems.combination import Combination
from nsa_verify.problems.findings import Finding
from nsa_verify.run import suite, workers
from nsa_verify.run.runner import run_jobs


@pytest.fixture(scope="module")
def combination() -> Combination:
    return combination_of("faulty_kernels:accept")


def combination_of(probe: str, forward: str = "faulty_kernels:forward") -> Combination:
    win = dataclasses.replace(sdpa().slots["win"], forward=forward)
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
    for name, (_, expected) in behaviours.items():  # the reason contains ``expected``, see above
        killers.expect("behaviour of a kernel", name, expected)


def test_a_faulty_kernel_is_a_failed_row_in_this_process(combination) -> None:
    before = KernelState()
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


def test_a_worker_with_a_broken_gpu_is_replaced(combination) -> None:
    jobs = jobs_of(["breaks the GPU", "healthy", "breaks the GPU and raises", "healthy"])
    (findings,) = run_jobs([combination], jobs, job_limit_s=60).findings
    assert [sum(f.ok is False for f in job) for job in findings] == [1, 0, 1, 0]


def test_a_worker_with_a_broken_gpu_is_replaced_after_an_error_of_nsa_core(combination) -> None:
    first, healthy = jobs_of(["healthy", "healthy"])
    jobs = [dataclasses.replace(first, check=breaks_the_gpu_and_is_unavailable), healthy]
    broken, after = run_jobs([combination], jobs, job_limit_s=60).findings[0]
    assert [f.detail for f in broken] == ["BackendUnavailable: no"]
    assert all(f.ok for f in after)


def test_a_worker_with_a_broken_gpu_ends_before_the_next_one_starts(
    combination, monkeypatch
) -> None:
    start, running = workers._Pool.start, []

    def watched(pool: workers._Pool, *arguments: object) -> None:
        running.append([process.is_alive() for process in pool._processes])
        start(pool, *arguments)

    monkeypatch.setattr(workers._Pool, "start", watched)
    run_jobs([combination], jobs_of(["breaks the GPU", "healthy"]), job_limit_s=60)
    assert running == [[], [False]]


def test_no_case_is_shrunk_on_a_broken_gpu(combination, monkeypatch) -> None:
    """Every smaller case would fail, and the finding would not name the kernel any more."""
    judged = []

    def judge(combination: Combination, case: object) -> list[Finding]:
        judged.append(case)
        return [Finding("generated win", "win", "case", "float32", "run", False)]

    monkeypatch.setattr(gpu_context, "gpu_error", lambda: "CUDA error: misaligned address")
    (finding,) = OnGenerated("a case", judge, ShrinkBudget())(combination, None, None)
    assert finding.ok is False
    assert judged == ["a case"]


def test_no_history_is_shrunk_on_a_broken_gpu(combination, monkeypatch) -> None:
    replayed = []

    class FailingReplay:
        def __init__(self, history: History, *arguments: object) -> None:
            replayed.append(history)

        def first_failure(self, judge: object) -> Failure:
            return Failure(0, Fault("win", "o", "it is wrong"))

    monkeypatch.setattr(gpu_context, "gpu_error", lambda: "CUDA error: misaligned address")
    monkeypatch.setattr(histories, "Replay", FailingReplay)
    monkeypatch.setattr(histories, "_plans", lambda *arguments: None)
    history = parse_history("batch=2 page_size=4 step=5,0 reorder=0,0 step=1,1")
    (job,) = suite.history_jobs(history, [torch.float32])
    (finding,) = job.run(combination)
    assert finding.detail.startswith("after step=5,0: it is wrong; repeat with")
    assert replayed == [history]


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


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ("crash", "killed its process with SIGSEGV while planning"),
        ("exit", "ended its process with exit status 0 while planning"),
        pytest.param("hang", "did not end within 8 s while planning", marks=pytest.mark.slow),
    ],
)
def test_a_module_that_ends_its_process_is_named_with_its_backend(action, reason) -> None:
    limit_s = 8 if action == "hang" else 60
    with pytest.raises(BackendUnavailable) as caught:
        call_in_child(plan_deadly, action, limit_s=limit_s, doing="while planning")
    assert str(caught.value) == f"backend 'faulty', import of module 'deadly_module': {reason}"


def plan_deadly(action: str) -> None:
    os.environ["DEADLY_MODULE"] = action
    combination = combination_of("faulty_kernels:accept", "deadly_module:forward")
    combination.plan(cases.config_of(2, 1, 8, 8, (8, 4, 8, 3, 8)), torch.float32)


@pytest.mark.slow
def test_after_three_hangs_of_a_slot_only_the_jobs_that_call_it_are_not_run(combination) -> None:
    hang, fine = jobs_of(["hang", "healthy"])
    first, again, second, third = (
        dataclasses.replace(hang, case=dataclasses.replace(hang.case, name=f"case {number}"))
        for number in (1, 1, 2, 3)
    )
    # It calls sel only, on a case in which win hangs.
    other = dataclasses.replace(first, name="any blocks", check=slots.any_blocks)
    combine = next(job for job in generated() if job.name == "generated combine")
    last = dataclasses.replace(fine, name="last")
    jobs = [first, again, other, fine, second, third, last, other, combine, decode_job()]
    healthy = Combination({}, "cpu", Registry(()).with_backend(sdpa()))
    faulty, ours = run_jobs([combination, healthy], jobs, job_limit_s=2).findings
    hung = "backend 'faulty', slot 'win', forward: did not end within 2 s"
    limit = "slot 'win', prefill, did not end within 2 s"
    assert [
        next((f.detail for f in job if f.quantity == "run"), "" if job[0].ok else "?")
        for job in faulty
    ] == [
        *(hung, f"not run: a check of this case with {limit}", "", "", hung, hung),
        f"not run: checks of 3 cases with {limit}",
        *("", "", ""),
    ]
    assert all(f.ok for job in ours for f in job)
    assert len(ours) == len(jobs)
    assert BEHAVIOURS["hang"][1] in hung
    killers.expect("behaviour of a kernel", "hang", BEHAVIOURS["hang"][1])


def generated() -> list[suite.Job]:
    return generated_jobs.jobs_for("quick", [torch.float32], 0, 3, suite.Job)


def decode_job() -> suite.Job:
    step = steps.quick_steps()[0]
    check = suite.OnStep(decode_parity.decode_parity, step)
    return suite.Job("decode", check, step.case, torch.float32)

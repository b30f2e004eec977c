"""`nsa verify` in the interpreter: every check and slot on tiny cases, in fp32 and bf16."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from nsa_cli.app import app
from nsa_core.contract import SLOTS
from nsa_verify.drawn.step import BlockStep
from nsa_verify.run import suite

CHECKS = {check.name for check in suite._CHECKS} - {"packed"}  # parity judges a packed case
STEP_CHECKS = {check.name for check in suite._STEP_CHECKS if check.interpreter}


def test_interpreter_jobs_are_small_and_cover_every_check() -> None:
    jobs = suite.jobs("interpreter", [torch.float32, torch.bfloat16], text=None)
    generated = {"generated core", "generated block_attention", BlockStep().check_name}
    assert {job.name for job in jobs} == CHECKS | STEP_CHECKS | generated
    # run-to-run bits and reads of every token take too long
    assert len(STEP_CHECKS) == len(suite._STEP_CHECKS) - 2
    assert {job.dtype for job in jobs if job.name == "parity"} == {torch.float32, torch.bfloat16}
    for job in jobs:
        assert job.case.batch * job.case.tokens <= 80
        assert job.case.config.qk_dim == 16 >= job.case.config.v_dim
        assert not isinstance(job.check, suite.OnStep) or max(job.check.step.lengths) <= 80


def verify(folder: Path, slots: tuple[str, ...], *more: str) -> dict:
    backends = [f"--{slot}={'triton' if slot in slots else 'sdpa'}" for slot in SLOTS]
    result = CliRunner().invoke(
        app, ["verify", "--device", "cpu", *backends, *more, "--json", str(folder / "report.json")]
    )
    assert result.exit_code == 0, result.output
    return json.loads((folder / "report.json").read_text())


@pytest.mark.slow
def test_verify_runs_kernels_in_the_strict_interpreter(tmp_path: Path) -> None:
    report = verify(tmp_path, ("combine",), "--jobs=1")
    assert report["interpreted"]
    assert report["preset"] == "interpreter"
    profile_findings = [
        f for f in report["findings"] if f["quantity"] == "profile" and f["slot"] == "combine"
    ]
    assert [f["detail"] for f in profile_findings] == ["profile shows combine_forward"]


def seconds_of_fixed_work() -> float:
    """Return the processor time of a fixed loop in Python, a measure of this core's speed."""
    start = time.process_time()
    counts: dict[int, int] = {}
    for i in range(2_000_000):
        counts[i & 1023] = counts.get(i & 1023, 0) + i * i % 7
    return time.process_time() - start


@pytest.mark.slow
def test_verify_of_every_slot_takes_at_most_200_times_a_fixed_loop(tmp_path: Path) -> None:
    """The limit is 90 s on a core that runs the loop in 0.45 s, and scales with the core's speed.

    Measured: 109 s with a loop of 0.63 s, a factor of 173. Processor time is compared, because
    other programs use the machine.
    """
    fixed = [seconds_of_fixed_work()]
    start = time.process_time()
    report = verify(tmp_path, SLOTS, "--jobs=1")
    taken = time.process_time() - start
    fixed.append(seconds_of_fixed_work())
    assert {f["slot"] for f in report["findings"]} >= set(SLOTS)
    assert 10 < taken / (sum(fixed) / 2) < 200, (taken, fixed)

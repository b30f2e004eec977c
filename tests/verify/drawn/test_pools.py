"""Histories of pages that the caller of nsa_decode owns, and the faults that they find."""

from __future__ import annotations

import killers
import pytest
import torch

from nsa_verify.drawn import jobs as drawn_jobs
from nsa_verify.drawn.caches.history import PoolHistory
from nsa_verify.drawn.draw import draw
from nsa_verify.drawn.judge import judge
from nsa_verify.drawn.parser import parse
from nsa_verify.problems.combination import Combination
from nsa_verify.run import suite
from pool_faults import FAULTS

AUTO = Combination({}, name="auto")


def test_histories_have_every_operation_and_a_row_of_padding():
    operations = [
        x for history in draw("nsa_decode", "full", ["float64"]) for x in history.operations
    ]
    assert {x.kind for x in operations} == set(PoolHistory.OPERATIONS)
    assert any(x.padding for x in operations)


def test_a_line_is_read_as_it_is_written():
    line = "nsa_decode batch=2 page_size=8 cmp_page=3 newest=freed step=5,9+2 fork=1,0 move=0"
    assert str(parse(line)) == line


@pytest.mark.slow
def test_healthy_pages_pass():
    for history in draw("nsa_decode", "quick", ["float32", "bfloat16"], seed=3):
        assert all(finding.ok for finding in judge(AUTO, history))


@pytest.mark.parametrize(
    "fault",
    [f if i % 4 == 0 else pytest.param(f, marks=pytest.mark.slow) for i, f in enumerate(FAULTS)],
    ids=lambda fault: fault.name,
)
def test_fault_of_nsa_decode_is_found(fault, monkeypatch):
    monkeypatch.setattr(drawn_jobs, "shrink", lambda history, fails, budget: history)
    jobs = drawn_jobs.step_jobs("quick", [torch.float32], 0, suite.Job)
    with fault.planted():
        failed = (
            finding
            for job in jobs
            if job.name == "page histories"
            for finding in job.run(AUTO)
            if finding.ok is False
        )
        killers.expect("page histories", fault.name, killers.killer(next(failed)))

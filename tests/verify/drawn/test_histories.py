"""Histories: their text, their model, and the faults of a cache that they find."""

from __future__ import annotations

import dataclasses

import killers
import pytest
import torch

from cache_faults import FAULTS, CacheFault
from nsa_core.cache import step
from nsa_verify.drawn import jobs as drawn_jobs
from nsa_verify.drawn.caches import replay
from nsa_verify.drawn.caches.history import History, Operation
from nsa_verify.drawn.caches.model import Model
from nsa_verify.drawn.draw import DESIGNS, draw
from nsa_verify.drawn.judge import judge
from nsa_verify.drawn.parser import parse
from nsa_verify.drawn.shrink import ShrinkBudget
from nsa_verify.problems.combination import Combination
from nsa_verify.run import suite

AUTO = Combination({}, name="auto")
# One fault of each part of the cache, that an early history finds.
ORDINARY = (
    "the ring index is off by one after a wrap",
    "reorder forgets the raw ring",
    "reset keeps the lengths on the device",
    "a compressed token is written one step late",
)


def histories(count, seed):
    return draw("cache", "quick", ["float64"], seed=seed, count=count)


def failures(history):
    return [finding for finding in judge(AUTO, history) if finding.ok is False]


def test_histories_have_every_operation_and_depend_on_the_seed():
    drawn = histories(20, 1)
    kinds = {operation.kind for history in drawn for operation in history.operations}
    assert kinds == set(History.OPERATIONS)
    again = DESIGNS["cache"]("quick", ["float64"]).draw(1, 20)
    assert list(drawn) == again != list(histories(20, 2))
    # A sequence reaches the end of its cache.
    assert any(max(_lengths(history), default=0) == history.max_len for history in drawn)


def _lengths(history):
    model, reached = Model(history), []
    for operation in history.operations:
        if model.exists(operation) and not model.refused(operation):
            model.apply(operation)
            reached += model.lengths
    return reached


def test_model_refuses_as_the_cache_documents():
    model = Model(History(max_len=10, max_rollback=2))
    model.apply(Operation("step", (9,)))
    assert model.refused(Operation("step", (2,)))
    assert not model.refused(Operation("step", (1,)))
    assert not model.refused(Operation("crop", (7,)))
    assert model.refused(Operation("crop", (6,)))
    model.apply(Operation("crop", (7,)))
    assert model.refused(Operation("crop", (6,)))  # the sequence has had 9 tokens
    assert model.refused(Operation("crop", (8,)))
    assert not model.exists(Operation("load", (0, 0)))


def test_long_chunks_of_single_sequences_come_in_turn():
    """The first piece of sequence 0 ends where that of sequence 1 begins."""
    line = "cache dtype=float64 l=4 d=2 block=4 n=4 init=1 local=1 h=2 batch=2 chunk_rows=4"
    assert not failures(parse(f"{line} max_step=1 step=5,9 step=12,12"))


@pytest.mark.slow
def test_healthy_cache_passes_in_low_precision():
    for history in histories(3, 8):
        assert not failures(history.replace(dtype="bfloat16"))


@pytest.mark.parametrize(("dtype", "factor"), [("bfloat16", 1.01), ("float32", 1 + 1e-6)])
def test_wrong_head_of_one_branch_is_found(dtype, factor, monkeypatch):
    """After the output projection, one head of one branch would be a small part of each number."""
    record = replay.recorded

    def planted(plan, calls):
        def win(*tensors, **options):
            o, lse = plan.win(*tensors, **options)
            return torch.cat([o[..., :1, :] * factor, o[..., 1:, :]], -2), lse

        return record(dataclasses.replace(plan, win=win), calls)

    line = f"cache dtype={dtype} h=3 groups=2 batch=2 max_len=64 step=61,40"
    assert not failures(parse(line))
    monkeypatch.setattr(replay, "recorded", planted)
    assert [failure.quantity for failure in failures(parse(line))] == ["o of a step"]


def test_output_of_another_sequence_is_found():
    """The rows of the output projection are compared with those that the layer returns."""
    change = ("index_copy(0, sequences, y)", "index_copy(0, sequences.flip(0), y)")
    line = parse("cache dtype=float64 batch=3 step=5,0,5")
    assert not failures(line)
    with CacheFault("", step, "prefill", *change).planted():
        assert [failure.quantity for failure in failures(line)] == ["y"]


@pytest.mark.slow
def test_failure_is_shrunk_to_a_line_that_repeats_it():
    (fault,) = (f for f in FAULTS if f.name == "reorder forgets the raw ring")
    line = "cache dtype=float64 batch=3 max_rollback=3 step=0,3,11 step=1,1,1 reorder=2,2,0"
    long = parse(f"{line} step=1,0,2")
    with fault.planted():
        check = drawn_jobs.OnDrawn(long, ShrinkBudget(20.0))
        (failure,) = check(AUTO, None, None)
        small = parse(failure.case)
        assert small.batch == 2
        assert [operation.kind for operation in small.operations] == ["step", "reorder"]
        assert "max_rollback" not in failure.case
        assert failures(small)[0].quantity == failure.quantity
    assert not failures(small)


def _found(fault, preset, monkeypatch):
    monkeypatch.setattr(drawn_jobs, "shrink", lambda history, fails, budget: history)
    jobs = drawn_jobs.step_jobs(preset, [torch.float32, torch.bfloat16], 0, suite.Job)
    with fault.planted():
        return [
            finding
            for job in jobs
            if job.name == "cache histories"
            for finding in job.run(AUTO)
            if finding.ok is False
        ]


@pytest.mark.few_cases(
    "reorder forgets the raw ring", "a compressed token is written one step late"
)
@pytest.mark.parametrize("fault", [f for f in FAULTS if f.name in ORDINARY], ids=ORDINARY)
def test_fault_of_the_cache_is_found(fault, monkeypatch):
    first, *_ = _found(fault, "quick", monkeypatch)
    killers.expect("cache histories, quick", fault.name, killers.killer(first))


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_every_fault_of_the_cache_is_found(fault, monkeypatch):
    first, *_ = _found(fault, "full", monkeypatch)
    killers.expect("cache histories, full", fault.name, killers.killer(first))


def test_lost_reference_keeps_a_page_that_is_reported():
    """A leak is no wrong number: only the count of free pages shows it."""
    (fault,) = (f for f in FAULTS if f.name == "a crop loses its pages")
    history = parse("cache dtype=float64 page_size=4 max_rollback=9 step=9 crop=3")
    assert not failures(history)
    with fault.planted():
        assert failures(history)[0].quantity == "pages"


def test_refused_dtype_is_reported_without_a_verdict():
    """A history of a combination that cannot run is one finding that does not apply."""
    only_fa2 = Combination(dict.fromkeys(("cmp", "sel", "win"), "fa2"))
    try:
        assert [finding.ok for finding in judge(only_fa2, parse("cache step=3"))] == [None]
    except RuntimeError as error:  # flash-attn is not installed here
        assert "fa2" in str(error)  # noqa: PT017

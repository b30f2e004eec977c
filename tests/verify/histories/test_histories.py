"""Histories: their text, their model, and the faults of a cache that they find."""

from __future__ import annotations

import dataclasses
import re

import killers
import pytest
import torch

from cache_faults import FAULTS
from nsa_core import InvalidInput
from nsa_verify.checks import histories
from nsa_verify.generated.design import longer_design, missing_tuples
from nsa_verify.histories.draw import LEVELS, draw_histories
from nsa_verify.histories.history import BASE, History, Operation, Sizes, parse_history
from nsa_verify.histories.model import Model
from nsa_verify.problems.combination import Combination
from nsa_verify.run.suite import Job

AUTO = Combination({}, name="auto")
EXAMPLE = "compress=linear scale=-0.7 batch=2 page_size=4 step=5,0+2 save=0 load=0,1 crop=5,4"
# One fault of each part of the cache, that an early history finds.
ORDINARY = (
    "the ring index is off by one after a wrap",
    "reorder forgets the raw ring",
    "reset keeps the lengths on the device",
    "a compressed token is written one step late",
)


def failures(jobs):
    """The failed findings of the first job that has one."""
    for job in jobs:
        failed = [finding for finding in job.run(AUTO) if finding.ok is False]
        if failed:
            return failed
    return []


@pytest.mark.parametrize("seed", [0, 5])
def test_line_of_a_history_is_read_back_exactly(seed):
    for history in (*draw_histories(12, seed), parse_history(EXAMPLE)):
        assert parse_history(str(history)) == history
    assert str(parse_history(EXAMPLE)) == EXAMPLE


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("step", "'step' must be name=value"),
        ("stpe=1", "did you mean"),
        ("batch=two", "batch needs integers >= 0, got 'two'"),
        ("batch=-1", "batch needs integers >= 0, got '-1'"),
        ("batch=2 batch=2", "batch stands twice"),
        ("batch=2 step=1", "step=1 has 1 integers, expected 2"),
        ("load=0", "load=0 has 1 integers, expected 2"),
        ("crop=1+2", "only a step has rows of padding"),
        ("rope=yes", "rope must be True or False, got 'yes'"),
        ("scale=big", "scale must be a number or None, got 'big'"),
        ("compress_stride=3", "compress_stride"),
    ],
)
def test_wrong_line_is_refused_with_the_word(line, message):
    with pytest.raises(InvalidInput, match=re.escape(message)):
        parse_history(line)


def test_design_of_histories_has_every_pair():
    count = sum(histories.COUNTS["full"])
    for seed in (0, 3):
        assert missing_tuples(LEVELS, longer_design(LEVELS, count, seed=seed)) == []


def test_histories_have_every_operation_and_depend_on_the_seed():
    drawn = draw_histories(20, 1)
    kinds = {operation.kind for history in drawn for operation in history.operations}
    assert kinds >= {"step", "crop", "reorder", "reset", "save", "load", "release", "reserve"}
    draw_histories.cache_clear()
    assert drawn == draw_histories(20, 1) != draw_histories(20, 2)
    full = [
        history for history in drawn if max(_lengths(history), default=0) == history.sizes.max_len
    ]
    assert full  # a sequence reaches the end of its cache


def _lengths(history):
    model, reached = Model(history), []
    for operation in history.operations:
        if model.exists(operation) and not model.refused(operation):
            model.apply(operation)
            reached += model.lengths
    return reached


def test_model_refuses_as_the_cache_documents():
    history = History(BASE, Sizes(batch=1, max_len=10, max_rollback=2), ())
    model = Model(history)
    model.apply(Operation("step", (9,)))
    assert model.refused(Operation("step", (2,)))
    assert not model.refused(Operation("step", (1,)))
    assert not model.refused(Operation("crop", (7,)))
    assert model.refused(Operation("crop", (6,)))
    model.apply(Operation("crop", (7,)))
    assert model.refused(Operation("crop", (6,)))  # the sequence has had 9 tokens
    assert model.refused(Operation("crop", (8,)))
    assert not model.exists(Operation("load", (0, 0)))


def test_healthy_cache_passes_in_low_precision():
    for number, history in enumerate(draw_histories(3, 8)):
        job = histories.history_job(history, torch.bfloat16, f"history {number}", Job)
        assert [finding.ok for finding in job.run(AUTO)] == [True]


def test_failure_is_shrunk_to_a_line_that_repeats_it():
    (fault,) = (f for f in FAULTS if f.name == "reorder forgets the raw ring")
    long = parse_history("batch=3 max_rollback=3 step=0,3,11 step=1,1,1 reorder=2,2,0 step=1,0,2")
    with fault.planted():
        job = histories.history_job(long, torch.float64, "long", Job)
        (failure, *_) = failures([job])
        line = re.search(r"--history '([^']*)'", failure.detail)
        small = parse_history(line[1])
        assert small.sizes.batch == 2
        assert [operation.kind for operation in small.operations] == ["step", "reorder"]
        assert "max_rollback" not in str(small)
        job = histories.history_job(small, torch.float64, "repeated", Job)
        repeated = failures([job])
        assert repeated[0].quantity == failure.quantity
    assert not failures([job])


def _found(fault, preset, monkeypatch):
    monkeypatch.setattr(histories, "shrink", lambda history, fails: history)
    with fault.planted():
        return failures(histories.jobs_for(preset, [torch.float32, torch.bfloat16], 0, Job))


@pytest.mark.parametrize("fault", [f for f in FAULTS if f.name in ORDINARY], ids=ORDINARY)
def test_fault_of_the_cache_is_found(fault, monkeypatch):
    first, *_ = _found(fault, "quick", monkeypatch)
    killers.expect("cache histories, quick", fault.name, killers.killer(first))


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_every_fault_of_the_cache_is_found(fault, monkeypatch):
    first, *_ = _found(fault, "full", monkeypatch)
    killers.expect("cache histories, full", fault.name, killers.killer(first))


def test_lost_reference_keeps_a_page_that_is_reported(monkeypatch):
    """A leak is no wrong number: only the count of free pages shows it."""
    (fault,) = (f for f in FAULTS if f.name == "a crop loses its pages")
    history = parse_history("page_size=4 max_rollback=9 step=9 crop=3")
    job = histories.history_job(history, torch.float64, "pages", Job)
    monkeypatch.setattr(histories, "shrink", lambda history, fails: history)
    assert not failures([job])
    with fault.planted():
        assert failures([job])[0].quantity == "pages"


def test_refused_dtype_is_reported_without_a_verdict():
    """A history of a combination that cannot run is one finding that does not apply."""
    only_fa2 = Combination(dict.fromkeys(("cmp", "sel", "win"), "fa2"))
    history = dataclasses.replace(parse_history("step=3"), config=BASE)
    job = histories.history_job(history, torch.float32, "refused", Job)
    try:
        assert [finding.ok for finding in job.run(only_fa2)] == [None]
    except RuntimeError as error:  # flash-attn is not installed here
        assert "fa2" in str(error)  # noqa: PT017

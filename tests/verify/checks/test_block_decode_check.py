"""The check of block_attention_decode passes correct decode forms and fails faulty ones."""

from __future__ import annotations

from typing import Any

import killers
import pytest
import torch

import toy_blocks
from nsa_core.block import step as core
from nsa_core.contract import DTYPES, DecodeCall, SlotSpec
from nsa_verify.drawn.draw import draw
from nsa_verify.drawn.judge import judge
from nsa_verify.drawn.step import STARTS, BlockStep
from nsa_verify.problems.combination import Combination
from nsa_verify.problems.findings import Finding
from nsa_verify.run import suite

FORMS = sorted(name for name in vars(toy_blocks) if name.startswith("decode_"))
CHECK = BlockStep().check_name
FORMS.remove("decode_forms")


def findings(
    combination: Combination, preset: str = "interpreter", dtype: str = "float32"
) -> list[Finding]:
    steps = draw("block_attention_decode", preset, [dtype], seed=3)
    return [finding for step in steps for finding in judge(combination, step)]


@pytest.mark.few_cases
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("preset", ["quick", pytest.param("full", marks=pytest.mark.slow)])
def test_correct_forms_pass(preset: str, dtype: str) -> None:
    results = findings(toy_blocks.subject(), preset, dtype)
    steps = draw("block_attention_decode", preset, [dtype], seed=3)
    assert {f.case for f in results} == set(map(str, steps))
    assert all(finding.ok for finding in results), [f for f in results if not f.ok]


@pytest.mark.few_cases("decode_in_the_first_pages", "decode_one_token_early")
@pytest.mark.parametrize("form", FORMS)
def test_a_faulty_form_fails(form: str) -> None:
    results = findings(toy_blocks.subject(decode=form), "quick")
    first = next(finding for finding in results if finding.ok is False)
    killers.expect("block attention decode", form, killers.killer(first))


def test_a_faulty_split_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        core,
        "split_blocks",
        lambda blocks, sizes, keys: blocks.long().repeat_interleave(sizes.parts, -1),
    )
    assert False in [finding.ok for finding in findings(toy_blocks.subject(), "quick")]


def test_a_backend_without_the_form_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy_blocks, "SlotSpec", lambda *paths, **fields: SlotSpec(*paths[:2]))
    results = findings(toy_blocks.subject())
    assert results
    assert {finding.ok for finding in results} == {None}
    assert "has no decode form of sel" in results[0].detail


def test_steps_have_sequences_that_are_shorter_than_the_step() -> None:
    steps = draw("block_attention_decode", "quick", DTYPES)
    assert {step.h for step in steps} == {*range(1, 21), 64}
    for starts in STARTS:
        drawn = [step for step in steps if step.starts == starts and step.rows > 1]
        assert any(0 < length < step.rows for step in drawn for length in step.lengths)


def test_lengths_that_are_read_as_dense_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(geometry: Any, scale: float, starts: Any, lengths: Any, *rest: Any) -> DecodeCall:
        dense = lengths.as_strided(lengths.shape, (1,))
        return DecodeCall(geometry, scale, starts, dense, *rest)

    monkeypatch.setattr(core, "DecodeCall", faulty)
    failed = {f.case for f in findings(toy_blocks.subject()) if f.ok is False}
    assert failed
    assert all("metadata=strided" in case for case in failed)


@pytest.mark.parametrize("preset", ["interpreter", "quick"])
def test_the_jobs_of_a_preset_have_the_check(preset: str) -> None:
    jobs = suite.jobs(preset, [torch.float32], phase="decode")
    count = sum(job.name == CHECK for job in jobs)
    assert count == len(draw("block_attention_decode", preset, ["float32"])) > 5

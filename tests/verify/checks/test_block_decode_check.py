"""The check of block_attention_decode passes correct decode forms and fails faulty ones."""

from __future__ import annotations

import pytest
import torch

import toy_blocks
from nsa_core.contract import SlotSpec
from nsa_core.layer import block_step as core
from nsa_verify.checks import block_decode
from nsa_verify.combination import Combination
from nsa_verify.findings import Finding
from nsa_verify.run import suite

FORMS = sorted(name for name in vars(toy_blocks) if name.startswith("decode_"))
FORMS.remove("decode_forms")


def findings(
    combination: Combination, preset: str = "quick", dtype: torch.dtype = torch.float32
) -> list[Finding]:
    jobs = block_decode.jobs_for(preset, [dtype], 3, suite.Job)
    return [finding for job in jobs for finding in job.run(combination)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("preset", ["quick", "full"])
def test_correct_forms_pass(preset: str, dtype: torch.dtype) -> None:
    results = findings(toy_blocks.subject(), preset, dtype)
    assert {finding.case for finding in results} == {
        step.case(0).name for step in block_decode.STEPS[preset]
    }
    assert all(finding.ok for finding in results), [f for f in results if not f.ok]


@pytest.mark.parametrize("form", FORMS)
def test_a_faulty_form_fails(form: str) -> None:
    assert False in [finding.ok for finding in findings(toy_blocks.subject(decode=form))]


def test_a_faulty_split_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        core, "split_blocks", lambda blocks, parts: blocks.long().repeat_interleave(parts, -1)
    )
    assert False in [finding.ok for finding in findings(toy_blocks.subject())]


def test_a_backend_without_the_form_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy_blocks, "SlotSpec", lambda *paths, **fields: SlotSpec(*paths[:2]))
    results = findings(toy_blocks.subject())
    assert [finding.ok for finding in results] == [None] * len(block_decode.STEPS["quick"])
    assert "has no decode form of sel" in results[0].detail


@pytest.mark.parametrize(
    "preset", ["interpreter", *(pytest.param(p, marks=pytest.mark.slow) for p in ("quick", "full"))]
)
def test_the_jobs_of_a_preset_have_the_check(preset: str) -> None:
    jobs = suite.jobs(preset, [torch.float32], text=None, phase="decode")
    names = [job.case.name for job in jobs if job.name == block_decode.CHECK]
    assert names == [step.case(0).name for step in block_decode.STEPS[preset]]

"""Each decode check of `nsa verify` passes correct forms and fails forms that violate its rule."""

from __future__ import annotations

import dataclasses
import json

import killers
import pytest
import torch
from typer.testing import CliRunner

from nsa_backend_sdpa.plugin import nsa_register_backends as sdpa
from nsa_cli.app import app
from nsa_core.plan.registry import Registry
from nsa_verify.checks import decode_compress, decode_fused, decode_invariants
from nsa_verify.checks.decode_parity import decode_parity
from nsa_verify.problems.combination import Combination
from nsa_verify.problems.steps import quick_steps
from nsa_verify.run import suite
from toy_forms import subject

STEP = quick_steps()[2]  # five rows per sequence, some of them padding, with pages
CHECKS = {
    "ties": decode_invariants.ties,
    "run to run": decode_invariants.run_to_run,
    "page order": decode_invariants.page_order,
    "replay": decode_invariants.replayed,
    "dispatch": decode_invariants.dispatch,
    "fused step": decode_fused.fused_step,
    "fused append": decode_fused.fused_append,
    "fused gates": decode_fused.fused_gates,
    "fused compress": decode_compress.fused_compress,
}
BROKEN = {
    "run to run": [{"win": "win_not_deterministic"}],
    "page order": [{"win": "win_with_page_numbers"}],
    "replay": [{"win": "win_with_stale_lengths"}],
    "dispatch": [{"win": "win_without_evidence"}],
    "fused step": [
        {"step": f"step_with_{fault}"}
        for fault in ("fewer_blocks", "swapped_gates", "written_padding")
    ],
    "fused append": [
        {"append": f"append_{fault}"}
        for fault in (
            "rotated_one_early",
            "with_padding",
            "without_rotary_of_win",
            "with_swapped_values",
        )
    ],
    "fused gates": [
        {"gates": f"gates_{fault}"}
        for fault in ("without_bias", "with_bf16_sums", "with_shifted_heads")
    ],
    "fused compress": [
        {"compress": f"compress_{fault}"}
        for fault in (
            "one_early",
            "one_late",
            "with_another_ring_row",
            "without_rotary",
            "without_position",
            "with_tanh_gelu",
        )
    ],
}
WRITING = "win_writing_its_input"  # the guard of calls finds it in every check
_FORMS = {"step": "step", "append": "append", "gates": "gates", "compress": "compress"}
ALL = {
    "block attention decode",
    "generated steps",
    "cache histories",
    "page histories",
    "decode",
    "decode reads",
    *(f"decode {check}" for check in CHECKS),
}


def run(check: str, dtype: torch.dtype = torch.float32, **forms: str) -> list[bool]:
    return [f.ok for f in CHECKS[check](subject(**forms), STEP, dtype) if f.ok is not None]


@pytest.mark.parametrize("check", CHECKS)
def test_correct_forms_pass(check):
    for dtype in (torch.float32, torch.bfloat16):
        results = run(check, dtype, **_FORMS)
        assert results
        assert all(results)


@pytest.mark.parametrize(
    ("check", "forms"),
    [(check, forms) for check, broken in BROKEN.items() for forms in broken],
    ids=str,
)
def test_faulty_form_fails_its_check(check, forms):
    assert False in run(check, **forms)
    killers.expect("decode checks", *forms.values(), check)


def test_form_that_writes_to_its_input_fails_the_check_that_runs_it():
    (finding,) = suite.Job(
        "decode", suite.OnStep(decode_parity, STEP), STEP.case, torch.float32
    ).run(subject(win=WRITING))
    assert finding.ok is False
    assert "slot 'win', decode: it changed argument 3 in place" in finding.detail
    killers.expect("decode checks", WRITING, "guard of calls")


@pytest.mark.slow
def test_jobs_contain_every_decode_check():
    names = {job.name for job in suite.jobs("quick", [torch.float32], phase="decode")}
    assert names == ALL
    assert (
        not {j.name for j in suite.jobs("full", [torch.float32], phase="prefill", cases_per_slot=0)}
        & names
    )
    both = suite.jobs("interpreter", [torch.float32])
    assert {"parity", "decode", "decode fused step"} <= {job.name for job in both}


def test_decode_checks_do_not_apply_without_decode_forms():
    slots = {name: dataclasses.replace(slot, decode=None) for name, slot in sdpa().slots.items()}
    registry = Registry(()).with_backend(
        dataclasses.replace(sdpa(), name="prefill-only", slots=slots)
    )
    job = suite.jobs("quick", [torch.float32], phase="decode")[0]
    (finding,) = job.run(Combination({}, registry=registry))
    assert finding.ok is None
    assert "has no decode form of cmp" in finding.detail


@pytest.mark.slow
def test_report_has_the_phase(tmp_path, monkeypatch):
    monkeypatch.setattr(suite, "STEPS", {"quick": lambda: (STEP,)})
    report = tmp_path / "report.json"
    arguments = [
        "verify",
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--phase",
        "decode",
        "--json",
        str(report),
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    contents = json.loads(report.read_text())
    assert contents["phase"] == "decode"
    # "decode reads" runs only on steps of one token.
    assert {f["check"] for f in contents["findings"]} == ALL - {"decode reads"}
    assert any(f["ok"] is None and "no fused step" in f["detail"] for f in contents["findings"])

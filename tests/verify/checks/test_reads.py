"""Tokens read, counted by experiment: what is predicted, and one token too many or too few is found
in either.
"""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from nsa_cli.app import app
from nsa_verify.cases import TINY, config_of
from nsa_verify.checks import reads
from nsa_verify.checks.reads import PAPER_BOUND, count_reads, predicted_total, reads_config
from nsa_verify.run import suite
from toy_forms import subject

CONFIG = config_of(4, 2, 16, 16, TINY)  # l=8 d=4 l'=16 n=4 w=24


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("length", [1, 7, 8, 11, 12, 17, 24, 25, 77])
def test_what_is_read_is_what_is_predicted(length, dtype):
    found = count_reads(subject(), CONFIG, length, dtype, chunk=50)
    assert [(r.branch, r.kv_head) for r in found] == [
        (b, g) for b in ("cmp", "sel", "win") for g in (0, 1)
    ]
    for entry in found:
        assert entry.ok, entry
        assert entry.predicted == entry.counted_values == entry.counted_keys
    of = {r.branch: r.predicted for r in found}
    assert (of["cmp"], of["win"]) == (max(0, (length - 8) // 4 + 1), min(24, length))
    assert sum(of.values()) == predicted_total(CONFIG, length)


@pytest.mark.parametrize(
    ("slot", "form", "count", "said"),
    [
        ("win", "win_one_more", 25, "1 token(s) too many [44], 0 too few"),
        ("win", "win_one_fewer", 23, "0 token(s) too many [], 1 too few [45]"),
        ("cmp", "cmp_one_more", 17, "1 token(s) too many [16], 0 too few"),
        ("sel", "sel_one_more", 54, "1 token(s) too many [69], 0 too few"),
        ("sel", "sel_one_fewer", 52, "0 token(s) too many [], 1 too few [68]"),
    ],
)
def test_a_token_too_many_and_one_too_few(slot, form, count, said):
    found = [
        r
        for r in count_reads(subject(**{slot: form}), CONFIG, 69, torch.float32)
        if r.branch == slot
    ]
    assert [(r.ok, r.counted_values, r.counted_keys) for r in found] == [(False, count, count)] * 2
    assert f"values of {said}" in found[0].detail
    assert f"keys of {said}" in found[0].detail


def test_a_key_that_is_not_read_is_counted_apart_from_its_value():
    found = [
        r
        for r in count_reads(subject(sel="sel_with_a_key_unread"), CONFIG, 30, torch.float32)
        if r.branch == "sel"
    ]
    assert [(r.counted_values, r.counted_keys) for r in found] == [(30, 28)] * 2
    assert not found[0].ok


def test_bytes():
    (cmp, _, sel, *_) = count_reads(subject(), config_of(6, 2, 16, 8, TINY), 40, torch.bfloat16)
    # select reads k_cmp too
    assert (cmp.predicted, cmp.distinct_bytes, cmp.again_bytes) == (
        9,
        9 * 24 * 2,
        9 * 16 * 2,
    )
    assert (sel.predicted, sel.distinct_bytes, sel.again_bytes, sel.shared_bytes) == (
        40,
        40 * 48,
        0,
        2 * 40 * 48,
    )


def test_the_formula_stays_below_the_papers_table_4():
    for length, bound in PAPER_BOUND.items():
        assert predicted_total(reads_config(), length) == bound - 1


def test_verify_prints_the_table(tmp_path, monkeypatch):
    monkeypatch.setattr(reads, "LENGTHS", (33,))
    monkeypatch.setattr(reads, "PAPER_BOUND", {33: 67})
    monkeypatch.setattr(suite, "jobs", lambda *_, **__: [])
    report = tmp_path / "report.json"
    arguments = [
        "verify",
        "--device",
        "cpu",
        "--reads",
        "--phase",
        "decode",
        "--dtype",
        "float32",
        "--json",
        str(report),
    ]
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "the paper's Table 4: 67" in done.output
    assert "6 checks passed, 0 failed" in done.output
    rows = json.loads(report.read_text())["reads"]
    assert [(row["branch"], row["counted_values"]) for row in rows[::2]] == [
        ("cmp", 1),
        ("sel", 33),
        ("win", 33),
    ]
    monkeypatch.setattr(reads, "_predicted", lambda *_: [{0}] * 2)
    wrong = CliRunner().invoke(app, arguments[:-2], env={"COLUMNS": "200"})
    assert wrong.exit_code == 1
    assert "too many" in wrong.output


def test_a_combination_without_decode_forms_says_why(monkeypatch):
    monkeypatch.setattr(suite, "jobs", lambda *_, **__: [])
    done = CliRunner().invoke(
        app, ["verify", "--device", "cpu", "--reads", "--phase", "decode", "--win", "fa2"]
    )
    assert done.exit_code == 3

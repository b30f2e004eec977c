"""`nsa tune`: its records decide the choice of `auto`, as long as the environment is the same."""

from __future__ import annotations

import dataclasses
import json
import re
import warnings

import pytest
import torch

from nsa_bench.shapes import parse_shape
from nsa_bench.tune import tune
from nsa_bench.tune_candidates import TuneCandidates, find_tune_candidates
from nsa_cli import output
from nsa_core.plan import tuned
from nsa_core.plan.plan import resolve

CONFIG = parse_shape("2/1/8").config((8, 4, 16, 3, 24))


def candidates_in(registry) -> TuneCandidates:
    return find_tune_candidates(CONFIG, registry, device="cpu", dtype=torch.float32)


@pytest.fixture
def registry(registry_with):
    """Return a registry with sdpa and a correct but slow win backend of higher priority."""
    return registry_with("slow", delay=0.05, priority=100)


_records: list[tuned.Record] = []


@pytest.fixture
def measured(registry):
    """Return the registry after tuning; the records are measured once and saved for each test."""
    if not _records:
        labels: list[str] = []
        candidates = candidates_in(registry)
        result = tune(candidates, length=48, budget_s=0.001, advance=labels.append)
        _records.extend(result.records)
        # The command's progress bar needs the exact number of steps.
        assert len(labels) == candidates.steps
    tuned.save(_records)
    return registry


def window(registry, **changes) -> str:
    return resolve(CONFIG, registry=registry, **changes).choices["win"].backend


@pytest.mark.slow
@pytest.mark.parametrize("needs_grad", [False, True])
def test_auto_takes_the_fastest_measured_backend_and_explains_it(registry, needs_grad):
    assert window(registry, needs_grad=needs_grad) == "slow"  # by priority
    tuning = tune(candidates_in(registry), length=48, budget_s=0.001)
    tuned.save(tuning.records)
    plan = resolve(CONFIG, registry=registry, needs_grad=needs_grad)
    assert plan.choices["win"].backend == "sdpa"
    assert "win: sdpa 0.1.0 (auto, tuned: " in plan.explain()
    assert "against slow" in plan.explain()
    assert "cmp: sdpa 0.1.0 (auto)" in plan.explain()  # only one candidate
    assert window(registry, backends={"win": "slow"}) == "slow"  # an explicit choice wins


@pytest.mark.slow
def test_records_apply_only_to_the_measured_request(measured):
    assert window(measured) == "sdpa"
    assert window(measured, dtype="float64") == "slow"
    assert window(measured, varlen=True) == "slow"
    assert window(measured, deterministic=True) == "slow"


@pytest.mark.few_cases(
    "versions-value2",
    "versions-value3",
    "times_ms-value4",
    "times_ms-value5",
    "times_ms-value6",
    "times_ms-value7",
    "shape_class-2/1/8/8",
    "times_ms-3",
    "slot-3",
)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("device", "another GPU"),
        ("torch", "1.0"),
        ("versions", {"sdpa": "0.0", "slow": "1.0"}),
        ("versions", {"sdpa": "0.1.0"}),
        ("times_ms", {"sdpa": -1.0, "slow": 2.0}),
        ("times_ms", {"sdpa": "fast", "slow": 2.0}),
        ("times_ms", {"sdpa": 10**400, "slow": 2.0}),
        ("times_ms", {}),
        ("times_ms", 3),
        ("shape_class", "2/1/8/8"),
        ("slot", 3),
    ],
)
def test_records_of_other_environments_and_malformed_records_are_ignored(measured, field, value):
    document = json.loads(tuned.path().read_text())
    for record in document["records"]:
        record[field] = value
    tuned.path().write_text(json.dumps(document))
    assert window(measured) == "slow"


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"schema_version": 2, "records": []}', "{}"]
)
def test_a_corrupt_file_is_reported_and_replaced(nsa, measured, content):
    tuned.path().write_text(content)
    with pytest.warns(UserWarning, match="is not a file of nsa tune") as caught:
        assert window(measured) == "slow"
    (warning,) = caught
    assert str(warning.message).startswith(f"{tuned.path()} is")
    assert str(warning.message).endswith("nsa tune --reset deletes it")
    shown = nsa("tune", "--show")
    assert (shown.code, shown.out) == (2, "")
    assert "is not a file of nsa tune" in shown.err
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert nsa("tune", "--reset").code == 0
    tuned.save(_records)
    assert window(measured) == "sdpa"


@pytest.mark.filterwarnings("error")
def test_a_cache_folder_that_cannot_exist_has_no_records(monkeypatch, tmp_path):
    """Services run with HOME=/dev/null."""
    monkeypatch.setattr(tuned, "path", lambda: tmp_path / "file" / "tuned.json")
    (tmp_path / "file").write_text("")
    assert tuned.load() == []


def test_a_file_that_cannot_be_read_is_not_called_corrupt(monkeypatch, tmp_path):
    monkeypatch.setattr(tuned, "path", lambda: tmp_path)
    with pytest.warns(UserWarning, match="cannot be read and is not used: .*IsADirectory"):
        assert tuned.load() == []


@pytest.mark.slow
def test_wrong_backends_are_neither_timed_nor_recorded(registry_with):
    registry = registry_with("wrong", lambda o: o * 1.01, priority=-5)
    tuning = tune(candidates_in(registry), length=48, budget_s=0.001)
    wrong = [t for t in tuning.times if t.backend == "wrong"]
    assert {t.slot for t in wrong} == {"win"}
    assert {t.time_ms for t in wrong} == {None}
    assert all("gate failed" in t.reason for t in wrong)
    assert "win" not in {r.slot for r in tuning.records}
    assert {r.slot for r in tuning.records} == {"cmp", "select", "sel", "combine"}


@pytest.mark.slow
def test_the_command_saves_records_and_explain_shows_them(nsa, registry, monkeypatch):
    monkeypatch.setattr(output, "find_backends", lambda: registry)
    arguments = ("--shape", "2/1/8", "--blocks", "8,4,16,3,24", "--length", "48", "--device", "cpu")
    done = nsa("tune", *arguments, "--budget", "0.001")
    assert done.code == 0, done.err
    assert str(tuned.path()) in done.out
    assert {r.slot for r in tuned.load()} == {"cmp", "select", "sel", "win", "combine"}
    monkeypatch.setattr(
        tuned, "choose", lambda records, *request: ("sdpa", "1 ms against slow 50 ms")
    )
    shown = nsa("backends", "explain", "--device", "cpu")
    assert "win      sdpa 0.1.0  nsa tune: 1 ms against slow 50 ms" in shown.out


def test_the_command_shows_and_deletes_saved_choices(nsa, registry):
    tuned.save([_record(slot, time) for slot, time in (("win", 0.5), ("cmp", 2104.0))])
    shown = nsa("tune", "--show")
    assert shown.code == 0, shown.err
    assert "chip, torch 2.0, 2/1/8/8 8,4,16,3,24 float32 (not used: torch" in shown.out
    assert re.search(r"win +training +slow +0.5 ms against sdpa 3 ms at 48 tokens", shown.out)
    assert re.search(r"cmp +training +sdpa +2100 ms at 48 tokens", shown.out)
    assert shown.out.index("cmp") < shown.out.index("win")
    assert nsa("tune", "--show", "--reset").code == 2
    assert len(tuned.load()) == 2
    reset = nsa("tune", "--reset")
    assert reset.code == 0
    assert reset.out.startswith(shown.out)
    assert not tuned.path().exists()
    assert "no choices are saved" in nsa("tune", "--show").out
    assert nsa("tune", "--reset").code == 0


def test_saved_texts_are_printed_without_control_characters(nsa):
    record = dataclasses.replace(
        _record("cmp", 2.0),
        device="chip\x1b[2J\u202e\nwin",
        date="\x07[bold]",
        times_ms={"a\x1b\n": 1.0},
        versions={"a\x1b\n": "1"},
    )
    tuned.save([record])
    shown = nsa("tune", "--show")
    assert r"chip\x1b[2J\u202e win" in shown.out
    assert r"a\x1b\n" in shown.out
    assert r"\x07[bold]" in shown.out
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", shown.out)


def _record(slot: str, time: float) -> tuned.Record:
    shape = "2/1/8/8 8,4,16,3,24 float32 training"
    times, versions = {"sdpa": 3.0, "slow": time}, {"sdpa": "1", "slow": "1"}
    if slot == "cmp":
        times, versions = {"sdpa": time}, {"sdpa": "1"}
    return tuned.Record("chip", "2.0", shape, slot, times, versions, 48, "2026-01-31")


@pytest.mark.slow
def test_the_command_exits_with_1_if_a_backend_is_wrong(nsa, registry_with, monkeypatch):
    registry = registry_with("wrong", lambda o: o * 1.01)
    monkeypatch.setattr(output, "find_backends", lambda: registry)
    done = nsa(
        "tune",
        "--shape",
        "2/1/8",
        "--blocks",
        "8,4,16,3,24",
        "--length",
        "48",
        "--device",
        "cpu",
        "--budget",
        "0.001",
    )
    assert done.code == 1
    assert len(re.findall(r"NOT CORRECT win=wrong: win \(wrong\) o: ", done.out)) == 1
    assert "NOT CORRECT win=wrong: win (wrong) dq: " in done.out


def test_a_machine_without_a_backend_gets_the_reasons_and_no_file(nsa, monkeypatch):
    monkeypatch.setenv("NSA_DISABLE_PLUGINS", "sdpa,triton,fa2,1")
    done = nsa("tune", "--shape", "tiny")
    assert (done.code, done.out) == (4, "")
    assert "sdpa 0.1.0: disabled: named in NSA_DISABLE_PLUGINS" in done.err
    assert not tuned.path().exists()

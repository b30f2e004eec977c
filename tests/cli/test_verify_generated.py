"""`nsa verify --cases` and `--case`: generated cases, their counts, and lines that repeat them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from nsa_cli import output
from nsa_cli.app import app
from nsa_cli.verify_report import (
    _command,
    _not_run,
    _print_failures,
    checks_rows,
    refusal_lines,
    summary,
)
from nsa_core.plan.registry import default_registry


def verify(*options: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["verify", "--device", "cpu", *options])
    return done.exit_code, done.output


def test_one_case_runs_alone(tmp_path: Path) -> None:
    file = tmp_path / "verify.json"
    line = "win dtype=float16 w=3 scale=-0.3 documents=0,5,1 poison=nan_v"
    code, text = verify("--win", "sdpa", "--case", line, "--json", str(file))
    report = json.loads(file.read_text())
    assert code == 0, text
    assert {finding["check"] for finding in report["findings"]} == {"generated win"}
    assert {finding["case"] for finding in report["findings"]} == {line}
    assert report["dtypes"] == ["float16"]
    assert text.splitlines()[0] == "sdpa 0.1.0 in every slot; cpu, float16, seed 0"  # and no text
    assert report["generated"] == {"win": {"cases": 1, "refused": 0, "reasons": []}}


def test_one_decode_step_runs_alone(tmp_path: Path) -> None:
    file = tmp_path / "verify.json"
    line = "decode dtype=float16 n=3 h=2 lengths=29,0,7 new=2,0,1 rows=2 page_size=8 gates=wide"
    code, text = verify("--win", "sdpa", "--case", line, "--json", str(file))
    report = json.loads(file.read_text())
    assert code == 0, text
    assert {finding["check"] for finding in report["findings"]} == {"generated steps"}
    assert {finding["case"] for finding in report["findings"]} == {line}
    assert {finding["slot"] for finding in report["findings"]} == {"cmp", "select", "sel", "win"}
    assert report["dtypes"] == ["float16"]


def test_one_history_runs_alone(tmp_path: Path) -> None:
    file = tmp_path / "verify.json"
    line = "cache dtype=bfloat16 batch=2 page_size=4 step=5,0+2 save=0 load=0,1 crop=5,5"
    code, text = verify("--win", "sdpa", "--case", line, "--json", str(file))
    (finding,) = json.loads(file.read_text())["findings"]
    assert code == 0, text
    assert (finding["check"], finding["case"], finding["dtype"]) == (
        "cache histories",
        line,
        "bfloat16",
    )


def _finding(ok: bool | None, detail: str = "", slot: str = "sel") -> dict[str, object]:
    finding = {"check": f"generated {slot}", "slot": slot, "case": f"{slot} w=3"}
    finding |= {"dtype": "float32", "quantity": "o", "detail": detail}
    return finding | {"ok": ok, "row": None, "elem": None, "bias": None}


def _report(*findings: dict[str, object], refused: int = 0, cases: int = 2) -> dict[str, object]:
    count = {"cases": cases, "refused": refused, "reasons": ["needs Dk = 64", "b", "c"]}
    return {
        "findings": list(findings),
        "generated": {"sel": count},
        "named": {"sel": "mine", "win": "sdpa"},
        "backends": {"sel": "mine 1"},
        "device": "cpu",
        "interpreted": False,
        "preset": "quick",
        "phase": "both",
        "dtypes": ["float32"],
        "seed": 3,
        "seconds": 1.0,
    }


def test_a_case_of_partial_queries_is_judged_or_refused_with_its_reason(tmp_path: Path) -> None:
    file = tmp_path / "verify.json"
    line = "win w=3 tokens=9 first_query=5 queries=2"
    code, text = verify("--win", "sdpa", "--case", line, "--json", str(file))
    findings = json.loads(file.read_text())["findings"]
    assert {(f["check"], f["case"]) for f in findings} == {("partial queries", line)}, text
    if default_registry().get("sdpa").spec.slots["win"].partial:
        assert (code, {f["ok"] for f in findings}) == (0, {True}), text
    else:
        assert code == 3
        assert "does not take queries that begin inside a sequence" in " ".join(text.split())


def test_a_failed_case_of_partial_queries_is_repeated_by_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    finding = _finding(False, "row 9 > 4") | {"check": "partial queries"}
    _print_failures(Console(), [_report(finding)], {})
    repeats = [x for x in capsys.readouterr().out.splitlines() if x.startswith("to repeat")]
    command = "nsa verify --sel mine --win sdpa --device cpu --case 'sel w=3'"
    assert repeats == [f"to repeat: {command}"]


def test_failures_of_parity_are_listed_before_those_of_the_layer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    layers = [_finding(False) | {"check": "layer", "case": f"layer {n}"} for n in range(30)]
    parity = _finding(False) | {"check": "parity", "case": "h=1"}
    _print_failures(Console(), [_report(*layers, parity)], {})
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("FAILED parity, sel, h=1")
    assert lines[2].startswith("FAILED layer, sel, layer 0")


def test_a_detail_is_cut_and_printed_without_control_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    finding = _finding(False, "\x1b[2J" + "long " * 1000)
    _print_failures(output.console(), [_report(finding)], {})
    line = capsys.readouterr().out.splitlines()[1]
    assert line.startswith("FAILED generated sel, sel, sel w=3, float32, o: \\x1b[2Jlong long ")
    assert line.endswith("long l ... (4204 more characters)")
    (reason,) = _not_run([_finding(None, "long " * 1000) | {"check": "layer"}])
    assert len(reason) <= 800


def test_refusals_are_shown_and_refusing_everything_fails() -> None:
    some = _report(_finding(True), _finding(None), refused=1)
    assert refusal_lines(some) == ["generated sel: 1 of 2 cases refused: needs Dk = 64; b"]
    assert summary(some)[1] == 0
    every = _report(_finding(None), _finding(None), _finding(True, slot="win"), refused=2)
    line, code = summary(every)
    assert (code, "sel refused every generated case" in line) == (1, True)
    rows = checks_rows(every["findings"])[1]  # type: ignore[arg-type]
    assert [str(row[-1]) for row in rows] == ["REFUSED", "ok"]


def test_a_check_that_failed_as_a_whole_concerns_all_slots() -> None:
    findings = [
        _finding(True) | {"check": "causality", "slot": slot} for slot in ("", "cmp", "sel")
    ]
    assert [row[:3] for row in checks_rows(findings)[1]] == [["causality", "all", "3"]]


@pytest.mark.parametrize("line", ["sel w=3", "decode", "cache batch=2 step=5,3"])
def test_a_failed_line_is_repeated_by_one_command_that_names_every_backend(line: str) -> None:
    finding = _finding(False, "row 9 > 4") | {"case": line}
    typed = {"--cases": 9, "--job-timeout": None}
    command = _command(_report(finding) | {"shard": "2/8"}, finding, typed)
    assert command == f"nsa verify --sel mine --win sdpa --device cpu --case {shlex.quote(line)}"


def test_a_failed_line_is_planned_as_in_the_run() -> None:
    finding = _finding(False, "row 9 > 4")
    run = {"preset": "full", "phase": "decode"}
    command = _command(_report(finding) | run, finding, {"--job-timeout": 5.0})
    assert command == (
        "nsa verify --sel mine --win sdpa --device cpu --preset full --phase decode"
        " --case 'sel w=3' --job-timeout 5.0"
    )


def test_a_failed_check_is_repeated_by_the_part_of_the_run_with_the_same_cases() -> None:
    finding = _finding(False, "row 9 > 4") | {"check": "layer", "case": "a", "dtype": "float64"}
    report = _report(finding) | {"dtypes": ["float32", "float16"]}
    typed = {"--cases": 0, "--job-timeout": None}
    start = "nsa verify --sel mine --win sdpa --device cpu --dtype"
    assert _command(report, finding, {}) == f"{start} float64 --seed 3"
    command = _command(report | {"shard": "2/8"}, finding, typed)
    assert command == f"{start} float32,float16 --seed 3 --shard 2/8 --cases 0"


def test_a_failure_is_repeated_with_the_same_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = _finding(False, "row 9 > 4")
    monkeypatch.setattr(output, "_plugin_options", (True, 20.0))
    monkeypatch.setenv("NSA_PLUGINS", "")
    monkeypatch.setenv("NSA_DISABLE_PLUGINS", "fa2, mine")
    monkeypatch.setenv("NSA_CHECK", "1")
    command = _command(_report(finding) | {"interpreted": True}, finding, {})
    assert command == (
        "TRITON_INTERPRET=1 NSA_PLUGINS='' NSA_DISABLE_PLUGINS='fa2, mine' NSA_CHECK=1"
        " nsa --safe --plugin-limit 20 verify --sel mine --win sdpa --device cpu --case 'sel w=3'"
    )


@pytest.mark.parametrize("name", ["case 7", "sel 7", "history 2", "S=w", "layer compress=mlp"])
def test_a_failure_without_a_line_is_repeated_by_the_checks(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    finding = _finding(False, "its process ended") | {"case": name}
    _print_failures(Console(width=300), [_report(finding)], {})
    assert "--case" not in capsys.readouterr().out

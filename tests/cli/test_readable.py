"""What a person sees: every command fits 80, 100 and 200 columns and breaks no word."""

from __future__ import annotations

import copy
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
import typer

from nsa_cli import app as nsa_app
from nsa_cli import verify
from nsa_core.contract import SLOTS
from screen import FRAMES, assert_readable

RESULTS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "h200"
WIDTHS = (80, 100, 200)
DETAIL = (
    "row 12 of head 3: error 1.234 of its limit, at position (0, 17, 3, 5): got 0.123456, golden"
    " 0.234567, limit 0.0001234; 14 rows are wrong"
)


def finding(check: str, slot: str, ok: bool | None, row: float | None = None) -> dict:
    return {
        "check": check,
        "slot": slot,
        "case": "five tokens, some absent",
        "dtype": "bfloat16",
        "quantity": "dk_cmp",
        "ok": ok,
        "row": row,
        "elem": row,
        "bias": None,
        "detail": "" if ok else DETAIL if ok is False else "sdpa has no fused gates",
    }


def report(*failed: str) -> dict:
    """Return a report of `nsa verify` in which the checks ``failed`` have a failure in sel."""
    checks = ("parity", "decode fused append", "run to run")
    findings = [
        finding(check, slot, not (check in failed and slot == "sel"), 1.25 if failed else 0.5)
        for check in checks
        for slot in SLOTS
    ]
    findings += [finding("layer", "", True), finding("run to run", "cmp", None)]
    findings += [finding("decode fused gates", "", None)]
    return {
        "schema_version": 1,
        "device": "NVIDIA H200",
        "interpreted": False,
        "dtypes": ["float32", "bfloat16", "float16"],
        "preset": "full",
        "phase": "prefill",
        "seed": 7,
        "backends": {slot: f"{'triton' if slot == 'sel' else 'sdpa'} 0.1.0" for slot in SLOTS},
        "named": {slot: "triton" if slot == "sel" else "sdpa" for slot in SLOTS},
        "seconds": 12.3,
        "interrupted": None,
        "findings": findings,
    }


def assert_command_is_readable(nsa, terminal, *arguments: str, code: int = 0) -> str:
    """Assert that a command fits 80, 100 and 200 columns, and return its piped output."""
    piped = nsa(*arguments)
    assert piped.code == code, piped.err
    for columns in WIDTHS:
        exit_code, text = terminal(*arguments, columns=columns)
        assert exit_code == code
        assert_readable(text, piped.out, columns)
    return piped.out


@pytest.mark.few_cases("0---every-combination", "1---every-combination", "2---every-combination")
@pytest.mark.parametrize("options", [(), ("--verbose",), ("--every-combination",)], ids=" ".join)
@pytest.mark.parametrize("failed", [(), ("run to run",), ("parity", "run to run")], ids=len)
def test_verify_is_readable_and_prints_failures_first(nsa, terminal, monkeypatch, options, failed):
    every = "--every-combination" in options
    reports = [report(), report(*failed)] if every else [report(*failed)]
    monkeypatch.setattr(verify, "run_combinations", lambda *a: copy.deepcopy(reports))
    out = assert_command_is_readable(
        nsa, terminal, "verify", "--device", "cpu", *options, code=1 if failed else 0
    )
    lines = out.splitlines()
    header = next(index for index, line in enumerate(lines) if "verdict" in line)
    rows = lines[header + 1 : lines.index("", header)]
    failing = [row.rstrip().endswith("FAILED") for row in rows]
    assert failing == sorted(failing, reverse=True)
    assert sum(failing) == (bool(failed) if every else len(failed))
    checks = 5 if "--verbose" not in options else len(SLOTS) * 3 + 2
    assert len(rows) == (2 if every else checks)
    words = " ".join(out.split())
    for check in failed:
        where = f"FAILED {check}, sel, five tokens, some absent, bfloat16, dk_cmp: {DETAIL}"
        assert where in words
    assert ("to repeat: nsa verify" in words) == bool(failed)
    if failed:
        command = words.partition("to repeat: ")[2]
        assert "--select sdpa --sel triton" in command
        assert "--device cuda --dtype bfloat16 --preset full --phase prefill --seed 7" in command
    assert lines[-1] == (
        f"{2 - bool(failed)} of 2 combinations passed in 25 s"
        if every
        else f"{16 - len(failed)} checks passed, {len(failed)} failed, 2 not applicable in 12 s"
    )
    assert "not run: sdpa has no fused gates (decode fused gates)" in words or every


def test_verify_counts_what_does_not_apply_in_its_row(nsa, monkeypatch):
    monkeypatch.setattr(verify, "run_combinations", lambda *a: [report()])
    rows = [line.split() for line in nsa("verify", "--device", "cpu").out.splitlines()]
    assert ["run", "to", "run", "all", "5", "1", "0.50", "ok"] in rows
    assert ["decode", "fused", "gates", "all", "0", "1", "-", "not", "run"] in rows


@pytest.mark.few_cases("decode_small")
@pytest.mark.parametrize("name", ["core_64_4_128", "decode", "decode_small"])
def test_bench_report_is_readable(nsa, terminal, name):
    out = assert_command_is_readable(
        nsa, terminal, "bench", "report", str(RESULTS / f"{name}.json")
    )
    assert "Combinations" in out


def test_bench_prints_every_figure_at_every_width(terminal):
    from nsa_bench.render.tables import tables
    from nsa_bench.result import read_result

    file = RESULTS / "decode_small.json"
    cells = {
        word
        for _, _, rows in tables(read_result(file))
        for row in rows
        for cell in row
        for word in cell.split()
    }
    assert len(cells) > 100
    for columns in WIDTHS:
        _, text = terminal("bench", "report", str(file), columns=columns)
        assert cells <= set(text.split())


def test_bench_compare_is_readable(nsa, terminal, tmp_path):
    old = RESULTS / "core_64_4_128.json"
    document = json.loads(old.read_text())
    for measurement in document["measurements"][::3]:
        for key in ("median_ms", "q1_ms", "q3_ms"):
            if measurement["performance"] is not None:
                measurement["performance"][key] *= 3
    new = tmp_path / "new.json"
    new.write_text(json.dumps(document))
    out = assert_command_is_readable(nsa, terminal, "bench", "compare", str(old), str(new), code=1)
    assert "slower" in out
    assert out.splitlines()[-1].split()[1] == "figures:"


def test_columns_of_numbers_are_aligned_at_the_point(nsa):
    out = nsa("bench", "report", str(RESULTS / "decode_small.json")).out.splitlines()
    header = next(line for line in out if line.startswith("batch"))
    end = header.index(" ms") + 3
    rows = out[out.index(header) + 1 :]
    figures = [row[:end].split()[-1] for row in rows[: rows.index("")]]
    points = {row[:end].rindex(".") for row, figure in zip(rows, figures) if "." in figure}
    assert len({len(figure) for figure in figures}) > 1
    assert len(points) == 1


def test_tune_is_readable(nsa, terminal, monkeypatch):
    from nsa_bench import tune
    from nsa_bench.result import Gate
    from nsa_bench.tune import SlotTime, Tuning

    times = [SlotTime("cmp", "sdpa", "0.1.0", "inference", 1.5, "")]
    times += [SlotTime("cmp", "triton", "0.1.0", "inference", None, DETAIL)]
    gate = Gate("cmp=triton", "2/1/8", "float32", False, "case", 1.0, [DETAIL])
    monkeypatch.setattr(tune, "tune", lambda *a, **o: Tuning("a device", times, [gate], []))
    out = assert_command_is_readable(nsa, terminal, "tune", "--device", "cpu", code=1)
    assert f"not timed: cmp, inference, triton 0.1.0: {DETAIL}" in " ".join(out.split())


def help_pages(command, path=()) -> list[tuple[str, ...]]:
    pages = [(*path, "--help")]
    for name, child in getattr(command, "commands", {}).items():
        pages += help_pages(child, (*path, name))
    return pages


HELP_PAGES = help_pages(typer.main.get_command(nsa_app.app))


@pytest.mark.parametrize("arguments", HELP_PAGES, ids=" ".join)
def test_help_is_complete_and_begins_with_at_most_twelve_options(terminal, arguments):
    code, page = terminal(*arguments, columns=80)
    assert code == 0
    assert max(map(len, page.splitlines())) <= 80
    assert "…" not in page  # no text is cut
    command = typer.main.get_command(nsa_app.app)
    for name in arguments[:-1]:
        command = command.commands[name]
    words = " ".join(page.translate(FRAMES).split())
    panels: list[str | None] = []
    for param in command.params:
        assert param.help, f"{param.name} has no help"
        if param.param_type_name == "option":
            assert any(name in words for name in param.opts)
            assert (param.metavar or "") in words  # it is not broken over lines
            assert f"{param.opts[0]} TEXT" not in words or param.name == "prompt"
            if param.opts[0] in ("--dtype", "--phase", "--inputs", "--rival"):
                assert re.search(rf"{param.opts[0]} <?\w+\|\w+", words), "no choices are shown"
            panels.append(param.rich_help_panel)
    assert panels.count(None) <= 12
    assert set(panels) <= {None, "Advanced"}


def test_commands_are_listed_in_groups(nsa):
    panels: dict[str, list[str]] = {}
    for line in nsa("--help").out.splitlines():
        if title := re.match(r"╭─ (.+?) ─+╮", line):
            entries = panels.setdefault(title[1], [])
        elif entry := re.match(r"│ (\S+)", line):
            entries.append(entry[1])
    assert list(panels) == ["Options", "Use", "Check", "Measure", "Train"]
    assert set(panels["Use"]) == {"backends", "doctor", "inspect"}


@pytest.fixture
def complete(nsa, monkeypatch):
    """Return a function that returns the completions of words, the last of which is incomplete."""

    def run(words: str, shell: str = "bash") -> list[str]:
        variables = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        variables |= {"_TYPER_COMPLETE_ARGS": words, "_NSA_COMPLETE": f"complete_{shell}"}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        done = nsa()
        assert done.code == 0, done.err
        return done.out.split()

    return run


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("nsa ", {"backends", "verify", "bench", "train"}),
        ("nsa verify --cmp ", {"sdpa", "triton"}),
        ("nsa verify --dtype fp32,bf", {"fp32,bf16", "fp32,bfloat16"}),
        ("nsa bench --preset ", {"quick", "full"}),
        ("nsa verify --preset ", {"quick", "full"}),
        ("nsa bench --combo win=s", {"win=sdpa"}),
        ("nsa backends show sd", {"sdpa"}),
    ],
)
def test_bash_completion(complete, words, expected):
    completions = set(complete(words))
    assert expected <= completions
    assert all(word.startswith(words.rpartition(" ")[2]) for word in completions)


def test_zsh_completion(complete):
    assert '"triton"))\'' in complete("nsa verify --win ", "zsh")[-1]


def test_completion_imports_no_torch():
    code = (
        "import sys\nfrom nsa_cli.app import main\ntry:\n    main([])\nfinally:\n"
        "    assert 'torch' not in sys.modules"
    )
    words = "nsa backends explain --cmp sd"
    variables = {"COMP_WORDS": words, "COMP_CWORD": "4", "_NSA_COMPLETE": "complete_bash"}
    environment = {**os.environ, **variables}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "sdpa\n"), done.stderr


def test_the_completion_script_names_the_variable(nsa, monkeypatch):
    monkeypatch.setenv("_NSA_COMPLETE", "source_bash")
    done = nsa()
    assert done.code == 0
    assert "_NSA_COMPLETE=complete_bash" in done.out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("verify", "--combo", "sdpa"), "choose the backend of each slot with --cmp, --select"),
        (("verify", "--backend", "sdpa"), "choose the backend of each slot with --cmp, --select"),
        (("bench", "--win", "sdpa"), "choose backends with --combo: a name, or pairs such as win="),
        (("train", "--cmp", "sdpa"), "choose backends with --backends: a name, or pairs"),
        (("verify", "--forse"), "--force"),
        (("backends", "list", "--jsn"), "--json"),
        (("--saef",), "--safe"),
        (("verify", "--dtype", "bf61"), "got 'bf61'; did you mean 'bf16'?"),
        (("bench", "--dtype", "float32,fp31"), "got 'fp31'; did you mean 'fp32'?"),
    ],
)
def test_mistyped_options_get_a_suggestion(nsa, arguments, sentence):
    done = nsa(*arguments)
    assert done.code == 2
    assert sentence in done.err


def test_short_dtype_names_become_long_ones(nsa, monkeypatch):
    dtypes = []

    def record(combinations, options, *others):
        dtypes.extend(str(dtype) for dtype in options.dtypes)
        return [report()]

    monkeypatch.setattr(verify, "run_combinations", record)
    assert nsa("verify", "--device", "cpu", "--dtype", "bf16,fp16,fp32,fp64,bfloat16").code == 0
    assert dtypes == [f"torch.{name}" for name in ("bfloat16", "float16", "float32", "float64")]
    done = nsa("backends", "explain", "--dtype", "fp64", "--device", "cpu", "--json")
    assert "float64" in done.out
    assert done.code == 0


def test_errors_on_a_terminal_break_between_words(monkeypatch, capsys):
    from nsa_cli import output

    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with pytest.raises(SystemExit):
        output.end(2, "the first line\n  " + "word " * 20 + "x" * 50)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["nsa: the first line", "  " + " ".join(["word"] * 7)]
    assert lines[2].startswith("    word")
    assert "".join(line.strip() for line in lines).endswith("x" * 50)
    assert max(map(len, lines)) <= 40

"""docs/report-rows.md: 25 rows, tests that are collected, and commands that exist once they have
given a figure.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from typing import Any, NamedTuple

import pytest
import typer

PENDING = "not measured yet"


class Row(NamedTuple):
    number: str
    claim: str
    was: str
    check: str
    figure: str
    command: str


def rows(repo: Any) -> list[Row]:
    lines = [
        line for line in repo.text("docs/report-rows.md").splitlines() if re.match(r"\| \d", line)
    ]
    return [Row(*(cell.strip() for cell in line.strip("|").split("|"))) for line in lines]


def named_tests(row: Row) -> list[str]:
    return re.findall(r"`(tests/[\w/]+\.py(?:::\w+)?)`", row.check)


def result_files(row: Row) -> list[str]:
    return re.findall(r"`(benchmarks/results/h200/[\w.]+)`", row.figure)


def commands(row: Row) -> list[list[str]]:
    return [shlex.split(text) for text in re.findall(r"`([^`]+)`", row.command)]


def test_there_are_25_rows_and_no_cell_is_empty(repo: Any) -> None:
    found = rows(repo)
    assert [row.number for row in found] == [str(n) for n in range(1, 26)]
    for row in found:
        assert all(row), row.number
        assert len(commands(row)) == 1, f"row {row.number} needs one command"
        shown = (
            named_tests(row)
            or result_files(row)
            or PENDING in row.figure
            or "nsa verify" in row.command
        )
        assert shown, row.number
        for file in result_files(row):
            assert (repo.root / file).is_file(), (row.number, file)


def collected(*arguments: str) -> set[str]:
    """Ids that pytest collects, without parameters."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
        *arguments,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode in (0, 5), done.stdout + done.stderr
    return {line.split("[")[0] for line in done.stdout.splitlines() if "::" in line}


def missing(named: set[str], found: set[str]) -> set[str]:
    return named - found - {name.split("::")[0] for name in found}


def test_every_named_test_is_collected(
    repo: Any, collected_ids: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By this run, or by one of its own for the files that this run leaves out."""
    monkeypatch.chdir(repo.root)
    named = {name for row in rows(repo) for name in named_tests(row)}
    if named := missing(named, {name.split("[")[0] for name in collected_ids}):
        named = missing(named, collected(*sorted({name.split("::")[0] for name in named})))
    assert not named, f"docs/report-rows.md names {sorted(named)}"
    # A command's files hold the tests that its row names, and -k leaves them in.
    for row in rows(repo):
        (words,) = commands(row)
        if words[0] == "pytest":
            given = [word for word in words[1:] if word.startswith("tests/")]
            assert given, row.number
            assert all((repo.root / name).exists() for name in given), row.number
            keyword = words[words.index("-k") + 1] if "-k" in words else ""
            assert any(
                name.startswith(tuple(given)) and keyword in name for name in named_tests(row)
            ), row.number


def fault(words: list[str], repo: Any) -> str:
    """What is wrong with a command; "": nothing."""
    if words[0] == "pytest":
        return ""
    if words[0] == "python":
        script = repo.root / words[1]
        if not script.is_file():
            return f"{words[1]} is not there"
        text = script.read_text(encoding="utf-8")
        lacking = [word for word in words[2:] if word.startswith("--") and f'"{word}"' not in text]
        return f"{words[1]} has no {', '.join(lacking)}" if lacking else ""
    if words[0] != "nsa":
        return f"{words[0]} is no command of ours"
    from nsa_cli.app import app

    command: Any = typer.main.get_command(app)
    words = words[1:]
    while hasattr(command, "commands"):
        if not words or words[0] not in command.commands:
            if command.invoke_without_command and (not words or words[0].startswith("-")):
                break
            return f"nsa has no {' '.join(words[:1])}"
        command, words = command.commands[words[0]], words[1:]
    options = {name for parameter in command.params for name in parameter.opts}
    lacking = [word for word in words if word.startswith("--") and word not in options]
    return f"nsa {command.name} has no {', '.join(lacking)}" if lacking else ""


def test_commands_that_gave_a_figure_exist(repo: Any) -> None:
    wrong = {row.number: fault(*commands(row), repo) for row in rows(repo) if row.figure != PENDING}
    assert not any(wrong.values()), {number: text for number, text in wrong.items() if text}


def documented(text: str) -> list[list[str]]:
    """The commands of a page's indented blocks, continued lines joined."""
    lines = text.replace("\\\n", " ").splitlines()
    shown = [
        line.strip().split("#")[0]
        for line in lines
        if re.match(r" {4}(nsa|python benchmarks/\S+\.py) ", line)
    ]
    return [shlex.split(line) for line in shown]


@pytest.mark.parametrize(("page", "least"), [("docs/bench.md", 6), ("benchmarks/README.md", 3)])
def test_commands_of_a_page_exist(page: str, least: int, repo: Any) -> None:
    found = documented(repo.text(page))
    assert len(found) >= least
    wrong = {" ".join(words): fault(words, repo) for words in found}
    assert not any(wrong.values()), {command: text for command, text in wrong.items() if text}


def test_commands_of_the_figures_exist(repo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(repo.root / "benchmarks")
    from figure_pieces import PIECES

    wrong = {piece.name: fault(shlex.split(piece.command), repo) for piece in PIECES}
    assert not any(wrong.values()), {name: text for name, text in wrong.items() if text}


@pytest.mark.parametrize(
    "command",
    [
        "nsa verify --frobnicate",
        "nsa frobnicate",
        "nsa bench --phaze decode",
        "nsa backends frobnicate",
        "python benchmarks/absent.py",
        "python benchmarks/real_blocks.py --absent",
        "make",
    ],
)
def test_a_command_that_does_not_exist_is_found(command: str, repo: Any) -> None:
    assert fault(command.split(), repo)


@pytest.mark.parametrize(
    "command",
    ["nsa verify --win fa2", "nsa bench --phase decode", "nsa bench compare a b", "nsa tune"],
)
def test_a_command_that_exists_passes(command: str, repo: Any) -> None:
    assert not fault(command.split(), repo)

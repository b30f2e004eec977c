"""Every row of tests/verify/report_rows/README.md has tests, or files and commands, that exist."""

from __future__ import annotations

import re
import shlex
from typing import Any, NamedTuple

import pytest
import typer
from figure_pieces import PIECES


class Row(NamedTuple):
    number: str
    claim: str
    check: str  # with its result and its command


def rows(repo: Any) -> list[Row]:
    lines = [
        line
        for line in repo.text("tests/verify/report_rows/README.md").splitlines()
        if re.match(r"\| \d", line)
    ]
    return [Row(*(cell.strip() for cell in line.strip("|").split("|"))) for line in lines]


def named_tests(row: Row) -> list[str]:
    return re.findall(r"`(tests/[\w/]+\.py(?:::\w+)?)`", row.check)


def result_files(row: Row) -> list[str]:
    return re.findall(r"`(benchmarks/results/h[12]00/[\w.]+)`", row.check)


def commands(row: Row) -> list[list[str]]:
    return [shlex.split(text) for text in re.findall(r"`((?:nsa|python) [^`]+)`", row.check)]


def test_the_page_has_25_rows_without_empty_cells(repo: Any) -> None:
    table = rows(repo)
    assert [row.number for row in table] == [str(n) for n in range(1, 26)]
    for row in table:
        assert all(row), row.number
        assert named_tests(row) or result_files(row) or commands(row), row.number
        for file in result_files(row):
            assert (repo.root / file).is_file(), (row.number, file)


def command_error(words: list[str], repo: Any) -> str:
    """Return the error of a command line; "" if the command and its options exist."""
    if words[:3] == ["python", "-m", "torch.distributed.run"]:
        program = words[3:]  # of every process, after the options of the launcher
        while program and program[0] != "-m" and not program[0].endswith(".py"):
            program = program[1:]
        if program[:2] == ["-m", "nsa_cli"]:
            return command_error(["nsa", *program[2:]], repo)
        if not program or program[0] == "-m":
            return f"{' '.join(program[:2])} is neither nsa_cli nor a script"
        return command_error(["python", *program], repo)
    if words[0] == "python":
        script = repo.root / words[1]
        if not script.is_file():
            return f"{words[1]} does not exist"
        text = script.read_text(encoding="utf-8")
        for module in re.findall(r"(?m)^(?:from|import) (\w+)", text):  # of the same folder
            if (shared := script.with_name(f"{module}.py")).is_file():
                text += shared.read_text(encoding="utf-8")
        end = words.index("--") if "--" in words else len(words)  # another command may follow
        unknown = [w for w in words[2:end] if w.startswith("--") and f'"{w}"' not in text]
        if unknown or end == len(words):
            return f"{words[1]} has no {', '.join(unknown)}" if unknown else ""
        return command_error(words[end + 1 :], repo)
    if words[0] != "nsa":
        return f"{words[0]} is neither nsa nor python"
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
    unknown = [word for word in words if word.startswith("--") and word not in options]
    return f"nsa {command.name} has no {', '.join(unknown)}" if unknown else ""


def test_commands_of_rows_exist(repo: Any) -> None:
    errors = {" ".join(w): command_error(w, repo) for row in rows(repo) for w in commands(row)}
    assert errors
    assert not any(errors.values()), {command: text for command, text in errors.items() if text}


_COMMAND = r"([A-Z_]+=\S+ )*(nsa|python benchmarks/\S+\.py)( |$)"


def documented_commands(text: str) -> list[list[str]]:
    """Return the commands in the indented and bash blocks of a page; joins continued lines."""
    text = text.replace("\\\n", " ")
    lines = re.findall(r"(?m)^ {4}(.*)$", text)
    for block in re.findall(r"(?ms)^```bash\n(.*?)^```$", text):
        lines += block.splitlines()
    words = [shlex.split(line.split("#")[0]) for line in lines if re.match(_COMMAND, line)]
    return [[word for word in line if not re.fullmatch(r"[A-Z_]+=\S+", word)] for line in words]


def test_commands_of_every_guide_exist(repo: Any) -> None:
    errors = {}
    guides = [*repo.root.glob("docs/how-to/*.md"), *repo.root.glob("docs/start/*.md")]
    for page in (*guides, repo.root / "benchmarks" / "README.md"):
        for words in documented_commands(page.read_text(encoding="utf-8")):
            errors[f"{page.name}: {' '.join(words)}"] = command_error(words, repo)
    assert len(errors) > 25
    assert not any(errors.values()), {command: text for command, text in errors.items() if text}


def test_commands_of_the_figures_exist(repo: Any) -> None:
    errors = {piece.name: command_error(shlex.split(piece.command), repo) for piece in PIECES}
    assert not any(errors.values()), {name: text for name, text in errors.items() if text}


@pytest.mark.parametrize(
    "command",
    [
        "nsa verify --frobnicate",
        "nsa frobnicate",
        "nsa bench --phaze decode",
        "nsa backends frobnicate",
        "python benchmarks/absent.py",
        "python -m torch.distributed.run --nproc-per-node 2 -m absent bench",
        "python -m torch.distributed.run --nproc-per-node 2 -m nsa_cli bench --absent",
        "python -m torch.distributed.run --nproc-per-node 2 benchmarks/scaling.py --absent",
        "python benchmarks/real_blocks.py --absent",
        "make",
    ],
)
def test_a_command_that_does_not_exist_is_detected(command: str, repo: Any) -> None:
    assert command_error(command.split(), repo)


@pytest.mark.parametrize(
    "command",
    ["nsa verify --win fa2", "nsa bench decode", "nsa bench compare a b", "nsa tune"],
)
def test_a_command_that_exists_has_no_error(command: str, repo: Any) -> None:
    assert not command_error(command.split(), repo)

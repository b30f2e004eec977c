"""docs/scripts/capture_commands.py replaces the output of the commands on a page."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest


@pytest.fixture
def captures(repo) -> Any:
    path = repo.root / "docs" / "scripts" / "capture_commands.py"
    spec = importlib.util.spec_from_file_location("capture_commands", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_only_the_output_of_commands_is_replaced(captures):
    page = (
        "text\n```console\n$ one\nold\n$ two\n```\n````console\n$ three\n```\nold\n```\n````\nend\n"
    )
    new = "text\n```console\n$ one\nONE\n$ two\nTWO\n```\n````console\n$ three\nTHREE\n````\nend\n"
    assert captures.commands_of(page) == ["one", "two", "three"]
    assert captures.replace_output(page, lambda command: command.upper() + "\n") == new


def test_a_command_sees_a_terminal_of_80_columns(captures, tmp_path):
    command = "exec 3>&1; test -t 3 && stty size <&3 | cut -d' ' -f2; printf '\\033[1mbold\\033[0m'"
    assert captures.run_in_terminal(command, str(tmp_path)) == "80\nbold\n"


def test_the_page_of_the_commands_shows_each_of_them_within_80_columns(captures, repo):
    import typer

    from nsa_cli.app import app

    def names(command: Any, path: str) -> list[str]:
        children = getattr(command, "commands", None)
        if not children:
            return [path]
        return [name for child in children for name in names(children[child], f"{path} {child}")]

    page = repo.text("docs/reference/cli.md")
    shown = captures.commands_of(page)
    missing = [
        name
        for name in names(typer.main.get_command(app), "nsa")
        if not any(f"{command} ".startswith(f"{name} ") for command in shown)
    ]
    assert not missing
    lines = [line for block in captures.BLOCK.finditer(page) for line in block[0].splitlines()]
    assert [line for line in lines if len(line) > 80 and not line.startswith("$ ")] == []

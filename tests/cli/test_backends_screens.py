"""list, show, explain and doctor in terminals of 80, 100 and 200 columns, and in a pipe."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
import types

import pytest
from rich.console import Console

from five_commands import WITHOUT_CHILDREN
from nsa_cli import health, output
from nsa_cli.screen import wrap
from nsa_core.contract import Reason
from nsa_core.plan.registry import Registry, discover
from screen import assert_readable

COMMANDS = [
    ("backends", "list"),
    ("backends", "list", "--no-probe"),
    ("backends", "list", "--gpu", "a100", "--phase", "decode"),
    ("backends", "show", "fa2"),
    ("backends", "show", "long-winded"),
    ("backends", "explain"),
    ("backends", "explain", "--gpu", "t4", "--grad", "--head-dim", "320"),
    ("doctor",),
    ("doctor", "--report"),
]
LONG = "/a/directory/with/a/long/name/that/no/terminal/of/80/columns/can/show/libcudart.so.12"

PLATFORM = "Linux-6.18.44-firecracker-v310-gpu-production-x86_64-with-glibc2.39"


@pytest.fixture(scope="module")
def registry() -> Registry:
    """Our backends, and one whose name, version and reason are long."""
    ours = discover(safe=True)
    spec = dataclasses.replace(
        ours.get("sdpa").spec, name="long-winded", probe="long_winded:probe", rank=None
    )
    return ours.with_backend(spec, version="12.0.0rc1+local.build", distribution="nsa-long-winded")


@pytest.fixture
def environment(monkeypatch, registry) -> None:
    """A registry with a long-winded backend, and probes of `nsa doctor` in this process."""
    module = types.ModuleType("long_winded")
    module.probe = lambda request: [
        Reason("long", "the library cannot be loaded because its file is missing", "reinstall it")
    ]
    monkeypatch.setitem(sys.modules, "long_winded", module)
    monkeypatch.setattr("nsa_core.plan.registry.discover", lambda **options: registry)
    for name, stand_in in WITHOUT_CHILDREN.items():
        monkeypatch.setattr(health, name, stand_in)
    monkeypatch.setattr(health.platform, "platform", lambda: PLATFORM)


@pytest.mark.few_cases("backends list", "backends list --no-probe")
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_word_is_broken_and_no_line_is_too_long(nsa, terminal, environment, command) -> None:
    piped = nsa(*command)
    assert "\x1b" not in piped.out
    for columns in (80, 100, 200):
        code, text = terminal(*command, columns=columns)
        assert code == piped.code
        assert_readable(text, piped.out, columns)
        assert text.split() == piped.out.split()  # nothing is left out in a narrow terminal


@pytest.mark.parametrize("command", [("list",), ("show", "sdpa")], ids=" ".join)
def test_a_table_that_is_wider_than_the_terminal_loses_no_cell(nsa, terminal, command) -> None:
    piped = nsa("--safe", "backends", *command)
    _, text = terminal("--safe", "backends", *command, columns=40)
    assert text.split() == piped.out.split()


@pytest.mark.parametrize("options", [(), ("--gpu", "a100")], ids=" ".join)
def test_the_list_of_our_backends_has_at_most_ten_lines(terminal, options) -> None:
    _, text = terminal("--safe", "backends", "list", *options, columns=80)
    assert len(text.splitlines()) <= 10, text
    assert text.count("flash-attn") <= 2
    assert ("\nfa2, triton: needs cuda, got cpu\n" in text) != bool(options)


def test_a_terminal_that_cannot_show_the_check_mark_gets_ascii(terminal) -> None:
    for command in (("list",), ("show", "sdpa")):
        _, text = terminal("--safe", "backends", *command, columns=80, encoding="ascii")
        assert "+D" in text
        assert "+ forward and backward" in text
        assert text.isascii()
        assert "\\u" not in text


def test_statuses_are_coloured_in_a_terminal() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system="standard", width=80)
    output.print_table(console, ("name", "state"), [("fa2", "unavailable"), ("sdpa", "ready")])
    _, first, second = file.getvalue().splitlines()
    assert "\x1b[33munavailable" in first
    assert "\x1b[32mready" in second


def test_a_word_that_is_longer_than_a_line_is_broken() -> None:
    lines = [*wrap(f"  - cannot read {LONG}, see above", 40)]
    assert max(map(len, lines)) <= 40
    assert lines[0].startswith("  - cannot read")
    assert all(line.startswith("    ") for line in lines[1:])
    words = [word for line in lines for word in line.removeprefix("  - ").split()]
    assert "".join(words) == f"cannotread{LONG},seeabove"


def test_doctor_ends_with_problems_and_the_command_to_type(
    terminal, environment, monkeypatch
) -> None:
    problem = {"what": "torch", "message": f"cannot open {LONG}", "hint": "pip install torch"}
    inspect = health.inspect_environment
    monkeypatch.setattr(
        health, "inspect_environment", lambda limit: {**inspect(limit), "troubles": [problem]}
    )
    _, text = terminal("doctor", columns=80)
    assert max(map(len, text.splitlines())) <= 80
    first, *_, command, blank, verdict = text[text.index("PROBLEM") :].splitlines()
    assert first.startswith("PROBLEM torch: cannot open")
    assert (command, blank) == ("  type: pip install torch", "")
    assert verdict == "no attention can run in this environment"


def test_show_prints_which_fused_forms_state_their_workspace(nsa):
    lines = nsa("backends", "show", "triton", "--gpu", "h100").out.splitlines()
    first = lines.index("fused     workspace")
    assert [line.split() for line in lines[first + 1 : first + 7]] == [
        ["step", "no"],
        ["append", "no"],
        ["gates", "no"],
        ["compress", "no"],
        ["backward", "yes"],
        [],
    ]
    (row,) = json.loads(nsa("backends", "show", "triton", "--json").out)["backends"]
    assert row["fused"]["backward"] == {"workspace": True}
    assert row["fused"]["step"] == {"workspace": False}
    assert "fused" not in nsa("backends", "show", "sdpa").out

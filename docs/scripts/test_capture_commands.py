"""capture_commands.py replaces the output of the commands on a page."""

from __future__ import annotations

import capture_commands


def test_only_the_output_of_commands_is_replaced():
    page = (
        "text\n```console\n$ one\nold\n$ two\n```\n````console\n$ three\n```\nold\n```\n````\nend\n"
    )
    new = "text\n```console\n$ one\nONE\n$ two\nTWO\n```\n````console\n$ three\nTHREE\n````\nend\n"
    assert capture_commands.commands_of(page) == ["one", "two", "three"]
    assert capture_commands.replace_output(page, lambda command: command.upper() + "\n") == new


def test_a_command_sees_a_terminal_of_80_columns(tmp_path):
    command = "exec 3>&1; test -t 3 && stty size <&3 | cut -d' ' -f2; printf '\\033[1mbold\\033[0m'"
    assert capture_commands.run_in_terminal(command, str(tmp_path)) == "80\nbold\n"

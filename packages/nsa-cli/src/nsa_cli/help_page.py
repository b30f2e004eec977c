"""The help page of a command: its description, then commands and options in panels.

Typer's own rich help sets up to six columns side by side, which leaves 28 columns for descriptions
at 80 columns, and takes 150 ms to load. Here descriptions stand beside their option at every width.
"""

from __future__ import annotations

import inspect
import io
import re
import sys
from typing import Any

from nsa_cli import output
from nsa_cli.panels import COMMAND_PANELS, OPTION_PANELS

_LONGEST_BESIDE = 28  # columns; a longer option has its description on the next line
_COMPLETION_OPTIONS = ("install_completion", "show_completion")
_TYPE_NAMES = {"bool": "", "str": "TEXT", "text": "TEXT", "path": "PATH", "int": "N"}
_TYPE_NAMES |= {"integer": "N", "float": "NUMBER", "boolean": ""}
_STYLES = {  # pattern -> style
    r"^Usage:|^\S.*(?=:$)": "bold yellow",
    r"(?<![\w-])--?[a-zA-Z][\w-]*": "cyan",
    r"`[^`]+`": "bold",
    r"\[(default: [^\]]*|required)\]": "dim",
}

Panels = dict[str, list[tuple[str, str]]]


def help_page(command: Any, ctx: Any) -> str:
    """Return the help page of ``command``, coloured if standard output is a terminal."""
    width = output.text_width()
    lines = output.wrap(command.get_usage(ctx), width, "  ")
    for paragraph in _paragraphs(command.help):
        lines += ["", *output.wrap(paragraph, width)]
    commands, parameters = _command_panels(command, ctx), _parameter_panels(command, ctx)
    for panels in (commands, parameters):
        names = [left for entries in panels.values() for left, _ in entries]
        column = 4 + max((len(left) for left in names if len(left) <= _LONGEST_BESIDE), default=4)
        for title, entries in panels.items():
            lines += ["", f"{title}:"]
            for left, description in entries:
                lines += _entry(left, description, column, width)
    for paragraph in _paragraphs(command.epilog):
        lines += ["", *output.wrap(paragraph, width)]
    return _coloured(lines) if sys.stdout.isatty() else "\n".join(lines) + "\n"


def _coloured(lines: list[str]) -> str:
    from rich.console import Console
    from rich.text import Text

    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=output.UNLIMITED)
    commands = re.compile(r"^  [a-z][\w-]*(?=  )")
    for line in lines:
        text = Text(line)
        for pattern, style in _STYLES.items():
            text.highlight_regex(pattern, style)
        text.highlight_regex(commands, "cyan")
        console.print(text)
    return file.getvalue()


def _paragraphs(text: str | None) -> list[str]:
    cleaned = inspect.cleandoc(text or "").partition("\f")[0]
    return [" ".join(paragraph.split()) for paragraph in cleaned.split("\n\n") if paragraph.strip()]


def _entry(left: str, description: str, column: int, width: int) -> list[str]:
    """Return the lines of one command or option, with the description from ``column`` on."""
    indent = " " * column
    lines = [indent + line for line in output.wrap(description, width - column)] or [indent]
    if len(left) + 4 > column:
        return [f"  {left}", *lines]
    return [f"  {left}".ljust(column) + lines[0][column:], *lines[1:]]


def _command_panels(command: Any, ctx: Any) -> Panels:
    """Return the commands of each panel: groups of commands first."""
    panels: Panels = {name: [] for name in COMMAND_PANELS}
    for name in command.list_commands(ctx) if hasattr(command, "list_commands") else ():
        child = command.get_command(ctx, name)
        if child is not None and not child.hidden:
            panel = panels.setdefault(child.rich_help_panel or "Commands", [])
            entry = (name, child.get_short_help_str(limit=1000))
            panel.insert(0 if hasattr(child, "list_commands") else len(panel), entry)
    return {title: entries for title, entries in panels.items() if entries}


def _parameter_panels(command: Any, ctx: Any) -> Panels:
    """Return the parameters of each panel: arguments first, options without a panel last."""
    arguments: Panels = {"Arguments": []}
    named_panels = OPTION_PANELS.get(command.name, {})
    titles = {name: title for title, names in named_panels.items() for name in names}
    panels: Panels = {title: [] for title in named_panels}
    others: Panels = {"Options": []}
    for param in command.get_params(ctx):
        record = None if getattr(param, "hidden", False) else param.get_help_record(ctx)
        if record is None:
            continue
        entry = (_left(record[0]), _description(record[1]))
        if param.param_type_name == "argument":
            arguments["Arguments"].append((param.metavar or param.name.upper(), entry[1]))
        elif param.name in _COMPLETION_OPTIONS:
            others.setdefault("Shell completion", []).append(entry)
        elif title := titles.get(param.name) or getattr(param, "rich_help_panel", None):
            panels.setdefault(title, []).append(entry)
        else:
            others["Options"].append(entry)
    return {title: entries for title, entries in (arguments | panels | others).items() if entries}


def _description(text: str) -> str:
    """Return the help of a parameter with its range in words: "[default: 1; at least 1]"."""
    text = re.sub(r"(\[|; )x>=([\d.]+)\]$", r"\1at least \2]", text)
    text = re.sub(r"(\[|; )(\d+)<=x<=\d+\]$", r"\1at least \2]", text)
    return text.replace("  [", " [")


def _left(text: str) -> str:
    """Return the names of an option and the form of its value: "--length N"."""
    names = re.match(r"(-[\w-]+(, | / |/)?)+", text)
    if names is None:
        return text
    form = text[names.end() :].strip()
    if form.startswith("<"):
        form = form.strip("<>").removeprefix("list[").removesuffix("]")
    form = form.removesuffix("...").strip()
    return (
        f"{names[0].strip()} {_TYPE_NAMES.get(form.lower().removesuffix(' range'), form)}".strip()
    )

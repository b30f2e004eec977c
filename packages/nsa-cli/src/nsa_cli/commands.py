"""The classes behind every command: limits of integers, and hints at the options of backends."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
import typer.core

from nsa_cli import output
from nsa_core.limits import largest, shown

_METAVARS = {
    **dict.fromkeys(("int", "int range"), "N"),
    **dict.fromkeys(("float", "float range"), "NUMBER"),
    **dict.fromkeys(("path", "list[Path]"), "FILE"),
    **dict.fromkeys(("str", "list[str]"), "TEXT"),
}
_BACKEND_OPTIONS = (
    *("--cmp", "--sel", "--win", "--select", "--combine"),
    *("--combo", "--backend", "--backends"),
)
_INSTEAD = {  # option of a command that chooses backends -> how to use it
    "--combo": "choose backends with --combo: a name, or pairs such as win=sdpa,cmp=triton",
    "--backends": "choose backends with --backends: a name, or pairs such as win=sdpa,cmp=triton",
    "--cmp": "choose the backend of each slot with --cmp, --select, --sel, --win and --combine",
}


class _Command:
    """Help and errors that commands and groups share."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters; help shows N, FILE and TEXT where typer names Python's types."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if param.param_type_name == "argument":
                param.display_type_rich = lambda ctx: None  # its name says enough
            elif param.metavar is None and hasattr(param, "display_type"):
                label = (param.display_type(ctx) or "").strip("<>")
                choices = label if "|" in label else None
                param.metavar = "" if param.is_flag else _METAVARS.get(label, choices)
        return params

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse ``args``; errors name the value, or the option that this command has instead.

        --json without a file means "-", standard output.
        """
        for index, (word, after) in reversed([*enumerate(itertools.pairwise([*args, "--"]))]):
            if word == "--json" and after.startswith("-") and after != "-":
                args = [*args[: index + 1], "-", *args[index + 1 :]]
        try:
            rest: list[str] = super().parse_args(ctx, [*args])  # type: ignore[misc]
        except output.ClickError as error:
            if isinstance(error.__cause__, ValueError) and hasattr(error.__cause__, "errors"):
                raise output.UsageError(_wrong_value(error, error.__cause__), ctx) from None
            option = getattr(error, "option_name", None)
            if (root := ctx.find_root()) is not ctx and option in {
                name for param in root.command.params for name in param.opts
            }:
                place = f"give it before the command: {root.info_name} {option} ..."
                raise output.UsageError(f"{error.message.rstrip('.')}; {place}", ctx) from None
            if option in _BACKEND_OPTIONS:
                known = {name for param in ctx.command.params for name in param.opts}
                for other, sentence in _INSTEAD.items():
                    if other in known:
                        message = error.message.rstrip(".")
                        raise output.UsageError(f"{message}; {sentence}", ctx) from None
            raise
        if not ctx.resilient_parsing:
            _check_repeats(self, ctx, args)
            _check_numbers(self, ctx)
            _check_paths(self, ctx, args)
        return rest


class Command(_Command, typer.core.TyperCommand):
    """A command of `nsa`."""


class Group(_Command, typer.core.TyperGroup):
    """A group of commands of `nsa`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the named command; the error about an unknown one lists all."""
        try:
            return super().resolve_command(ctx, args)
        except output.ClickError as error:
            known = ", ".join(self.list_commands(ctx))
            raise output.UsageError(f"{error.message.rstrip('.')} (known: {known})", ctx) from None


class App(typer.Typer):
    """A Typer whose commands are of the classes :class:`Command` and :class:`Group`."""

    def __init__(self, **settings: Any) -> None:
        defaults: dict[str, Any] = {
            "cls": Group,
            "rich_markup_mode": "markdown",
            "context_settings": {"help_option_names": ["-h", "--help"]},
            "add_completion": False,
        }
        super().__init__(**(defaults | settings))

    def command(self, name: str | None = None, **settings: Any) -> Callable[..., Any]:
        """Register a command, as :meth:`typer.Typer.command` does."""
        return super().command(name, **({"cls": Command} | settings))

    def callback(self, **settings: Any) -> Callable[..., Any]:
        """Register the function of a group, as :meth:`typer.Typer.callback` does."""
        return super().callback(**({"cls": Group} | settings))


def _wrong_value(error: Any, cause: Any) -> str:
    """Return the message about a value that typer's library for types refuses."""
    fault = cause.errors()[0]
    message = fault["msg"].removeprefix("Value error, ").split(", unable")[0].rstrip(".")
    option = error.param.opts[0]
    if "Input should" in message:
        return f"{message.replace('Input should', f'{option} must')}, got {fault['input']!r}"
    return f"{option}: {message}"


def _check_repeats(command: Any, ctx: Any, args: list[str]) -> None:
    """Refuse an option whose first value would be lost, because only the last one counts."""
    for param, count in Counter(command.make_parser(ctx).parse_args([*args])[2]).items():
        takes_values = param.param_type_name == "option" and not (param.multiple or param.is_flag)
        if takes_values and count > 1:
            raise output.UsageError(
                f"{param.opts[0]} is given {count} times: give it once, with commas between the"
                " values if it takes several",
                ctx,
            )


def _check_numbers(command: Any, ctx: Any) -> None:
    """Refuse an integer beyond the limit of its option, and infinity, for every command alike."""
    for param in command.params:
        value, limit = ctx.params.get(param.name), largest(param.name)
        if isinstance(value, float) and math.isinf(value):
            raise output.UsageError(f"{param.opts[0]} must be finite, got {value}", ctx)
        if type(value) is int and abs(value) > limit:
            bound = f"<= {limit}" if value > 0 else f">= {-limit}"
            raise output.UsageError(f"{param.opts[0]} must be {bound}, got {shown(value)}", ctx)


def _check_paths(command: Any, ctx: Any, args: list[str]) -> None:
    """Refuse an empty path, which pathlib takes for the working directory."""
    for param in command.params if "" in args else []:
        if param.param_type_name == "argument" and ctx.params[param.name] == Path("."):
            raise output.UsageError(f"{param.metavar} must be a path, got ''", ctx)
    names = {option: param.name for param in command.params for option in param.opts}
    for word, after in itertools.pairwise([*args, "--"]):
        option, equals, value = word.partition("=")
        if not (value if equals else after) and isinstance(ctx.params.get(names.get(option)), Path):
            raise output.UsageError(f"{option} must be a path, got ''", ctx)

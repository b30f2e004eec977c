"""The classes behind every command: limits of integers, and hints at the options of backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
import typer.core

from nsa_cli import output
from nsa_core.limits import largest, shown

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
        """Return the parameters; a flag has no metavar, where typer may print <bool>."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False) and param.metavar is None:
                param.metavar = ""
        return params

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse ``args``; the error about an option of other commands says what this one has."""
        try:
            rest: list[str] = super().parse_args(ctx, args)  # type: ignore[misc]
        except output.ClickError as error:
            if getattr(error, "option_name", None) in _BACKEND_OPTIONS:
                known = {name for param in ctx.command.params for name in param.opts}
                for option, sentence in _INSTEAD.items():
                    if option in known:
                        raise output.UsageError(f"{error.message}; {sentence}", ctx) from None
            raise
        if not ctx.resilient_parsing:
            _check_integers(self, ctx)
        return rest


class Command(_Command, typer.core.TyperCommand):
    """A command of `nsa`."""


class Group(_Command, typer.core.TyperGroup):
    """A group of commands of `nsa`."""


class App(typer.Typer):
    """A Typer whose commands are of the classes :class:`Command` and :class:`Group`."""

    def __init__(self, **settings: Any) -> None:
        defaults: dict[str, Any] = {
            "cls": Group,
            "rich_markup_mode": "markdown",
            "add_completion": False,
        }
        super().__init__(**(defaults | settings))

    def command(self, name: str | None = None, **settings: Any) -> Callable[..., Any]:
        """Register a command, as :meth:`typer.Typer.command` does."""
        return super().command(name, **({"cls": Command} | settings))

    def callback(self, **settings: Any) -> Callable[..., Any]:
        """Register the function of a group, as :meth:`typer.Typer.callback` does."""
        return super().callback(**({"cls": Group} | settings))


def _check_integers(command: Any, ctx: Any) -> None:
    """Refuse an integer beyond the limit of its option, for every command alike."""
    for param in command.params:
        value, limit = ctx.params.get(param.name), largest(param.name)
        if type(value) is int and abs(value) > limit:
            bound = f"<= {limit}" if value > 0 else f">= {-limit}"
            raise output.UsageError(f"{param.opts[0]} must be {bound}, got {shown(value)}", ctx)

"""The command `nsa`: its sub-commands and its global options. Nothing here imports torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from nsa_cli import backends, bench, output
from nsa_cli.conformance import conformance
from nsa_cli.doctor import doctor, env
from nsa_cli.generate import generate
from nsa_cli.train import train
from nsa_cli.tune import tune
from nsa_cli.verify import verify

_HELP = """Native Sparse Attention (NSA, arXiv 2502.11089): list, explain and verify its backends.

This is not DeepSeek Sparse Attention (DSA), the lightning indexer of DeepSeek-V3.2.
"""
_CODES = """Exit codes: 0 ok; 1 a check failed; 2 usage, unknown name or invalid input; 3 known, but
unsupported or unavailable here; 4 nothing can work; 5 could not write; 130 interrupted, 143 by
SIGTERM; 141 the output was closed."""

app = typer.Typer(
    name="nsa",
    help=_HELP,
    epilog=_CODES,
    add_completion=False,
    rich_markup_mode=None,  # plain help: quick, and never cut
    pretty_exceptions_enable=False,
)
# A short help of its own, because the one typer makes from a docstring is cut.
app.add_typer(backends.app, name="backends", short_help="List, show and explain backends.")
app.command(short_help="Check backends against a float64 truth.")(verify)
app.command(short_help="Measure backends here, for `auto` to use.")(tune)
app.add_typer(bench.app, name="bench", short_help="Time backends against dense attention.")
app.command(short_help="Train a small language model.")(train)
app.command(short_help="Text from a model that was trained.")(generate)
app.command(short_help="Run the suite for authors of backends.")(conformance)
app.command(short_help="What this machine has, what is wrong, and what to type.")(doctor)
app.command(short_help="Print a block to paste in a bug report.")(env)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"nsa {version('nsa-cli')}")
        raise typer.Exit


@app.callback()
def options(
    safe: Annotated[
        bool, typer.Option("--safe", help="Load this project's own plugins only.")
    ] = False,
    plugin_limit: Annotated[
        float,
        typer.Option(
            help="Seconds a third-party plugin may take to load in a child process.", min=0.1
        ),
    ] = 20.0,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Options that every command shares."""
    output.set_plugin_options(safe, plugin_limit)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``nsa`` with the process's arguments (or these) and leave with its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    # The command is invoked without typer's own main, which answers Ctrl-C and closed pipes with
    # codes of its own.
    command = typer.main.get_command(app)
    output.prepare_streams()
    code = 0
    with output.exit_codes():
        try:
            with command.make_context("nsa", arguments) as context:
                command.invoke(context)
        except typer.Exit as leave:
            code = leave.exit_code
        sys.stdout.flush()
    raise SystemExit(code)

"""The command `nsa`: its sub-commands and global options. This module does not import torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from nsa_cli import backends, bench, output
from nsa_cli.conformance import conformance
from nsa_cli.doctor import doctor, env
from nsa_cli.generate import generate
from nsa_cli.inspect import inspect
from nsa_cli.train import train
from nsa_cli.tune import tune
from nsa_cli.verify import verify

_HELP = """Native Sparse Attention (NSA, arXiv 2502.11089): list, verify and time its backends.

This is not DeepSeek Sparse Attention (DSA), the lightning indexer of DeepSeek-V3.2.
"""
_EXIT_CODES = """Exit codes: 0 ok; 1 a check failed; 2 usage error, unknown name or invalid input;
3 a backend or device is unsupported or unavailable on this machine; 4 no backend can run; 5 the
output could not be written; 130 interrupted by Ctrl-C; 143 ended by SIGTERM; 141 the reader closed
the output."""

app = typer.Typer(
    name="nsa",
    help=_HELP,
    epilog=_EXIT_CODES,
    add_completion=False,
    rich_markup_mode=None,  # plain help loads faster and is never truncated
    pretty_exceptions_enable=False,
)
# Each command states its short help, because typer truncates the one that it takes from docstrings.
app.add_typer(backends.app, name="backends", short_help="List, show and explain backends.")
app.command(short_help="Check backends against a float64 oracle.")(verify)
app.command(short_help="Time backends on this device, so that `auto` picks the fastest.")(tune)
app.add_typer(bench.app, name="bench", short_help="Time backends against dense attention.")
app.command(short_help="Train a small language model.")(train)
app.command(short_help="Generate text from a checkpoint.")(generate)
app.command(short_help="Show which blocks a model selects.", rich_help_panel="Use")(inspect)
app.command(short_help="Run the conformance suite on one backend.")(conformance)
app.command(short_help="Diagnose this environment and suggest fixes.")(doctor)
app.command(short_help="Print an environment report for bug reports.")(env)


def _print_version(requested: bool) -> None:
    if requested:
        from importlib.metadata import version

        typer.echo(f"nsa {version('nsa-cli')}")
        raise typer.Exit


@app.callback()
def options(
    safe: Annotated[
        bool, typer.Option("--safe", help="Load only the backends of this project.")
    ] = False,
    plugin_limit: Annotated[
        float,
        typer.Option(help="Time limit in seconds for loading each third-party plugin.", min=0.1),
    ] = 20.0,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Set the options that every command shares."""
    output.set_plugin_options(safe, plugin_limit)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``nsa`` with ``arguments``, by default those of the process, and exit with its code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    # Typer's own main would exit with other codes on Ctrl-C and on closed pipes.
    command = typer.main.get_command(app)
    output.prepare_streams()
    code = 0
    with output.exit_codes():
        try:
            with command.make_context("nsa", arguments) as context:
                command.invoke(context)
        except typer.Exit as exit_request:
            code = exit_request.exit_code
        sys.stdout.flush()
    raise SystemExit(code)

"""The command `nsa`: its sub-commands and global options. This module does not import torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from nsa_cli import backends, bench, output
from nsa_cli.commands import App
from nsa_cli.convert import convert
from nsa_cli.doctor import doctor
from nsa_cli.generate import generate
from nsa_cli.inspect import inspect
from nsa_cli.train import train
from nsa_cli.tune import tune
from nsa_cli.verify import verify

USE, CHECK, MEASURE, TRAIN = "Use", "Check", "Measure", "Train"  # panels of commands, in this order
_HELP = """Native Sparse Attention (NSA, arXiv 2502.11089): list, verify, time and train it.

This is not DeepSeek Sparse Attention (DSA), the lightning indexer of DeepSeek-V3.2.
"""
_EXIT_CODES = """Exit codes: 0 ok; 1 a check failed; 2 usage error, unknown name or invalid input;
3 a backend or device is unsupported or unavailable on this machine; 4 no backend can run; 5 could
not write the output; 130, 143 or 129 ended by Ctrl-C, SIGTERM or SIGHUP; 141 the reader closed
the output."""

app = App(name="nsa", help=_HELP, epilog=_EXIT_CODES, add_completion=True)
app.add_typer(
    backends.app,
    name="backends",
    short_help="List, show and explain backends, and write a new one.",
    rich_help_panel=USE,
)
app.command(short_help="Diagnose this environment, or report it.", rich_help_panel=USE)(doctor)
app.command(short_help="Show which blocks a model selects.", rich_help_panel=USE)(inspect)
app.command(short_help="Check backends against a float64 oracle.", rich_help_panel=CHECK)(verify)
app.add_typer(
    bench.app,
    name="bench",
    short_help="Time backends against dense attention.",
    rich_help_panel=MEASURE,
)
app.command(
    short_help="Time backends on this device, so that `auto` picks the fastest.",
    rich_help_panel=MEASURE,
)(tune)
app.command(short_help="Train a small language model.", rich_help_panel=TRAIN)(train)
app.command(short_help="Generate text from a checkpoint.", rich_help_panel=TRAIN)(generate)
app.command(short_help="Convert a Hugging Face model to NSA.", rich_help_panel=TRAIN)(convert)


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
    ] = output.PLUGIN_LIMIT_S,
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
    output.prepare_streams()
    code = 0
    with output.exit_codes():
        # Typer's own main would exit with other codes on Ctrl-C and on closed pipes.
        command = typer.main.get_command(app)
        command._main_shell_completion({}, "nsa")  # exits if a shell asks for completions
        try:
            with command.make_context("nsa", arguments) as context:
                command.invoke(context)
        except typer.Exit as exit_request:
            code = exit_request.exit_code
        except SystemExit as exit_request:
            # rich, which prints help pages, would exit with 1 if the reader closed the output
            if exit_request.code == 1 and isinstance(exit_request.__context__, BrokenPipeError):
                raise exit_request.__context__ from None
            raise
        sys.stdout.flush()
    raise SystemExit(code)

"""`nsa doctor`: report this machine's environment, its problems and their fixes."""

from __future__ import annotations

from typing import Annotated

import typer

from nsa_cli import output
from nsa_core.errors import InvalidInput


def doctor(
    report: Annotated[
        bool,
        typer.Option(
            "--report", help="Print a block for a bug report, without paths and user names."
        ),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON with a schema_version.")] = False,
    limit: Annotated[
        float, typer.Option(help="Time limit in seconds for importing each library.", min=1.0)
    ] = 60.0,
) -> None:
    """Check Python, torch, CUDA, the driver, GPUs, triton, flash-attn and every plugin.

    Prints a command to type for each problem. Each library and each third-party plugin loads in a
    child process with a time limit, so that a crash or a hang becomes a line of the report. Exit
    code 4 if no attention can run in this environment; 0 with --report.
    """
    from nsa_cli import health, health_rows

    with output.exit_codes():
        if json and report:
            raise InvalidInput("--json and --report print one document each; leave one of them out")
        document = health.inspect_environment(limit)
        if json:
            output.print_json(document)
        elif report:
            health_rows.print_block(document)
        else:
            health_rows.print_screen(document)
    raise typer.Exit(0 if document["works"] or report else output.BROKEN)

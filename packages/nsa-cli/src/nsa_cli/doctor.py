"""`nsa doctor` and `nsa env`: report this machine's environment, its problems and their fixes."""

from __future__ import annotations

from typing import Annotated

import typer

from nsa_cli import output

_Limit = typer.Option("--limit", help="Time limit in seconds for importing each library.", min=1.0)


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print JSON with a schema_version.")] = False,
    limit: Annotated[float, _Limit] = 60.0,
) -> None:
    """Check Python, torch, CUDA, the driver, GPUs, triton, flash-attn and every plugin.

    Prints a command to type for each problem. Each library and each third-party plugin loads in a
    child process with a time limit, so that a crash or a hang becomes a line of the report. Exit
    code 4 if no attention can run in this environment.
    """
    from nsa_cli import health, health_rows

    with output.exit_codes():
        document = health.inspect_environment(limit)
        if json:
            output.print_json(document)
        else:
            health_rows.print_screen(document)
    raise typer.Exit(0 if document["works"] else output.BROKEN)


def env(limit: Annotated[float, _Limit] = 60.0) -> None:
    """Print versions, GPUs and backends for a bug report, without paths and user names."""
    from nsa_cli import health, health_rows

    with output.exit_codes():
        health_rows.print_block(health.inspect_environment(limit))

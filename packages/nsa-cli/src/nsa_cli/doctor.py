"""`nsa doctor` and `nsa env`: what this machine has, what is wrong with it, and what to type."""

from __future__ import annotations

from typing import Annotated

import typer

from nsa_cli import output

_Limit = typer.Option(
    "--limit", help="Seconds each library may take to import in its child process.", min=1.0
)


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print JSON with a schema_version.")] = False,
    limit: Annotated[float, _Limit] = 60.0,
) -> None:
    """One screen: Python, torch, CUDA, driver, GPUs, triton, flash-attn and every plugin, and what
    to type.

    Each library and each third-party plugin is tried in a child process with a time limit, so that
    one that crashes, hangs or exits is a line here. Exit code 4 if the environment cannot work.
    """
    from nsa_cli import health

    with output.exit_codes():
        document = health.examine(limit)
        if json:
            output.print_json(document)
        else:
            health.print_screen(document)
    raise typer.Exit(0 if document["works"] else output.BROKEN)


def env(limit: Annotated[float, _Limit] = 60.0) -> None:
    """Print a block to paste in a bug report: versions, GPUs and backends; no paths, no host or
    user names.
    """
    from nsa_cli import health

    with output.exit_codes():
        health.print_block(health.examine(limit))

"""Append the options of every command to reference/cli.md, from the Typer application.

MkDocs runs this file with the plugin gen-files. Typer writes the text. `nsa --help` needs no torch,
so the documentation tools are enough.
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import mkdocs_gen_files


def options_of_commands(root: pathlib.Path) -> str:
    """Return sections with the options of `nsa` and of every command below it."""
    sources = [str(path) for path in sorted(root.glob("packages/*/src"))]
    text = subprocess.run(
        [sys.executable, "-m", "typer", "nsa_cli.app", "utils", "docs", "--name", "nsa"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sources), "TERMINAL_WIDTH": "100"},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    # Sub-commands such as `nsa backends list` become sections beside the other commands.
    text = re.sub(r"(?m)^#{2,} (?=`nsa )", "## ", text)
    return re.sub(r"\A# `nsa`\n", "\n## `nsa`\n", text)


with mkdocs_gen_files.open("reference/cli.md", "a") as page:
    page.write(options_of_commands(pathlib.Path(__file__).resolve().parents[2]))

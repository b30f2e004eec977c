"""Write the output of the commands on a page, as a terminal of 80 columns shows it.

    python docs/scripts/capture_commands.py docs/reference/cli.md

Each block that starts with ```console holds commands behind "$ " and their output. The script runs
the commands of all blocks in order, in one empty folder, and replaces the output, in which ~ stands
for that folder. A command that the page shows with " | head -N" or "; echo $?" runs in a shell as
it is written.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import pty
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable

COLUMNS = 80
# Output that holds a fence, as that of `nsa doctor --report`, stands between longer ones.
BLOCK = re.compile(r"(?ms)^(?P<fence>`{3,})console\n(?P<lines>.*?)^(?P=fence)$")
_PLATFORM = re.compile(r"Linux-[\w.]+(-[\w.]+)*?-x86_64")  # names the kernel of the machine
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|\r")


def commands_of(page: str) -> list[str]:
    """Return the commands that a page shows, in order."""
    return [
        line.removeprefix("$ ")
        for block in BLOCK.finditer(page)
        for line in block["lines"].splitlines()
        if line.startswith("$ ")
    ]


def replace_output(page: str, run: Callable[[str], str]) -> str:
    """Return the page with the output of each command replaced by what ``run`` returns."""

    def capture(block: re.Match[str]) -> str:
        lines = [line for line in block["lines"].splitlines() if line.startswith("$ ")]
        output = "".join(f"{line}\n{run(line[2:])}" for line in lines)
        return f"{block['fence']}console\n{output}{block['fence']}"

    return BLOCK.sub(capture, page)


def run_in_terminal(command: str, folder: str) -> str:
    """Run a shell command on a terminal of 80 columns and return what stays on its screen.

    Progress bars go to standard error and vanish at the end of a command, so standard error is
    shown only if the command fails.
    """
    import fcntl
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    # A cache folder of its own, so that `nsa tune` changes nothing for the user.
    variables = {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "PWD": folder}
    variables["XDG_CACHE_HOME"] = f"{folder}/.cache"
    path = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=folder,
            env=os.environ | variables | {"PATH": path},
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=errors,
        )
        os.close(theirs)
        written = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # Linux reports a closed terminal as an error
                break
            if not part:
                break
            written += part
        os.close(ours)
        if process.wait():
            errors.seek(0)
            written += errors.read()
    text = _CONTROL.sub("", written.decode()).replace(f"{folder}/", "~/")
    text = _PLATFORM.sub("Linux-x86_64", text)
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def main() -> None:
    """Rewrite the page that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", type=pathlib.Path)
    page = parser.parse_args().page
    text = page.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="nsa-") as folder:

        def run(command: str) -> str:
            print(f"$ {command}", file=sys.stderr, flush=True)
            return run_in_terminal(command, folder)

        text = replace_output(text, run)
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

"""Fixtures for tests of `nsa`: a clean environment, and `nsa` in a separate process."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from clean_environment import clean_environment as clean_environment


@pytest.fixture
def start() -> Callable[..., subprocess.Popen[str]]:
    """Return a function that starts `nsa` in a separate process."""

    def popen(*arguments: str, **options) -> subprocess.Popen[str]:
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
        env = {**os.environ, **options.pop("env", {})}
        # Output is buffered for most users, so that write errors appear at a flush.
        env.pop("PYTHONUNBUFFERED", None)
        return subprocess.Popen([sys.executable, "-m", "nsa_cli", *arguments], env=env, **options)

    return popen


class _Terminal(io.TextIOWrapper):
    """Text written to a terminal, kept in memory."""

    def __init__(self, encoding: str) -> None:
        super().__init__(io.BytesIO(), encoding=encoding, errors="strict", write_through=True)

    def isatty(self) -> bool:
        return True

    def text(self) -> str:
        """Return what was written, without colours and cursor movements."""
        written = self.buffer.getvalue().decode(self.encoding)  # type: ignore[attr-defined]
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """Return a function that runs `nsa` as in a terminal of ``columns`` columns.

    It returns the exit code and the text of standard output, without colours.
    """
    from nsa_cli.app import main

    def run(*arguments: str, columns: int, encoding: str = "utf-8") -> tuple[int, str]:
        screen = _Terminal(encoding)
        with monkeypatch.context() as patch:
            patch.setenv("COLUMNS", str(columns))
            patch.setenv("TERM", "xterm-256color")
            patch.setattr(sys, "stdout", screen)
            with pytest.raises(SystemExit) as caught:
                main(arguments)
        return int(caught.value.code or 0), screen.text()

    return run

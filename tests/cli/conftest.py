"""`nsa` run in this process, or in one of its own."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from nsa_cli.app import main


@dataclasses.dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """Nobody's settings and nobody's remembered verdicts."""
    for name in ("NSA_PLUGINS", "NSA_DISABLE_PLUGINS", "COLUMNS", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def nsa(capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Run `nsa` here, where torch is loaded already."""

    def run(*arguments: str) -> Done:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        captured = capsys.readouterr()
        return Done(int(caught.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture
def start() -> Callable[..., subprocess.Popen[str]]:
    """Start `nsa` in a process of its own."""

    def popen(*arguments: str, **options) -> subprocess.Popen[str]:
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
        env = {**os.environ, **options.pop("env", {})}
        env.pop("PYTHONUNBUFFERED", None)  # most users' output is buffered, and fails when it is flushed
        return subprocess.Popen([sys.executable, "-m", "nsa_cli", *arguments], env=env, **options)

    return popen

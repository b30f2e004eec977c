"""Fixtures for tests of `nsa`: a clean environment, and `nsa` in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """Remove the user's settings and use an empty cache directory."""
    for name in ("NSA_PLUGINS", "NSA_DISABLE_PLUGINS", "COLUMNS", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


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

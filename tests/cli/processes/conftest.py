"""Run `nsa` in separate processes."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Callable

import pytest


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Remove the user's settings and use an empty cache directory."""
    for name in ("NSA_PLUGINS", "NSA_DISABLE_PLUGINS", "NSA_CHECK", "COLUMNS", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def nsa() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs `nsa` or another module in a separate process."""

    def run(
        *arguments: str,
        path: pathlib.Path | None = None,
        module: str = "nsa_cli",
        **options: object,
    ):
        folders = [str(path)] * bool(path) + [os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, folders)),
        }
        return subprocess.run(
            [sys.executable, "-m", module, *arguments],
            capture_output=True,
            text=True,
            env=environment,
            timeout=500,
            check=False,
            **options,
        )

    return run

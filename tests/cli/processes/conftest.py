"""Run `nsa` in separate processes."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Callable

import pytest


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

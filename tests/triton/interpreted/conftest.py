"""Collect the files named interpreted_*.py, which need TRITON_INTERPRET=1.

The variable must be set before anything imports triton. Without it, each file is one test, which
runs the file in a pytest process of its own. With it, as nox sets it, the tests are collected as
usual: TRITON_INTERPRET=1 pytest tests/triton/interpreted.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NOTHING_SELECTED = 5


def pytest_pycollect_makemodule(
    module_path: pathlib.Path, parent: pytest.Collector
) -> pytest.Collector | None:
    if INTERPRETED or not module_path.name.startswith("interpreted_"):
        return None
    return InterpretedFile.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the slowest tests first, so that workers finish at about the same time."""
    items.sort(
        key=lambda item: not (isinstance(item, InterpretedRun) or "mutants" in item.path.name)
    )


class InterpretedFile(pytest.File):
    """A file that runs as one item, in another process."""

    def collect(self) -> list[pytest.Item]:
        return [InterpretedRun.from_parent(self, name="in the interpreter")]


class InterpretedRun(pytest.Item):
    """A run of pytest on the file, in a child process with TRITON_INTERPRET=1."""

    def runtest(self) -> None:
        pytest.importorskip("triton")
        selection = ["-m", self.config.option.markexpr] if self.config.option.markexpr else []
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-ra",
            "-p",
            "no:cacheprovider",
            *selection,
            str(self.path),
        ]
        environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        environment.pop("PYTEST_XDIST_WORKER", None)
        result = subprocess.run(
            command, env=environment, cwd=self.config.rootpath, capture_output=True, text=True
        )
        if result.returncode == NOTHING_SELECTED:
            pytest.skip("no test of the file is selected")
        if result.returncode:
            pytest.fail(result.stdout + result.stderr, pytrace=False)
        self.user_properties.append(
            ("interpreted", f"{self.path.name}: {result.stdout.strip().splitlines()[-1]}")
        )


@pytest.fixture(autouse=True)
def strictly() -> Iterator[None]:
    """Run every kernel of an interpreted test in the strict interpreter, the faster one, too."""
    from nsa_backend_triton.strict.interpreter import strict

    with strict() if INTERPRETED else contextlib.nullcontext():
        yield


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, int]]:
    """Settings by kernel that replace those of the table."""
    from nsa_backend_triton.host import configs

    override: dict[str, dict[str, int]] = {}
    pick = configs.pick

    def picked(kernel: str, architecture: int, **traits: int) -> configs.Settings:
        return {**pick(kernel, architecture, **traits), **override.get(kernel, {})}

    monkeypatch.setattr(configs, "pick", picked)
    return override

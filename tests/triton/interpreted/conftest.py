"""Files named interpreted_*.py run with TRITON_INTERPRET=1, which must be set before anything
imports triton.

Without the variable each such file is one test, which runs the file in a pytest process of its own.
With it (TRITON_INTERPRET=1 pytest tests/triton/interpreted), as nox sets it, the tests are
collected as usual.
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
    """What takes longest first: begun last, a minute of it would keep one worker when the other has
    nothing left.
    """
    items.sort(
        key=lambda item: not (isinstance(item, InterpretedRun) or "mutants" in item.path.name)
    )


class InterpretedFile(pytest.File):
    """A file that runs elsewhere, as one item."""

    def collect(self) -> list[pytest.Item]:
        return [InterpretedRun.from_parent(self, name="in the interpreter")]


class InterpretedRun(pytest.Item):
    """pytest on the file in a child process whose triton interprets."""

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
        done = subprocess.run(
            command, env=environment, cwd=self.config.rootpath, capture_output=True, text=True
        )
        if done.returncode == NOTHING_SELECTED:
            pytest.skip("nothing in it is selected")
        if done.returncode:
            pytest.fail(done.stdout + done.stderr, pytrace=False)
        self.user_properties.append(
            ("interpreted", f"{self.path.name}: {done.stdout.strip().splitlines()[-1]}")
        )


@pytest.fixture(autouse=True)
def strictly() -> Iterator[None]:
    """Every kernel of an interpreted test runs in the strict interpreter, which is also the quicker
    one.
    """
    from nsa_backend_triton.strict.interpreter import strict

    with strict() if INTERPRETED else contextlib.nullcontext():
        yield

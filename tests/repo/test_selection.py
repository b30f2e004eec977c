"""The marker few_cases of tests/conftest.py: the ordinary run has few cases of a function."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = """
import pytest

@pytest.mark.few_cases
@pytest.mark.parametrize(("a", "b", "c"), {cases})
def test_every_value(a, b, c): pass

@pytest.mark.few_cases("2")
@pytest.mark.parametrize("a", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_named(a): pass
"""
CASES = list(itertools.product("xyz", "12", ("-", "+")))


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A small suite that uses tests/conftest.py."""
    shutil.copy(Path(__file__).parents[1] / "conftest.py", tmp_path)
    (tmp_path / "test_few.py").write_text(SUITE.format(cases=CASES))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n    gpu\n    few_cases\n")
    return tmp_path


def run(suite: Path, *options: str) -> str:
    """Return the output of pytest."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    return subprocess.run(command, cwd=suite, capture_output=True, text=True, check=False).stdout


def test_the_ordinary_run_has_every_value_or_the_named_cases(suite: Path) -> None:
    output = run(suite, "--collect-only", "-m", "not slow")
    *few, named = [line for line in output.splitlines() if "::" in line]
    assert named == "test_few.py::test_named[2]"
    assert len(few) == 3
    assert {*"".join(few)} >= {*"xyz12-+"}


def test_a_named_case_that_does_not_exist_fails(suite: Path) -> None:
    file = suite / "test_few.py"
    file.write_text(file.read_text().replace('few_cases("2")', 'few_cases("2", "5")'))
    output = run(suite, "-m", "not slow")
    assert "few_cases names ['5'], which do not exist" in output
    assert "4 passed" in output
    # A run of one case collects no other.
    assert "1 passed" in run(suite, "test_few.py::test_named[1]")

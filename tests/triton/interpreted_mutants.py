"""Every mutant of every jit function is killed; the equivalent ones are listed with the reason.

The ordinary run takes a tenth, chosen by each mutant's own name; `nox -s full` takes all.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest

import mutation

EQUIVALENT: dict[str, str] = json.loads(Path(__file__).with_name("equivalent_mutants.json").read_text())
FUNCTIONS = sorted(mutation.functions())
SORTED = ("combine", "tile")  # modules whose survivors have been sorted into missing cases and equivalents
PROVED = [name for name in FUNCTIONS if name.partition(".")[0] in SORTED]
ONE_IN = 10


def chosen(mutant: mutation.Mutant) -> bool:
    return zlib.crc32(mutant.key.encode()) % ONE_IN == 0


@pytest.fixture(scope="module")
def problems() -> list[mutation.Problem]:
    return mutation.problems()


def survivors(mutants: list[mutation.Mutant], problems: list[mutation.Problem], name: str, folder: Path) -> list[str]:
    asked = [problem for problem in problems if name in problem.ran]
    return [mutant.key for mutant in mutants if not mutation.killed(mutant, asked, folder)]


def test_every_jit_function_runs_in_some_problem(problems: list[mutation.Problem]) -> None:
    assert set(FUNCTIONS) - set().union(*(problem.ran for problem in problems)) == set()


def test_the_healthy_kernels_give_the_same_twice(problems: list[mutation.Problem]) -> None:
    """Without this, a comparison that always differs would kill every mutant."""
    assert not [f"{p.slot} {p.case.name}" for p in problems if p.differs()]


def test_the_list_of_equivalent_mutants_is_of_this_code() -> None:
    named = {key.partition(":")[0] for key in EQUIVALENT}
    known = {mutant.key for name in named & set(FUNCTIONS) for mutant in mutation.mutants(name)}
    assert not set(EQUIVALENT) - known
    assert all(len(reason) > 10 for reason in EQUIVALENT.values())


@pytest.mark.parametrize("name", PROVED)
def test_a_tenth_of_the_mutants_is_killed(name: str, problems: list[mutation.Problem], tmp_path: Path) -> None:
    mutants = [m for m in mutation.mutants(name) if chosen(m) and m.key not in EQUIVALENT]
    assert not survivors(mutants, problems, name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROVED)
def test_every_mutant_is_killed(name: str, problems: list[mutation.Problem], tmp_path: Path) -> None:
    mutants = mutation.mutants(name)
    found = survivors(mutants, problems, name, tmp_path)
    print(f"{name}: {len(mutants)} mutants, {len(found)} alive")
    assert sorted(found) == sorted(m.key for m in mutants if m.key in EQUIVALENT)

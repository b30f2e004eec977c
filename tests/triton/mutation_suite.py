"""What is demanded of a group of modules: each mutant of each of their jit functions dies, or is listed as equivalent.

The ordinary run takes a tenth of them, chosen by each mutant's own name; `nox -s full` takes all.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path

import pytest

import mutation
from launches import Launch
from mutation_cases import Tiny, launches_of

FUNCTIONS = sorted(mutation.functions())
OF_SEL = ("sel_", "delta.")  # the modules whose mutants have a file of their own
ONE_IN = 10
TWICE_S = 0.1  # of processor time: only a launch as quick as this is run again in the ordinary suite


def chosen(mutant: mutation.Mutant) -> bool:
    return zlib.crc32(mutant.key.encode()) % ONE_IN == 0


class Mutants:
    """Tests of the ``names`` ("module.function"), on the launches of ``cases``."""

    names: tuple[str, ...] = ()
    cases: Mapping[str, Tiny] = {}

    @pytest.fixture(scope="class")
    def launches(self) -> list[Launch]:
        return launches_of(self.cases)

    def test_every_function_runs_in_some_launch(self, launches: list[Launch]) -> None:
        assert set(self.names) - set().union(*(launch.ran for launch in launches)) == set()

    def test_healthy_kernels_leave_the_same_twice(self, launches: list[Launch]) -> None:
        """Without this, a comparison that always differs would kill every mutant."""
        quick = [launch for launch in launches if launch.seconds < TWICE_S]
        assert quick
        assert not [f"{launch.label}: {launch.name}" for launch in quick if launch.differs()]

    @pytest.mark.slow
    def test_all_of_them_do(self, launches: list[Launch]) -> None:
        assert not [f"{launch.label}: {launch.name}" for launch in launches if launch.differs()]

    def test_a_tenth_of_the_mutants_is_killed(self, launches: list[Launch], tmp_path: Path) -> None:
        mutants = [mutant for name in self.names for mutant in mutation.mutants(name)]
        asked = [mutant for mutant in mutants if chosen(mutant) and mutant.key not in mutation.EQUIVALENT]
        assert len(asked) > len(mutants) / ONE_IN / 2
        assert not mutation.survivors(asked, launches, tmp_path)

    @pytest.mark.slow
    def test_every_mutant_is_killed_but_the_equivalent_ones(self, launches: list[Launch], tmp_path: Path) -> None:
        wrong = {name: found for name in self.names if (found := mutation.unproved(name, launches, tmp_path))}
        assert not wrong

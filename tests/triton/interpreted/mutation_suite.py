"""What is demanded of a group of modules: each mutant of each of their jit functions dies, or is
listed as equivalent.

The ordinary run takes a tenth of them, chosen by each mutant's own name; `nox -s full` takes all.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping
from pathlib import Path

import pytest

import mutation
from launches import InterpretedLaunch
from mutation_cases import Tiny, launches_of

FUNCTIONS = sorted(mutation.functions())
# how the functions of a group begin; a group is a file, and runs beside the others
OF_SEL = ("sel.",)
OF_THE_REST = ("span.", "select.", "combine.", "shared.", "host.")
OF_DECODE = ("decode.",)
ONE_IN = 10
TWICE = 24  # launches, the smallest, are run again in the ordinary suite


def chosen(mutant: mutation.Mutant) -> bool:
    return zlib.crc32(mutant.key.encode()) % ONE_IN == 0


@functools.cache
def _launches(group: type[Mutants]) -> list[InterpretedLaunch]:
    return launches_of(group.cases)


class Mutants:
    """Tests of the ``names`` ("folder.module.function"), on the launches of ``cases``."""

    names: tuple[str, ...] = ()
    cases: Mapping[str, Tiny] = {}

    @property
    def launches(self) -> list[InterpretedLaunch]:
        """Made once."""
        return _launches(type(self))

    def test_every_function_runs_in_some_launch(self) -> None:
        assert self.names
        unseen = set(self.names) - set().union(*(launch.ran for launch in self.launches))
        assert not unseen, unseen

    def test_healthy_kernels_leave_the_same_twice(self) -> None:
        """Without this, a comparison that always differs would kill every mutant."""
        different = [
            f"{launch.label}: {launch.name}" for launch in self.launches[:TWICE] if launch.differs()
        ]
        assert self.launches
        assert not different, different

    @pytest.mark.slow
    def test_all_of_them_do(self) -> None:
        different = [
            f"{launch.label}: {launch.name}" for launch in self.launches if launch.differs()
        ]
        assert not different, different

    def test_a_tenth_of_the_mutants_is_killed(self, tmp_path: Path) -> None:
        mutants = [mutant for name in self.names for mutant in mutation.mutants(name)]
        sample = [mutant for mutant in mutants if chosen(mutant)]
        assert len(sample) > len(mutants) / ONE_IN / 2
        asked = [mutant for mutant in sample if mutant.key not in mutation.EQUIVALENT]
        alive = mutation.survivors(asked, self.launches, tmp_path)
        assert not alive, alive

    @pytest.mark.slow
    def test_every_mutant_is_killed_but_the_equivalent_ones(self, tmp_path: Path) -> None:
        wrong = [
            key for name in self.names for key in mutation.unproved(name, self.launches, tmp_path)
        ]
        assert not wrong, wrong

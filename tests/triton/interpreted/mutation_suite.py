"""The mutation tests of a group of modules.

Every mutant of every jit function must be killed or be listed as equivalent. The ordinary suite
runs a tenth of the mutants of the decode kernels, chosen by their own names; `nox -s full` runs
all.
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
# Prefixes of the functions of each group. A group is one test file, so groups run in parallel.
OF_SEL = ("sel.",)
OF_THE_REST = ("span.", "select.", "combine.", "shared.", "host.")
OF_DECODE = ("decode.",)
ONE_IN = 10
PARTS = 8
REPLAYED = 24  # smallest launches that the ordinary suite runs a second time


def chosen(mutant: mutation.Mutant) -> bool:
    return zlib.crc32(mutant.key.encode()) % ONE_IN == 0


@functools.cache
def _launches(group: type[Mutants]) -> list[InterpretedLaunch]:
    return launches_of(group.cases)


class Mutants:
    """Tests of the functions ``names`` ("folder.module.function") on the launches of ``cases``."""

    names: tuple[str, ...] = ()
    cases: Mapping[str, Tiny] = {}

    @property
    def launches(self) -> list[InterpretedLaunch]:
        """The launches of ``cases``, recorded once."""
        return _launches(type(self))

    def test_every_function_runs_in_some_launch(self) -> None:
        assert self.names
        unseen = set(self.names) - set().union(*(launch.ran for launch in self.launches))
        assert not unseen, unseen

    def test_unchanged_kernels_reproduce_their_results(self) -> None:
        """Otherwise a comparison that always differs would kill every mutant."""
        smallest = self.launches[:REPLAYED]
        different = [f"{launch.label}: {launch.name}" for launch in smallest if launch.differs()]
        assert self.launches
        assert not different, different

    @pytest.mark.slow
    def test_all_unchanged_kernels_reproduce_their_results(self) -> None:
        different = [
            f"{launch.label}: {launch.name}" for launch in self.launches if launch.differs()
        ]
        assert not different, different

    def test_a_tenth_of_the_mutants_is_killed(self, tmp_path: Path) -> None:
        mutants = [mutant for name in self.names for mutant in mutation.mutants(name)]
        sample = [mutant for mutant in mutants if chosen(mutant)]
        assert len(sample) > len(mutants) / ONE_IN / 2
        killable = [mutant for mutant in sample if mutant.key not in mutation.EQUIVALENT]
        alive = mutation.survivors(killable, self.launches, tmp_path)
        assert not alive, alive

    @pytest.mark.slow
    @pytest.mark.parametrize("part", range(PARTS))
    def test_every_mutant_except_equivalent_ones_is_killed(self, part: int, tmp_path: Path) -> None:
        """The functions are divided among PARTS tests, so that shards can share the work."""
        failures = [
            key
            for name in self.names[part::PARTS]
            for key in mutation.unproved(name, self.launches, tmp_path)
        ]
        assert not failures, failures

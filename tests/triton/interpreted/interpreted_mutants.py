"""Mutants of the kernels of cmp, win, select and combine, and of what every kernel shares."""

from __future__ import annotations

from pathlib import Path

import killers
import pytest

import mutation
import mutation_cases
import mutation_select_cases
from mutation_suite import FUNCTIONS, OF_DECODE, OF_SEL, OF_THE_REST, Mutants


@pytest.mark.slow
class TestTheRest(Mutants):
    names = tuple(name for name in FUNCTIONS if name.startswith(OF_THE_REST))
    # one case of sel reaches the row masks of the shared online softmax; others place tiles of
    # queries that begin inside a sequence
    cases = (
        mutation_cases.SPAN_CASES
        | mutation_select_cases.SELECT_CASES
        | mutation_cases.COMBINE_CASES
        | {"sel dense": mutation_cases.SEL_CASES["sel dense"]}
        | mutation_cases.PARTIAL_CASES
    )

    @pytest.mark.parametrize(
        ("key", "by"),
        [
            (
                (
                    "shared.rows.num_compressed: (length - COMPRESS_BLOCK) // STRIDE + 1"
                    " -> (length - COMPRESS_BLOCK) // STRIDE - 1"
                ),
                ("result",),
            ),
            # a search without end
            ("shared.rows.owner: high - low > 1 -> high - low >= 1", mutation.ANY),
            ("span.geometry.key_tiles: high - low -> high + low", ("work",)),
            ("shared.rows.finish_softmax: 1.0 -> 2.0", ()),
        ],
        ids=["result", "endless", "work", "equivalent"],
    )
    def test_what_kills_a_mutant(self, key: str, by: tuple[str, ...], tmp_path: Path) -> None:
        (mutant,) = [m for m in mutation.mutants(key.partition(":")[0]) if m.key == key]
        reached = [launch for launch in self.launches if mutant.name in launch.ran]
        few = [launch for launch in reached if launch.label != "core short"][:9]
        for kind in mutation.ANY:
            alive = mutation.survivors([mutant], few, tmp_path, (kind,))
            assert alive == ([] if kind in by else [key]), kind


def test_every_function_is_in_a_group() -> None:
    assert [
        name for name in FUNCTIONS if not name.startswith((*OF_THE_REST, *OF_SEL, *OF_DECODE))
    ] == []


def test_the_list_of_equivalent_mutants_is_of_this_code() -> None:
    named = {key.partition(":")[0] for key in mutation.EQUIVALENT}
    known = {mutant.key for name in named & set(FUNCTIONS) for mutant in mutation.mutants(name)}
    assert not set(mutation.EQUIVALENT) - known
    assert all(len(reason) > 10 for reason in mutation.EQUIVALENT.values())


def test_the_list_of_killers_has_the_number_of_mutants_of_each_function() -> None:
    """A replayed launch kills each mutant that is not equivalent; edits of a kernel change both."""
    for name in FUNCTIONS:
        made = [mutant.key for mutant in mutation.mutants(name)]
        equivalent = sum(key in mutation.EQUIVALENT for key in made)
        counts = f"{len(made) - equivalent} by a replayed launch, {equivalent} equivalent"
        killers.expect("kernels of triton", name, counts)
    assert killers.load()["kernels of triton"].keys() == set(FUNCTIONS)


def test_the_readme_states_how_many_mutants_there_are() -> None:
    assert sum(len(mutation.mutants(name)) for name in FUNCTIONS) > 3000

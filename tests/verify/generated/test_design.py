"""The covering design holds every allowed pair and triple, and depends on its seed alone."""

from __future__ import annotations

import itertools

import pytest

from nsa_core.errors import InvalidInput
from nsa_verify.generated.design import Row, covering_design, longer_design, missing_tuples

LEVELS = {name: list(range(4)) for name in "abcdef"}


def _small(row: Row) -> bool:
    return bool((row["a"] + 1) * (row["b"] + 1) <= 8)


@pytest.mark.parametrize("seed", [0, 7])
def test_design_has_every_pair_and_is_short(seed: int) -> None:
    rows = covering_design(LEVELS, seed=seed)
    pairs = {
        (one, other, row[one], row[other])
        for row in rows
        for one, other in itertools.combinations(LEVELS, 2)
    }
    assert len(pairs) == 15 * 16
    assert missing_tuples(LEVELS, rows) == []
    assert len(rows) < 40  # the full product has 4096


def test_design_has_every_triple_of_the_named_parameters() -> None:
    rows = covering_design(LEVELS, triples=["a", "b", "c", "d"])
    named = {name: LEVELS[name] for name in "abcd"}
    assert missing_tuples(named, rows, 3) == []
    assert missing_tuples(LEVELS, rows, 2) == []
    assert missing_tuples(LEVELS, rows, 3)  # the others have pairs only


def test_design_has_every_pair_that_a_filter_allows_and_no_other() -> None:
    rows = covering_design(LEVELS, allowed=_small, needs=["a", "b"])
    assert all(map(_small, rows))
    assert missing_tuples(LEVELS, rows, 2, _small, ["a", "b"]) == []
    assert missing_tuples(LEVELS, rows, 2)  # a=3 and b=3 are not allowed together


def test_missing_tuples_finds_a_removed_row() -> None:
    rows = covering_design(LEVELS)
    assert missing_tuples(LEVELS, rows[:-1])


def test_design_depends_on_its_seed_alone() -> None:
    assert covering_design(LEVELS, seed=3) == covering_design(LEVELS, seed=3)
    assert covering_design(LEVELS, seed=3) != covering_design(LEVELS, seed=4)


def test_longer_design_starts_with_the_design_and_repeats_no_row() -> None:
    design = covering_design(LEVELS, seed=2)
    rows = longer_design(LEVELS, 3 * len(design), seed=2)
    assert rows[: len(design)] == design
    assert len({repr(row) for row in rows}) == len(rows) == 3 * len(design)
    assert longer_design(LEVELS, 5, seed=2) == design[:5]
    assert len(longer_design({"a": [1, 2], "b": [3]}, 100)) == 2


def test_design_refuses_parameters_without_values_and_unknown_ones() -> None:
    with pytest.raises(InvalidInput, match="b empty"):
        covering_design({"a": [1], "b": []})
    with pytest.raises(InvalidInput, match="z unknown"):
        covering_design(LEVELS, triples=["a", "b", "z"])

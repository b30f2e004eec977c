"""The covering design holds every allowed pair and triple, and depends on its seed alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from nsa_core.contract import DTYPES, SLOTS
from nsa_verify.drawn.design import Design, Row
from nsa_verify.drawn.draw import DESIGNS, draw

LEVELS = {name: list(range(4)) for name in "abcdef"}
PLAIN = Design(LEVELS)


def missing(design: Design, rows: Sequence[Row], strength: int = 2) -> list[Row]:
    """List the tuples of ``strength`` values that are in no row and in an allowed one."""
    result = []
    read = {name: design.levels[name] for name in design.needs if name in design.levels}
    read |= {name: design.levels[name][:1] for name in design.firsts if name in design.levels}
    for names in itertools.combinations(design.levels, strength):
        indexed = {name: list(design.levels[name]) for name in names}
        covered = {tuple(indexed[name].index(row[name]) for name in names) for row in rows}
        for picks in itertools.product(*(range(len(values)) for values in indexed.values())):
            part = {name: indexed[name][i] for name, i in zip(names, picks)}
            free = [name for name in read if name not in part]
            completed = (
                {**part, **dict(zip(free, values))}
                for values in itertools.product(*(read[name] for name in free))
            )
            if picks not in covered and (
                design.allowed is None or any(map(design.allowed, completed))
            ):
                result.append(part)
    return result


def _small(row: Row) -> bool:
    return bool((row["a"] + 1) * (row["b"] + 1) <= 8)


@pytest.mark.parametrize("seed", [0, 7])
def test_design_has_every_pair_and_is_short(seed: int) -> None:
    rows = PLAIN.rows(seed)
    pairs = {
        (one, other, row[one], row[other])
        for row in rows
        for one, other in itertools.combinations(LEVELS, 2)
    }
    assert len(pairs) == 15 * 16
    assert missing(PLAIN, rows) == []
    assert len(rows) < 40  # the full product has 4096


def test_design_has_every_triple_of_the_named_parameters() -> None:
    rows = Design(LEVELS, triples="abcd").rows()
    assert missing(Design({name: LEVELS[name] for name in "abcd"}), rows, 3) == []
    assert missing(PLAIN, rows) == []
    assert missing(PLAIN, rows, 3)  # the others have pairs only


def test_design_has_every_pair_that_a_filter_allows_and_no_other() -> None:
    design = Design(LEVELS, allowed=_small, needs="ab")
    rows = design.rows()
    assert all(map(_small, rows))
    assert missing(design, rows) == []
    assert missing(PLAIN, rows)  # a=3 and b=3 are not allowed together


def test_missing_finds_a_removed_row() -> None:
    assert missing(PLAIN, PLAIN.rows()[:-1])


def test_design_depends_on_its_seed_alone() -> None:
    assert PLAIN.rows(3) == Design(LEVELS).rows(3)
    assert PLAIN.rows(3) != PLAIN.rows(4)


def test_longer_design_starts_with_the_design_and_repeats_no_row() -> None:
    design = PLAIN.rows(2)
    rows = PLAIN.rows(2, 3 * len(design))
    assert rows[: len(design)] == design
    assert len({repr(row) for row in rows}) == len(rows) == 3 * len(design)
    assert PLAIN.rows(2, 5) == design[:5]
    assert PLAIN.rows(2, 0) == []
    assert len(Design({"a": [1, 2], "b": [3]}).rows(0, 100)) == 2


HISTORIES = ("cache", "nsa_decode")


@pytest.mark.parametrize("name", DESIGNS)
def test_quick_has_every_allowed_pair_in_few_rows(name: str) -> None:
    """48 decode steps, and as many histories as full has, have every pair."""
    design = DESIGNS[name]("full" if name in HISTORIES else "quick", DTYPES)
    for seed in (0, 4) if name in ("decode", *HISTORIES) else (0,):
        rows = design.rows(seed)
        assert missing(design, rows) == []
        assert len(rows) <= (200 if name in HISTORIES else 90)
    if name in (*SLOTS, "decode"):
        assert max(len(values) for values in design.levels.values()) <= 5
    if name not in HISTORIES:
        assert len(draw(name, "quick", DTYPES)) == len(design.rows(0))


@pytest.mark.slow
@pytest.mark.parametrize("slot", SLOTS)
def test_full_has_every_allowed_pair_and_every_triple_that_interacts(slot: str) -> None:
    design = DESIGNS[slot]("full", DTYPES)
    rows = design.rows()
    assert missing(design, rows) == []
    interacting = {name: design.levels[name] for name in design.triples}
    assert len(interacting) >= 4
    # A filter reads parameters outside the triple too, so the test completes rows with their first
    # values: a triple that they allow must occur.
    needs = [name for name in design.needs if name in design.levels]
    first = {name: min(design.levels[name], key=str) for name in needs}
    first |= {name: design.levels[name][0] for name in design.firsts if name in design.levels}

    def allowed(row: dict[str, object]) -> bool:
        return design.allowed({**first, "groups": 1, "documents": "dense", **row})

    assert missing(Design(interacting, allowed=allowed), rows, 3) == []

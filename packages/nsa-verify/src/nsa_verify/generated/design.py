"""Covering designs: few rows that hold every pair (or triple) of values of several parameters."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import covertable  # type: ignore[import-untyped]

from nsa_core.errors import InvalidInput

Row = dict[str, Any]  # a value per parameter
Levels = Mapping[str, Sequence[Any]]  # the values of each parameter


class OneOf(tuple[Any, ...]):
    """Values of a parameter that a design takes as one value.

    A parameter of many values would need a row for each pair of them with the values of another
    parameter. :func:`take_turns` distributes the values over the rows.
    """

    __slots__ = ()


# Query heads per kv head: every size up to 20, and 64.
GROUP_SIZES = (
    OneOf((1, 2, 3, 4)),
    OneOf((5, 6, 7, 8)),
    OneOf((9, 10, 16, 64)),
    OneOf((11, 12, 13, 14)),
    OneOf((15, 17, 18, 19, 20)),
)


def take_turns(rows: Sequence[Row], seed: int = 0) -> list[Row]:
    """Return ``rows`` with a value in the place of each OneOf; the rows take its values in turn.

    Args:
        rows: The rows of a design.
        seed: The first row takes the value with this number, modulo the number of values.
    """
    turns: dict[tuple[str, OneOf], Iterator[int]] = {}

    def value(name: str, values: Any) -> Any:
        if not isinstance(values, OneOf):
            return values
        turn = next(turns.setdefault((name, values), itertools.count(seed)))
        return values[turn % len(values)]

    return [{name: value(name, values) for name, values in row.items()} for row in rows]


def covering_design(
    levels: Levels,
    *,
    seed: int = 0,
    triples: Sequence[str] = (),
    allowed: Callable[[Row], bool] | None = None,
    needs: Sequence[str] = (),
    firsts: Sequence[str] = (),
) -> list[Row]:
    """Return rows in which every allowed pair of values of two parameters occurs.

    The first rows cover the most pairs, so a prefix of the design is a good small design. The rows
    depend on ``seed`` and on nothing else that changes from run to run.

    Args:
        levels: The values of each parameter. A value may be any object.
        seed: Chooses one of many designs.
        triples: Parameters of which every allowed triple of values occurs too.
        allowed: Returns whether a row may occur; None allows every row.
        needs: Parameters that ``allowed`` reads. It receives rows that hold at least these.
        firsts: Parameters that it reads too, and of which it allows the first value wherever it
            allows another one.

    Raises:
        InvalidInput: A parameter has no value, or ``triples`` or ``needs`` names an unknown one.

    Example:
        >>> rows = covering_design({"a": [1, 2], "b": ["x", "y"], "c": [True, False]}, seed=1)
        >>> len(rows) < 8 and not missing_tuples({"a": [1, 2], "b": ["x", "y"]}, rows)
        True
    """
    empty = [name for name, values in levels.items() if not values]
    unknown = [name for name in (*triples, *needs, *firsts) if name not in levels]
    if empty or unknown:
        raise InvalidInput(
            "levels must give each parameter at least one value:"
            f" {', '.join(empty) or 'none'} empty, {', '.join(unknown) or 'none'} unknown"
        )
    names = list(levels)
    if len(names) == 1:
        return [{names[0]: value} for value in levels[names[0]]]
    # The library compares values; indices are comparable, and any object has one.
    factors = {name: list(range(len(values))) for name, values in levels.items()}

    def row_of(indices: Mapping[str, int]) -> Row:
        return {name: levels[name][indices[name]] for name in names if name in indices}

    sub_models = [{"fields": list(triples), "strength": 3}] if len(triples) >= 3 else []
    found = covertable.make(factors, strength=2, salt=str(seed), sub_models=sub_models)
    rows = [row_of(row) for row in found]
    if allowed is None or all(map(allowed, rows)):
        return rows
    groups: list[tuple[str, ...]] = [*itertools.combinations(names, 2)]
    groups += itertools.combinations(triples, 3) if len(triples) >= 3 else []
    first_values = {name: levels[name][0] for name in firsts}
    return _repaired(rows, groups, allowed, {name: levels[name] for name in needs}, first_values)


def _repaired(
    rows: Sequence[Row],
    groups: Sequence[tuple[str, ...]],
    allowed: Callable[[Row], bool],
    needs: Levels,
    firsts: Row,
) -> list[Row]:
    """Replace the rows that are not allowed by rows with the same tuples that are.

    The constraints of the library can take minutes and hundreds of rows, because its greedy search
    runs into dead ends.

    Args:
        rows: A design without a filter.
        groups: The parameters of each tuple to keep.
        allowed: Returns whether a row may occur.
        needs: Parameters that ``allowed`` reads, and their values.
        firsts: Parameters that it reads too, and the values that it always allows.
    """

    def tuples(row: Row) -> set[tuple[tuple[str, ...], str]]:
        return {(names, repr([row[name] for name in names])) for names in groups}

    kept = [row for row in rows if allowed(row)]
    covered = {one for row in kept for one in tuples(row)}
    impossible = set()
    for row in rows:
        if allowed(row):
            continue
        for names in groups:
            key = (names, repr([row[name] for name in names]))
            if key in covered or key in impossible:
                continue
            if smaller := _nearest(row, names, allowed, needs, firsts):
                kept.append(smaller)
                covered |= tuples(smaller)
            else:
                impossible.add(key)
    return kept


def _nearest(
    row: Row,
    fixed: Sequence[str],
    allowed: Callable[[Row], bool],
    needs: Levels,
    firsts: Row,
) -> Row | None:
    """Return an allowed row that differs from ``row`` in the fewest ``needs``, not in ``fixed``.

    It may have all ``firsts`` that are not fixed.
    """
    free = [name for name in needs if name not in fixed]
    firsts = {name: value for name, value in firsts.items() if name not in fixed}
    for count in range(len(free) + 1):
        for changed in itertools.combinations(free, count):
            for values in itertools.product(*(needs[name] for name in changed)):
                candidate = {**row, **dict(zip(changed, values))}
                if allowed(candidate):
                    return candidate
                if firsts and allowed(candidate := {**candidate, **firsts}):
                    return candidate
    return None


def longer_design(levels: Levels, count: int, *, seed: int = 0, **options: Any) -> list[Row]:
    """Return ``count`` distinct rows: a covering design, then the designs of the next seeds.

    Args:
        levels: The values of each parameter.
        count: Number of rows; fewer are returned if the parameters have fewer rows.
        seed: Seed of the first design.
        **options: Other arguments of :func:`covering_design`.
    """
    rows: list[Row] = []
    seen: set[str] = set()
    for next_seed in itertools.count(seed):
        before = len(rows)
        for row in covering_design(levels, seed=next_seed, **options):
            if (key := repr(row)) not in seen:
                seen.add(key)
                rows.append(row)
        if len(rows) >= count or len(rows) == before:
            return rows[:count]
    raise AssertionError("unreachable")


def missing_tuples(
    levels: Levels,
    rows: Sequence[Row],
    strength: int = 2,
    allowed: Callable[[Row], bool] | None = None,
    needs: Sequence[str] = (),
    firsts: Sequence[str] = (),
) -> list[Row]:
    """List the tuples of ``strength`` values that occur in no row and in at least one allowed row.

    Args:
        levels: The values of each parameter.
        rows: The design.
        strength: Number of parameters in a tuple.
        allowed: Returns whether a row may occur; None allows every row.
        needs: Parameters that ``allowed`` reads.
        firsts: Parameters that it reads too, as in :func:`covering_design`.
    """
    missing = []
    choices = {n: levels[n] for n in needs} | {n: levels[n][:1] for n in firsts}
    for names in itertools.combinations(levels, strength):
        indexed = {name: list(levels[name]) for name in names}
        covered = {tuple(indexed[name].index(row[name]) for name in names) for row in rows}
        for picks in itertools.product(*(range(len(values)) for values in indexed.values())):
            part = {name: indexed[name][i] for name, i in zip(names, picks)}
            if picks not in covered and (
                allowed is None or any(map(allowed, _completions(part, choices)))
            ):
                missing.append(part)
    return missing


def _completions(part: Row, choices: Levels) -> Iterator[Row]:
    free = [name for name in choices if name not in part]
    for values in itertools.product(*(choices[name] for name in free)):
        yield {**part, **dict(zip(free, values))}

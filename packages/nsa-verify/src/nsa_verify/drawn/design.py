"""Covering designs: few rows that hold every pair (or triple) of values of several parameters."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import covertable  # type: ignore[import-untyped]

Row = dict[str, Any]  # a value per parameter
Levels = Mapping[str, Sequence[Any]]  # the values of each parameter


class OneOf(tuple[Any, ...]):
    """Values of a parameter that a design takes as one value.

    A parameter of many values would need a row for each pair of them with the values of another
    parameter. :meth:`Design.draw` distributes the values over the rows.
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


def _row(row: Row, number: int, seed: int) -> Row:
    return row


class _Greedy:
    """Chooses the pairs that covertable's greedy criterion chooses, several times as fast.

    That one counts all pairs of a row for each candidate; this one counts those of each new value
    with the row, once for all candidates.
    """

    @staticmethod
    def extract(search: Any) -> Iterator[tuple[int, int]]:
        """Yield the pairs of values for the current row of ``search``, a covertable Controller."""
        row, missing = search.row, search.incomplete
        while not search.is_filled():
            # Value -> whether it is new, and its missing pairs with the row.
            gains = dict.fromkeys(row.values(), (0, 0))
            for key, values in search.serials.items():
                for v in values if key not in row else ():
                    pairs = ((u, v) if u < v else (v, u) for u in row.values())
                    gains[v] = (1, sum(pair in missing for pair in pairs))
            best, most = None, -1
            for pair in missing:
                one, other = gains.get(pair[0]), gains.get(pair[1])
                if one is None or other is None or not (new := one[0] + other[0]):
                    continue
                count = one[1] + other[1] + (new == 2)
                if most < count:
                    best, most = pair, count
                if count > len(row) * new:  # no pair has more
                    break
            if best is None:
                return
            yield best


@dataclasses.dataclass(frozen=True)
class Design:
    """Rows in which every allowed pair of values of two parameters occurs.

    Attributes:
        levels: The values of each parameter. A value may be any object.
        build: Returns what a row describes; receives the row, its number and the seed.
        triples: Parameters of which every allowed triple of values occurs too.
        allowed: Returns whether a row may occur; None allows every row.
        needs: Parameters that ``allowed`` reads. It receives rows that hold at least these.
        firsts: Parameters that it reads too, and of which it allows the first value wherever it
            allows another one.
        count: Number of rows; None takes the whole design.

    Example:
        >>> design = Design({"a": [1, 2], "b": ["x", "y"], "c": [True, False]})
        >>> 6 <= len(design.rows(seed=1)) < 8
        True
    """

    levels: Levels
    build: Callable[[Row, int, int], Any] = _row
    triples: Sequence[str] = ()
    allowed: Callable[[Row], bool] | None = None
    needs: Sequence[str] = ()
    firsts: Sequence[str] = ()
    count: int | None = None

    def draw(self, seed: int = 0, count: int | None = None) -> list[Any]:
        """Return what the rows describe; arguments as in :meth:`rows`.

        The rows take the values of a OneOf in turn. The first row takes that with the number
        ``seed``, modulo the number of values.
        """
        turns: dict[tuple[str, OneOf], Iterator[int]] = {}

        def value(name: str, values: Any) -> Any:
            if not isinstance(values, OneOf):
                return values
            turn = next(turns.setdefault((name, values), itertools.count(seed)))
            return values[turn % len(values)]

        rows = [{n: value(n, x) for n, x in row.items()} for row in self.rows(seed, count)]
        return [self.build(row, number, seed) for number, row in enumerate(rows)]

    def rows(self, seed: int = 0, count: int | None = None) -> list[Row]:
        """Return the rows, which depend on ``seed`` and on nothing else that changes.

        The first rows cover the most pairs, so a prefix of the design is a good small design.

        Args:
            seed: Chooses one of many designs.
            count: Number of distinct rows: those of the design, then those of the next seeds. None
                takes the count of the design; fewer are returned if there are fewer.
        """
        count = self.count if count is None else count
        if count is None:
            return self._covering(seed)
        rows: list[Row] = []
        seen: set[str] = set()
        for next_seed in itertools.count(seed):
            before = len(rows)
            for row in self._covering(next_seed) if count else ():
                if (key := repr(row)) not in seen:
                    seen.add(key)
                    rows.append(row)
            if len(rows) >= count or len(rows) == before:
                return rows[:count]
        raise AssertionError("unreachable")

    def _covering(self, seed: int) -> list[Row]:
        """Return the rows that cover every pair, without those of other seeds."""
        names, triples = list(self.levels), list(self.triples)
        if len(names) == 1:
            return [{names[0]: value} for value in self.levels[names[0]]]
        # The library compares values; indices are comparable, and any object has one.
        factors = {name: list(range(len(values))) for name, values in self.levels.items()}
        options: dict[str, Any] = {"criterion": _Greedy}
        if len(triples) >= 3:
            options = {"sub_models": [{"fields": triples, "strength": 3}]}
        found = covertable.make(factors, strength=2, salt=str(seed), **options)
        rows = [{n: self.levels[n][row[n]] for n in names if n in row} for row in found]
        if self.allowed is None or all(map(self.allowed, rows)):
            return rows
        groups: list[tuple[str, ...]] = [*itertools.combinations(names, 2)]
        groups += itertools.combinations(triples, 3) if len(triples) >= 3 else []
        return self._repaired(rows, groups, self.allowed)

    def _repaired(
        self,
        rows: Sequence[Row],
        groups: Sequence[tuple[str, ...]],
        allowed: Callable[[Row], bool],
    ) -> list[Row]:
        """Replace the rows that are not allowed by rows with the same tuples that are.

        The constraints of the library can take minutes and hundreds of rows, because its greedy
        search runs into dead ends.

        Args:
            rows: A design without a filter.
            groups: The parameters of each tuple to keep.
            allowed: The filter.
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
                if nearest := self._nearest(row, names, allowed):
                    kept.append(nearest)
                    covered |= tuples(nearest)
                else:
                    impossible.add(key)
        return kept

    def _nearest(
        self, row: Row, fixed: Sequence[str], allowed: Callable[[Row], bool]
    ) -> Row | None:
        """Return an allowed row that differs from ``row`` in the fewest needs, not in ``fixed``.

        It may have all first values that are not fixed.
        """
        free = self.levels.keys() - fixed
        needs = {name: self.levels[name] for name in self.needs if name in free}
        firsts = {name: self.levels[name][0] for name in self.firsts if name in free}
        for count in range(len(needs) + 1):
            for changed in itertools.combinations(needs, count):
                for values in itertools.product(*(needs[name] for name in changed)):
                    candidate = {**row, **dict(zip(changed, values))}
                    if allowed(candidate):
                        return candidate
                    if firsts and allowed(candidate := {**candidate, **firsts}):
                        return candidate
        return None

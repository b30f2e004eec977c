"""Arrange a wide table of a benchmark for a narrow screen: groups of its columns, stacked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nsa_bench.render.format import Rows
from nsa_bench.roofline import PARTS
from nsa_core.contract import SLOTS

_KEYS = ("batch", "tokens", "subject")
_GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("time", ("ms", "q1 ms", "q3 ms", "eager ms", "CV %", "x dense")),
    ("efficiency", ("% of floor", "bound", "TB/s", "MiB")),
    ("time of each part", tuple(f"{name} ms" for name in PARTS)),
    ("shares", tuple(f"{name} %" for name in (*SLOTS, "sum"))),
)
_GAP = 2  # columns between two columns


def arrange(rows: Rows, width: int) -> Iterator[Rows]:
    """Yield ``rows`` as one table if it fits ``width`` columns, else as tables to be stacked.

    Each of these has the columns that identify a row and as many groups of columns as fit; a group
    that does not fit is divided. Rows without a value in these groups are left out of all tables
    but the first.
    """
    title, columns, cells = rows
    keys = [name for name in columns if name in _KEYS]
    groups = [
        (title_of_group, [name for name in columns if name in names])
        for title_of_group, names in _GROUPS
    ]
    groups = [
        (title_of_group, part)
        for title_of_group, names in groups
        for part in _divided(rows, keys, names, width)
    ]
    if not groups or _width(columns, cells) <= width:
        yield rows
        return
    parts = [groups[:1]]
    for group in groups[1:]:
        names = [*keys, *(name for _, members in (*parts[-1], group) for name in members)]
        if _width(*_select(rows, names, keep_all=len(parts) == 1)) <= width:
            parts[-1].append(group)
        else:
            parts.append([group])
    for index, part in enumerate(parts):
        names = [*keys, *(name for _, members in part for name in members)]
        subtitle = " and ".join(dict.fromkeys(title_of_group for title_of_group, _ in part))
        header, selected = _select(rows, names, keep_all=index == 0)
        if selected:
            yield f"{title} | {subtitle}", header, selected


def _divided(
    rows: Rows, keys: Sequence[str], names: Sequence[str], width: int
) -> Iterator[list[str]]:
    """Yield the columns ``names`` in parts that fit ``width`` columns beside ``keys``."""
    part: list[str] = []
    for name in names:
        if part and _width(*_select(rows, [*keys, *part, name], keep_all=True)) > width:
            yield part
            part = []
        part.append(name)
    if part:
        yield part


def _select(rows: Rows, names: Sequence[str], keep_all: bool) -> tuple[list[str], list[list[str]]]:
    """Return the columns ``names`` and the rows that have a value in one that is no key."""
    _, columns, cells = rows
    positions = [columns.index(name) for name in names]
    selected = [[row[position] for position in positions] for row in cells]
    keys = sum(name in _KEYS for name in names)
    return list(names), [row for row in selected if keep_all or any(_values(row[keys:]))]


def _values(cells: Sequence[str]) -> list[str]:
    return [cell for cell in cells if cell not in ("", "-")]


def _width(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> int:
    """Return the columns of a screen that a table takes on one line per row."""
    widths = [max(map(len, column)) for column in zip(columns, *cells)]
    return sum(widths) + _GAP * (len(widths) - 1)

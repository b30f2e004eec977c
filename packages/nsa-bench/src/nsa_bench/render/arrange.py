"""Arrange a wide table of a benchmark for a narrow screen: parts of its columns, stacked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nsa_bench.render.format import Rows

_GAP = 2  # columns of the screen between two columns


def arrange(rows: Rows, width: int) -> Iterator[Rows]:
    """Yield ``rows`` as one table if it fits ``width`` columns, else as tables to be stacked.

    Each of these has the columns up to "subject", which identify a row, and as many others as fit.
    Rows without a value in these are left out of all tables but the first. A table without times
    stays as it is.
    """
    title, columns, cells = rows
    if "ms" not in columns or _width(columns, cells) <= width:
        yield rows
        return
    keys = [*range(columns.index("subject") + 1)]
    parts: list[list[int]] = [[]]
    for position in range(len(keys), len(columns)):
        if parts[-1] and _width(*_select(rows, [*keys, *parts[-1], position])) > width:
            parts.append([])
        parts[-1].append(position)
    for part in parts:
        header, selected = _select(rows, [*keys, *part])
        if part is not parts[0]:
            selected = [
                row for row in selected if any(c not in ("", "-") for c in row[len(keys) :])
            ]
        if selected:
            yield title if part is parts[0] else f"{title}, continued", header, selected


def _select(rows: Rows, positions: Sequence[int]) -> tuple[list[str], list[list[str]]]:
    """Return the columns at these positions."""
    _, columns, cells = rows
    return [columns[i] for i in positions], [[row[i] for i in positions] for row in cells]


def _width(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> int:
    """Return the columns of a screen that a table takes on one line per row."""
    widths = [max(map(len, column)) for column in zip(columns, *cells)]
    return sum(widths) + _GAP * (len(widths) - 1)

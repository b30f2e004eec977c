"""Lay out text for a terminal of any width: no word is broken, and no line is too long.

Piped output has no width: its lines are not wrapped.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

STYLES = {
    "ready": "green",
    "broken": "red",
    "incompatible": "red",
    "wrong": "red",
    "unavailable": "yellow",
    "disabled": "yellow",
    "missing": "yellow",
}
_NARROWEST = 24  # columns of the last cell of a row; a longer one with less room gets its own line


def columns_of(console: Console) -> int | None:
    """Return the width of the terminal, or None if the output is piped."""
    return console.width if console.file.isatty() else None


def shorten(text: str, limit: int) -> str:
    """Return ``text``, cut at a word border to at most ``limit`` characters with " ..."."""
    return text if len(text) <= limit else textwrap.shorten(text, limit, placeholder=" ...")


def wrap(text: str, columns: int | None, first: str = "", rest: str | None = None) -> list[str]:
    """Return the lines of a paragraph.

    A word that is longer than a line, such as a path, is broken after a separator.

    Args:
        text: The paragraph.
        columns: The width of the terminal; None does not wrap.
        first: Start of the first line.
        rest: Start of the other lines; None: as many spaces as ``first`` has characters.
    """
    rest = " " * len(first) if rest is None else rest
    if columns is None:
        return [(first + text).rstrip()]
    room = max(columns - max(len(first), len(rest)), 1)
    lines = textwrap.wrap(
        re.sub(r"\S+", lambda word: " ".join(_parts(word[0], room)), text),
        max(columns, len(rest) + 1),
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines or [first.rstrip()]


def _parts(word: str, room: int) -> list[str]:
    """Return ``word``, in parts of at most ``room`` characters that end after a separator."""
    parts = [""]
    for piece in re.findall(r"[^/\\:;,=_.&?-]*[/\\:;,=_.&?-]?", word):
        while len(piece) > room:  # no separator far and wide
            parts += [piece[:room], ""]
            piece = piece[room:]
        if len(parts[-1] + piece) > room:
            parts.append("")
        parts[-1] += piece
    return [part for part in parts if part]


def print_rows(
    console: Console,
    rows: Iterable[Sequence[str]],
    gaps: Sequence[int] = (),
    styled: int | None = None,
    header: bool = False,
    indent: int = 0,
) -> None:
    """Print ``rows`` as a table whose last column is wrapped.

    Args:
        console: Where to print.
        rows: Cells of each row. All rows have the same number of cells.
        gaps: Spaces after each column but the last; missing entries are 2.
        styled: The column whose cells are coloured by STYLES.
        header: Print the first row in bold.
        indent: Spaces before each row.
    """
    from rich.text import Text

    rows = [tuple(row) for row in rows]
    if not rows:
        return
    columns = columns_of(console)
    *widths, _ = (max(map(len, column)) for column in zip(*rows))
    gaps = [*gaps, *[2] * (len(widths) - len(gaps))]
    for number, row in enumerate(rows):
        start = " " * indent
        offset = 0
        for index, cell in enumerate(row[:-1]):
            offset = len(start) if index == styled else offset
            start += cell.ljust(widths[index] + gaps[index])
        room = None if columns is None else columns - len(start)
        if room is not None and room < min(_NARROWEST, len(row[-1])):
            # No room beside the other cells: the last cell goes on lines of its own.
            lines = [start.rstrip(), *wrap(row[-1], columns, " " * (indent + 4))]
        else:
            lines = wrap(row[-1], columns, start)
        for position, line in enumerate(lines):
            text = Text(line, "bold" if header and number == 0 else "")
            if styled is not None and position == 0:
                text.stylize(STYLES.get(row[styled], ""), offset, offset + len(row[styled]))
            print_line(console, text)


def print_paragraph(console: Console, text: str, first: str = "", rest: str | None = None) -> None:
    """Print a paragraph, as :func:`wrap` lays it out."""
    for line in wrap(text, columns_of(console), first, rest):
        print_line(console, line)


def print_line(console: Console, text: object) -> None:
    """Print one line that fits, without the trailing spaces and the wrapping of rich."""
    console.print(text, soft_wrap=True)

"""Text and tables that fit a terminal. Piped text has no width: its lines are not wrapped.

Files and plugins of strangers bring some of the texts, so control characters are escaped here.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from nsa_core.util.text import escape_control

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {  # of cells that are a state or a verdict
    "green": ("ready", "ok"),
    "yellow": ("unavailable", "disabled", "missing", "not run", "ok so far"),
    "red": ("broken", "incompatible", "wrong"),
    "bold red": ("FAILED", "REFUSED"),  # after a number or not
}
UNLIMITED = 1_000_000  # columns; lines of piped output are never broken or truncated by rich
_WIDEST_TEXT = 100  # columns; longer lines of text are hard to read


def console(stderr: bool = False) -> Console:
    """Return a console that prints control characters and markup as text.

    Piped output has no colour and no line limit.
    """
    from rich.console import Console

    class PlainConsole(Console):
        def on_broken_pipe(self) -> None:  # rich would exit with code 1
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

        def print(self, *objects: Any, **options: Any) -> None:
            texts = (escape_control(each) if isinstance(each, str) else each for each in objects)
            super().print(*texts, **options)

    file = sys.stderr if stderr else sys.stdout
    width = None if file.isatty() else UNLIMITED
    return PlainConsole(file=file, width=width, markup=False, highlight=False, emoji=False)


def table_width() -> int:
    """Return the columns of a table: those of the terminal; 100 if piped."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDEST_TEXT


def shorten(text: str, limit: int) -> str:
    """Return ``text``, cut at a word border to at most ``limit`` characters with " ..."."""
    return text if len(text) <= limit else textwrap.shorten(text, limit, placeholder=" ...")


def wrap(text: str, columns: int, indent: str | None = None) -> Iterator[str]:
    """Yield the lines of ``text``, broken between words.

    Args:
        text: The text; each line of it keeps its spaces at the left.
        columns: The width of the terminal.
        indent: The start of each further line of a line that is broken; None: two spaces more than
            the first.
    """
    for line in text.splitlines() or [""]:
        margin = line[: len(line) - len(line.lstrip(" "))]
        rest = margin + "  " if indent is None else indent
        yield from textwrap.wrap(
            line,
            max(columns, len(rest) + 1),
            subsequent_indent=rest,
            break_on_hyphens=False,
        ) or [""]


def print_text(target: Console, text: str, style: str = "", indent: str | None = None) -> None:
    """Print ``text`` with hanging indent; in a terminal, lines break between words.

    Args:
        target: A console from :func:`console`.
        text: The text; each line of it starts at the left margin.
        style: The style of a terminal, such as "bold red".
        indent: The start of each wrapped line; None: two spaces more than the first.
    """
    lines = text.splitlines() or [""]
    if target.file.isatty():
        lines = list(wrap(text, min(_WIDEST_TEXT, target.width), indent))
    for line in lines:
        target.print(line, style=style, no_wrap=True, overflow="ignore", crop=False)


def print_table(
    target: Console,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    title: str = "",
    wrapped: Collection[str] = (),
    gap: int = 2,
) -> None:
    """Print a table without borders; a word is broken only if it takes half of the screen.

    A row that is wider than the terminal is printed whole, and the terminal breaks it. Columns of
    numbers are aligned at their decimal points, others at the left. A state and a verdict are
    coloured.

    Args:
        target: A console from :func:`console`.
        columns: The header; a unit belongs to it.
        rows: The cells of each row; a line break in one is escaped.
        title: A line above the table.
        wrapped: The columns that may take several lines per row on a narrow screen; all others
            take one.
        gap: Spaces between two columns.
    """
    from rich.table import Table
    from rich.text import Text

    if title:
        print_text(target, title, "bold")
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    aligned: list[list[str]] = []
    for index, name in enumerate(columns):
        cells = [escape_control(row[index]).replace("\n", "\\n") for row in rows]
        words = [word for text in (name, *cells) for word in text.split()]
        if _is_numeric(cells):
            # Rich would strip the padding at the right of right-justified cells.
            column = [name, *_align_decimals(cells)]
            name, *cells = (cell.rjust(max(map(len, column))) for cell in column)
        aligned.append(cells)
        is_wrapped = columns[index] in wrapped
        table.add_column(
            Text(name),
            no_wrap=not is_wrapped,
            min_width=(
                min(max(map(len, words)), target.width // 2)
                if is_wrapped
                else max(map(len, (name, *cells)))  # else rich would cut what does not fit
            ),
            overflow="fold",
        )
    for row in zip(*aligned):
        table.add_row(*(Text(cell, _style(cell)) for cell in row))
    with target.capture() as captured:
        target.print(table, crop=False)
    for line in captured.get().splitlines():
        print(line.rstrip(), file=target.file)


def _style(cell: str) -> str:
    state = cell.lstrip("0123456789 ")
    return next((style for style, states in _STYLES.items() if state in states), "")


def _is_numeric(texts: Sequence[str]) -> bool:
    """Return whether ``texts`` are numbers, such as "1.25", "3e+12", "40%", "-" for none, or ""."""
    number = re.compile(r"-|[-+]?[\d,]+(\.\d+)?(e[-+]\d+)?%?")
    return any(texts) and all(number.fullmatch(text) for text in texts if text)


def _align_decimals(texts: Sequence[str]) -> list[str]:
    """Pad numbers at the right so that their decimal points are in one column."""
    tails = [len(re.sub(r"^[-+]?[\d,]*", "", text)) if text != "-" else 0 for text in texts]
    return [text + " " * (max(tails, default=0) - tail) for text, tail in zip(texts, tails)]


def fitted(message: str) -> str:
    """Return ``message`` with its lines wrapped between words if standard error is a terminal."""
    if not sys.stderr.isatty():
        return message
    return "\n".join(wrap(message, shutil.get_terminal_size().columns))

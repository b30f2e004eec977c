"""Check that the output of a command fits a terminal."""

from __future__ import annotations

FRAMES = str.maketrans(dict.fromkeys("─│╭╮╰╯", " "))  # drawn around the panels of a help page


def assert_readable(text: str, unwrapped: str, columns: int) -> None:
    """Assert that ``text`` fits ``columns`` and breaks no word.

    Args:
        text: The output at ``columns`` columns.
        unwrapped: The same output without a limit of columns.
        columns: The width of the terminal.
    """
    # A command to copy is never broken.
    lines = [line for line in text.splitlines() if not line.startswith("to repeat: ")]
    too_long = [line for line in lines if len(line) > columns]
    assert not too_long, f"longer than {columns} columns:\n" + "\n".join(too_long)
    broken = sorted(set(text.translate(FRAMES).split()) - set(unwrapped.translate(FRAMES).split()))
    # A path that is longer than a line is broken.
    long_words = [word for word in unwrapped.split() if len(word) > columns - 30]
    broken = [part for part in broken if not any(part in word for word in long_words)]
    assert not broken, f"broken at {columns} columns: {broken}\n{text}"

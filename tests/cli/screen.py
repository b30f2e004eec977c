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
    too_long = [line for line in text.splitlines() if len(line) > columns]
    assert not too_long, f"longer than {columns} columns:\n" + "\n".join(too_long)
    broken = sorted(set(text.translate(FRAMES).split()) - set(unwrapped.translate(FRAMES).split()))
    # A path that is longer than a line is broken after a separator.
    long_words = [word for word in unwrapped.split() if len(word) > columns - 8]
    broken = [
        part
        for part in broken
        if not any(part in word and part[-1] in "/\\:;,=_.&?-" for word in long_words)
        and not any(word.endswith(part) for word in long_words)
    ]
    assert not broken, f"broken at {columns} columns: {broken}\n{text}"

"""Foreign text made safe to show: plugin names, exception messages and hints are other people's
words.
"""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable

# Cc control, Cf invisible (bidirectional overrides), Cs lone surrogates, Co private use, Cn
# unassigned; the separators Zl and Zp break lines.
_UNSAFE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def one_line(text: object) -> str:
    """``text`` on one line: white space collapsed, every other control or invisible character as
    its escape.
    """
    words = " ".join(str(text).split())
    return "".join(
        c.encode("unicode_escape").decode() if unicodedata.category(c) in _UNSAFE else c
        for c in words
    )


def describe_error(error: BaseException) -> str:
    """Type and message on one line, "ImportError: no such thing", even when the exception cannot
    print itself.
    """
    try:
        text = one_line(error)
    except Exception:  # noqa: BLE001  the exception may be a plugin's own class
        text = "(its message cannot be printed)"
    kind = one_line(type(error).__name__)
    return f"{kind}: {text}" if text else kind


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The words "; did you mean 'triton'?" when a known name is close, else nothing."""
    close = difflib.get_close_matches(name.lower(), list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""

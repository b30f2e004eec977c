"""Safe display of untrusted text: plugin names, exception messages and hints."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterable

# Unicode categories: Cc control, Cf invisible (bidirectional overrides), Cs lone surrogates, Co
# private use, Cn unassigned; Zl and Zp are line and paragraph separators.
_UNSAFE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
_CUDA_ADVICE = re.compile(r"\n(?:Search for `cuda|CUDA kernel errors might be)")


def one_line(text: object) -> str:
    """Return ``text`` on one line, with control and invisible characters escaped.

    Whitespace is collapsed to single spaces.
    """
    words = " ".join(str(text).split())
    return "".join(
        c.encode("unicode_escape").decode() if unicodedata.category(c) in _UNSAFE else c
        for c in words
    )


def escape_control(text: str) -> str:
    """Escape control and format characters of ``text``, except newlines and tabs."""
    return "".join(
        c
        if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf", "Cs")
        else c.encode("unicode_escape").decode()
        for c in text
    )


def describe_error(error: BaseException) -> str:
    """Return type and message of an exception on one line, for example "ImportError: no module".

    PyTorch's advice after the message of a CUDA error is left out. Works even if the exception's
    __str__ raises.
    """
    try:
        text = one_line(_CUDA_ADVICE.split(str(error), maxsplit=1)[0])
    except Exception:  # noqa: BLE001  the exception may be a plugin's own class
        text = "(the message cannot be printed)"
    kind = one_line(type(error).__name__)
    return f"{kind}: {text}" if text else kind


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'triton'?" if a known name is similar to ``name``, else ""."""
    close = difflib.get_close_matches(name.lower(), list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""

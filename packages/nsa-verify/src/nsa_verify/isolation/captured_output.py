"""Capture what a child process prints, so that it reaches neither tables nor JSON."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from pathlib import Path

_TAIL = 4096  # bytes of a file that are read
_STREAMS = {1: "stdout", 2: "stderr"}
_active = False
_seen = 0  # bytes of standard output that printed() has returned


def capture_output(folder: Path) -> None:
    """Write all further output of this process to files in ``folder``; for child processes.

    The output of C libraries is captured too.
    """
    global _active, _seen
    for number, name in _STREAMS.items():
        file = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)
    sys.stdout = open(1, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    _active, _seen = True, 0


def forget_output() -> None:
    """Empty the files, so that they hold the output of one check only."""
    global _seen
    if _active:
        printed()
        for number in _STREAMS:
            with contextlib.suppress(OSError):
                os.ftruncate(number, 0)
        _seen = 0


def printed() -> str:
    """Return the end of the text that went to standard output since the last call; "" if none.

    Returns "" in a process whose output is not captured.
    """
    global _seen
    if not _active:
        return ""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    ctypes.CDLL(None).fflush(None)
    try:
        size = os.fstat(1).st_size
        start, _seen = max(_seen, size - _TAIL), size
        return os.pread(1, size - start, start).decode(errors="replace") if size > start else ""
    except OSError:  # the kernel closed standard output
        return ""


def last_output(folder: Path) -> str:
    """Return the end of what a process wrote to standard error, or else to standard output."""
    for name in ("stderr", "stdout"):
        try:
            text = (folder / name).read_bytes()[-_TAIL:].decode(errors="replace")
        except OSError:
            continue
        if text.strip():
            return text
    return ""

"""Capture what a child process prints, so that it reaches neither tables nor JSON."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import sys
from pathlib import Path
from typing import Any

_TAIL = 4096  # bytes of a file that are read
_STREAMS = {1: "stdout", 2: "stderr"}
_files: dict[int, int] = {}  # descriptor of a stream -> a second descriptor of its file
_opened: dict[int, _Text] = {}  # descriptor of a stream -> its stream in Python
_seen = 0  # bytes of standard output that printed() has returned


class _StaysOpen:
    """A stream that records a call of close() and stays open: pytest holds it too."""

    was_closed = False

    def close(self) -> None:
        self.was_closed = True


class _Bytes(_StaysOpen, io.BufferedWriter):  # type: ignore[misc]
    pass


class _Text(_StaysOpen, io.TextIOWrapper):  # type: ignore[misc]
    pass


def capture_output(folder: Path) -> None:
    """Write all further output of this process to files in ``folder``; for child processes.

    The output of C libraries is captured too.
    """
    global _seen
    for number, name in _STREAMS.items():
        file = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        os.dup2(file, number)
        _files[number] = file
        _open_stream(number)
    _seen = 0


def _open_stream(number: int) -> None:
    buffer = _Bytes(io.FileIO(number, "w", closefd=False))
    stream = _Text(buffer, encoding="utf-8", errors="backslashreplace", write_through=True)
    _opened[number] = stream
    setattr(sys, _STREAMS[number], stream)


def restore_streams() -> list[str]:
    """Open standard output and error again; return how each was closed or replaced, if it was.

    Does nothing in a process whose output is not captured.
    """
    faults = []
    for number, file in _files.items():
        name, descriptor = f"sys.{_STREAMS[number]}", f"file descriptor {number} ({_name(number)})"
        stream = _opened[number]
        try:
            streams: tuple[Any, Any] = (stream, stream.buffer)
        except ValueError:  # its buffer was detached
            faults.append(f"it detached {name}")
            _open_stream(number)
        else:
            if any(s.was_closed for s in streams):
                faults.append(f"it closed {name}")
            for each in streams:
                each.was_closed = False
        try:
            fault = "" if os.path.sameopenfile(number, file) else f"it replaced {descriptor}"
        except OSError:
            fault = f"it closed {descriptor}"
        if fault:
            faults.append(fault)
            with contextlib.suppress(OSError):  # the second descriptor is closed too
                os.dup2(file, number)
    return faults


def _name(number: int) -> str:
    return "standard output" if number == 1 else "standard error"


def forget_output() -> None:
    """Empty the files, so that they hold the output of one check only."""
    global _seen
    printed()
    for file in _files.values():
        with contextlib.suppress(OSError):
            os.ftruncate(file, 0)
    _seen = 0


def printed() -> str:
    """Return the end of the text that went to standard output since the last call; "" if none.

    Returns "" in a process whose output is not captured.
    """
    global _seen
    if not _files:
        return ""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    ctypes.CDLL(None).fflush(None)
    try:
        size = os.fstat(_files[1]).st_size
        start, _seen = max(_seen, size - _TAIL), size
        return os.pread(_files[1], size - start, start).decode(errors="replace")
    except OSError:  # the kernel closed every descriptor
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

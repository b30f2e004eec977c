"""The third-party function that a child process runs, for its parent to read if the child ends."""

from __future__ import annotations

import contextlib
import json
import mmap
from collections.abc import Iterator
from pathlib import Path

from nsa_core.torch_ops.call_wrapper import Where

_FILE, _SIZE = "activity", 4096
_memory: mmap.mmap | None = None


def record_activity(folder: Path) -> None:
    """Write the activity of this process to ``folder`` from now on; for child processes."""
    global _memory
    with (folder / _FILE).open("wb+") as file:
        file.truncate(_SIZE)
        _memory = mmap.mmap(file.fileno(), _SIZE)  # survives a crash, unlike a buffer


@contextlib.contextmanager
def running(where: Where) -> Iterator[None]:
    """Record that this process runs the function ``where`` inside the block."""
    if _memory is None:
        yield
        return
    before = _memory[:_SIZE]
    text = json.dumps(where).encode()[: _SIZE - 1] + b"\0"
    _memory[: len(text)] = text
    try:
        yield
    finally:
        _memory[:_SIZE] = before


def last_activity(folder: Path) -> Where | None:
    """Return the function in which the process of ``folder`` ended; None outside of them all."""
    try:
        text = (folder / _FILE).read_bytes().partition(b"\0")[0]
        backend, what, doing = json.loads(text)
    except (OSError, ValueError):
        return None
    return str(backend), str(what), str(doing)


def describe(where: Where) -> str:
    """Return ``where`` as the beginning of a message."""
    backend, what, doing = where
    if doing == "import":
        return f"backend {backend!r}, import of module {what.partition(':')[0]!r}"
    if doing == "plugin":
        return f"backend {backend!r}, call of {what!r}"
    return f"backend {backend!r}, slot {what!r}, {doing}"

"""The signals that a kernel sends to its own process, which blocks or ignores them."""

from __future__ import annotations

import os
import signal

# Child processes block them: a terminal and `timeout` send them to all processes of a command.
_BLOCKED = (signal.SIGINT, signal.SIGTERM)
_watching = False


def watch_signals() -> None:
    """Let :func:`take_signals` take the blocked signals of this process; for child processes."""
    global _watching
    _watching = hasattr(signal, "sigtimedwait")


def take_signals() -> list[str]:
    """Take the blocked signals that wait, and return the names of those from this process itself.

    Returns [] in a process that :func:`watch_signals` did not prepare.
    """
    if not _watching:
        return []
    names = []
    for number in _BLOCKED:
        if number in signal.sigpending():
            info = signal.sigtimedwait([number], 0)
            if info is not None and info.si_pid == os.getpid():
                names.append(number.name)
    return names

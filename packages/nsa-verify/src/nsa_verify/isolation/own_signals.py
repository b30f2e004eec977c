"""Notice the signals that a kernel sends to its own process, and refuse those to the command."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from typing import Any

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


def keep_signals_inside() -> None:
    """Let no signal of this process reach the command; for child processes.

    The process gets a session of its own, so that a signal to its group ends nothing else. Python
    code that sends one to a parent, to a parent's group or to every process gets a PermissionError.
    """
    if not hasattr(os, "setsid"):
        return
    os.setsid()
    command = multiprocessing.parent_process()
    parents = {os.getppid(), *([command.pid] if command and command.pid else [])}
    groups = {os.getpgid(parent) for parent in parents}

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("os.kill", "os.killpg"):
            return
        target, number = arguments
        to_group = event == "os.killpg" or target < 0
        if target == -1 or abs(target) in (groups if to_group else parents):
            name = signal.Signals(number).name if number in [*signal.Signals] else number
            raise PermissionError(f"a kernel must not send signal {name} to the command")

    sys.addaudithook(refuse)

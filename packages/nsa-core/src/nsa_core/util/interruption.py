"""SIGINT and SIGTERM held back, so that a long run ends in order: between two pieces of work, with
what it has.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


class Interruption:
    """Whether a signal has asked a run to end, and which one was the first."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    @property
    def came(self) -> bool:
        """A signal has come."""
        return self.signal is not None

    @property
    def name(self) -> str:
        """ "SIGTERM", say; empty before a signal has come."""
        return "" if self.signal is None else self.signal.name

    @contextlib.contextmanager
    def cuts_short(self) -> Iterator[None]:
        """End the block at a KeyboardInterrupt (a second Ctrl-C) that follows a signal, and go on
        behind it.
        """
        try:
            yield
        except KeyboardInterrupt:
            if not self.came:
                raise


NEVER = Interruption()  # of a run that nobody interrupts: Ctrl-C raises as ever


def exit_code(name: str) -> int:
    """What a shell reports for a process that the signal ``name`` ended: 130 for SIGINT, 143 for
    SIGTERM.
    """
    return 128 + signal.Signals[name]


@contextlib.contextmanager
def held(*numbers: signal.Signals) -> Iterator[Interruption]:
    """Hold back these signals (SIGINT and SIGTERM unless named) and tell of the first.

    A second SIGINT raises KeyboardInterrupt, or does whatever it did before. Further SIGTERMs
    change nothing: `timeout` sends its own twice. Outside the main thread, which alone gets
    signals, nothing is held.
    """
    came = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    before = {
        number: signal.getsignal(number) for number in numbers or (signal.SIGINT, signal.SIGTERM)
    }

    def hold(number: int, frame: object) -> None:
        came.signal = came.signal or signal.Signals(number)
        if number == signal.SIGINT:
            signal.signal(number, before[signal.SIGINT])

    for number in before:
        signal.signal(number, hold)
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def kept_from_children() -> Iterator[None]:
    """Processes started inside never get SIGINT and SIGTERM, which this one gets behind the block.

    A terminal and `timeout` send them to the whole group, where one process alone should decide
    what ends.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

"""Deferred SIGINT and SIGTERM, so that a long run can stop between two units of work."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

_IMPORT_S = 0.05  # an alarm that rings during an import rings again after this time


class Interruption:
    """The first signal received while signals are deferred.

    Attributes:
        signal: the signal, or None if none was received.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._grace_s: float | None = None

    @property
    def received(self) -> bool:
        """Whether a signal was received."""
        return self.signal is not None

    @property
    def name(self) -> str:
        """Name of the signal, for example "SIGTERM"; empty if none was received."""
        return "" if self.signal is None else self.signal.name

    @contextlib.contextmanager
    def stop_on_interrupt(self, grace_s: float | None = None) -> Iterator[None]:
        """Suppress a KeyboardInterrupt that ends the block, if a signal was received before it.

        The second Ctrl-C raises it: the block stops at once and execution continues after it.

        Args:
            grace_s: After this many seconds the first signal raises it too, if the block has not
                ended by itself. Only an operation outside of Python delays it. None: never.
        """
        self._grace_s = grace_s
        try:
            yield
        except KeyboardInterrupt:
            if not self.received:
                raise
        finally:
            if grace_s is not None and self.received:
                _stop_alarm()
            self._grace_s = None

    def record(self, number: int) -> None:
        """Record a signal, and let a block that does not end by itself end after its grace."""
        global _signal_received
        _signal_received = True
        first, self.signal = self.signal is None, self.signal or signal.Signals(number)
        if first and self._grace_s is not None and hasattr(signal, "setitimer"):
            _start_alarm(self._grace_s, KeyboardInterrupt())


_signal_received = False


def is_ctrl_c(error: BaseException) -> bool:
    """Return whether ``error`` is a KeyboardInterrupt that a signal caused, such as a Ctrl-C.

    Code that raises a KeyboardInterrupt itself is told from a signal by a handler that records it.

    Where Python's own handler of SIGINT is installed, the two cannot be told apart, and every
    KeyboardInterrupt counts as a Ctrl-C.
    """
    if not isinstance(error, KeyboardInterrupt):
        return False
    return _signal_received or signal.getsignal(signal.SIGINT) is signal.default_int_handler


@contextlib.contextmanager
def recorded_ctrl_c() -> Iterator[None]:
    """Record a Ctrl-C inside the block before it raises KeyboardInterrupt, for is_ctrl_c().

    An import is finished first: C++ code that runs while torch is imported, and that calls Python,
    ends the process if Python raises.

    Outside the main thread, and where SIGINT has another handler, the block has no effect.
    """
    global _signal_received
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    after_import: Callable[[int, FrameType | None], None] | None = None

    def interrupt(number: int, frame: FrameType | None) -> None:
        global _signal_received
        nonlocal after_import
        _signal_received = True
        if hasattr(signal, "setitimer") and _is_importing(frame):
            after_import = _start_alarm(_IMPORT_S, KeyboardInterrupt())
        else:
            signal.default_int_handler(number, frame)

    _signal_received = False
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if after_import is not None and signal.getsignal(signal.SIGALRM) is after_import:
            _stop_alarm()


NEVER = Interruption()  # for a run without deferred signals: Ctrl-C raises KeyboardInterrupt


def exit_code(name: str) -> int:
    """Return the exit code that a shell reports for a process ended by the signal ``name``.

    It is 130 for SIGINT and 143 for SIGTERM.
    """
    return 128 + signal.Signals[name]


@contextlib.contextmanager
def alarm_in(seconds: float, error: BaseException) -> Iterator[None]:
    """Raise ``error`` in the block after ``seconds``, between two operations of Python.

    An import is finished first: a module that is imported by half fails whoever uses it next.

    Call it in the main thread, where no other alarm is set. A signal that an :class:`Interruption`
    records replaces the alarm by its own.
    """

    # It rings again: code such as __del__ swallows exceptions.
    ring = _start_alarm(seconds, error, again_s=0.1)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGALRM) is ring:
            _stop_alarm()


def _start_alarm(
    seconds: float, error: BaseException, again_s: float = 0.0
) -> Callable[[int, FrameType | None], None]:
    """Raise ``error`` in the main thread after ``seconds``; return the handler that does it."""

    def ring(number: int, frame: FrameType | None) -> None:
        if _is_importing(frame):
            signal.setitimer(signal.ITIMER_REAL, _IMPORT_S, again_s)
            return
        raise error

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, again_s)
    return ring


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib."):
            return True
        frame = frame.f_back
    return False


def _stop_alarm() -> None:
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


@contextlib.contextmanager
def deferred_signals(*numbers: signal.Signals) -> Iterator[Interruption]:
    """Defer signals inside the block; the yielded Interruption records the first one.

    A second SIGINT has its previous effect, normally a KeyboardInterrupt. Further SIGTERMs are
    ignored, because `timeout` sends two. Outside the main thread, which alone receives signals, the
    block has no effect.

    Args:
        numbers: the signals; default SIGINT and SIGTERM.
    """
    global _signal_received
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    previous = {
        number: signal.getsignal(number) for number in numbers or (signal.SIGINT, signal.SIGTERM)
    }

    def record(number: int, frame: object) -> None:
        interruption.record(number)
        if number == signal.SIGINT:
            signal.signal(number, previous[signal.SIGINT])

    _signal_received = False
    for number in previous:
        signal.signal(number, record)
    try:
        yield interruption
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        _signal_received = False


@contextlib.contextmanager
def signals_blocked_in_children() -> Iterator[None]:
    """Block SIGINT and SIGTERM in child processes started inside the block.

    A terminal and `timeout` signal the whole process group, but only the parent should decide when
    to stop. The parent receives the signals after the block.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)

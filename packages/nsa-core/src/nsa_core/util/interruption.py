"""SIGINT, SIGTERM and SIGHUP: the first one asks a long run to end, the second one ends it.

All three have the same effect, a KeyboardInterrupt that names the signal. A signal that the process
ignores from its start, as SIGHUP under nohup, stays ignored.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType

SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
# `timeout` sends SIGTERM to the command and to its group: two signals so soon are one.
_SAME_S = 0.1
# Called when this process ends: by itself, or at once by a signal, when atexit calls nothing.
at_end: list[Callable[[], None]] = []


class Interruption:
    """The first signal received while signals are recorded.

    Attributes:
        signal: the signal, or None if none was received.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._received_at = 0.0
        self._deferred = self._ends = False
        self._grace_s: float | None = None

    @property
    def received(self) -> bool:
        """Whether a signal was received."""
        return self.signal is not None

    @property
    def name(self) -> str:
        """Name of the signal, for example "SIGTERM"; empty if none was received."""
        return "" if self.signal is None else self.signal.name

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal was received.

        Call it after code of others, which may have swallowed the exception.
        """
        if self.received:
            raise KeyboardInterrupt(self.name)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Let the first signal inside the block raise nothing; the second one raises."""
        before, self._deferred = self._deferred, True
        try:
            yield
        finally:
            self._deferred = before

    @contextlib.contextmanager
    def ending_process(self) -> Iterator[None]:
        """Let a signal inside the block end the process at once, with a line on standard error.

        For imports of libraries that swallow a KeyboardInterrupt, or cannot be imported twice.
        """
        self._ends = True
        try:
            yield
        finally:
            self._ends = False

    @contextlib.contextmanager
    def stop_on_interrupt(self, grace_s: float | None = None) -> Iterator[None]:
        """Defer signals inside the block, and suppress a KeyboardInterrupt that one of them raises.

        The second signal raises it: the block stops at once and execution continues after it.

        Args:
            grace_s: After this many seconds the first signal raises it too, if the block has not
                ended by itself. Only an operation outside of Python delays it. None: never.
        """
        self._grace_s = grace_s
        try:
            with self.deferred():
                yield
        except KeyboardInterrupt:
            if not self.received:
                raise
        finally:
            if grace_s is not None and self.received:
                _stop_alarm()
            self._grace_s = None

    def record(self, number: int, frame: object = None) -> None:
        """Handle a signal: record the first one, and raise KeyboardInterrupt unless it is deferred.

        A deferred block that does not end by itself ends after its grace.
        """
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._received_at = signal.Signals(number), now
            if self._ends:
                with contextlib.suppress(OSError):
                    os.write(2, f"nsa: interrupted by {self.name}\n".encode())
                _call_at_end()
                os._exit(exit_code(self.name))
            if self._deferred:
                if self._grace_s is not None and hasattr(signal, "setitimer"):
                    signal.signal(signal.SIGALRM, self.record)  # as a second signal
                    signal.setitimer(signal.ITIMER_REAL, self._grace_s)
                return
        elif now - self._received_at < _SAME_S:
            return
        raise KeyboardInterrupt(self.name)


@atexit.register
def _call_at_end() -> None:
    for function in at_end:
        function()


NEVER = Interruption()  # for a run whose signals are not recorded
_active: Interruption | None = None


def is_ctrl_c(error: BaseException) -> bool:
    """Return whether ``error`` is a KeyboardInterrupt that a signal caused, such as a Ctrl-C.

    Code that raises a KeyboardInterrupt itself is told from a signal by a handler that records it.

    Where Python's own handler of SIGINT is installed, the two cannot be told apart, and every
    KeyboardInterrupt counts as a Ctrl-C.
    """
    if not isinstance(error, KeyboardInterrupt):
        return False
    received = _active is not None and _active.received
    return received or signal.getsignal(signal.SIGINT) is signal.default_int_handler


def signal_of(error: KeyboardInterrupt) -> str:
    """Return the name of the signal that raised ``error``; "SIGINT" if it does not say."""
    names = [number.name for number in SIGNALS]
    return str(error) if str(error) in names else "SIGINT"


def exit_code(name: str) -> int:
    """Return the exit code that a shell reports for a process ended by the signal ``name``.

    It is 130 for SIGINT, 143 for SIGTERM and 129 for SIGHUP.
    """
    return 128 + signal.Signals[name]


@contextlib.contextmanager
def recorded_signals() -> Iterator[Interruption]:
    """Let signals inside the block raise KeyboardInterrupt; the yielded Interruption records one.

    A block inside another one yields the same Interruption. Outside the main thread, which alone
    receives signals, the block has no effect.
    """
    global _active
    if threading.current_thread() is not threading.main_thread():
        yield Interruption()
        return
    if _active is not None:
        with _checked(_active):
            yield _active
        return
    _active = interruption = Interruption()
    # None: a handler that Python did not install, and cannot install again.
    previous = {
        number: handler
        for number in SIGNALS
        if (handler := signal.getsignal(number)) not in (signal.SIG_IGN, None)
    }
    for number in previous:
        signal.signal(number, interruption.record)
    try:
        with _checked(interruption):
            yield interruption
    finally:
        for number, handler in previous.items():
            # A process that ends ignores signals until it has ended.
            if signal.getsignal(number) == interruption.record:
                signal.signal(number, handler)
        _active = None


@contextlib.contextmanager
def _checked(interruption: Interruption) -> Iterator[None]:
    """Raise KeyboardInterrupt again in place of an error that comes after it.

    An import that swallows it may leave modules that fail whoever uses them next.
    """
    try:
        yield
    except (ImportError, AttributeError, RuntimeError):
        interruption.check()
        raise


@contextlib.contextmanager
def deferred_signals() -> Iterator[Interruption]:
    """Record signals inside the block and defer them: the first one raises nothing."""
    with recorded_signals() as interruption, interruption.deferred():
        yield interruption


@contextlib.contextmanager
def alarm_in(seconds: float, error: BaseException) -> Iterator[None]:
    """Raise ``error`` in the block after ``seconds``, between two operations of Python.

    An import of the block runs to its end first, because a package that is half imported stays
    broken for the rest of the process.

    Call it in the main thread, where no other alarm is set. A signal that an :class:`Interruption`
    records replaces the alarm by its own.
    """

    ended = False

    def imports(frame: FrameType | None) -> int:
        files = [each.f_code.co_filename for each, _ in traceback.walk_stack(frame)]
        return files.count("<frozen importlib._bootstrap>")

    before = imports(sys._getframe())

    def ring(number: int, frame: FrameType | None) -> None:
        if not ended and imports(frame) <= before:
            raise error

    signal.signal(signal.SIGALRM, ring)
    # It rings again: code such as __del__ swallows exceptions.
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.1)
    try:
        yield
    finally:
        ended = True  # before any call: an error raised here would leave the alarm on
        if signal.getsignal(signal.SIGALRM) is ring:
            _stop_alarm()


def _stop_alarm() -> None:
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


@contextlib.contextmanager
def signals_blocked_in_children() -> Iterator[None]:
    """Block the signals in child processes started inside the block.

    A terminal and `timeout` signal the whole process group, but only the parent should decide when
    to stop. The parent receives the signals after the block.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)

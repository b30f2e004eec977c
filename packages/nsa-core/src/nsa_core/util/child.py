"""Child processes that call functions for this process, each with a time limit. Imports no torch.

Third-party code runs in them: code that crashes, exits or hangs ends its child only. They come from
a fork server that may have imported torch already, so each one starts at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

from nsa_core.errors import BackendUnavailable, NSAError
from nsa_core.util.interruption import (
    NEVER,
    Interruption,
    at_end,
    signals_blocked_in_children,
)
from nsa_core.util.text import describe_error, one_line

METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
processes: Any = multiprocessing.get_context(METHOD)
_POLL_S = 0.1
_TAIL = 4096  # bytes of output that are read
_starting = threading.Lock()


class ChildEnded(BackendUnavailable):
    """A child ended without an answer, or was ended at its limit; the message has its name.

    Attributes:
        how: How it ended, such as "killed its process with SIGSEGV while loading".
        hung: Whether it was ended at its limit.
        where: The function that it announced last; () outside of them all.
    """

    def __init__(self, subject: str, how: str, hung: bool, where: tuple[str, ...]) -> None:
        super().__init__(f"{subject}: {how}" if subject else how)
        self.how, self.hung, self.where = how, hung, where


class Child:
    """A child process that calls functions, one after another; it ends with this object.

    Once it has ended without an answer, every later call raises the same error. A pickled Child is
    None: in another process the functions are called there.

    Args:
        name: The beginning of the message of its end, such as "backend 'mine'".
    """

    def __init__(self, name: str = "") -> None:
        self.name = name
        self._ended: ChildEnded | None = None
        self._ready_at = float("inf")
        self._sent_at = 0.0
        self._answer: list[Any] | None = None  # a result and an error; []: it has ended
        # Its standard error, whose last line explains a crash, and what it announced last: in
        # files, which cost a kernel's call less than a message.
        self._output, self._announced = (
            tempfile.NamedTemporaryFile(prefix="nsa-")  # noqa: SIM115  closed with this object
            for _ in range(2)
        )
        self._connection, child_end = processes.Pipe()
        self._process = start(_serve, child_end, self._output.name, self._announced.name)
        child_end.close()
        self._kill = weakref.finalize(self, kill, self._process)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    @property
    def announced(self) -> tuple[tuple[str, ...], str, float]:
        """The function that runs (see :func:`announced`), its name, and time.monotonic() then."""
        record = os.pread(self._announced.fileno(), _TAIL, 0).partition(b"\0")[0]
        try:
            where, text, since = json.loads(record)
        except ValueError:  # nothing yet, or half of a record
            return (), "", 0.0
        return tuple(where), text, since

    @property
    def has_ended(self) -> bool:
        """Whether it has ended without an answer, or was ended."""
        return self._ended is not None

    def call(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        limit_s: float = float("inf"),
        doing: str = "",
        stop: Interruption = NEVER,
    ) -> Any:
        """Return ``function(*arguments)`` of the child; all are pickled.

        Args:
            function: The function.
            arguments: Its arguments.
            limit_s: Seconds after which the child is ended; its start does not count.
            doing: The end of the error's message, such as "while loading".
            stop: The child is ended once this has received a signal.

        Raises:
            NSAError: The function raised it, or another exception, which is the message.
            ChildEnded: The child ended, or was ended.
        """
        self.send(function, *arguments)
        return self.receive(limit_s, doing, stop)

    def send(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Let the child call a function, whose result :meth:`receive` returns."""
        if self._ended is not None:
            return
        os.ftruncate(self._output.fileno(), 0)
        self._sent_at = time.monotonic()
        with contextlib.suppress(OSError):  # receive() detects a dead child
            self._connection.send((function, arguments))

    def receive(self, limit_s: float, doing: str, stop: Interruption = NEVER) -> Any:
        """Return the result of the call that :meth:`send` began; see :meth:`call`."""
        while self._ended is None:
            if self.poll(_POLL_S):
                return self._result(doing)
            if stop.received:
                self._fail(f"was ended by {stop.name}", False)
            elif time.monotonic() > max(self._sent_at, self._ready_at) + limit_s:
                self._fail(f"did not end within {limit_s:g} s {doing}", True)
        raise self._ended

    def poll(self, seconds: float) -> bool:
        """Wait for the result, or for the end of the child; return whether :meth:`receive` can."""
        deadline = time.monotonic() + seconds
        while self._answer is None:
            left = max(0.0, deadline - time.monotonic())
            ready = wait([self._connection, self._process.sentinel], left)
            if not ready:
                return False
            try:
                # A process that the child started may hold the pipe open.
                if self._connection not in ready and not self._connection.poll():
                    raise EOFError
                message = self._connection.recv()
            except (EOFError, OSError):
                message = []
            if isinstance(message, float):
                self._ready_at = message
            else:
                self._answer = message
        return True

    def end(self) -> None:
        """End the child, and the processes that it started, at once."""
        self._kill()
        self._ended = self._ended or ChildEnded(self.name, "was ended", False, ())

    def _result(self, doing: str) -> Any:
        """Return the result of a message, or raise its error, or the end of the child."""
        answer, self._answer = self._answer, None
        if answer:
            result, error = answer
            if error is not None:
                raise error
            return result
        self._process.join(10)  # its pipe closes before it exits
        starting = self._ready_at == float("inf")
        doing = "while it started" if starting else doing
        self._fail(describe_exit(self._process.exitcode or 0, doing), False)
        raise AssertionError("unreachable")

    def _fail(self, how: str, hung: bool) -> None:
        """End the child for a reason, with the last line of its output, and raise the error."""
        self._kill()
        where, text, _ = self.announced
        os.lseek(self._output.fileno(), -min(_TAIL, os.fstat(self._output.fileno()).st_size), 2)
        lines = os.read(self._output.fileno(), _TAIL).decode(errors="replace")
        line = last_line(lines)
        how = how.strip() + (f"; its last line of output: {line!r}" if line else "")
        self._ended = ChildEnded(text or self.name, how, hung, where)
        self.end()
        raise self._ended


def last_line(text: str) -> str:
    """Return the last line of ``text`` that is not empty, of at most 200 characters."""
    lines = [line for line in text.splitlines() if line.strip()]
    return one_line(lines[-1])[:200] if lines else ""


def describe_exit(status: int, doing: str) -> str:
    """Describe how a process ended, from its return code (negative: the number of a signal)."""
    if status >= 0:
        return f"ended its process with exit status {status} {doing}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"killed its process with {name} {doing}"


def preload(*modules: str) -> None:
    """Start the fork server, which imports ``modules`` in the background for all children."""
    resource_tracker.ensure_running()  # its start would unblock the signals
    if METHOD == "forkserver":
        from multiprocessing import forkserver

        if modules:
            processes.set_forkserver_preload([*modules])
        with signals_blocked_in_children(), _without_main():
            forkserver.ensure_running()
        if _end_server not in at_end:
            at_end.append(_end_server)


def _end_server() -> None:
    """Kill the fork server, which would end by itself only after its imports."""
    from multiprocessing import forkserver

    pid = getattr(forkserver._forkserver, "_forkserver_pid", None)  # type: ignore[attr-defined]
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def start(target: Callable[..., None], *arguments: Any) -> Any:
    """Start a child process that calls ``target(*arguments)``, with the signals blocked.

    Its standard output goes to standard error.
    """
    process = processes.Process(target=_run, args=(target, arguments), daemon=True)
    # The fork server blocks the signals already; blocking them here would delay them.
    blocked = signals_blocked_in_children if METHOD == "spawn" else contextlib.nullcontext
    with _starting:
        preload()
        with blocked(), _without_main():
            process.start()
    return process


def kill(process: Any) -> None:
    """Kill a child of :func:`start` and the processes that it started, and wait for it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Hide the main module, which a child would run again: it needs nothing of it."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _run(target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Run in the child: prepare the process, and call the target."""
    with contextlib.suppress(OSError):
        os.dup2(2, 1)  # standard output belongs to the command
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        # A crash of this process is expected, so it writes no core file.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Only the parent receives a Ctrl-C; a KeyboardInterrupt here is raised by a plugin.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(os, "setsid"):
        os.setsid()  # a signal to the group of this process reaches no other
    threading.Thread(target=_end_with_parent, daemon=True).start()
    target(*arguments)


def _end_with_parent() -> None:
    """End this process when its parent ends, also in the middle of a call."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


_file = -1  # of a child, the descriptor of the file for what it announces
_where: tuple[tuple[str, ...], str] = ((), "")  # the function that runs, and its name


def _serve(connection: Connection, output: str, file: str) -> None:
    """Run in the child: call the functions that the parent names, until the pipe closes."""
    global _file
    _file = os.open(file, os.O_WRONLY)
    with tempfile.TemporaryFile() as printed_text:
        os.dup2(printed_text.fileno(), 1)
    os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND), 2)
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = open(number, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
        setattr(sys, name, stream)
    connection.send(time.monotonic())
    with contextlib.suppress(EOFError, OSError):
        while True:
            try:
                function, arguments = connection.recv()
            except (ImportError, AttributeError) as error:  # a function of the main module
                answer = None, NSAError(describe_error(error))
            else:
                answer = _answer(function, arguments)
            try:
                connection.send(answer)
            except (AttributeError, TypeError, pickle.PicklingError) as error:
                connection.send((None, NSAError(describe_error(error))))


def _answer(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, Any]:
    """Return (result, None) or (None, error) of a function that may raise anything."""
    try:
        return function(*arguments), None
    except NSAError as error:
        is_own = type(error).__module__.startswith("nsa_core.")
        return None, error if is_own else NSAError(describe_error(error))
    except BaseException as error:  # noqa: BLE001  a plugin may raise anything
        return None, NSAError(describe_error(error))


@contextlib.contextmanager
def announced(where: tuple[str, ...], text: str) -> Iterator[None]:
    """Tell the parent of a :class:`Child` that the function ``where`` runs in the block.

    Args:
        where: The function.
        text: Its name, which begins the message if the process ends in the block.
    """
    global _where
    before, _where = _where, (where, text)
    _write_where()
    try:
        yield
    finally:
        _where = before
        _write_where()


def _write_where() -> None:
    if _file >= 0:
        with contextlib.suppress(OSError):  # a plugin closed the file
            record = json.dumps((*_where, time.monotonic())).encode()[: _TAIL - 1]
            os.pwrite(_file, record + b"\0", 0)


@functools.cache
def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def printed() -> str:
    """Return the end of the text that a :class:`Child` printed since the last call; "" if none.

    Returns "" in every other process.
    """
    if _file < 0:
        return ""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a plugin closed the stream
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
        _c_library().fflush(None)
        size = os.fstat(1).st_size
        if size:
            text = os.pread(1, _TAIL, max(0, size - _TAIL)).decode(errors="replace")
            os.ftruncate(1, 0)
            os.lseek(1, 0, os.SEEK_SET)
            return text
    return ""

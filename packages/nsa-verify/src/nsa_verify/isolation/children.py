"""Child processes for third-party code: started from a server that has imported torch already."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from nsa_core.errors import BackendUnavailable, NSAError
from nsa_core.plan.loading import BackendEntry
from nsa_core.plan.trial import describe_exit
from nsa_core.util.interruption import signals_blocked_in_children
from nsa_core.util.text import describe_error
from nsa_verify.isolation.own_signals import keep_signals_inside, watch_signals

# A fork server imports torch once, and uses no GPU itself, so each of its children starts at once.
METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
processes: Any = multiprocessing.get_context(METHOD)
PLAN_LIMIT_S = 60.0
_POLL_S = 0.02


def needs_isolation(entry: BackendEntry) -> bool:
    """Return whether kernels of ``entry`` run in child processes only.

    These are all backends of other distributions. A spec that this process registered itself
    (Registry.with_backend) has no entry point and shares the process.
    """
    return entry.status == "ready" and not entry.first_party and bool(entry.entry_point)


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """Hide the main module, which a child would run again: it needs nothing of it."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def preload(modules: list[str]) -> None:
    """Import ``modules`` in the background, so that the first child starts sooner."""
    resource_tracker.ensure_running()  # its start would unblock the signals
    if METHOD == "forkserver":
        from multiprocessing import forkserver

        if modules:
            processes.set_forkserver_preload(modules)
        with signals_blocked_in_children(), without_main():
            forkserver.ensure_running()


def start(target: Callable[..., None], *arguments: Any) -> Any:
    """Start a child process that calls ``target(*arguments)``, with the signals blocked.

    Its standard output goes to standard error.
    """
    process = processes.Process(target=_run, args=(target, arguments), daemon=True)
    preload([])
    # The fork server blocks the signals already; blocking them here would delay them.
    blocked = signals_blocked_in_children if METHOD == "spawn" else contextlib.nullcontext
    with blocked(), without_main():
        process.start()
    return process


def end_status(process: Any) -> int:
    """Wait for a child whose pipe has closed, end it if need be, and return its exit status."""
    process.join(10)  # its pipe closes before it exits
    if process.exitcode is None:
        process.kill()
        process.join()
    return int(process.exitcode or 0)


def call_in_child(function: Callable[..., Any], *arguments: Any, limit_s: float, doing: str) -> Any:
    """Return ``function(*arguments)``, called in a child process; both are pickled.

    Args:
        function: The function.
        arguments: Its arguments.
        limit_s: Seconds after which the child is ended.
        doing: What the child does, for the error, such as "while planning".

    Raises:
        NSAError: The function raised it.
        BackendUnavailable: The child ended without a result, or did not end in time.
    """
    with tempfile.TemporaryDirectory(prefix="nsa-") as folder:
        connection, child_end = processes.Pipe()
        process = start(_serve_call, child_end, Path(folder), function, arguments)
        child_end.close()
        try:
            end = time.monotonic() + limit_s
            while not connection.poll(_POLL_S):
                if time.monotonic() > end:
                    why = f"did not end within {limit_s:g} s {doing}"
                    raise BackendUnavailable(
                        describe_end(why, Path(folder), "a third-party backend ")
                    )
                if process.exitcode is not None and not connection.poll():
                    raise EOFError
            result, error = connection.recv()
        except (EOFError, OSError):
            why = describe_exit(end_status(process), doing)
            raise BackendUnavailable(
                describe_end(why, Path(folder), "a third-party backend ")
            ) from None
        finally:
            process.kill()
            process.join()
            connection.close()
    if error is not None:
        raise error
    return result


def describe_end(why: str, folder: Path, subject: str = "") -> str:
    """Return ``why`` a child ended, with the function that it ran and its last line of output.

    Args:
        why: How the child ended.
        folder: The folder of its output and activity.
        subject: Begins the message if the child ran no function of a backend.
    """
    from nsa_verify.isolation.activity import describe, last_activity
    from nsa_verify.isolation.call_guard import last_line
    from nsa_verify.isolation.captured_output import last_output

    where, line = last_activity(folder), last_line(last_output(folder))
    subject = f"{describe(where)}: " if where else subject
    return subject + why + (f"; its last line of output: {line!r}" if line else "")


def _run(target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Run in the child: prepare the process, and call the target."""
    import signal

    with contextlib.suppress(OSError):
        os.dup2(2, 1)  # standard output belongs to the command
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        # A crash of this process is expected, so it writes no core file.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Only the parent receives a Ctrl-C; a KeyboardInterrupt here is raised by a kernel.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    watch_signals()
    keep_signals_inside()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    target(*arguments)


def _end_with_parent() -> None:
    """End this process when its parent ends, also in the middle of a call."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _serve_call(
    connection: Connection, folder: Path, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    import torch

    from nsa_verify.isolation.activity import record_activity
    from nsa_verify.isolation.call_guard import guarded_calls
    from nsa_verify.isolation.captured_output import capture_output

    capture_output(folder)
    record_activity(folder)
    torch.set_num_threads(1)
    result, error = None, None
    try:
        with guarded_calls():
            result = function(*arguments)
    except NSAError as raised:
        error = raised
    except BaseException as raised:  # noqa: BLE001  a plugin may raise anything
        error = BackendUnavailable(f"a third-party backend raised {describe_error(raised)}")
    connection.send((result, error))

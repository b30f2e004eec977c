"""Slow calls: a child process makes them, and ends at a limit or a signal.

The child has its own inputs, of the same seed, and on a GPU its own context. It prepares one
workload, as the clock does, and takes a sample whenever it is asked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch

from nsa_bench.clocks import EagerClock, clock_for
from nsa_bench.limits import Limits
from nsa_bench.timing import (
    INTERRUPTED,
    LATE,
    NO_MEMORY,
    Prepared,
    TimeUp,
    Workload,
    reason_of,
)
from nsa_core.plan.trial import describe_exit
from nsa_core.util.interruption import Interruption
from nsa_core.util.text import describe_error
from nsa_verify.isolation import children

_POLL_S = 0.05
_BEGIN, _END = "begin", "end"  # a setup or call has begun, or has ended


# AttributeError and TypeError: pickle cannot send an object. AssertionError: this process is itself
# a daemon.
_START_ERRORS = (OSError, AssertionError, AttributeError, TypeError, pickle.PicklingError)


class CannotStart(Exception):
    """The child process could not set up the workload, for example a backend of a test."""


class RemoteCall:
    """A workload in a child process.

    Args:
        make: Sets the workload up in the child; a function that pickle can send.
        device: Device of its clock.
        limits: When the child is ended.
        stop: Reports an interruption, which also ends the child.
        eager: Take the samples with an EagerClock; otherwise with the device's clock.
        inference: Run everything in inference mode.
    """

    def __init__(
        self,
        make: Callable[[], Workload],
        device: str,
        limits: Limits,
        stop: Interruption,
        *,
        eager: bool = False,
        inference: bool = False,
    ) -> None:
        self._limits, self._stop = limits, stop
        self._process: Any = None
        self._sample_limit_s = float("inf")
        self._connection, child_end = children.processes.Pipe()
        arguments = (child_end, make, device, torch.get_num_threads(), eager, inference)
        try:
            with limits.until_deadline():
                self._process = children.start(_serve, *arguments)
        except _START_ERRORS as error:
            raise CannotStart(describe_error(error)) from error
        finally:
            child_end.close()

    def prepare(self) -> Prepared:
        """Prepare the workload in the child.

        Raises:
            TimeUp: A limit or an interruption ended the child.
            CannotStart: The child could not begin.
            RuntimeError: The workload failed; OutOfMemoryError if memory ran out.
        """
        message, limit_s, begun = None, float("inf"), False
        while not isinstance(message, Prepared):
            try:
                message = self._receive(limit_s)
            except RuntimeError as error:
                if begun or isinstance(error, torch.OutOfMemoryError):
                    raise
                raise CannotStart(str(error)) from error
            begun |= message == _BEGIN
            limit_s = self._limits.first_call_s if message == _BEGIN else float("inf")
        self._sample_limit_s = self._limits.max_call_s * message.calls
        return dataclasses.replace(message, take=self.sample)

    def sample(self) -> float:
        """Take a sample in the child; return milliseconds per call.

        Raises:
            TimeUp: A limit or an interruption ended the child.
            RuntimeError: The child ended.
        """
        with contextlib.suppress(OSError):  # the next receive detects a dead child
            self._connection.send(None)
        return float(self._receive(self._sample_limit_s))

    def end(self) -> None:
        """End the child at once."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._connection.close()

    def _receive(self, limit_s: float) -> Any:
        """Return the child's next message; end the child at a limit."""
        end = time.monotonic() + limit_s
        while not self._connection.poll(_POLL_S):
            now = time.monotonic()
            reasons = {
                INTERRUPTED: self._stop.received,
                LATE: now > self._limits.deadline,
                self._limits.too_slow: now > end,
            }
            reason = next((reason for reason, is_over in reasons.items() if is_over), "")
            if reason:
                self.end()
                raise TimeUp(reason)
        try:
            message = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(10)
            status = self._process.exitcode or 0
            raise RuntimeError(describe_exit(status, "in a child process")) from None
        if isinstance(message, BaseException):
            raise message
        return message


def prepare_in_child(
    make: Callable[[], Workload],
    device: str,
    limits: Limits,
    stop: Interruption,
    children: contextlib.ExitStack,
    **mode: bool,
) -> Prepared:
    """Prepare a workload in a child process, which ends when ``children`` closes.

    The other arguments, and ``mode``, are those of RemoteCall; the errors those of
    RemoteCall.prepare().
    """
    call = RemoteCall(make, device, limits, stop, **mode)
    children.callback(call.end)
    return call.prepare()


def _serve(
    connection: Connection,
    make: Callable[[], Workload],
    device: str,
    threads: int,
    eager: bool,
    inference: bool,
) -> None:
    """Run in the child: prepare the workload, and take samples until the pipe closes."""
    torch.set_num_threads(threads)

    @contextlib.contextmanager
    def announced() -> Iterator[None]:
        connection.send(_BEGIN)
        yield
        connection.send(_END)

    mode = torch.inference_mode() if inference else contextlib.nullcontext()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError), mode:
        try:
            clock = EagerClock() if eager else clock_for(device)
            prepared = clock.prepare(dataclasses.replace(make(), limited=announced))
            connection.send(dataclasses.replace(prepared, call=_in_child))
            while True:
                connection.recv()
                connection.send(clock.sample(prepared.call, prepared.calls))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise
        except BaseException as error:  # noqa: BLE001  a third-party kernel may raise anything
            no_memory = reason_of(error) == NO_MEMORY
            connection.send(
                torch.OutOfMemoryError(str(error))
                if no_memory
                else RuntimeError(describe_error(error))
            )


def _in_child() -> None:
    """Stand in for a call that cannot be sent to the parent."""
    raise AssertionError("this call runs in a child process")

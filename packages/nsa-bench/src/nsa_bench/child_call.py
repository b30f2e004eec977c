"""A workload in a child process, which a limit or a signal ends while a call runs.

The child has its own inputs, of the same seed, and on a GPU its own context. It prepares one
workload, as the clock does, and takes a sample whenever it is asked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from nsa_bench.clocks import LEAD_MS, EagerClock, clock_for
from nsa_bench.limits import Limits
from nsa_bench.timing import (
    INTERRUPTED,
    LATE,
    NO_MEMORY,
    Clock,
    Prepared,
    TimeUp,
    Workload,
    reason_of,
    take_sample,
)
from nsa_core.errors import NSAError
from nsa_core.util.child import Child, announced
from nsa_core.util.interruption import Interruption
from nsa_core.util.text import describe_error

_POLL_S = 0.05
_CALL = ("call",)  # a setup or call that has a limit

# AttributeError and TypeError: pickle cannot send an object. AssertionError: this process is itself
# a daemon.
_START_ERRORS = (OSError, AssertionError, AttributeError, TypeError, pickle.PicklingError)


class CannotStart(Exception):
    """The child process could not set up the workload, for example a backend of a test."""


@dataclasses.dataclass(frozen=True)
class _Failure:
    """An exception in the child: its text, and whether the setup or a call had begun."""

    text: str
    no_memory: bool
    has_begun: bool = True


class ChildCall:
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
        self._limits, self._stop, self._on_gpu = limits, stop, device.startswith("cuda")
        self._sample_limit_s = float("inf")
        try:
            with limits.until_deadline():
                self._child = Child()
                self._child.send(_prepare, make, device, torch.get_num_threads(), eager, inference)
        except _START_ERRORS as error:
            raise CannotStart(describe_error(error)) from error

    def prepare(self) -> Prepared:
        """Prepare the workload in the child.

        Raises:
            TimeUp: A limit or an interruption ended the child.
            CannotStart: The child could not begin.
            RuntimeError: The workload failed; OutOfMemoryError if memory ran out.
        """
        prepared: Prepared = self._receive(self._limits.first_call_s)
        limit_s = self._limits.max_call_s
        self._sample_limit_s = limit_s * prepared.calls
        if self._on_gpu:  # untimed calls before it take at most LEAD_MS and one call
            self._sample_limit_s += limit_s + 1e-3 * LEAD_MS
        return dataclasses.replace(prepared, take=self.sample)

    def sample(self, *, begins_turn: bool) -> float:
        """Take a sample in the child, as :func:`nsa_bench.timing.take_sample` does.

        Raises:
            TimeUp: A limit or an interruption ended the child.
            RuntimeError: The child ended.
        """
        self._child.send(_sample, begins_turn)
        return float(self._receive(self._sample_limit_s))

    def end(self) -> None:
        """End the child at once."""
        self._child.end()

    def _receive(self, limit_s: float) -> Any:
        """Return the child's result; end the child at a limit."""
        while not self._child.poll(_POLL_S):
            now, (running, _, since) = time.monotonic(), self._child.announced
            reasons = {
                INTERRUPTED: self._stop.received,
                LATE: now > self._limits.deadline,
                self._limits.too_slow: running == _CALL and now > since + limit_s,
            }
            reason = next((reason for reason, is_over in reasons.items() if is_over), "")
            if reason:
                self.end()
                raise TimeUp(reason)
        try:
            result = self._child.receive(0.0, "in a child process")
        except RuntimeError:
            raise
        except NSAError as error:  # the function could not be sent
            raise CannotStart(str(error)) from error
        if isinstance(result, _Failure):
            if result.no_memory:
                raise torch.OutOfMemoryError(result.text)
            raise (RuntimeError if result.has_begun else CannotStart)(result.text)
        return result


def in_child(
    workload: Workload,
    make: Callable[[], Workload],
    device: str,
    limits: Limits,
    stop: Interruption,
    children: contextlib.ExitStack,
    *,
    otherwise: Callable[[], Prepared] | None = None,
    **mode: bool,
) -> Workload:
    """Return a workload that a child process prepares and samples.

    Args:
        workload: The workload in this process.
        make: Returns the same workload in the child.
        device: As in ChildCall, like ``limits``, ``stop`` and ``mode``.
        limits: When the child is ended.
        stop: Reports an interruption.
        children: Ends the child when it closes.
        otherwise: Prepares the workload if the child cannot begin; None: that is a failure.
        mode: ``eager`` and ``inference`` of ChildCall.
    """

    def start() -> Prepared:
        try:
            call = ChildCall(make, device, limits, stop, **mode)
            children.callback(call.end)
            return call.prepare()
        except CannotStart as error:
            if otherwise is None:
                raise RuntimeError(str(error)) from error
            return otherwise()

    return dataclasses.replace(workload, start=start)


_prepared: list[tuple[Clock, Prepared, bool]] = []  # of a child


def _prepare(
    make: Callable[[], Workload], device: str, threads: int, eager: bool, inference: bool
) -> Prepared | _Failure:
    """Prepare the workload in the child."""
    torch.set_num_threads(threads)
    has_begun = False

    @contextlib.contextmanager
    def limited() -> Iterator[None]:
        nonlocal has_begun
        has_begun = True
        with announced(_CALL, ""):
            yield

    try:
        with torch.inference_mode(inference):
            clock: Clock = EagerClock() if eager else clock_for(device)
            prepared = clock.prepare(dataclasses.replace(make(), limited=limited))
    except BaseException as error:  # noqa: BLE001  a third-party kernel may raise anything
        return _Failure(describe_error(error), reason_of(error) == NO_MEMORY, has_begun)
    _prepared.append((clock, prepared, inference))
    return dataclasses.replace(prepared, call=not_here)


def _sample(begins_turn: bool) -> float | _Failure:
    """Take a sample in the child."""
    ((clock, prepared, inference),) = _prepared
    try:
        with torch.inference_mode(inference), announced(_CALL, ""):
            return take_sample(clock, prepared, begins_turn=begins_turn)
    except BaseException as error:  # noqa: BLE001  a third-party kernel may raise anything
        return _Failure(describe_error(error), reason_of(error) == NO_MEMORY)


def not_here() -> NoReturn:
    """Stand in for a call that runs in a child process only."""
    raise AssertionError("this call runs in a child process")

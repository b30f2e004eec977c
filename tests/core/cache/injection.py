"""Errors injected into operations on a cache, and the public state of a cache."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nsa_core import NSACache, NSAError
from nsa_verify.drawn.caches.history import Operation
from nsa_verify.drawn.caches.replay import Interrupted, Replay
from nsa_verify.problems.combination import Combination

AUTO = Combination({}, name="auto")
ERRORS = (RuntimeError, torch.OutOfMemoryError, KeyboardInterrupt)


class HookError(Exception):
    """Raised by a hook."""


INJECTED = (*ERRORS, HookError, NSAError)  # an error in a kernel is raised as an NSAError


def raise_hook_error(*args: object) -> None:
    raise HookError


class RaiseAt(TorchDispatchMode):
    """Raise an error instead of running operator number ``number``, and the ``more`` after it."""

    def __init__(self, number: int | None, error: type[BaseException], more: int = 0) -> None:
        super().__init__()
        self.numbers = range(0) if number is None else range(number, number + more + 1)
        self.error, self.count = error, 0

    @property
    def raised(self) -> bool:
        return any(number < self.count for number in self.numbers)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        if self.count - 1 in self.numbers:
            raise self.error(f"injected at {function}")
        return function(*args, **(kwargs or {}))


class RaiseAtOpcode:
    """Raise KeyboardInterrupt before opcode number ``number`` of the cache's code.

    Python itself checks for signals at few opcodes. Before others, among them those that call
    ``__exit__`` of a ``with torch.no_grad():``, the interrupt would leave gradients switched off.
    """

    def __init__(self, number: int | None) -> None:
        self.number, self.count, self.raised = number, 0, False

    def __enter__(self) -> RaiseAtOpcode:
        self._former, self._gradients = sys.gettrace(), torch.is_grad_enabled()
        sys._getframe().f_trace_opcodes = True  # Python 3.12 reports opcodes if set before settrace
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._former)
        torch.set_grad_enabled(self._gradients)

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if "/nsa_core/cache/" not in frame.f_code.co_filename.replace("\\", "/"):
            return None
        if frame.f_code.co_flags & inspect.CO_GENERATOR:  # Python drops an error of a closed one
            return None
        frame.f_trace = self._trace  # Python 3.13 needs it before f_trace_opcodes
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            self.count += 1
            if self.count - 1 == self.number:
                self.raised = True
                raise KeyboardInterrupt
        return self._trace


class RaiseInHook:
    """Raise an error in a forward hook of a module."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module, self.raised = module, False

    def __enter__(self) -> RaiseInHook:
        self._handle = self._module.register_forward_hook(self._raise)
        return self

    def __exit__(self, *error: object) -> None:
        self._handle.remove()

    def _raise(self, *args: object) -> None:
        self.raised = True
        raise HookError


def state(cache: NSACache) -> tuple[Any, ...]:
    """Return the public state: lengths, pages and capacity, on the host and on the device."""
    table, rows = cache.table, None if cache.pages is None else cache.pages.rows
    pages = None if cache.pages is None else (cache.pages.free, rows)
    entries = [table.entries[b, : len(row)].tolist() == row for b, row in enumerate(rows or [])]
    lengths, room = cache.lengths.tolist(), table.device_room.tolist()
    flags = (cache.overflowed.tolist(), cache.undo)
    return lengths, cache.host_lengths(), cache.peaks, pages, entries, table.room, room, flags


def undone(
    replay: Replay, injector: RaiseAt | RaiseAtOpcode | RaiseInHook
) -> Callable[[Operation], torch.Tensor | None]:
    """Return a function that runs an operation with an injector, and checks that it is undone."""

    def run(operation: Operation) -> torch.Tensor | None:
        cache, call = replay.cache, replay.prepared(operation)
        before = state(cache)
        try:
            with injector:
                return call()
        except INJECTED:
            if not injector.raised:
                raise
        if cache.undo is not None:  # the undo was interrupted too: the next operation completes it
            cache.reset([])
        complete = isinstance(injector, RaiseAtOpcode) and state(cache) != before
        assert complete or state(cache) == before
        raise Interrupted(undone=not complete)

    return run

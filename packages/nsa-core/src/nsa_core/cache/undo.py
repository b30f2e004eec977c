"""Undo of a cache operation that raises, so that the caller can repeat it.

An operation opens a record of the former state, changes the cache, and closes the record. Closing
is one assignment: an interrupt before it undoes the operation, and one after it comes too late. If
the undo fails too, for example because of a second interrupt, the record stays open, and the next
operation on the cache undoes it first.

Most changes need no copy, because nothing reads rows beyond the lengths:

    sel, cmp     new rows lie beyond the lengths; a shared page is copied before a step writes to it
    win, raw     a ring has rows for max_rollback + max_step - 1 tokens besides the window or block,
                 so a step overwrites no token that a later step or crop can reach
    lengths      ``starts`` holds the former lengths; lists on the host are replaced, never changed

A step longer than ``max_step``, a reorder and a load overwrite rows of the former state. They copy
these rows first.

The replay of a CUDA graph runs without Python, so nothing here can undo it.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

Cache = TypeVar("Cache", bound="Undoable")
Result = TypeVar("Result")
P = ParamSpec("P")


@dataclasses.dataclass(slots=True)
class Undo:
    """The state of a cache before an operation.

    Attributes:
        lengths: a tensor with the former lengths; None if they have not changed.
        saved: functions that give tensors of the cache their former content.
        frame: the frame of :func:`run_or_undo` that opened the record.
    """

    bounds: list[int]
    exact: bool
    captured: bool
    peaks: list[int]
    room: list[int]
    page_rows: list[list[int]] | None
    lengths: torch.Tensor | None = None
    saved: list[Callable[[], torch.Tensor]] = dataclasses.field(default_factory=list)
    frame: FrameType | None = None

    def save(self, *tensors: torch.Tensor) -> None:
        """Copy tensors or views of the cache, which the caller then changes."""
        self.saved += [functools.partial(tensor.copy_, tensor.clone()) for tensor in tensors]

    def save_rows(self, tensor: torch.Tensor, index: torch.Tensor) -> None:
        """Copy the rows ``index`` int64 [N] of a tensor of the cache."""
        rows = tensor.index_select(0, index)
        self.saved.append(functools.partial(tensor.index_copy_, 0, index, rows))

    def is_running(self) -> bool:
        """Return whether the operation runs now, and calls this function."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self.frame:
            frame = frame.f_back
        return frame is not None


class Undoable(Protocol):
    """The part of a cache that opens and closes records."""

    undo: Undo | None

    def begin(self) -> Undo:
        """Open a record of the current state."""

    def roll_back(self) -> None:
        """Return to the state of the open record, if there is one, and close it."""


def run_or_undo(
    cache: Undoable, function: Callable[P, Result], /, *args: P.args, **options: P.kwargs
) -> Result:
    """Return ``function(*args, **options)``; if it raises, undo its changes of the cache.

    A call inside another one is undone by the outer call.
    """
    if cache.undo is not None and cache.undo.is_running():
        return function(*args, **options)
    cache.begin().frame = sys._getframe()
    try:
        result = function(*args, **options)
        cache.undo = None
    finally:
        cache.roll_back()  # does nothing if the record is closed
    return result


def run_or_undo_all(
    caches: Sequence[Undoable],
    function: Callable[P, Result],
    /,
    *args: P.args,
    **options: P.kwargs,
) -> Result:
    """Do :func:`run_or_undo` with one call that changes several caches, such as a model's."""
    try:
        for cache in caches:
            cache.begin().frame = sys._getframe()
        result = function(*args, **options)
        for cache in caches:
            cache.undo = None
    finally:
        for cache in caches:
            cache.roll_back()
    return result


def undone_on_error(
    method: Callable[Concatenate[Cache, P], Result],
) -> Callable[Concatenate[Cache, P], Result]:
    """Decorate a method of a cache: if it raises, its changes are undone."""

    @functools.wraps(method)
    def wrapper(cache: Cache, /, *args: P.args, **options: P.kwargs) -> Result:
        return run_or_undo(cache, method, cache, *args, **options)

    return wrapper

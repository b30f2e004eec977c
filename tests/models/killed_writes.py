"""Kill a save before each of its effects on the file system, or in the middle of a file."""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import safetensors.torch

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_EVENTS = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.link", "os.truncate"}


class Killed(BaseException):
    """The process is killed: after it, no effect happens any more."""


class Effects:
    """The effects of a block, of which those from number ``kill_at`` on do not happen.

    Attributes:
        names: The effects so far.
        dead: Whether an effect was stopped.
    """

    def __init__(self, kill_at: int | None) -> None:
        self.names: list[str] = []
        self.dead = False
        self._kill_at = kill_at

    def is_last(self) -> bool:
        """Return whether the next effect is the first that does not happen."""
        return len(self.names) == self._kill_at

    def happen(self, name: str) -> None:
        if self.dead or self.is_last():
            self.dead = True
            raise Killed(name)
        self.names.append(name)


_current: Effects | None = None
_fsync, _save_file = os.fsync, safetensors.torch.save_file


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    """See every call of Python that changes files; an exception prevents it."""
    if _current is None:
        return
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES:
        _current.happen(f"open {arguments[0]}")
    elif event in _EVENTS:
        _current.happen(f"{event} {arguments[0]}")


sys.addaudithook(_hook)  # it cannot be removed


def _recorded_fsync(descriptor: int) -> None:
    if _current is not None:
        _current.happen(f"fsync {os.readlink(f'/proc/self/fd/{descriptor}')}")
    _fsync(descriptor)


def _recorded_save(tensors: Any, file: pathlib.Path, metadata: Any) -> None:
    """Write tensors, which the library does outside Python; a kill may leave half the file."""
    global _current
    effects, _current = _current, None
    assert effects is not None
    effects.happen(f"write {file}")
    _save_file(tensors, file, metadata)
    if effects.is_last():
        os.truncate(file, file.stat().st_size // 2)
    _current = effects
    effects.happen(f"written {file}")


@contextlib.contextmanager
def killed_at(number: int | None) -> Iterator[Effects]:
    """Kill the block before its effect ``number``; the block's Killed is suppressed."""
    global _current
    effects = Effects(number)
    with (
        mock.patch("os.fsync", _recorded_fsync),
        mock.patch("safetensors.torch.save_file", _recorded_save),
        contextlib.suppress(Killed),
    ):
        _current = effects
        try:
            yield effects
        finally:
            _current = None

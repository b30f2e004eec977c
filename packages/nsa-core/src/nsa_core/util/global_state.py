"""The global state of a process that code of a plugin must leave as it was. Imports no torch."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from nsa_core.util.planning_lock import planning_lock
from nsa_core.util.text import one_line

_log = logging.getLogger("nsa")
_ABSENT = object()  # the value of state that does not exist yet


@dataclasses.dataclass(frozen=True)
class Item:
    """One piece of state: how to read it, and how to restore the value that was read.

    Attributes:
        read: returns the value.
        restore: sets the value.
        module: the library whose state it is, which counts once it is imported; "": Python's own.
    """

    read: Callable[[], Any]
    restore: Callable[[Any], object]
    module: str = ""


def _is_imported(module: str) -> bool:
    """Return whether ``module`` is imported, and not only while another thread imports it."""
    spec = getattr(sys.modules.get(module), "__spec__", None)
    return spec is not None and not getattr(spec, "_initializing", False)


def _torch() -> Any:
    return sys.modules["torch"]


def _default_device() -> Any:
    from torch.utils import _device

    return _device.CURRENT_DEVICE


def _cuda_random() -> Any:
    """Return the random state of the current GPU, once CUDA runs and outside of a capture."""
    cuda = _torch().cuda
    if not cuda.is_initialized() or cuda.is_current_stream_capturing():
        return _ABSENT
    return cuda.get_rng_state()


def _numpy_random() -> Any:
    name, keys, *rest = sys.modules["numpy.random"].get_state()
    return name, keys.tobytes(), tuple(rest)


def _restore_numpy_random(state: Any) -> None:
    import numpy

    name, keys, rest = state
    numpy.random.set_state((name, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # the directory was deleted
        return ""


def _of_torch(read: str, restore: str) -> Item:
    """Return an item that functions of torch read and restore."""
    return Item(
        lambda: getattr(_torch(), read)(), lambda value: getattr(_torch(), restore)(value), "torch"
    )


ITEMS: Mapping[str, Item] = {
    "PyTorch's default dtype": _of_torch("get_default_dtype", "set_default_dtype"),
    "PyTorch's default device": Item(
        _default_device, lambda device: _torch().set_default_device(device), "torch"
    ),
    "PyTorch's gradient mode": _of_torch("is_grad_enabled", "set_grad_enabled"),
    # torch.use_deterministic_algorithms would import torch._inductor.
    "PyTorch's deterministic algorithms": _of_torch(
        "get_deterministic_debug_mode", "set_deterministic_debug_mode"
    ),
    "PyTorch's number of threads": _of_torch("get_num_threads", "set_num_threads"),
    "PyTorch's random state": _of_torch("get_rng_state", "set_rng_state"),
    "the GPU's random state": Item(
        _cuda_random, lambda state: _torch().cuda.set_rng_state(state), "torch"
    ),
    "numpy's random state": Item(_numpy_random, _restore_numpy_random, "numpy.random"),
    "Python's random state": Item(random.getstate, random.setstate),
    "the working directory": Item(_working_directory, os.chdir),
}

# The items that only their own setters change. Another thread may draw random numbers at any time.
SETTINGS = {name: item for name, item in ITEMS.items() if "random" not in name}


class GlobalState:
    """A snapshot of the global state of this process and thread.

    Args:
        items: the pieces of state, by the names that messages give them.
    """

    def __init__(self, items: Mapping[str, Item] = ITEMS) -> None:
        self._items = items
        modules = {item.module for item in items.values()}
        imported = {module for module in modules if not module or _is_imported(module)}
        self._values = {n: item.read() for n, item in items.items() if item.module in imported}

    def changed(self) -> list[str]:
        """Return the names of the state that differs from the snapshot."""
        return [
            name
            for name, item in self._items.items()
            if name in self._values and not _equal(item.read(), self._values[name])
        ]

    def restore(self) -> list[str]:
        """Restore all that has changed since the snapshot, and return its names."""
        changed = self.changed()
        for name in changed:
            with contextlib.suppress(OSError):  # a directory may be gone
                self._items[name].restore(self._values[name])
        return changed


def _equal(one: Any, other: Any) -> bool:
    if one is _ABSENT or other is _ABSENT:
        return True
    if hasattr(one, "data_ptr") and hasattr(other, "data_ptr"):  # random states, on the CPU
        return _bytes(one) == _bytes(other)
    return bool(one == other)


def _bytes(state: Any) -> bytes:
    """Return the bytes of a random state, without an operator that a mode of torch could see."""
    import ctypes  # rarely needed

    return ctypes.string_at(state.data_ptr(), state.numel())


_reported: list[str] = []


def report_change(text: str) -> None:
    """Log once that a plugin changed the state."""
    if text not in _reported:
        _reported.append(text)
        _log.warning("%s: restored; report it to the plugin's author", text)


def take_reports() -> list[str]:
    """Return what :func:`report_change` has logged since the last call."""
    reports, _reported[:] = [*_reported], []
    return reports


@contextlib.contextmanager
def loading(plugin: str, items: Mapping[str, Item] = ITEMS) -> Iterator[None]:
    """Restore at the end of the block what the code of ``plugin`` changed, and log its name.

    The block imports modules of a plugin or calls its hook. It has the planning lock, so that no
    other plugin sets state at the same time. Each change is logged once.

    Args:
        plugin: name of the backend or of the entry point, for the message.
        items: the pieces of state.
    """
    with planning_lock:
        state = GlobalState(items)
        try:
            yield
        finally:
            if changed := state.restore():
                report_change(f"loading plugin {one_line(plugin)} changed {', '.join(changed)}")


def is_new(path: str) -> bool:
    """Return whether the module of ``path``, "module:function", is not imported yet."""
    return path.partition(":")[0] not in sys.modules

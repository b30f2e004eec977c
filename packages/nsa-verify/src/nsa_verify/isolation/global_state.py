"""The global state of a process that a kernel must leave as it was."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _device

_DEVICE_TYPES = ("cpu", "cuda")
_SIGNALS = tuple(sorted(signal.valid_signals()))
# A module may set these when it is imported, and a kernel may import a module in its first call.
_SET_BY_IMPORTS = ("the environment variables", "the filters of warnings")


@dataclasses.dataclass(frozen=True)
class _Item:
    """One piece of state: how to read it, and how to restore the value that was read."""

    read: Callable[[], Any]
    restore: Callable[[Any], object]


def _numpy_random() -> Any:
    """Return numpy's random state if numpy is loaded."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not hasattr(numpy, "random"):
        return None
    name, keys, *rest = numpy.random.get_state()
    return name, keys.tobytes(), tuple(rest)


def _restore_numpy_random(state: Any) -> None:
    import numpy

    if state is not None:
        name, keys, rest = state
        numpy.random.set_state((name, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))


def _cuda_random() -> Any:
    """Return the random state of the current GPU, once CUDA runs."""
    return torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None


def _restore_cuda_random(state: Any) -> None:
    if state is not None:
        torch.cuda.set_rng_state(state)


def _restore_autocast(enabled: Any) -> None:
    for device, value in zip(_DEVICE_TYPES, enabled):
        torch.set_autocast_enabled(device, value)


def _restore_environment(values: Any) -> None:
    for name in os.environ.keys() - values.keys():
        del os.environ[name]
    os.environ.update(values)


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # the directory was deleted
        return ""


def _restore_signal_handlers(handlers: Any) -> None:
    for number, handler in zip(_SIGNALS, handlers):
        if handler is not None and signal.getsignal(number) != handler:
            signal.signal(number, handler)


def _blocked_signals() -> Any:
    if not hasattr(signal, "pthread_sigmask"):
        return None
    return signal.pthread_sigmask(signal.SIG_BLOCK, ())


def _flushes_subnormals() -> bool:
    """Return whether subnormal results or inputs count as 0; PyTorch has no getter."""
    smallest_normal, subnormal = sys.float_info.min, float.fromhex("0x1p-1074")
    return smallest_normal * 0.5 == 0.0 or subnormal * 2.0**64 == 0.0


def _restore_filters(filters: Any) -> None:
    warnings.filters[:] = filters  # type: ignore[index]
    warnings._filters_mutated()  # type: ignore[attr-defined]


def _restore_streams(streams: Any) -> None:
    sys.stdout, sys.stderr = streams


_ITEMS = {
    "PyTorch's default dtype": _Item(torch.get_default_dtype, torch.set_default_dtype),
    "PyTorch's default device": _Item(lambda: _device.CURRENT_DEVICE, torch.set_default_device),
    "PyTorch's gradient mode": _Item(torch.is_grad_enabled, torch.set_grad_enabled),
    "PyTorch's autocast": _Item(
        lambda: tuple([torch.is_autocast_enabled(device) for device in _DEVICE_TYPES]),
        _restore_autocast,
    ),
    # torch.use_deterministic_algorithms would import torch._inductor.
    "PyTorch's deterministic algorithms": _Item(
        torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode
    ),
    "PyTorch's matmul precision": _Item(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    ),
    "PyTorch's cuDNN settings": _Item(
        lambda: (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark),
        lambda value: torch.backends.cudnn.set_flags(_deterministic=value[0], _benchmark=value[1]),
    ),
    "the treatment of subnormal numbers": _Item(_flushes_subnormals, torch.set_flush_denormal),
    "PyTorch's number of threads": _Item(torch.get_num_threads, torch.set_num_threads),
    "PyTorch's random state": _Item(torch.get_rng_state, torch.set_rng_state),
    "the GPU's random state": _Item(_cuda_random, _restore_cuda_random),
    "numpy's random state": _Item(_numpy_random, _restore_numpy_random),
    "Python's random state": _Item(random.getstate, random.setstate),
    "the environment variables": _Item(lambda: dict(os.environ), _restore_environment),
    "the working directory": _Item(_working_directory, os.chdir),
    "the signal handlers": _Item(
        lambda: tuple([signal.getsignal(number) for number in _SIGNALS]), _restore_signal_handlers
    ),
    "the blocked signals": _Item(
        _blocked_signals, lambda mask: signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    ),
    "the filters of warnings": _Item(lambda: list(warnings.filters), _restore_filters),
    "sys.stdout and sys.stderr": _Item(lambda: (sys.stdout, sys.stderr), _restore_streams),
}


class GlobalState:
    """A snapshot of the global state of this process and thread."""

    def __init__(self) -> None:
        self._modules = len(sys.modules)
        self._values = {name: item.read() for name, item in _ITEMS.items()}

    def restore(self) -> list[str]:
        """Restore all that has changed since the snapshot, and return its names.

        Values that the import of a module may set are restored and returned only if no module was
        imported since the snapshot.
        """
        changed = [
            name for name, item in _ITEMS.items() if not _equal(item.read(), self._values[name])
        ]
        if len(sys.modules) != self._modules:
            changed = [name for name in changed if name not in _SET_BY_IMPORTS]
        for name in changed:
            # Only the main thread may set a signal handler; a directory may be gone.
            with contextlib.suppress(OSError, ValueError):
                _ITEMS[name].restore(self._values[name])
        return changed


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other)

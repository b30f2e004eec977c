"""The global state of a process that a kernel must leave as it was."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from typing import Any

import torch

from nsa_core.util.global_state import ITEMS, GlobalState, Item

_DEVICE_TYPES = ("cpu", "cuda")
_SIGNALS = tuple(sorted(signal.valid_signals()))
# A module may set these when it is imported, and a kernel may import a module in its first call.
_SET_BY_IMPORTS = ("the environment variables", "the filters of warnings")


def _restore_autocast(enabled: Any) -> None:
    for device, value in zip(_DEVICE_TYPES, enabled):
        torch.set_autocast_enabled(device, value)


def _restore_environment(values: Any) -> None:
    for name in os.environ.keys() - values.keys():
        del os.environ[name]
    os.environ.update(values)


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


# The state that no plugin may change when it is loaded, and more.
_ITEMS = {
    **ITEMS,
    "PyTorch's autocast": Item(
        lambda: tuple([torch.is_autocast_enabled(device) for device in _DEVICE_TYPES]),
        _restore_autocast,
    ),
    "PyTorch's matmul precision": Item(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    ),
    "PyTorch's cuDNN settings": Item(
        lambda: (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark),
        lambda value: torch.backends.cudnn.set_flags(_deterministic=value[0], _benchmark=value[1]),
    ),
    "the treatment of subnormal numbers": Item(_flushes_subnormals, torch.set_flush_denormal),
    "the environment variables": Item(lambda: dict(os.environ), _restore_environment),
    "the signal handlers": Item(
        lambda: tuple([signal.getsignal(number) for number in _SIGNALS]), _restore_signal_handlers
    ),
    "the blocked signals": Item(
        _blocked_signals, lambda mask: signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    ),
    "the filters of warnings": Item(lambda: list(warnings.filters), _restore_filters),
    "sys.stdout and sys.stderr": Item(lambda: (sys.stdout, sys.stderr), _restore_streams),
}


class KernelState(GlobalState):
    """A snapshot of the global state of this process and thread before a call of a kernel."""

    def __init__(self) -> None:
        self._modules = len(sys.modules)
        super().__init__(_ITEMS)

    def changed(self) -> list[str]:
        """Return the names of the state that differs from the snapshot.

        Values that the import of a module may set are left out if a module was imported since the
        snapshot.
        """
        names = super().changed()
        if len(sys.modules) == self._modules:
            return names
        return [name for name in names if name not in _SET_BY_IMPORTS]

"""Global state: the current CUDA device, autocast, compilation, transforms, and NSA_CHECK."""

from __future__ import annotations

import contextlib
import os

import torch
from torch.autograd import forward_ad

_NO_CHANGE = contextlib.nullcontext()


def checks_values(x: torch.Tensor) -> bool:
    """Return whether calls check the values of ``x``: on a GPU, reading them waits for it."""
    return x.device.type == "cpu" or os.environ.get("NSA_CHECK") == "1"


def autocast_enabled(device: torch.device) -> bool:
    """Return whether autocast is enabled for tensors on ``device``."""
    # torch.amp.is_autocast_available would cover meta tensors, but it breaks graphs up to torch
    # 2.11.
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def dtype_of_products(x: torch.Tensor) -> torch.dtype:
    """Return the dtype of products of x: autocast's, or that of x. Autocast leaves float64."""
    if x.dtype == torch.float64 or not autocast_enabled(x.device):
        return x.dtype
    return torch.get_autocast_dtype(x.device.type)


def no_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context in which autocast is disabled for tensors on ``device``."""
    if not autocast_enabled(device):
        return _NO_CHANGE
    if torch.compiler.is_compiling():  # torch.compile supports only torch.autocast
        return torch.autocast(device.type, enabled=False)
    # _DisableAutocast takes a fifth of the host time of torch.autocast.
    disabled: contextlib.AbstractContextManager[object] = torch._C._DisableAutocast()
    return disabled


def backend_state(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return the context in which a backend runs: ``device`` is current and autocast is off.

    With autocast on, the fp32 products of a backend would not stay fp32.
    """
    kind = device.type
    if kind != "cuda" or device.index == torch.cuda.current_device():
        if kind != "meta" and not torch.is_autocast_enabled(kind):  # two calls less
            return _NO_CHANGE
        return no_autocast(device)
    stack = contextlib.ExitStack()
    stack.enter_context(torch.cuda.device(device))
    stack.enter_context(no_autocast(device))
    return stack


def is_transformed() -> bool:
    """Return whether torch.func transforms the call, or tensors may carry tangents.

    The latter are the dual tensors of torch.autograd.forward_ad, on which torch.func.jvp builds.
    """
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def is_eager() -> bool:
    """Return whether operations run eagerly: neither compiled nor transformed.

    Only then may an autograd node of this project replace the gradients of PyTorch's operations.
    """
    return not torch.compiler.is_compiling() and not is_transformed()


def is_exporting() -> bool:
    """Return whether torch.export traces the call.

    In PyTorch 2.11 and earlier, torch.compile replaces torch.compiler.is_exporting() by True in
    every function that it compiles. So the flag behind it is read.
    """
    flag: bool | None = getattr(torch.compiler, "_is_exporting_flag", None)
    return torch.compiler.is_exporting() if flag is None else flag


def is_capturing(device: torch.device) -> bool:
    """Return whether the current stream of ``device`` is being captured in a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()

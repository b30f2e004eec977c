"""What PyTorch does to code around it: the current CUDA device, autocast, and whether it transforms
it.
"""

from __future__ import annotations

import contextlib

import torch

_AS_IT_IS = contextlib.nullcontext()


def autocasts(device: torch.device) -> bool:
    """Whether autocast is on for tensors on ``device``."""
    # torch.amp.is_autocast_available, which would say so of meta tensors, is a graph break up to
    # torch 2.11.
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def no_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Turn autocast off, where it is on, for tensors on ``device``."""
    if not autocasts(device):
        return _AS_IT_IS
    if torch.compiler.is_compiling():  # which knows no other
        return torch.autocast(device.type, enabled=False)
    # a fifth of its host time
    without: contextlib.AbstractContextManager[object] = torch._C._DisableAutocast()
    return without


def surroundings(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Where a backend runs: ``device`` current, autocast off, so that its fp32 products stay
    fp32.
    """
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    if not elsewhere:
        return no_autocast(device)
    stack = contextlib.ExitStack()
    stack.enter_context(torch.cuda.device(device))
    stack.enter_context(no_autocast(device))
    return stack


def eager() -> bool:
    """Whether ops run as they are called, so that a gradient of ours may stand for theirs: no
    compiler, no vmap.
    """
    return not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active()


def capturing(device: torch.device) -> bool:
    """Whether what runs on ``device`` is being captured in a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()

"""The device that a call is made for: the one its tensors lie on, or one that a dry run describes.

A dry run (workspace.py) calls the slots with tensors on the meta device, which have no data.
Routes, tile sizes and operand dtypes then follow the described device, and long loops are shortened
to the iterations that can hold the most memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor


class _Described(NamedTuple):
    device_type: str
    capability: tuple[int, int] | None


_described: ContextVar[_Described | None] = ContextVar("described", default=None)


@contextlib.contextmanager
def described(device_type: str, capability: tuple[int, int] | None) -> Iterator[None]:
    """Treat tensors on the meta device, in this context, as tensors on this kind of device."""
    token = _described.set(_Described(device_type, capability))
    try:
        yield
    finally:
        _described.reset(token)


def device_type(tensor: Tensor) -> str:
    """The type of ``tensor``'s device, such as "cuda"."""
    dry_run = _described.get()
    if dry_run is not None and tensor.device.type == "meta":
        return dry_run.device_type
    return tensor.device.type


def capability(tensor: Tensor) -> tuple[int, int] | None:
    """The compute capability of ``tensor``'s device; None where it is not a CUDA device."""
    dry_run = _described.get()
    if dry_run is not None and tensor.device.type == "meta":
        return dry_run.capability
    return torch.cuda.get_device_capability(tensor.device) if tensor.is_cuda else None


def pieces(total: int, size: int, document: int = 0) -> Iterator[slice]:
    """Slices of at most ``size`` that cover ``range(total)``.

    A dry run gets the first two, the last three, and those around the start of the last document.
    They hold the peak of a loop whose iterations allocate alike, or more and more until the end of
    a document: an iteration that finds the results of another one, the largest, and the last, which
    may be shorter.

    Args:
        total: elements of the loop.
        size: elements of an iteration.
        document: elements of every document, where iterations grow inside one; 0: they do not.
    """
    count = -(-total // size)
    indices: Iterable[int] = range(count)
    if _described.get() is not None:
        crossing = (total - document) // size if document else count
        chosen = {0, 1, *range(count - 3, count), *range(crossing - 1, crossing + 2)}
        indices = sorted(index for index in chosen if 0 <= index < count)
    for index in indices:
        yield slice(index * size, min((index + 1) * size, total))

"""The device of a call: the device of its tensors, or the device that a dry run simulates.

A dry run (workspace.py) calls the slots with tensors on the meta device, which have no data. The
choice of implementation, the tile sizes and the operand dtypes then follow the simulated device.
Loops are shortened to the iterations that can reach the peak of memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor


class _Device(NamedTuple):
    device_type: str
    capability: tuple[int, int] | None


_simulated: ContextVar[_Device | None] = ContextVar("simulated", default=None)


@contextlib.contextmanager
def simulated(device_type: str, capability: tuple[int, int] | None) -> Iterator[None]:
    """In this context, treat tensors on the meta device as tensors on the given kind of device."""
    token = _simulated.set(_Device(device_type, capability))
    try:
        yield
    finally:
        _simulated.reset(token)


def device_type(tensor: Tensor) -> str:
    """Return the type of the device of ``tensor``, such as "cuda"."""
    dry_run = _simulated.get()
    if dry_run is not None and tensor.device.type == "meta":
        return dry_run.device_type
    return tensor.device.type


def capability(tensor: Tensor) -> tuple[int, int] | None:
    """Return the compute capability of the device of ``tensor``; None unless it is on CUDA."""
    dry_run = _simulated.get()
    if dry_run is not None and tensor.device.type == "meta":
        return dry_run.capability
    return torch.cuda.get_device_capability(tensor.device) if tensor.is_cuda else None


def chunks(total: int, size: int, document: int = 0) -> Iterator[slice]:
    """Yield slices of at most ``size`` elements that cover ``range(total)``.

    In a dry run, only some slices are yielded: the first two, the last three, and three around the
    start of the last document. The loop still reaches its peak of memory if its iterations
    allocate equal amounts, or amounts that grow up to the end of a document. The yielded slices
    include an iteration that starts while the results of another one exist, the largest iteration,
    and the last one, which may be shorter.

    Args:
        total: Elements of the loop.
        size: Elements of an iteration.
        document: Elements of each document, if iterations grow inside a document; otherwise 0.
    """
    count = -(-total // size)
    indices: Iterable[int] = range(count)
    if _simulated.get() is not None:
        last_start = (total - document) // size if document else count
        peak_indices = {0, 1, *range(count - 3, count), *range(last_start - 1, last_start + 2)}
        indices = sorted(index for index in peak_indices if 0 <= index < count)
    for index in indices:
        yield slice(index * size, min((index + 1) * size, total))

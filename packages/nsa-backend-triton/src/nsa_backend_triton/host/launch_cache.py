"""Launches worked out once: everything but the pointers of a launch follows from the metadata of
the call's tensors.

    @remembered
    def _launches(q, k, seqs, call):         # strides, tiles, configuration: some 50 us of Python
        return Launch(kernel, (programs,), strides(q), ..., HEADS=heads, ...)

    _launches(q, k, seqs, call)(q, k, out)
    # the next call of these shapes: a look-up, and the launch

The kernels' parameters are tensors and descriptors, then numbers, then constants. Where every
number is the same, as it is for equal metadata, and every tensor begins on 16 bytes, Triton would
specialise its arguments to the same binary again: that binary is launched without asking. Any other
tensor goes through Triton's own launcher.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import driver

from nsa_core.contract import DecodeCall, SlotCall

# calls remembered by each function: lengths of a server that never repeats one are not kept for
# ever
MOST = 4096

_tables: list[dict[Hashable, Any]] = []  # one of each remembered function

Arguments = ParamSpec("Arguments")
Made = TypeVar("Made")


def aligned(*tensors: object) -> bool:
    """Whether every tensor among them begins on 16 bytes; descriptors do, or could not be made."""
    for x in tensors:  # noqa: SIM110  a generator is twice the time, at every launch
        if isinstance(x, Tensor) and x.data_ptr() % 16:
            return False
    return True


class _Thread(threading.local):
    """Whether a CUDA context is known to be current in this thread."""

    attached = False


_thread = _Thread()


def _attach() -> None:
    # A thread that has made no call to CUDA has no context, without which no tensor map can be
    # made, and neither PyTorch, where the device is the current one, nor Triton, before the launch
    # itself, sees to it.
    torch.cuda.set_device(torch.cuda.current_device())
    _thread.attached = True


class Launch:
    """A kernel, its grid, and what it is told besides tensors; call it with those."""

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int],
        *numbers: float | tuple[int, ...],
        **constants: Any,
    ) -> None:
        self._kernel, self._grid, self._numbers, self._constants = kernel, grid, numbers, constants
        self._compiled: tuple[Any, tuple[Any, ...], Callable[[int], int], int] | None = None

    def __call__(self, *tensors: Any) -> None:
        """Launch on the current device and stream."""
        if not _thread.attached and tensors[0].is_cuda:
            _attach()
        known = self._compiled
        if known is not None and aligned(*tensors):
            runner, rest, stream_of, device = known
            runner(*tensors, *rest, stream=stream_of(device))
            return
        compiled = self._kernel[self._grid](*tensors, *self._numbers, **self._constants)
        if isinstance(compiled, CompiledKernel) and aligned(*tensors):
            constants = self._kernel.arg_names[len(tensors) + len(self._numbers) :]
            rest = (*self._numbers, *(self._constants[name] for name in constants))
            # What Triton would ask for at every launch: a binary is of one device.
            active = driver.active
            self._compiled = (
                compiled[self._grid[0], 1, 1],
                rest,
                active.get_current_stream,
                active.get_current_device(),
            )


def remembers(x: Tensor) -> bool:
    """Not in the interpreter nor in a dry run: there, kernels and tables are changed between
    calls.
    """
    return x.is_cuda


def remembered(make: Callable[Arguments, Made]) -> Callable[Arguments, Made]:
    """``make``, run once per metadata of its arguments; the first is a tensor, or a NamedTuple that
    begins with one.

    It may read a tensor's shape, strides, dtype and device, but no address, and keep none;
    sequences and calls have no boundaries for it.
    """
    known: dict[Hashable, Made] = {}
    _tables.append(known)

    @functools.wraps(make)
    def look_up(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Made:
        first = args[0] if isinstance(args[0], Tensor) else args[0][0]  # type: ignore[index]
        if not remembers(first):
            return make(*args, **kwargs)
        # A call of _metadata for every tensor would be half of this function's time.
        told = [(x.shape, x.stride(), x.dtype) if type(x) is Tensor else _metadata(x) for x in args]
        key = (first.device, *told)
        made = known.get(key)
        if made is None:
            if len(known) >= MOST:
                known.clear()
            made = known[key] = make(*args, **kwargs)
        return made

    return look_up


def forget() -> None:
    """Forget every call remembered so far, and with it the binaries of its launches: for a change
    of the driver.
    """
    for known in _tables:
        known.clear()


def _tensor(x: Tensor) -> Hashable:
    return x.shape, x.stride(), x.dtype


# What tells two arguments of a type apart; other types are told apart by equality.
READ: dict[type, Callable[[Any], Hashable]] = {
    Tensor: _tensor,
    SlotCall: lambda x: (x.geometry, x.scale, x.max_seqlen, x.deterministic),
    DecodeCall: lambda x: (
        x.geometry,
        x.scale,
        x.max_len,
        x.block_table.shape,
        x.block_table.stride(),
    ),
    dict: lambda x: tuple((name, _metadata(value)) for name, value in x.items()),
}


def _metadata(x: Any) -> Hashable:
    read = READ.get(type(x))
    if read is not None:
        return read(x)
    if isinstance(x, Tensor):
        return _tensor(x)
    if isinstance(x, tuple) and type(x) is not tuple:  # a plain one holds plain values
        return tuple(map(_metadata, x))
    plain: Hashable = x
    return plain

"""Cached launches: everything but the pointers of a launch follows from the tensors' metadata.

    @cached_by_metadata
    def _launches(q, k, seqs, call):         # strides, tiles, configuration: about 50 us of Python
        return Launch(kernel, (programs,), strides(q), ..., BLOCK_H=heads, ...)

    _launches(q, k, seqs, call)(q, k, out)
    # the next call with these shapes is one look-up and the launch

Parameters of the kernels are tensors and descriptors, then numbers and tuples of numbers (strides),
then constexprs. If every number is the same, as it is for equal metadata, and every tensor begins
on 16 bytes, Triton would specialize the arguments to the same binary again: that binary is launched
directly (direct_launch.py), or by the launcher of Triton while a profiler has hooks. A call
with any other tensor lets Triton look the binary up.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from nsa_backend_triton.host.direct_launch import DirectLaunch, direct_launch, has_hooks
from nsa_core.contract import KNOWN_METADATA, SlotCall

# Entries per decorated function: a server whose lengths never repeat must not fill the memory.
MAX_ENTRIES = 4096

_tables: list[dict[Hashable, Any]] = []  # one per decorated function

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def aligned(*tensors: object) -> bool:
    """Return whether every tensor begins on 16 bytes; other objects count as aligned.

    Descriptors of unaligned tensors cannot be created.
    """
    for x in tensors:  # noqa: SIM110  a generator takes twice the time, at every launch
        if isinstance(x, Tensor) and x.data_ptr() % 16:
            return False
    return True


def _compute_keys(function: Any) -> None:
    """Compute the keys of ``function`` in Triton's cache on disk, callees first.

    Up to 3.7, Triton leaves the constants of a callee that has no key yet out of its caller's key.
    A kernel would have another key after other kernels, and the next process would compile it anew
    (github.com/triton-lang/triton/pull/10494).
    """
    if isinstance(function, JITFunction) and function.hash is None:
        for name in function.fn.__code__.co_names:
            _compute_keys(function.fn.__globals__.get(name))
        function.cache_key  # noqa: B018  the property keeps what it computes


class _Thread(threading.local):
    """Whether a CUDA context is known to be current in this thread."""

    attached = False


_thread = _Thread()


def _attach() -> None:
    """Make a CUDA context current in this thread, which tensor maps need.

    A thread that has not called CUDA has none. Neither PyTorch, if the device is already the
    current one, nor Triton, before the launch itself, creates it.
    """
    torch.cuda.set_device(torch.cuda.current_device())
    _thread.attached = True


class _Compiled(NamedTuple):
    """A launch by Triton's launcher, without a look-up of the binary.

    It serves where a DirectLaunch cannot: while a profiler has hooks, and with launchers that it
    does not know.
    """

    run: Callable[..., None]
    after: tuple[Any, ...]  # arguments after the tensors
    stream_of: Callable[[int], int]
    device: int

    def __call__(self, tensors: tuple[Any, ...]) -> None:
        self.run(*tensors, *self.after, stream=self.stream_of(self.device))


class Launch:
    """A kernel, its grid, and its arguments except tensors; call it with the tensors."""

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int],
        *numbers: float | tuple[int, ...],
        **constants: Any,
    ) -> None:
        self._kernel, self._grid, self._numbers, self._constants = kernel, grid, numbers, constants
        self._direct: DirectLaunch | None = None
        self._compiled: _Compiled | None = None

    def __call__(self, *tensors: Any) -> None:
        """Launch on the current device and stream."""
        if not _thread.attached and tensors[0].is_cuda:
            _attach()
        if self._direct is not None and not has_hooks() and self._direct(tensors):
            return
        if self._compiled is not None and aligned(*tensors):
            self._compiled(tensors)
            return
        _compute_keys(self._kernel)
        compiled = self._kernel[self._grid](*tensors, *self._numbers, **self._constants)
        if isinstance(compiled, CompiledKernel) and aligned(*tensors):
            constants = self._kernel.arg_names[len(tensors) + len(self._numbers) :]
            after = (*self._numbers, *(self._constants[name] for name in constants))
            # Triton would look these up at every launch; a binary belongs to one device.
            active, grid = driver.active, (self._grid[0], 1, 1)
            stream_of, device = active.get_current_stream, active.get_current_device()
            self._direct = direct_launch(compiled, grid, tensors, after, stream_of, device)
            self._compiled = _Compiled(compiled[grid], after, stream_of, device)


def uses_cache(x: Tensor) -> bool:
    """Return whether launches on ``x`` are cached: on a GPU, not in the interpreter or a dry run.

    There, tests change kernels and tables between calls.
    """
    return x.is_cuda


def cached_by_metadata(make: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorate ``make`` to run once per metadata of its arguments.

    The first argument is a tensor, or a NamedTuple that begins with one. ``make`` may read shape,
    strides, dtype and device of a tensor, but no address, and must not keep a tensor. Boundaries of
    sequences and calls are not part of the metadata, so ``make`` must not read them either.
    """
    cache: dict[Hashable, Result] = {}
    _tables.append(cache)

    @functools.wraps(make)
    def look_up(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        first = args[0] if isinstance(args[0], Tensor) else args[0][0]  # type: ignore[index]
        if not uses_cache(first):
            return make(*args, **kwargs)
        # A call of _metadata for every argument would take half of this function's time.
        arguments: tuple[Any, ...] = args
        parts = [
            getattr(x, KNOWN_METADATA, None) or (x.shape, x.stride(), x.dtype)
            if type(x) in _TENSOR_TYPES
            else (x if type(x) in _PLAIN_TYPES else _metadata(x))
            for x in arguments
        ]
        key = (first.device, *parts)
        result = cache.get(key)
        if result is None:
            if len(cache) >= MAX_ENTRIES:
                cache.clear()
            result = cache[key] = make(*args, **kwargs)
        return result

    return look_up


class Memo(dict[Hashable, Any]):
    """Results of several functions of the same metadata, by name: one look-up serves all of them.

    Create it in a function decorated with :func:`cached_by_metadata`. It may hold only results that
    follow from the metadata of the arguments of that function.
    """

    def get_or_make(self, name: Hashable, make: Callable[..., Result], *args: Any) -> Result:
        """Return ``make(*args)`` of the first call with this ``name``."""
        result: Result | None = self.get(name)
        if result is None:
            result = self[name] = make(*args)
        return result


def clear() -> None:
    """Drop all cached launches and with them their binaries, for a change of the driver."""
    for cache in _tables:
        cache.clear()


def _tensor(x: Tensor) -> Hashable:
    return x.shape, x.stride(), x.dtype


# Metadata of an argument by its type; arguments of other types are compared by equality.
METADATA: dict[type, Callable[[Any], Hashable]] = {
    Tensor: _tensor,
    SlotCall: lambda x: (x.geometry, x.scale, x.max_seqlen, x.deterministic, x.first_query),
    dict: lambda x: tuple((name, _metadata(value)) for name, value in x.items()),
}


_TENSOR_TYPES = {Tensor, torch.nn.Parameter}
_PLAIN_TYPES = {int, float, bool, str, tuple, type(None)}  # a plain tuple holds plain values


def _metadata(x: Any) -> Hashable:
    read = METADATA.get(type(x))
    if read is not None:
        return read(x)
    if isinstance(x, Tensor):
        return _tensor(x)
    if isinstance(x, tuple) and type(x) is not tuple:
        return tuple(map(_metadata, x))
    plain: Hashable = x
    return plain

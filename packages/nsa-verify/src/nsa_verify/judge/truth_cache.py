"""Cache of truths and verdicts for judging several combinations on the same tensors.

Consecutive combinations differ in one slot. The inputs of the other slots, and often their outputs,
are bit for bit the same, so their truths and verdicts are too. The key is a hash of the bits of all
inputs.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import torch

MAX_BYTES = 1 << 30  # of tensors in cached results; the least recently used result is evicted

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_active: ContextVar[_Cache | None] = ContextVar("truth_cache", default=None)


class _Cache:
    """Results by key, with their sizes in bytes, in the order of their last use."""

    def __init__(self) -> None:
        self._results: OrderedDict[bytes, tuple[Any, int]] = OrderedDict()
        self._size = 0

    def get(self, key: bytes) -> tuple[Any] | None:
        if key not in self._results:
            return None
        self._results.move_to_end(key)
        return (self._results[key][0],)

    def put(self, key: bytes, result: Any) -> None:
        size = sum(x.nbytes for x in _tensors(result))
        self._results[key] = (result, size)
        self._size += size
        while self._size > MAX_BYTES:
            _, (_, freed) = self._results.popitem(last=False)
            self._size -= freed


@contextlib.contextmanager
def caching() -> Iterator[None]:
    """Cache results inside the block, in this context; drop them when the outermost one ends."""
    if _active.get() is not None:
        yield
        return
    token = _active.set(_Cache())
    try:
        yield
    finally:
        _active.reset(token)


def cached(compute: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Return ``compute``, which returns the cached result of a call on the same bits.

    It runs in inference mode, which dispatches the many small operations of a truth faster. Tensors
    among the arguments, also in mappings and sequences, are compared by dtype, shape and bits, and
    other values by their repr.
    """

    @functools.wraps(compute)
    @torch.inference_mode()
    def run(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        cache = _active.get()
        if cache is None:
            return compute(*args, **kwargs)
        digest = hashlib.blake2b()
        _update(digest, [compute.__module__, compute.__qualname__, args, kwargs])
        key = digest.digest()
        if (hit := cache.get(key)) is not None:
            found: _Result = hit[0]
            return found
        result = compute(*args, **kwargs)
        cache.put(key, result)
        return result

    return run


def _update(digest: Any, value: Any) -> None:
    """Add ``value`` to ``digest``."""
    if isinstance(value, torch.Tensor):
        host = value.detach().cpu().contiguous()
        digest.update(f"{host.dtype} {tuple(host.shape)};".encode())
        if host.numel():
            digest.update((ctypes.c_char * host.nbytes).from_address(host.data_ptr()))
    elif isinstance(value, (list, tuple, Mapping)):
        digest.update(f"{len(value)} of;".encode())
        for item in value.items() if isinstance(value, Mapping) else value:
            _update(digest, item)
    else:
        digest.update(f"{value!r};".encode())


def _tensors(tree: Any) -> list[torch.Tensor]:
    """List the tensors inside tuples, mappings and objects with attributes."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif hasattr(tree, "__dict__"):
        tree = vars(tree).values()
    elif not isinstance(tree, (tuple, list)):
        return []
    return [x for child in tree for x in _tensors(child)]

"""Cache of truths and verdicts for judging several combinations on the same tensors.

Consecutive combinations differ in one slot. The inputs of the other slots, and often their outputs,
are bit for bit the same, so their truths and verdicts are too. The key is a hash of the bits of all
inputs.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import torch

MAX_BYTES = 1 << 30  # of tensors in cached results; the least recently used result is evicted

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


@torch.inference_mode()  # dispatches the many small operations of a truth faster
def cached(name: Sequence[Any], inputs: Sequence[Any], compute: Callable[[], _Result]) -> _Result:
    """Return ``compute()``, or the cached result of the same computation on the same bits.

    ``compute`` runs in inference mode.

    Args:
        name: Name and constants of the computation, compared by their repr.
        inputs: All other inputs. Tensors are compared by dtype, shape and bits, other values by
            their repr.
        compute: Computes the result.
    """
    cache = _active.get()
    if cache is None:
        return compute()
    key = _key([*name, *inputs])
    if (hit := cache.get(key)) is not None:
        result: _Result = hit[0]
        return result
    result = compute()
    cache.put(key, result)
    return result


def _key(values: Sequence[Any]) -> bytes:
    digest = hashlib.blake2b()
    for x in values:
        if not isinstance(x, torch.Tensor):
            digest.update(f"{x!r};".encode())
            continue
        host = x.detach().cpu().contiguous()
        digest.update(f"{host.dtype} {tuple(host.shape)};".encode())
        if host.numel():
            digest.update((ctypes.c_char * host.nbytes).from_address(host.data_ptr()))
    return digest.digest()


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

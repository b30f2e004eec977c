"""TMA descriptors: which tensors they can read, and in which tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa_backend_triton.host.constexprs import band

_Sizes: TypeAlias = tuple[list[int], list[int], list[int]]  # shape, strides and tile


def descriptors_fit(packed: bool, *rows: Tensor) -> bool:
    """Return whether TMA descriptors can read the tensors ``rows`` [B, L, H, D].

    They must be aligned to 16 bytes, neither empty nor expanded, and D must be a multiple of its
    band. Packed documents need masked pointers: a tile must not read rows of the next document.
    """
    return not packed and all(
        x.numel()
        and x.data_ptr() % 16 == 0
        and all(n > 0 and n * x.itemsize % 16 == 0 for n in x.stride()[:-1])
        and x.shape[-1] % band(x.shape[-1]) == 0
        for x in rows
    )


class _Descriptor(TensorDescriptor):  # type: ignore[misc]  # triton has no types
    """A descriptor without validation at every launch: descriptors_fit has checked the tensor.

    Its shape, strides and tile are computed when Triton reads them, which is at the first launch;
    see :class:`nsa_backend_triton.host.direct_launch.DirectLaunch`.
    """

    def __init__(self, base: Tensor, sizes: Callable[..., _Sizes], *of: Any) -> None:
        self.base, self._sizes, self._of = base, sizes, of

    def __getattr__(self, name: str) -> Any:
        if name not in ("shape", "strides", "block_shape"):
            raise AttributeError(name)
        self.shape, self.strides, self.block_shape = self._sizes(self.base, *self._of)
        return vars(self)[name]


def key_descriptor(x: Tensor, block: int, length: int | None = None) -> TensorDescriptor:
    """Describe x [B, L, G, D] in tiles of ``block`` rows of one head and one band of columns.

    Reads past the end give zero, and so do reads past the first ``length`` rows.
    """
    return _Descriptor(x, _key_sizes, block, length)


def key_descriptors(
    x: Tensor, y: Tensor, block: int, length: int | None = None
) -> tuple[TensorDescriptor | None, TensorDescriptor | None]:
    """Return :func:`key_descriptor` of ``x`` and of ``y``; None twice for a ``block`` of 0 rows."""
    if not block:
        return None, None
    return key_descriptor(x, block, length), key_descriptor(y, block, length)


def _key_sizes(x: Tensor, block: int, length: int | None) -> _Sizes:
    batch, rows, heads, width = x.shape
    rows = rows if length is None else max(1, length)  # a descriptor cannot be empty
    return [batch, rows, heads, width], list(x.stride()), [1, block, 1, band(width)]


def stats_descriptor(stats: Tensor, length: int, block: int) -> TensorDescriptor:
    """Describe stats [2, B, H, S], S padded to 16 bytes, in runs of ``block`` numbers of one head.

    Reads from ``length`` on give zero.
    """
    return _Descriptor(stats, _stats_sizes, block, length)


def _stats_sizes(stats: Tensor, block: int, length: int) -> _Sizes:
    return [*stats.shape[:-1], length], list(stats.stride()), [1, 1, 1, block]

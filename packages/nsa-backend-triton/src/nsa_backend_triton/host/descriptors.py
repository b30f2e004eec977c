"""TMA descriptors of tensors: which tensors they can read, and in which tiles."""

from __future__ import annotations

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa_backend_triton.host.sequences import band


def descriptors_fit(packed: bool, *rows: Tensor) -> bool:
    """Whether TMA descriptors can read these [B, L, H, D]: aligned, not empty, not expanded, D
    whole bands.

    Packed documents need the pointers' masks: a tile may not read its neighbour's rows.
    """
    return not packed and all(
        x.numel()
        and x.data_ptr() % 16 == 0
        and all(n > 0 and n * x.itemsize % 16 == 0 for n in x.stride()[:-1])
        and x.shape[-1] % band(x.shape[-1]) == 0
        for x in rows
    )


class _Descriptor(TensorDescriptor):  # type: ignore[misc]  # triton has no types
    """A descriptor of what descriptors_fit has seen: not validated once more at every launch."""

    def __post_init__(self) -> None:
        """Nothing is left to check."""


def key_descriptor(x: Tensor, block: int) -> TensorDescriptor:
    """x [B, L, G, D], read in tiles of ``block`` rows of one head, a band of columns at a time;
    zero past its end.
    """
    return _Descriptor(x, list(x.shape), list(x.stride()), [1, block, 1, band(x.shape[3])])


def stats_descriptor(stats: Tensor, length: int, block: int) -> TensorDescriptor:
    """stats [2, B, H, S], S padded to 16 bytes, read in runs of ``block`` numbers of one head; zero
    from length on.
    """
    return _Descriptor(stats, [*stats.shape[:-1], length], list(stats.stride()), [1, 1, 1, block])

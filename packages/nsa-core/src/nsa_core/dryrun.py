"""Counting the bytes a backend's code takes by running it on tensors without data, for
SlotSpec.workspace.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

GRANULE = 512  # bytes: what PyTorch's CUDA allocator rounds a size up to
_SORTED_IN_PLACE = 4096  # rows as long as this are sorted by a kernel that needs no buffer


class PeakBytes(TorchDispatchMode):
    """The most bytes that tensors made inside the block held at one time, as PyTorch's CUDA
    allocator counts them.

    Views have no bytes of their own, and storages of ``given`` are not counted. What PyTorch's
    operators take on CUDA beyond their results is added where it is known; what other libraries
    allocate inside a call is not seen.

    Attributes:
        live: bytes of the storages made inside that are alive.
        peak: the most there ever were.
    """

    def __init__(self, *given: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live: int = 0
        self.peak: int = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in given}

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` and count the storages that it made."""
        given = {
            t.untyped_storage()._cdata for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                key, size = storage._cdata, rounded(storage.nbytes())
                if key not in self._known and key not in given:
                    self._known.add(key)
                    self.live += size
                    weakref.finalize(storage, self._free, key, size)
        self.peak = max(self.peak, self.live + _inside(func, args, kwargs))
        return out

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def rounded(size: int) -> int:
    """``size`` bytes as the allocator hands them out."""
    return -(-size // GRANULE) * GRANULE


def _inside(func: Any, args: Any, kwargs: Any) -> int:
    """Bytes that an operator of PyTorch holds on CUDA beside its result."""
    name = getattr(getattr(func, "overloadpacket", None), "__name__", "")
    if name == "sort":
        values, dim = args[0], (kwargs or {}).get("dim", args[1] if len(args) > 1 else -1)
        if values.shape[dim] <= _SORTED_IN_PLACE:
            return 0
        # A second copy of the values and of their int64 places, and the places it began with.
        return int(values.numel() * (values.element_size() + 16))
    if (
        name == "index_put_"
    ):  # sorts: indices and places, both sorted, and a second buffer of each, int64
        return 6 * 8 * int(args[1][0].numel())
    return 0

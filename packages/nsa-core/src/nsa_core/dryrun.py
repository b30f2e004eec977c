"""Counting the bytes a backend's code takes by running it on tensors without data, for
SlotSpec.workspace.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from nsa_core.contract import Request, SlotCall

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


def slot_inputs(request: Request) -> tuple[Tensor, list[Tensor], SlotCall]:
    """The tensors that ``request`` stands for, on the meta device: for a dry run of a slot.

    A ``batch`` or ``seq_len`` of None counts as 1. Packed: ``batch`` documents of together
    ``seq_len`` tokens, whose boundaries have no values.

    Returns:
        do, the tensors of the slot in the contract's order, and the call.
    """
    geometry = request.geometry
    batch, length = (1 if size is None else size for size in (request.batch, request.seq_len))
    dtype = getattr(torch, request.dtype)
    stats = torch.float64 if dtype == torch.float64 else torch.float32
    lead = (length,) if request.varlen else (batch, length)
    runs = geometry.max_compressed(length) if request.varlen else geometry.num_compressed(length)

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    heads, groups = request.n_heads, request.n_kv_heads
    q, do = (tensor(*lead, heads, width) for width in (request.head_dim, request.v_head_dim))
    keys = (*lead[:-1], runs) if request.slot in ("cmp", "select") else lead
    k, v = (tensor(*keys, groups, width) for width in (request.head_dim, request.v_head_dim))
    tensors = {
        "cmp": [q, k, v],
        "select": [q, k, tensor(*lead[:-1], heads, length, dtype=stats)],
        "sel": [q, k, v, tensor(*lead, groups, geometry.num_selected_blocks, dtype=torch.int32)],
        "win": [q, k, v],
        "combine": [tensor(*lead, heads, 3, dtype=stats), do, do, do],
    }[request.slot]
    cu_seqlens = tensor(batch + 1, dtype=torch.int32) if request.varlen else None
    scale = request.head_dim**-0.5
    return do, tensors, SlotCall(geometry, scale, cu_seqlens, length, request.deterministic)

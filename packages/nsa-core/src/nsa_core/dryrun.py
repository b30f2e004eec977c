"""Dry runs on tensors without data, to compute the workspace bytes of SlotSpec.workspace."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from nsa_core.contract import Request, SlotCall

GRANULE = 512  # bytes; PyTorch's CUDA allocator rounds sizes up to a multiple of it
_SORTED_IN_PLACE = 4096  # rows up to this length are sorted by a kernel without a buffer


class PeakBytes(TorchDispatchMode):
    """Count the peak bytes of tensors created inside the block, as PyTorch's CUDA allocator does.

    Views have no bytes of their own. Storages of ``existing`` tensors are not counted. Buffers that
    PyTorch's operators allocate on CUDA besides their results are added where known (sort and
    index_put_). Memory that other libraries allocate inside a call is not counted.

    Attributes:
        live: bytes of the live storages that were created inside the block.
        peak: maximum of ``live``.
    """

    def __init__(self, *existing: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live: int = 0
        self.peak: int = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in existing}

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` and count the storages that it created."""
        inputs = {
            t.untyped_storage()._cdata for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                key, size = storage._cdata, rounded(storage.nbytes())
                if key not in self._known and key not in inputs:
                    self._known.add(key)
                    self.live += size
                    weakref.finalize(storage, self._free, key, size)
        self.peak = max(self.peak, self.live + _temporary_bytes(func, args, kwargs))
        return out

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def rounded(size: int) -> int:
    """Return ``size`` bytes rounded up as the allocator does."""
    return -(-size // GRANULE) * GRANULE


def _temporary_bytes(func: Any, args: Any, kwargs: Any) -> int:
    """Return the bytes that a PyTorch operator allocates on CUDA besides its result."""
    name = getattr(getattr(func, "overloadpacket", None), "__name__", "")
    if name == "sort":
        values, dim = args[0], (kwargs or {}).get("dim", args[1] if len(args) > 1 else -1)
        if values.shape[dim] <= _SORTED_IN_PLACE:
            return 0
        # A second copy of the values and of their int64 indices, and the initial indices.
        return int(values.numel() * (values.element_size() + 16))
    if name == "index_put_":
        # It sorts int64 indices and positions: inputs, sorted copies and a buffer of each.
        return 6 * 8 * int(args[1][0].numel())
    return 0


def slot_inputs(
    request: Request, device: str | torch.device = "meta"
) -> tuple[Tensor, list[Tensor], SlotCall]:
    """Create uninitialised tensors of ``request``, for a dry run of a slot.

    A ``batch`` or ``seq_len`` of None counts as 1. For a packed request they are the number of
    documents and the total number of queries; the boundaries have no values. The queries of a
    partial request begin after as many tokens as they are themselves.

    Args:
        request: The request.
        device: Device of the tensors; those on "meta" have no data.

    Returns:
        The output gradient do, the tensors of the slot in the contract's order, and the SlotCall.
    """
    geometry = request.geometry
    batch, length = (1 if size is None else size for size in (request.batch, request.seq_len))
    first_query = length if request.partial else 0
    total = first_query + length
    dtype = getattr(torch, request.dtype)
    stats = torch.float64 if dtype == torch.float64 else torch.float32
    sequences = () if request.varlen else (batch,)
    lead = (*sequences, length)
    runs = geometry.max_compressed(total) if request.varlen else geometry.num_compressed(total)

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    heads, groups = request.n_heads, request.n_kv_heads
    q, do = (tensor(*lead, heads, width) for width in (request.head_dim, request.v_head_dim))
    keys = (*sequences, runs if request.slot in ("cmp", "select") else total)
    k, v = (tensor(*keys, groups, width) for width in (request.head_dim, request.v_head_dim))
    tensors = {
        "cmp": [q, k, v],
        "select": [q, k, tensor(*sequences, heads, length, dtype=stats)],
        "sel": [q, k, v, tensor(*lead, groups, geometry.num_selected_blocks, dtype=torch.int32)],
        "win": [q, k, v],
        "combine": [tensor(*lead, heads, 3, dtype=stats), do, do, do],
    }[request.slot]
    cu_seqlens = tensor(batch + 1, dtype=torch.int32) if request.varlen else None
    scale = request.head_dim**-0.5
    call = SlotCall(geometry, scale, cu_seqlens, total, request.deterministic, first_query)
    return do, tensors, call


def call_slot(
    slot: Any, request: Request, do: Tensor, tensors: list[Tensor], call: SlotCall
) -> None:
    """Call forward, and backward if gradients are needed, with the inputs of :func:`slot_inputs`.

    Outputs stay alive during the backward. Results are made contiguous, as nsa_core does.

    Args:
        slot: The module with the functions of ``request.slot``.
        request: The request.
        do: The output gradient.
        tensors: The slot's tensors.
        call: The call.
    """
    backward = request.needs_grad and request.slot != "select"
    if request.slot == "cmp" and not tensors[1].shape[-3]:
        # No query sees a key. nsa_core then creates the results without calling the backend.
        outputs = [do.new_empty(do.shape), do.new_empty(do.shape[:-1], dtype=torch.float32)]
        gradients = [torch.empty_like(x) for x in tensors] if backward else []
    else:
        outputs = _contiguous(slot.forward(*tensors, call=call))
        saved = () if request.slot == "combine" else outputs
        gradients = _contiguous(slot.backward(do, *tensors, *saved, call=call)) if backward else []
    del outputs, gradients


def _contiguous(results: Any) -> list[Tensor]:
    listed = [results] if isinstance(results, Tensor) else results
    return [x.contiguous() for x in listed]

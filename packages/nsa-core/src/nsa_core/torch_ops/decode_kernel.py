"""Kernels of decode forms: call a backend's function and check its results for all backends.

Decode forms are not torch operators. A decode step has no gradient, reads a cache that changes
between steps, and is captured in a CUDA graph instead of traced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nsa_core.contract import BlockTables, DecodeCall
from nsa_core.dtypes import stats_dtype
from nsa_core.torch_ops.autograd import refuse_tangents
from nsa_core.torch_ops.backend_call import TensorSpec, run_backend
from nsa_core.torch_ops.call_wrapper import import_function


@dataclasses.dataclass(frozen=True)
class DecodeKernel:
    """The decode form of one slot, or a fused form (contract.FUSED), of one backend."""

    backend: str
    slot: str
    function: Callable[..., Any]

    def __call__(self, *tensors: Any, call: DecodeCall, **options: Any) -> Any:
        """Run the decode form.

        Args:
            *tensors: Its inputs; :mod:`nsa_core.contract` gives their shapes.
            call: The geometry, the scale and the positions in the cache, of any strides.
            **options: Other keyword arguments of a fused form.

        Raises:
            NSAError: The backend raised or returned a wrong result; the message names it.
            Unsupported: A tensor carries a tangent of forward-mode differentiation.
        """
        q: torch.Tensor = tensors[0]
        refuse_tangents(self.slot, tensors)
        if not call.is_contiguous:
            # Copies at every call: the caller may change the values before the next one.
            call = _contiguous(call)
        if self.slot == "sel":
            tensors = (*tensors[:3], tensors[3].contiguous())
        where, specs = (self.backend, self.slot, "decode"), self._expected(tensors, call)
        options["call"] = call
        results = run_backend(where, self.function, tensors, specs, q.device, options)
        return results[0] if len(results) == 1 else tuple(results)

    def _expected(self, tensors: Sequence[Any], call: DecodeCall) -> list[TensorSpec]:
        """Return the shape and dtype of each result that the contract requires."""
        q = tensors[0]
        if self.slot == "compress":
            return []
        if self.slot == "append":
            return [(q.shape, q.dtype)]
        batch, rows, heads = q.shape[:3]
        if self.slot == "gates":
            return [((batch, rows, len(tensors[1]) // 3, 3), stats_dtype(q.dtype))]
        groups = tensors[2 if self.slot == "step" else 1].shape[-2]
        blocks = ((batch, rows, groups, call.geometry.num_selected_blocks), torch.int32)
        if self.slot == "select":
            return [blocks]
        if self.slot == "step":
            return [((batch, rows, heads, tensors[3].shape[-1]), q.dtype), blocks]
        o = (batch, rows, heads, tensors[2].shape[-1])
        return [(o, q.dtype), ((batch, heads, rows), stats_dtype(q.dtype))]


def _contiguous(call: DecodeCall) -> DecodeCall:
    """Return ``call`` with metadata whose last axis is contiguous."""
    sequences = None if call.sequences is None else call.sequences.contiguous()
    return dataclasses.replace(
        call,
        starts=call.starts.contiguous(),
        lengths=call.lengths.contiguous(),
        tables=BlockTables(*(table.contiguous() for table in call.tables)),
        sequences=sequences,
    )


def decode_kernel(backend: str, slot: str, path: str) -> DecodeKernel:
    """Return the kernel of the decode form that ``path``, "module:function", names.

    Raises:
        ImportError, AttributeError: The function cannot be imported.
    """
    return DecodeKernel(backend, slot, import_function(backend, path))

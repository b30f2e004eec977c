"""The workspace of each slot: its peak memory beyond its inputs, from a dry run.

A dry run calls the slot's own functions with tensors without data. The allocations inside a library
call are modelled on flash-attn 2.8.3 and flash-attn-4 4.0.0b36; flash-attn 2.5 to 2.7 and PyTorch's
copy allocate like 2.8.3. The outputs of the forward stay alive during the backward. A ``seq_len``
of None counts as one token, and a ``batch`` of None as one sequence or document. A partial request
counts as whole sequences.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Sequence

import torch
from torch import Tensor

from nsa_backend_fa2 import flash4, providers
from nsa_backend_fa2.providers import Attention, Gradients
from nsa_core.contract import Request
from nsa_core.dryrun import PeakBytes, call_slot, slot_inputs


def _round_up(count: int, step: int) -> int:
    return -(-count // step) * step


def _kernel_width(width: int) -> int:
    """Return the head width of the kernel that runs heads of ``width``."""
    return _round_up(width, 32 if width <= 128 else 64)


def _multiprocessors() -> int:
    return (
        int(torch.cuda.get_device_properties().multi_processor_count)
        if torch.cuda.is_available()
        else 1
    )


def _splits(blocks: int, columns: int) -> int:
    """Return how many splits of the keys the library computes in parallel.

    This is ``num_splits_heuristic`` of its flash_api.cpp.

    Args:
        blocks: Blocks of 64 query rows, of all heads and sequences together.
        columns: Blocks of keys.
    """
    capacity = 2 * _multiprocessors()
    if blocks >= 0.8 * capacity:
        return 1
    best, efficiency = 0.0, {}
    for splits in range(1, min(128, capacity, columns) + 1):
        if splits > 1 and -(-columns // splits) == -(-columns // (splits - 1)):
            continue
        waves = blocks * splits / capacity
        efficiency[splits] = waves / -(-blocks * splits // capacity)
        best = max(best, efficiency[splits])
    return next((splits for splits, value in efficiency.items() if value >= 0.85 * best), 1)


class AllocationsOnly:
    """A provider that allocates memory like the real one, and computes nothing.

    Args:
        copies_strided: Whether its backward copies do and o if they are not contiguous.
        flash4: Whether FlashAttention-4 runs the causal calls.
    """

    title = "allocations only"

    def __init__(self, copies_strided: bool, flash4: bool) -> None:
        self._copies_strided, self._flash4 = copies_strided, flash4

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, attention: Attention, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Allocate o and lse, and fp32 partial results if the library splits the keys.

        FlashAttention-2 splits them if there are too few blocks of query rows to fill the GPU.
        FlashAttention-4 does not, and writes to ``out``.
        """
        is_flash4 = self._flash4 and attention.causal
        o = torch.empty_like(q) if out is None or not is_flash4 else out
        if attention.packed is not None:
            return o, q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
        batch, rows, heads, width = q.shape
        lse = q.new_empty((batch, heads, rows), dtype=torch.float32)
        columns = -(-k.shape[1] // (256 if width <= 64 else 128 if width <= 128 else 64))
        splits = 1 if is_flash4 else _splits(batch * heads * -(-rows // 64), columns)
        if splits > 1:
            q.new_empty((splits, batch, heads, rows, _kernel_width(width) + 1), dtype=torch.float32)
        return o, lse

    def backward(
        self, tensors: Sequence[Tensor], attention: Attention, out: Tensor | None = None
    ) -> Gradients:
        """Allocate dq, dk and dv, and the buffers of the library.

        The buffers are dq and rowsum(do * o) in fp32, and dk and dv per query head if heads share
        keys. Those of FlashAttention-4 are the LSE too, and dk and dv per kv head in fp32.
        """
        do, q, k, v, o, _ = tensors
        is_flash4 = self._flash4 and attention.causal
        copied = (do, o) if self._copies_strided and not is_flash4 else ()
        buffers = [x.contiguous() for x in copied]
        dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
        dq = q.new_empty(q.shape) if out is None or not is_flash4 else out
        heads, width = q.shape[-2:]
        if attention.packed is None:
            sequences, rows = q.shape[0], q.shape[0] * _round_up(q.shape[1], 128)
        else:
            sequences = attention.packed.cu_q.shape[0] - 1
            rows = q.shape[0] + 128 * sequences  # the library pads each document to 128 rows
        # A deterministic backward has a copy of dq per thread block of a head.
        copies = -(-_multiprocessors() // (sequences * heads)) if attention.deterministic else 1
        dq_width = copies * _kernel_width(width) + 1 + is_flash4
        buffers.append(q.new_empty((rows, heads, dq_width), dtype=torch.float32))
        if heads != k.shape[-2] and is_flash4:
            per_sequence, count = (k.shape[0], 1) if attention.packed else (k.shape[1], sequences)
            shape = (count * _round_up(per_sequence, 128), k.shape[-2], _kernel_width(width))
            buffers += [k.new_empty(shape, dtype=torch.float32) for _ in range(2)]
        elif heads != k.shape[-2]:
            buffers += [x.new_empty((*x.shape[:-2], heads, width)) for x in (k, v)]
        return dq, dk, dv


@functools.lru_cache(maxsize=256)
def _measure(request: Request, copies_strided: bool, flash4: bool) -> int:
    """Return the peak bytes of the slot's functions on meta tensors, with contiguous results."""
    do, tensors, call = slot_inputs(dataclasses.replace(request, partial=False))
    module = importlib.import_module(f"nsa_backend_fa2.{request.slot}")
    with providers.override(AllocationsOnly(copies_strided, flash4)), PeakBytes() as count:
        call_slot(module, request, do, tensors, call)
    return int(count.peak)


def peak(request: Request) -> int:
    """Return the peak bytes of ``request.slot``, backward included if it needs gradients."""
    if 0 in (request.batch, request.seq_len):
        return 0
    # PyTorch's backward copies a noncontiguous o or do.
    copies_strided = isinstance(providers.first(), providers.TorchFlash)
    return _measure(request, copies_strided, flash4.serves(request))


cmp = sel = win = peak

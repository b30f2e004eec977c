"""The workspace of each slot: its peak memory beyond its inputs, from a dry run.

A dry run calls the slot's own functions with tensors without data. nsa_core.dryrun.PeakBytes counts
the outputs, the gradients and the largest step; the outputs of the forward stay alive during the
backward. It does not see the buffers that cuDNN and FlashAttention-2 allocate inside a backward, so
this module adds them.

For packed requests, ``batch`` is the number of documents. The memory of packed cmp depends on their
lengths, so its workspace is an upper bound: that of one document with all tokens.

A partial request states no number of keys. Its workspace is that of whole sequences of ``seq_len``
tokens: too small for ``seq_len`` queries over more keys, and an upper bound if ``seq_len`` counts
the keys.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nsa_backend_sdpa import cudnn
from nsa_backend_sdpa.device import simulated
from nsa_core.contract import Request, SlotCall
from nsa_core.dryrun import PeakBytes, call_slot, slot_inputs


class _WithLibraries(PeakBytes):
    """PeakBytes that also counts the buffers inside a backward of cuDNN or FlashAttention-2."""

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, kinds, args, kwargs)
        size = library_bytes(func.overloadpacket.__name__, args)
        self.peak = max(self.peak, self.live + size)
        return result


def library_bytes(operator: str, args: Sequence[Any]) -> int:
    """Return the bytes that an attention operator of PyTorch holds on CUDA besides its results.

    Args:
        operator: Name of the operator in torch.ops.aten.
        args: Its arguments. The second is q [N, H, L, D], the third k [N, G, L, D].
    """
    if operator == "_scaled_dot_product_flash_attention_backward":
        return _flash_bytes(args[1])
    if operator == "_scaled_dot_product_cudnn_attention_backward":
        return _cudnn_bytes(*args[1:4])
    return 0


def _flash_bytes(q: Tensor) -> int:
    """Return the bytes of dq and rowsum(do * o) in fp32, both padded."""
    batch, heads, length, width = q.shape
    width_step = 32 if width <= 128 else 64
    padded_length = -(-length // 128) * 128
    padded_width = -(-width // width_step) * width_step
    return batch * heads * padded_length * (padded_width + 1) * 4


def _cudnn_bytes(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Return the bytes of dq and rowsum(do * o) in fp32, and of dk and dv per query head.

    cuDNN 9 allocates dk and dv per query head if heads share keys.
    """
    dq_and_delta = q.shape[:-1].numel() * (q.shape[-1] + 1) * 4
    if q.shape[1] == k.shape[1]:
        return dq_and_delta
    heads = q.shape[:2].numel()
    return dq_and_delta + heads * k.shape[2] * (k.shape[-1] + v.shape[-1]) * k.element_size()


@functools.lru_cache(maxsize=256)
def peak(request: Request) -> int:
    """Return the peak bytes of ``request.slot``, backward included if it needs gradients."""
    if not request.seq_len:
        return 0
    do, tensors, call = slot_inputs(dataclasses.replace(request, partial=False))
    with simulated(request.device, request.capability):
        if request.slot != "cmp" or call.cu_seqlens is None:
            return _measure(request, do, tensors, call)
        # A document that is too short for cuDNN may need more memory than a long one.
        lengths = {request.seq_len, min(request.seq_len, cudnn.MIN_TOKENS - 1)}
        return max(_measure(request, do, tensors, _one_document(call, n)) for n in lengths)


def _one_document(call: SlotCall, length: int) -> SlotCall:
    """Return ``call`` for one document of ``length`` tokens, with boundaries that cmp can read."""
    cu_seqlens = torch.tensor([0, length], dtype=torch.int32)
    return SlotCall(call.geometry, call.scale, cu_seqlens, length, call.deterministic)


def _measure(request: Request, do: Tensor, tensors: list[Tensor], call: SlotCall) -> int:
    """Return the peak bytes of one call of the slot."""
    module = importlib.import_module(f"nsa_backend_sdpa.{request.slot}")
    with _WithLibraries() as count:
        call_slot(module, request, do, tensors, call)
    return int(count.peak)


cmp = select = sel = win = combine = peak

"""Peak bytes of a slot beyond its inputs, from a dry run: the slot's own code on tensors without
data.

nsa_core.dryrun.PeakBytes counts outputs, gradients and the largest step. It does not see the
buffers that cuDNN and FlashAttention-2 allocate inside a backward; they are added here. The outputs
of forward stay alive while backward runs. Packed: ``batch`` counts documents; where their lengths
decide (cmp), the answer is an upper bound, for one document of all tokens.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nsa_backend_sdpa import cudnn
from nsa_backend_sdpa.device import described
from nsa_core.contract import Request, SlotCall
from nsa_core.dryrun import PeakBytes, slot_inputs


class _WithLibraries(PeakBytes):
    """Counts the buffers inside a backward of cuDNN or FlashAttention-2 too."""

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, kinds, args, kwargs)
        size = library_bytes(func.overloadpacket.__name__, args)
        self.peak = max(self.peak, self.live + size)
        return result


def library_bytes(operator: str, args: Sequence[Any]) -> int:
    """Bytes that an attention operator of PyTorch holds on CUDA beside its results.

    Args:
        operator: its name in torch.ops.aten.
        args: its arguments, of which the second and third are q [N, H, L, D] and k [N, G, L, D].
    """
    if operator == "_scaled_dot_product_flash_attention_backward":
        return _flash_bytes(args[1])
    if operator == "_scaled_dot_product_cudnn_attention_backward":
        return _cudnn_bytes(*args[1:4])
    return 0


def _flash_bytes(q: Tensor) -> int:
    """dq and rowsum(do * o) in fp32, both padded."""
    batch, heads, length, width = q.shape
    step = 32 if width <= 128 else 64
    return batch * heads * (-(-length // 128) * 128) * (-(-width // step) * step + 1) * 4


def _cudnn_bytes(q: Tensor, k: Tensor, v: Tensor) -> int:
    """dq and rowsum(do * o) in fp32; where heads share keys, dk and dv of each (cuDNN 9)."""
    rows = q.shape[:-1].numel() * (q.shape[-1] + 1) * 4
    if q.shape[1] == k.shape[1]:
        return rows
    heads = q.shape[:2].numel()
    return rows + heads * k.shape[2] * (k.shape[-1] + v.shape[-1]) * k.element_size()


@functools.lru_cache(maxsize=256)
def peak(request: Request) -> int:
    """Bytes that ``request.slot`` holds at most, backward included where it needs gradients."""
    if not request.seq_len:
        return 0
    do, tensors, call = slot_inputs(request)
    with described(request.device, request.capability):
        if request.slot != "cmp" or call.cu_seqlens is None:
            return _measure(request, do, tensors, call)
        # Of packed documents, a short one may take the route with more bytes.
        longest = {request.seq_len, min(request.seq_len, cudnn.LEAST_TOKENS - 1)}
        return max(_measure(request, do, tensors, _one_document(call, n)) for n in longest)


def _one_document(call: SlotCall, length: int) -> SlotCall:
    """``call`` for one document of ``length`` tokens; cmp reads the boundaries on the host."""
    cu_seqlens = torch.tensor([0, length], dtype=torch.int32)
    return SlotCall(call.geometry, call.scale, cu_seqlens, length, call.deterministic)


def _measure(request: Request, do: Tensor, tensors: list[Tensor], call: SlotCall) -> int:
    module = importlib.import_module(f"nsa_backend_sdpa.{request.slot}")
    backward = request.needs_grad and request.slot != "select"
    with _WithLibraries() as count:
        if request.slot == "cmp" and not tensors[1].shape[-3]:
            # No query sees a key: nsa_core makes the results without a backend.
            outputs = [do.new_empty(do.shape), do.new_empty(do.shape[:-1], dtype=torch.float32)]
            gradients = [x.new_empty(x.shape) for x in tensors] if backward else []
            del outputs, gradients
            return int(count.peak)
        outputs = module.forward(*tensors, call=call)
        if backward:
            saved = () if request.slot == "combine" else outputs
            gradients = module.backward(do, *tensors, *saved, call=call)
            del gradients
        del outputs
    return int(count.peak)


cmp = select = sel = win = combine = peak

"""Peak bytes of a slot beyond its inputs, from a dry run: the slot's own code on tensors without
data.

Only what the library allocates inside a call is written down here, as in flash-attn 2.8.3 (2.5 to
2.7 and PyTorch's copy allocate alike). The outputs of forward stay alive while backward runs. A
``seq_len`` of None counts as one token, a ``batch`` of None as one sequence or document.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib

import torch
from torch import Tensor

from nsa_backend_fa2 import providers
from nsa_backend_fa2.providers import Attention
from nsa_backend_fa2.sel import keys_per_token, tokens_at_once
from nsa_core.contract import Request
from nsa_core.dryrun import PeakBytes, slot_inputs

# chunks of sel in a dry run; beyond them every chunk costs the same, the rest grows with the tokens
_EXACT_CHUNKS = 4


def _up(count: int, step: int) -> int:
    return -(-count // step) * step


def _wide(width: int) -> int:
    """Head width of the kernel that serves ``width``."""
    return _up(width, 32 if width <= 128 else 64)


def _multiprocessors() -> int:
    return (
        int(torch.cuda.get_device_properties().multi_processor_count)
        if torch.cuda.is_available()
        else 1
    )


def _splits(blocks: int, columns: int) -> int:
    """How many parts the library cuts the keys into: ``num_splits_heuristic`` of its flash_api.cpp.

    Args:
        blocks: blocks of 64 query rows, of all heads and sequences.
        columns: blocks of keys.
    """
    places = 2 * _multiprocessors()
    if blocks >= 0.8 * places:
        return 1
    best, efficiency = 0.0, {}
    for splits in range(1, min(128, places, columns) + 1):
        if splits > 1 and -(-columns // splits) == -(-columns // (splits - 1)):
            continue
        waves = blocks * splits / places
        efficiency[splits] = waves / -(-blocks * splits // places)
        best = max(best, efficiency[splits])
    return next((splits for splits, value in efficiency.items() if value >= 0.85 * best), 1)


class Hollow:
    """A provider that allocates as the real one does and computes nothing."""

    title = "allocations only"

    def __init__(self, copies_strided: bool) -> None:
        self._copies_strided = copies_strided

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, attention: Attention
    ) -> tuple[Tensor, Tensor]:
        """o and lse; inside, where few blocks of rows would leave the GPU idle, partial ones in
        fp32.
        """
        o = torch.empty_like(q)
        if attention.packed is not None:
            return o, q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
        batch, rows, heads, width = q.shape
        lse = q.new_empty((batch, heads, rows), dtype=torch.float32)
        columns = -(-k.shape[1] // (256 if width <= 64 else 128 if width <= 128 else 64))
        splits = _splits(batch * heads * -(-rows // 64), columns)
        if splits > 1:
            q.new_empty((splits, batch, heads, rows, _wide(width) + 1), dtype=torch.float32)
        return o, lse

    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        attention: Attention,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv; inside, dq in fp32, the rows' sums, and dk and dv per query head before the
        group is summed.
        """
        inside = [x.contiguous() for x in (do, o)] if self._copies_strided else []
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        heads, width = q.shape[-2:]
        if attention.packed is None:
            sequences, rows = q.shape[0], q.shape[0] * _up(q.shape[1], 128)
        else:
            sequences = attention.packed.cu_q.shape[0] - 1
            rows = q.shape[0] + 128 * sequences  # each document has rows of its own
        # One dq per thread block of a head, where the order of adding must not matter.
        copies = -(-_multiprocessors() // (sequences * heads)) if attention.deterministic else 1
        inside.append(q.new_empty((rows, heads, copies * _wide(width) + 1), dtype=torch.float32))
        if heads != k.shape[-2]:
            inside += [x.new_empty((*x.shape[:-2], heads, width)) for x in (k, v)]
        return dq, dk, dv


@functools.lru_cache(maxsize=256)
def _measure(request: Request, copies_strided: bool) -> int:
    """Peak bytes of the slot's own functions on meta tensors, and of making their results
    contiguous.
    """
    do, tensors, call = slot_inputs(request)
    module = importlib.import_module(f"nsa_backend_fa2.{request.slot}")
    count = PeakBytes()
    with providers.override(Hollow(copies_strided)), count:
        if request.slot == "cmp" and not tensors[1].shape[-3]:
            # No query sees a key: nsa_core makes the results without a backend.
            outputs = [do.new_empty(do.shape), do.new_empty(do.shape[:-1], dtype=torch.float32)]
            gradients = [torch.empty_like(x) for x in tensors] if request.needs_grad else []
            del outputs, gradients
            return int(count.peak)
        o, lse = _contiguous(module.forward(*tensors, call=call))
        if request.needs_grad:
            _contiguous(module.backward(do, *tensors, o, lse, call=call))
    return int(count.peak)


def _contiguous(results: tuple[Tensor, ...]) -> list[Tensor]:
    """As nsa_core hands them on."""
    return [x.contiguous() for x in results]


def _sizes(request: Request) -> tuple[Request, int]:
    """The request with every size, and its tokens in all; a size of None becomes 1."""
    batch, length = (1 if size is None else size for size in (request.batch, request.seq_len))
    tokens = length if request.varlen and batch else batch * length
    return dataclasses.replace(request, batch=batch, seq_len=length), tokens


def _copies_strided() -> bool:
    """Whether the library's backward copies an o or do that is not contiguous: PyTorch's does."""
    return isinstance(providers.first(), providers.TorchFlash)


def win(request: Request) -> int:
    """Bytes of the slot win."""
    request, tokens = _sizes(request)
    return _measure(request, _copies_strided()) if tokens else 0


cmp = win


def sel(request: Request) -> int:
    """Bytes of the slot sel: exact for few chunks of tokens, linear in the tokens beyond them."""
    request, tokens = _sizes(request)
    if tokens == 0:
        return 0
    copies_strided, geometry = _copies_strided(), request.geometry
    keys = keys_per_token(geometry, geometry.num_selected_blocks, request.seq_len or 0)
    chunk = tokens_at_once(request.n_kv_heads, keys)
    if tokens <= _EXACT_CHUNKS * chunk:
        return _measure(request, copies_strided)
    shortest = geometry.num_selected_blocks * geometry.select_block_size
    few = _up(max(shortest, _EXACT_CHUNKS // 2 * chunk), chunk)
    less, more = (
        _measure(dataclasses.replace(request, batch=1, seq_len=length), copies_strided)
        for length in (few, few + 2 * chunk)
    )
    return more + (more - less) * (tokens - few - 2 * chunk) // (2 * chunk)

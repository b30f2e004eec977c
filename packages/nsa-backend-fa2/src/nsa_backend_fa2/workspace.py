"""Peak bytes of forward, or of forward and backward, beyond the inputs, what the library allocates
inside included.

Not a formula beside the code but the code itself, run on tensors without storage while their bytes
are counted; only what a library allocates inside a call is written down here, as in flash-attn
2.8.3 (2.5 to 2.7 and PyTorch's copy allocate alike). Backward counts o and lse, which live until
then. A Request that does not say its size counts as one token, one that does not say how many
documents are packed as one document.
"""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from nsa_backend_fa2 import providers
from nsa_backend_fa2.providers import Attention
from nsa_backend_fa2.sel import keys_per_token, tokens_at_once
from nsa_core.contract import Request, SlotCall
from nsa_core.dryrun import PeakBytes

# of sel; beyond them every chunk costs the same, and the rest grows with the tokens
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
    """A provider that allocates as ``real`` does and computes nothing."""

    title = "allocations only"

    def __init__(self, real: providers.Provider | None) -> None:
        # PyTorch's backward copies an o or do that is not
        self._contiguous = isinstance(real, providers.TorchFlash)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: Attention) -> tuple[Tensor, Tensor]:
        """o and lse; inside, where few blocks of rows would leave the GPU idle, partial ones in
        fp32.
        """
        o = torch.empty_like(q)
        if how.packed is not None:
            return o, q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
        batch, rows, heads, width = q.shape
        lse = q.new_empty((batch, heads, rows), dtype=torch.float32)
        columns = -(-k.shape[1] // (256 if width <= 64 else 128 if width <= 128 else 64))
        splits = _splits(batch * heads * -(-rows // 64), columns)
        if splits > 1:
            q.new_empty((splits, batch, heads, rows, _wide(width) + 1), dtype=torch.float32)
        return o, lse

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, how: Attention
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv; inside, dq in fp32, the rows' sums, and dk and dv per query head before the
        group is summed.
        """
        inside = [x.contiguous() for x in (do, o)] if self._contiguous else []
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        heads, width = q.shape[-2:]
        if how.packed is None:
            sequences, rows = q.shape[0], q.shape[0] * _up(q.shape[1], 128)
        else:
            sequences = how.packed.cu_q.shape[0] - 1
            rows = q.shape[0] + 128 * sequences  # each document has rows of its own
        # One dq per thread block of a head, where the order of adding must not matter.
        copies = -(-_multiprocessors() // (sequences * heads)) if how.deterministic else 1
        inside.append(q.new_empty((rows, heads, copies * _wide(width) + 1), dtype=torch.float32))
        if heads != k.shape[-2]:
            inside += [x.new_empty((*x.shape[:-2], heads, width)) for x in (k, v)]
        return dq, dk, dv


def _measure(request: Request, batch: int, length: int) -> int:
    """Peak bytes of the slot's own functions on meta tensors, and of making their results
    contiguous.
    """
    geometry, slot = request.geometry, request.slot
    rows = geometry.max_compressed(length) if request.varlen else geometry.num_compressed(length)
    lead = (length,) if request.varlen else (batch, length)
    keys = (*lead[:-1], rows if slot == "cmp" else length)

    def empty(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    q, do = (
        empty((*lead, request.n_heads, width)) for width in (request.head_dim, request.v_head_dim)
    )
    inputs = [
        q,
        *(
            empty((*keys, request.n_kv_heads, width))
            for width in (request.head_dim, request.v_head_dim)
        ),
    ]
    if slot == "sel":
        inputs.append(empty((*lead, request.n_kv_heads, geometry.num_selected_blocks), torch.int32))
    cu = empty((batch + 1,), torch.int32) if request.varlen else None
    call = SlotCall(geometry, request.head_dim**-0.5, cu, length, request.deterministic)
    module = importlib.import_module(f"nsa_backend_fa2.{slot}")
    count = PeakBytes()
    with providers.instead(Hollow(providers.first())), count:
        if rows == 0 and slot == "cmp":  # nsa_core answers without the backend
            kept = [
                empty((*lead, request.n_heads, request.v_head_dim)),
                empty((*lead, request.n_heads), torch.float32),
            ]
            kept += [torch.empty_like(x) for x in inputs] if request.needs_grad else []
            return count.peak
        o, lse = _contiguous(module.forward(*inputs, call=call))
        if request.needs_grad:
            _contiguous(module.backward(do, *inputs, o, lse, call=call))
    return count.peak


def _contiguous(results: tuple[Tensor, ...]) -> list[Tensor]:
    """As nsa_core hands them on."""
    return [x.contiguous() for x in results]


def _sizes(request: Request) -> tuple[int, int, int]:
    """Sequences (documents when packed), the tokens of one (of all when packed), and tokens in
    all.
    """
    batch, length = (1 if size is None else size for size in (request.batch, request.seq_len))
    return batch, length, length if request.varlen and batch else batch * length


def win(request: Request) -> int:
    """Bytes of the slot win."""
    batch, length, tokens = _sizes(request)
    return _measure(request, batch, length) if tokens else 0


cmp = win


def sel(request: Request) -> int:
    """Bytes of the slot sel: exact for few chunks of tokens, continued in a straight line from
    there.
    """
    batch, length, tokens = _sizes(request)
    if tokens == 0:
        return 0
    keys = keys_per_token(request.geometry, request.geometry.num_selected_blocks, length)
    chunk = tokens_at_once(request.n_kv_heads, keys)
    if tokens <= _EXACT_CHUNKS * chunk:
        return _measure(request, batch, length)
    shortest = request.geometry.num_selected_blocks * request.geometry.select_block_size
    few = _up(max(shortest, _EXACT_CHUNKS // 2 * chunk), chunk)
    less, more = (_measure(request, 1, few + extra) for extra in (0, 2 * chunk))
    return more + (more - less) * (tokens - few - 2 * chunk) // (2 * chunk)

"""The slot sel by gathering: the selected keys of each token and group form one varlen document.

The h heads of a group are the query rows of its document, so that the keys are loaded once per
group. Tokens are split into chunks of a fixed number of gathered keys, so that memory beyond the
inputs and outputs does not grow with S.

The slot reads n * l' keys per token and group from memory three times over, which is slow. It
serves as an independent check of faster kernels, and runs where no faster kernel is available.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_backend_fa2.padding import attend, attend_backward, safe_boundaries
from nsa_backend_fa2.providers import Attention, Packed
from nsa_core.contract import SlotCall
from nsa_core.flash import MAX_BATCH
from nsa_core.layout import BlockGeometry
from nsa_core.packing import token_positions

KEYS_PER_CHUNK = 2**19  # gathered keys of a chunk


def keys_per_token(geometry: BlockGeometry, blocks: int, longest: int) -> int:
    """Return the most keys that ``blocks`` blocks of a document of ``longest`` tokens can hold."""
    return min(blocks, geometry.num_select_blocks(longest)) * geometry.select_block_size


def tokens_per_chunk(groups: int, keys: int) -> int:
    """Return the number of tokens of a chunk, for ``keys`` keys per token and group."""
    return max(1, min(KEYS_PER_CHUNK // keys, MAX_BATCH) // groups)


class Chunk(NamedTuple):
    """A chunk of tokens, and the indices of their selected keys.

    Attributes:
        first: First token, with batch and sequence flattened.
        last: End of the tokens, exclusive.
        key: int64 [N*K], flat index (token * G + group) of each gathered key. Entries without a key
            have an index beyond all keys.
        cu: int32 [N + 1], first gathered key of each token and group.
        longest: Upper bound of the keys of one token and group, K.
    """

    first: int
    last: int
    key: Tensor
    cu: Tensor
    longest: int


def _chunks(q: Tensor, k: Tensor, blocks: Tensor, call: SlotCall) -> Iterator[Chunk]:
    """Split the tokens of q [B, S, ...] into chunks; packed tensors have B = 1."""
    (batch, length), (key_rows, groups) = q.shape[:2], k.shape[1:3]
    end = call.first_query + length
    bound = end if call.cu_seqlens is None else min(call.max_seqlen, end)
    keys = keys_per_token(call.geometry, blocks.shape[-1], bound)
    step = tokens_per_chunk(groups, keys)
    flat_blocks = blocks.reshape(batch * length, groups, -1)
    if call.cu_seqlens is None:
        rows = torch.arange(batch * length, device=q.device)
        position = rows % length + call.first_query
        start = rows // length * key_rows
    else:
        bounds = safe_boundaries(call.cu_seqlens, end)
        positions = token_positions(bounds, length, call.first_query)
        position, start = positions.position, positions.start
    total, numbers = batch * length, range(-(-batch * length // step))
    for number in _peak_chunks(numbers) if q.is_meta else numbers:
        first, last = number * step, min((number + 1) * step, total)
        yield _chunk(
            first,
            last,
            flat_blocks[first:last],
            position[first:last],
            start[first:last],
            keys,
            call.geometry,
        )


def _peak_chunks(numbers: range) -> Iterable[int]:
    """Return two chunks from each end for a dry run, which reach its peak of memory.

    The others allocate the same. The second begins while results of the first exist, and the last
    one is shorter.
    """
    return dict.fromkeys([*numbers[:2], *numbers[-2:]])


def _chunk(
    first: int,
    last: int,
    blocks: Tensor,  # [N, G, n] any order, duplicates, -1, out of range
    position: Tensor,  # [N] in its document
    start: Tensor,  # [N] flat index of the document's first token
    keys: int,
    geometry: BlockGeometry,
) -> Chunk:
    """Compute the key indices of the tokens ``first .. last - 1``."""
    size, groups = geometry.select_block_size, blocks.shape[1]
    current = (position // size)[:, None, None]
    no_block = torch.iinfo(torch.int64).max
    selected = blocks.long()
    selected = selected.masked_fill((selected < 0) | (selected > current), no_block).sort(-1).values
    repeated = (selected[..., 1:] == selected[..., :-1]) & (selected[..., 1:] != no_block)
    selected[..., 1:].masked_fill_(repeated, no_block)
    # Ascending, with no_block at the end. Every block except the query's own, the last one, is
    # visible as a whole.
    selected = selected.sort(-1).values
    count = (selected != no_block).sum(-1) * size
    count -= (selected == current).any(-1) * (size - 1 - position % size)[:, None]
    count.clamp_(max=keys)  # keeps indices in bounds if the caller's max_seqlen is too small
    cu = torch.nn.functional.pad(count.flatten().cumsum(0), (1, 0))
    entry = torch.arange(count.numel() * keys, device=blocks.device)
    document = torch.searchsorted(cu[1:-1].contiguous(), entry, right=True)
    offset = entry - cu[document]
    used = offset < count.flatten()[document]
    offset.clamp_(max=keys - 1)
    block = selected.flatten(0, 1)[document, offset // size]
    token = start[document // groups] + block.masked_fill(~used, 0) * size + offset % size
    key = token * groups + document % groups
    return Chunk(first, last, key.masked_fill_(~used, no_block), cu.int(), keys)


def _rows(
    x: Tensor,  # [B*S, heads, D]
    chunk: Chunk,
) -> Tensor:  # [N*G*h, 1, D]
    """Return the chunk's query rows, one head each."""
    return x[chunk.first : chunk.last].reshape(-1, 1, x.shape[-1])


def _gather(
    x: Tensor,  # [B, N, G, D], any strides
    key: Tensor,
) -> Tensor:  # [N*K, 1, D]
    batch, length, groups, _ = x.shape
    valid_key = key.clamp(max=batch * length * groups - 1)
    token = valid_key // groups
    return x[token // length, token % length, valid_key % groups].unsqueeze(1)


def _attention(chunk: Chunk, heads: int, call: SlotCall) -> Attention:
    count = chunk.cu.shape[0] - 1
    rows = torch.arange(0, (count + 1) * heads, heads, dtype=torch.int32, device=chunk.cu.device)
    packed = Packed(rows, chunk.cu, heads, chunk.longest)
    return Attention(call.scale, causal=False, packed=packed, deterministic=call.deterministic)


def _batched(call: SlotCall, *tensors: Tensor) -> list[Tensor]:
    """Add a batch axis of 1 to packed tensors."""
    return list(tensors) if call.cu_seqlens is None else [x.unsqueeze(0) for x in tensors]


def forward(
    q: Tensor,  # [B, S, Hq, Dk], packed [T, Hq, Dk]
    k: Tensor,  # [B, S, G, Dk]
    v: Tensor,  # [B, S, G, Dv]
    blocks: Tensor,  # [B, S, G, n]
    *,
    call: SlotCall,
) -> tuple[Tensor, Tensor]:
    """Return o [B, S, Hq, Dv] and lse [B, Hq, S] (packed [T, Hq, Dv] and [Hq, T]).

    Rows without a selected block have o = 0 and lse = -inf.
    """
    shape, (q, k, v, blocks) = q.shape[:-1], _batched(call, q, k, v, blocks)
    batch, length, heads, _ = q.shape
    per_group, flat_q = heads // k.shape[2], q.flatten(0, 1)
    o = q.new_empty((batch * length, heads, v.shape[-1]))
    lse = torch.empty((batch * length, heads), dtype=torch.float32, device=q.device)
    for chunk in _chunks(q, k, blocks, call):
        tokens = slice(chunk.first, chunk.last)
        chunk_o, chunk_lse = attend(
            _rows(flat_q, chunk),
            _gather(k, chunk.key),
            _gather(v, chunk.key),
            _attention(chunk, per_group, call),
        )
        blank = (chunk.cu.diff() == 0).repeat_interleave(per_group).view(-1, heads)
        o[tokens] = chunk_o.view(-1, heads, v.shape[-1]).masked_fill(blank.unsqueeze(-1), 0)
        lse[tokens] = chunk_lse.view(-1, heads).masked_fill(blank, -torch.inf)
    heads_first = lse.view(batch, length, heads).transpose(1, 2)
    return o.view(*shape, -1), heads_first if call.cu_seqlens is None else heads_first[0]


def backward(
    do: Tensor,  # [B, S, Hq, Dv]
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    o: Tensor,
    lse: Tensor,
    *,
    call: SlotCall,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv, shaped like q, k and v; dk and dv are summed in fp32."""
    shapes = [x.shape for x in (q, k, v)]
    do, q, k, v, blocks, o, lse = _batched(call, do, q, k, v, blocks, o, lse)
    heads, (batch, key_rows, groups, _) = q.shape[2], k.shape
    flat_do, flat_q, flat_o, flat_lse = (
        x.flatten(0, 1) for x in (do, q, o, lse.transpose(1, 2).unsqueeze(-1))
    )
    dq = torch.empty(flat_q.shape, dtype=q.dtype, device=q.device)
    # The extra last row receives the undefined gradients of entries without a key.
    sums = [
        torch.zeros((batch * key_rows * groups + 1, x.shape[-1]), dtype=lse.dtype, device=q.device)
        for x in (k, v)
    ]
    for chunk in _chunks(q, k, blocks, call):
        do_rows, q_rows, o_rows, lse_rows = (
            _rows(x, chunk) for x in (flat_do, flat_q, flat_o, flat_lse)
        )
        attention = _attention(chunk, heads // groups, call)
        gathered = [_gather(x, chunk.key) for x in (k, v)]
        tensors = [do_rows, q_rows, *gathered, o_rows, lse_rows.view(1, -1)]
        grads = attend_backward(tensors, attention)
        del gathered, tensors
        blank = (chunk.cu.diff() == 0).repeat_interleave(heads // groups).view(-1, heads, 1)
        dq[chunk.first : chunk.last] = (
            grads[0].reshape(-1, heads, q.shape[-1]).masked_fill(blank, 0)
        )
        target = chunk.key.clamp(max=batch * key_rows * groups)
        for total, grad in zip(sums, grads[1:]):
            _add(total, target, grad.squeeze(1), call.deterministic)
    dk, dv = (total[:-1].to(q.dtype) for total in sums)
    return dq.view(shapes[0]), dk.view(shapes[1]), dv.view(shapes[2])


def _add(total: Tensor, index: Tensor, rows: Tensor, deterministic: bool) -> None:
    """Add ``rows`` to ``total`` at ``index``, in a fixed order if ``deterministic``."""
    rows = rows.to(total.dtype)
    if deterministic:
        # index_put_ sorts the indices; index_add_ uses atomics on CUDA.
        total.index_put_((index,), rows, accumulate=True)
    else:
        total.index_add_(0, index, rows)

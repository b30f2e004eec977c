"""The (token, block) pairs of a call sorted by block: what a kernel reads that holds a block and walks its tokens.

A bucket is one selection block of one sequence and kv head. Dense: bucket (b*G + g)*NB + j. Packed: head g owns
T // l' + n_docs buckets, document i those from cu[i] // l' + i on (as tile.place cuts tiles). A pair counts once, and
only if its block is a candidate (0 <= j <= t // l'); the rest is sorted behind the last bucket and never read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_backend_triton import tile
from nsa_backend_triton.launch import Sequences
from nsa_core.layout import BlockGeometry

TOKENS_PER_PROGRAM = 32


class PairLists(NamedTuple):
    """Pairs sorted by bucket; inside a bucket tokens ascend.

    Attributes:
        tokens: int32 [P] row of the pair's token, local to its sequence; P = B*S*G*n, packed T*G*n.
        slots: int32 [P] the pair's place 0..n-1 in blocks[token].
        offsets: int32 [n_buckets + 1] first pair of each bucket; the last is how many pairs count.
    """

    tokens: Tensor
    slots: Tensor
    offsets: Tensor


def buckets_per_head(seqs: Sequences, geometry: BlockGeometry) -> int:
    """Buckets of one kv head: dense of one batch entry, packed of all documents."""
    per_head = seqs.tiles(geometry.select_block_size)
    return per_head if seqs.packed else per_head // seqs.n


def build(
    blocks: Tensor,
    seqs: Sequences,
    geometry: BlockGeometry,
    *,
    kept: Tensor | None = None,
    rows: tuple[int, int] | None = None,
) -> PairLists:
    """Sort the pairs of ``blocks`` int32 or int64 [B, S, G, n] (packed [T, G, n]) by bucket, on the device.

    ``kept`` int8 [..., G, n], contiguous: 1 for the pairs that count, which are valid; without it every valid one.
    ``rows``: only those of (first, count) rows of all sequences after each other; P is of these alone.
    Bound by the sort (two radix passes over int16 keys below 2^15 buckets, else four).
    """
    groups, n = blocks.shape[-2:]
    per_head = buckets_per_head(seqs, geometry)
    n_buckets = per_head * groups * (1 if seqs.packed else seqs.n)
    dtype = torch.int16 if n_buckets < 2**15 else torch.int32
    first, count = rows or (0, blocks.numel() // (groups * n))
    # int32 for the kernel, which is then one binary; int16 for the sort, where it does.
    keys = torch.full((count * groups * n,), n_buckets, dtype=torch.int32, device=blocks.device)
    local = torch.zeros(count, dtype=torch.int32, device=blocks.device)
    row_stride = blocks.stride(-3)
    sel_keys_kernel[(seqs.tiles(TOKENS_PER_PROGRAM) * groups,)](
        blocks, kept if kept is not None else blocks, keys, local, seqs.cu, seqs.n, seqs.seq_len, first, count,
        0 if seqs.packed else blocks.stride(0), row_stride, blocks.stride(-2), per_head, groups,
        N=n, NP=triton.next_power_of_2(n), L=geometry.select_block_size, TILE=TOKENS_PER_PROGRAM,
        VARLEN=seqs.packed, KEPT=kept is not None, num_warps=4,
    )  # fmt: skip
    ordered, pairs = torch.sort(keys.to(dtype), stable=True)
    edges = torch.arange(n_buckets + 1, device=blocks.device, dtype=dtype)
    offsets = torch.searchsorted(ordered, edges, out_int32=True)
    tokens, slots = (torch.empty(keys.shape, dtype=torch.int32, device=blocks.device) for _ in range(2))
    sel_pairs_kernel[(triton.cdiv(len(keys), 1024),)](
        pairs, local, tokens, slots, len(keys), groups, N=n, SIZE=1024, num_warps=4
    )
    return PairLists(tokens, slots, offsets)


@triton.jit
def candidates(BLOCKS, row, length, N: tl.constexpr, NP: tl.constexpr, L: tl.constexpr, TILE: tl.constexpr, stride_t):
    """Blocks [TILE, NP] of the rows from ``row`` on, -1 where a place holds none, no candidate, or one seen before.

    BLOCKS points at the sequence's and head's first row. A value is compared before it is narrowed to int32.
    """
    t = row + tl.arange(0, TILE)
    place = tl.arange(0, NP)
    at = BLOCKS + t.to(tl.int64)[:, None] * stride_t
    inside = (t < length)[:, None]
    block = tl.load(at + place[None, :], mask=inside & (place < N)[None, :], other=-1)
    seen = (block < 0) | (block > (t // L)[:, None])
    for i in range(N):
        earlier = tl.load(at + i, mask=inside, other=-1)
        seen |= (block == earlier) & (place > i)[None, :]
    return tl.where(seen, -1, block).to(tl.int32)


@triton.jit(do_not_specialize=["n_seqs", "seq_len", "first_row", "count", "stride_b", "per_head"])
def sel_keys_kernel(
    BLOCKS, LEFT, KEYS, LOCAL, CU, n_seqs, seq_len, first_row, count, stride_b, stride_t, stride_g, per_head, groups,
    N: tl.constexpr, NP: tl.constexpr, L: tl.constexpr, TILE: tl.constexpr, VARLEN: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """The bucket of every pair, and the local row of every token.

    A program: TILE tokens of one kv head, [TILE, NP] in registers; N + 1 loads of TILE rows from L1, N compares of
    the tile. Bytes: blocks read and keys written once. Bound by memory.
    """
    program = tl.program_id(0)
    group = program % groups
    seq, start, length, row = tile.place(program // groups, CU, n_seqs, seq_len, TILE, VARLEN)
    first = start.to(tl.int64)
    base = BLOCKS + seq.to(tl.int64) * stride_b + first * stride_t + group * stride_g
    t = row + tl.arange(0, TILE)
    place = tl.arange(0, NP)
    if VARLEN:
        bucket = group * per_head + start // L + seq
        flat = first + t
    else:
        bucket = (seq * groups + group) * per_head
        flat = seq.to(tl.int64) * seq_len + t
    inside = (t < length) & (flat >= first_row) & (flat < first_row + count)
    if KEPT:
        valid = inside[:, None] & (place < N)[None, :]
        counts = tl.load(LEFT + (flat[:, None] * groups + group) * N + place[None, :], mask=valid, other=0) != 0
        # Only what counts is a candidate: a block out of range would overflow the sum below.
        block = tl.load(base + t.to(tl.int64)[:, None] * stride_t + place[None, :], mask=counts, other=0).to(tl.int32)
    else:
        block = candidates(base, row, length, N, NP, L, TILE, stride_t)
        counts = inside[:, None] & (block >= 0)
    into = KEYS + ((flat - first_row)[:, None] * groups + group) * N + place[None, :]
    tl.store(into, (bucket + block).to(KEYS.dtype.element_ty), mask=counts)
    tl.store(LOCAL + flat - first_row, t, mask=inside & (group == 0))


@triton.jit(do_not_specialize=["count"])
def sel_pairs_kernel(PAIRS, LOCAL, TOKENS, SLOTS, count, groups, N: tl.constexpr, SIZE: tl.constexpr):
    """Token and place of each sorted pair. SIZE pairs a program; 8 bytes read, 4 gathered, 8 written a pair."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < count
    pair = tl.load(PAIRS + at, mask=inside, other=0)
    tl.store(TOKENS + at, tl.load(LOCAL + pair // (groups * N), mask=inside, other=0), mask=inside)
    tl.store(SLOTS + at, (pair % N).to(tl.int32), mask=inside)

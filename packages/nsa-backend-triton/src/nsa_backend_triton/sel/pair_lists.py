"""The (token, block) pairs of a call sorted by block: what a kernel reads that holds a block and
walks its tokens.

A bucket is one selection block of one sequence and kv head. Dense: bucket (b*G + g)*NB + j. Packed:
head g owns T // l' + n_docs buckets, document i those from cu[i] // l' + i on (as rows.place cuts
tiles). A pair counts once, and only if its block is a candidate (0 <= j <= t // l'); the rest is
sorted behind the last bucket and never read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_backend_triton.host.launch_cache import Launch, remembered
from nsa_backend_triton.host.sequences import Sequences
from nsa_backend_triton.shared.rows import place
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
    """Sort the pairs of ``blocks`` int32 or int64 [B, S, G, n] (packed [T, G, n]) by bucket, on the
    device.

    ``kept`` int8 [..., G, n], contiguous: 1 for the pairs that count, which are valid; without it
    every valid one. ``rows``: only those of (first, count) rows of all sequences after each other;
    P is of these alone. Bound by the sort (two radix passes over int16 keys below 2^15 buckets,
    else four).
    """
    made = _prepare(blocks, seqs, geometry, kept is not None, rows)
    keys = blocks.new_empty(made.pairs, dtype=torch.int32)
    local = blocks.new_empty(made.rows, dtype=torch.int32)
    if seqs.packed:  # boundaries that leave rows out may not leave them to chance
        keys.fill_(made.buckets)
        local.zero_()
    made.write_keys(blocks, blocks if kept is None else kept, keys, local, seqs.cu)
    pairs = torch.sort(keys.to(made.key_dtype), stable=True).indices
    tokens, slots = torch.empty_like(keys), torch.empty_like(keys)
    offsets = keys.new_empty(made.buckets + 1)
    made.write_pairs(pairs, keys, local, tokens, slots, offsets)
    return PairLists(tokens, slots, offsets)


class _Call(NamedTuple):
    """What a call's metadata decide."""

    write_keys: Launch
    write_pairs: Launch
    # int32 for the kernel, which is then one binary; int16 for the sort, where it does
    key_dtype: torch.dtype
    rows: int
    pairs: int
    buckets: int


@remembered
def _prepare(
    blocks: Tensor,
    seqs: Sequences,
    geometry: BlockGeometry,
    kept: bool,
    rows: tuple[int, int] | None,
) -> _Call:
    groups, n = blocks.shape[-2:]
    per_head = buckets_per_head(seqs, geometry)
    buckets = per_head * groups * (1 if seqs.packed else seqs.n)
    first, count = rows or (0, blocks.numel() // (groups * n))
    pairs = count * groups * n
    write_keys = Launch(
        sel_keys_kernel, (seqs.tiles(TOKENS_PER_PROGRAM) * groups,), seqs.n, seqs.seq_len, first,
        count,
        0 if seqs.packed else blocks.stride(0), blocks.stride(-3), blocks.stride(-2), per_head,
        buckets, groups,
        N=n, NP=triton.next_power_of_2(n), L=geometry.select_block_size, TILE=TOKENS_PER_PROGRAM,
        VARLEN=seqs.packed, KEPT=kept, num_warps=4,
    )  # fmt: skip
    grid = (triton.cdiv(pairs, 1024) + triton.cdiv(buckets + 1, 1024),)
    write_pairs = Launch(
        sel_pairs_kernel, grid, pairs, buckets, groups, N=n, SIZE=1024, num_warps=4
    )
    dtype = torch.int16 if buckets < 2**15 else torch.int32
    return _Call(write_keys, write_pairs, dtype, count, pairs, buckets)


@triton.jit
def candidates(
    BLOCKS,
    row,
    length,
    N: tl.constexpr,
    NP: tl.constexpr,
    L: tl.constexpr,
    TILE: tl.constexpr,
    stride_t,
):
    """Blocks [TILE, NP] of the rows from ``row`` on, -1 where a slot holds none, no candidate, or
    one seen before.

    BLOCKS points at the sequence's and head's first row. A value is compared before it is narrowed
    to int32.
    """
    t = row + tl.arange(0, TILE)
    slot = tl.arange(0, NP)
    at = BLOCKS + t.to(tl.int64)[:, None] * stride_t
    inside = (t < length)[:, None]
    block = tl.load(at + slot[None, :], mask=inside & (slot < N)[None, :], other=-1)
    seen = (block < 0) | (block > (t // L)[:, None])
    for i in range(N):
        earlier = tl.load(at + i, mask=inside, other=-1)
        seen |= (block == earlier) & (slot > i)[None, :]
    return tl.where(seen, -1, block).to(tl.int32)


@triton.jit(
    do_not_specialize=["n_seqs", "seq_len", "first_row", "count", "stride_b", "per_head", "nowhere"]
)
def sel_keys_kernel(
    BLOCKS, LEFT, KEYS, LOCAL, CU,
    n_seqs, seq_len, first_row, count, stride_b, stride_t, stride_g, per_head, nowhere, groups,
    N: tl.constexpr, NP: tl.constexpr, L: tl.constexpr, TILE: tl.constexpr, VARLEN: tl.constexpr,
    KEPT: tl.constexpr,
):  # fmt: skip
    """The bucket of every pair, ``nowhere`` behind all for one that does not count; the local row
    of every token.

    A program: TILE tokens of one kv head, [TILE, NP] in registers; N + 1 loads of TILE rows from
    L1, N compares of the tile. Bytes: blocks read and keys written once. Bound by memory.
    """
    program = tl.program_id(0)
    group = program % groups
    seq, start, length, row = place(program // groups, CU, n_seqs, seq_len, TILE, VARLEN)
    first = start.to(tl.int64)
    base = BLOCKS + seq.to(tl.int64) * stride_b + first * stride_t + group * stride_g
    t = row + tl.arange(0, TILE)
    slot = tl.arange(0, NP)
    if VARLEN:
        bucket = group * per_head + start // L + seq
        flat = first + t
    else:
        bucket = (seq * groups + group) * per_head
        flat = seq.to(tl.int64) * seq_len + t
    inside = (t < length) & (flat >= first_row) & (flat < first_row + count)
    if KEPT:
        valid = inside[:, None] & (slot < N)[None, :]
        counts = (
            tl.load(
                LEFT + (flat[:, None] * groups + group) * N + slot[None, :], mask=valid, other=0
            )
            != 0
        )
        # Only what counts is a candidate: a block out of range would overflow the sum below.
        block = tl.load(
            base + t.to(tl.int64)[:, None] * stride_t + slot[None, :], mask=counts, other=0
        ).to(tl.int32)
    else:
        block = candidates(base, row, length, N, NP, L, TILE, stride_t)
        counts = inside[:, None] & (block >= 0)
    into = KEYS + ((flat - first_row)[:, None] * groups + group) * N + slot[None, :]
    tl.store(
        into, tl.where(counts, bucket + block, nowhere), mask=inside[:, None] & (slot < N)[None, :]
    )
    tl.store(LOCAL + flat - first_row, t, mask=inside & (group == 0))


@triton.jit(do_not_specialize=["count", "buckets"])
def sel_pairs_kernel(
    PAIRS,
    KEYS,
    LOCAL,
    TOKENS,
    SLOTS,
    OFFSETS,
    count,
    buckets,
    groups,
    N: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Token and place of each sorted pair, and behind these programs, where each bucket begins.

    SIZE pairs a program: 8 bytes read, 4 gathered, 8 written a pair. SIZE buckets a program: a
    binary search each.
    """
    programs = tl.cdiv(count, SIZE)
    if tl.program_id(0) < programs:
        at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
        inside = at < count
        pair = tl.load(PAIRS + at, mask=inside, other=0)
        tl.store(
            TOKENS + at, tl.load(LOCAL + pair // (groups * N), mask=inside, other=0), mask=inside
        )
        tl.store(SLOTS + at, (pair % N).to(tl.int32), mask=inside)
    else:
        bucket = (tl.program_id(0) - programs) * SIZE + tl.arange(0, SIZE)
        low = tl.zeros([SIZE], tl.int32)
        left = tl.zeros([SIZE], tl.int32) + count
        while (
            tl.max(left, 0) > 0
        ):  # the first pair of a bucket >= this one lies in low .. low + left
            half = left // 2
            pair = tl.load(PAIRS + low + half, mask=left > 0, other=0)
            below = (tl.load(KEYS + pair, mask=left > 0, other=0) < bucket) & (left > 0)
            low = tl.where(below, low + half + 1, low)
            left = tl.where(below, left - half - 1, half)
        tl.store(OFFSETS + bucket, low, mask=bucket <= buckets)

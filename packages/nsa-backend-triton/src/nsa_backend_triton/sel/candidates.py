"""The pairs that count of a tile of tokens, and their buckets."""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_backend_triton.shared.rows import place_queries, row_of_start, row_offset


@triton.jit
def count_bits(x):
    """Number of set bits of each int32 of ``x``."""
    # Unsigned: sums of an int32 would overflow.
    bits = x.to(tl.uint32, bitcast=True)
    bits = (bits & 0x55555555) + ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits & 0x0F0F0F0F) + ((bits >> 4) & 0x0F0F0F0F)
    bits = (bits & 0x00FF00FF) + ((bits >> 8) & 0x00FF00FF)
    bits = (bits & 0x0000FFFF) + ((bits >> 16) & 0x0000FFFF)
    return bits.to(tl.int32)


@triton.jit
def load_candidates(
    BLOCKS, first_t, length, stride_t,
    NUM_SELECTED: tl.constexpr, NUM_SELECTED_PAD: tl.constexpr, SELECT_BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Load the valid blocks [BLOCK_T, NUM_SELECTED_PAD] of the tokens from ``first_t`` on.

    An element is -1 if it is padding, if the token may not select the block, or if it repeats an
    earlier block of the token. BLOCKS points at the first row of the sequence and kv head. Values
    are compared before they are narrowed to int32.
    """
    offs_t = first_t + tl.arange(0, BLOCK_T)
    choice = tl.arange(0, NUM_SELECTED_PAD)
    row_ptrs = BLOCKS + offs_t.to(tl.int64)[:, None] * stride_t
    mask_t = (offs_t < length)[:, None]
    block = tl.load(
        row_ptrs + choice[None, :], mask=mask_t & (choice < NUM_SELECTED)[None, :], other=-1
    )
    invalid = (block < 0) | (block > (offs_t // SELECT_BLOCK)[:, None])
    for i in range(NUM_SELECTED):
        earlier = tl.load(row_ptrs + i, mask=mask_t, other=-1)
        invalid |= (block == earlier) & (choice > i)[None, :]
    return tl.where(invalid, -1, block).to(tl.int32)


@triton.jit
def pairs_of_tile(
    BLOCKS, MASK, CU_SEQLENS, num_seqs, seq_len, first_query, run_heads, run_rows, row_runs,
    num_rows, stride_blocks_b, stride_blocks_t, stride_blocks_h, buckets_per_head, run_buckets,
    num_kv_heads,
    NUM_SELECTED: tl.constexpr, NUM_SELECTED_PAD: tl.constexpr, SELECT_BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr, VARLEN: tl.constexpr, PARTIAL: tl.constexpr, USE_MASK: tl.constexpr,
):  # fmt: skip
    """The pairs of the program's BLOCK_T tokens of one kv head.

    Each run of ``run_heads`` kv heads and ``run_rows`` rows has ``run_buckets`` buckets of its own;
    there are ``row_runs`` runs of the same heads. USE_MASK: MASK holds 1 for the pairs that count;
    their blocks must be valid, since they are not compared again.

    Returns (rows of q with the sequences concatenated, tokens, whether they exist, the kv head, the
    buckets of block 0, the blocks, whether the pairs count). The last two are [BLOCK_T,
    NUM_SELECTED_PAD], the kv head is a number, the others are [BLOCK_T].
    """
    pid = tl.program_id(0)
    kv_head = pid % num_kv_heads
    seq, start, query_start, length, first_t = place_queries(
        pid // num_kv_heads, CU_SEQLENS, num_seqs, seq_len, first_query, BLOCK_T, VARLEN, PARTIAL
    )
    stride_blocks = stride_blocks_b, stride_blocks_t, stride_blocks_h
    blocks_base = BLOCKS + row_offset(seq, query_start, kv_head, stride_blocks)
    offs_t = first_t + tl.arange(0, BLOCK_T)
    choice = tl.arange(0, NUM_SELECTED_PAD)
    run_head = kv_head % run_heads
    if VARLEN:
        first_bucket = run_head * buckets_per_head + start // SELECT_BLOCK + seq
    else:
        first_bucket = (seq * run_heads + run_head) * buckets_per_head
    row = row_of_start(seq, query_start, seq_len, VARLEN) + offs_t
    mask_t = (offs_t < length) & (row < num_rows)
    first_bucket += (kv_head // run_heads * row_runs + (row // run_rows).to(tl.int32)) * run_buckets
    if USE_MASK:
        mask = mask_t[:, None] & (choice < NUM_SELECTED)[None, :]
        counts = (
            tl.load(
                MASK + (row[:, None] * num_kv_heads + kv_head) * NUM_SELECTED + choice[None, :],
                mask=mask,
                other=0,
            )
            != 0
        )
        # Load only the pairs that count: a block out of range would overflow the sum below.
        block = tl.load(
            blocks_base + offs_t.to(tl.int64)[:, None] * stride_blocks_t + choice[None, :],
            mask=counts,
            other=0,
        ).to(tl.int32)
    else:
        block = load_candidates(
            blocks_base, first_t, length, stride_blocks_t,
            NUM_SELECTED, NUM_SELECTED_PAD, SELECT_BLOCK, BLOCK_T,
        )  # fmt: skip
        counts = mask_t[:, None] & (block >= 0)
    return row, offs_t, mask_t, kv_head, first_bucket, block, counts

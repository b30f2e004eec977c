"""Sort the pairs of a call by bucket with one bit for each row and bucket.

A bucket has words of 32 bits. Bit i of its word w is set if the pair of row 32 w + i counts; rows
are numbered from the first one of the bucket's sequence and run. The words are ordered by bucket,
so a running sum of their set bits gives the place of every pair: the sum over all words before its
own, plus the set bits below its own bit. This replaces a radix sort, which has many more launches
and passes. The number of words grows with rows times blocks, so long sequences are sorted; see
:func:`fits`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_backend_triton.sel.candidates import count_bits, pairs_of_tile

WORD = tl.constexpr(32)  # bits
MAX_WORDS_PER_PAIR = 1
COUNT_BLOCK = 4096  # words of a program that counts bits


def words_per_bucket(seq_len: int, run_rows: int, packed: bool) -> int:
    """Return the words of a bucket.

    Args:
        seq_len: rows of q of a sequence, packed of all documents.
        run_rows: rows of a run.
        packed: whether the sequences are packed documents.
    """
    return int(triton.cdiv(run_rows if packed else min(run_rows, seq_len), WORD.value))


def fits(num_words: int, num_pairs: int) -> bool:
    """Return whether the bits of ``num_words`` words place the pairs faster than a sort."""
    return num_words <= min(MAX_WORDS_PER_PAIR * num_pairs, 2**31 - 1)


@triton.jit
def _word_and_bit(
    row, first_bucket, block, counts, seq_len, run_rows, bucket_words, VARLEN: tl.constexpr
):
    """(words [BLOCK_T, NUM_SELECTED_PAD], bits [BLOCK_T]) of the pairs of a tile.

    The word of a pair that does not count is 0.
    """
    place = row % run_rows
    if not VARLEN:
        place = tl.minimum(place, row % seq_len)
    place = place.to(tl.int32)
    word = (first_bucket[:, None] + block) * bucket_words + (place // WORD)[:, None]
    return tl.where(counts, word, 0), place % WORD


@triton.jit(
    do_not_specialize=[
        "num_seqs", "seq_len", "first_query", "run_heads", "run_rows", "row_runs", "num_rows",
        "stride_blocks_b", "buckets_per_head", "run_buckets", "bucket_words",
    ]
)  # fmt: skip
def sel_mark_kernel(
    BLOCKS, MASK, WORDS, CU_SEQLENS,
    num_seqs, seq_len, first_query, run_heads, run_rows, row_runs, num_rows,
    stride_blocks_b, stride_blocks_t, stride_blocks_h,
    buckets_per_head, run_buckets, bucket_words, num_kv_heads,
    NUM_SELECTED: tl.constexpr, NUM_SELECTED_PAD: tl.constexpr,
    SELECT_BLOCK: tl.constexpr, BLOCK_T: tl.constexpr,
    VARLEN: tl.constexpr, PARTIAL: tl.constexpr, USE_MASK: tl.constexpr,
):  # fmt: skip
    """Set the bits of the pairs of BLOCK_T tokens of one kv head in WORDS, which begin as 0.

    Each pair takes one atomic operation on L2, and these are the limit.
    """
    row, _, _, _, first_bucket, block, counts = pairs_of_tile(
        BLOCKS, MASK, CU_SEQLENS, num_seqs, seq_len, first_query, run_heads, run_rows, row_runs,
        num_rows, stride_blocks_b, stride_blocks_t, stride_blocks_h, buckets_per_head, run_buckets,
        num_kv_heads, NUM_SELECTED, NUM_SELECTED_PAD, SELECT_BLOCK, BLOCK_T, VARLEN, PARTIAL,
        USE_MASK,
    )  # fmt: skip
    word, bit = _word_and_bit(
        row, first_bucket, block, counts, seq_len, run_rows, bucket_words, VARLEN
    )
    ones = tl.full([BLOCK_T, NUM_SELECTED_PAD], 1, tl.int32) << bit[:, None]
    tl.atomic_or(WORDS + word, ones, mask=counts, sem="relaxed")


@triton.jit(do_not_specialize=["num_words"])
def sel_counts_kernel(WORDS, COUNTS, num_words, BLOCK_SIZE: tl.constexpr):
    """Write the number of set bits of each word. Bound by memory: 8 bytes a word."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offs < num_words
    tl.store(COUNTS + offs, count_bits(tl.load(WORDS + offs, mask=mask)), mask=mask)


@triton.jit(
    do_not_specialize=[
        "num_seqs", "seq_len", "first_query", "run_heads", "run_rows", "row_runs", "num_rows",
        "stride_blocks_b", "buckets_per_head", "run_buckets", "bucket_words", "num_buckets",
        "pair_programs",
    ]
)  # fmt: skip
def sel_places_kernel(
    BLOCKS, MASK, WORDS, ENDS, TOKENS, PLACES, OFFSETS, CU_SEQLENS,
    num_seqs, seq_len, first_query, run_heads, run_rows, row_runs, num_rows,
    stride_blocks_b, stride_blocks_t, stride_blocks_h,
    buckets_per_head, run_buckets, bucket_words, num_buckets, pair_programs, num_kv_heads,
    NUM_SELECTED: tl.constexpr, NUM_SELECTED_PAD: tl.constexpr,
    SELECT_BLOCK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    VARLEN: tl.constexpr, PARTIAL: tl.constexpr, USE_MASK: tl.constexpr,
):  # fmt: skip
    """Write the token of each pair to its place, the place, and the first pair of each bucket.

    ENDS holds the set bits up to the end of each word. The first ``pair_programs`` programs own
    BLOCK_T tokens of one kv head: 8 bytes gathered and 8 scattered per pair. The programs after
    them own BLOCK_SIZE buckets each.
    """
    if tl.program_id(0) < pair_programs:
        row, offs_t, mask_t, kv_head, first_bucket, block, counts = pairs_of_tile(
            BLOCKS, MASK, CU_SEQLENS, num_seqs, seq_len, first_query, run_heads, run_rows, row_runs,
            num_rows, stride_blocks_b, stride_blocks_t, stride_blocks_h, buckets_per_head,
            run_buckets, num_kv_heads, NUM_SELECTED, NUM_SELECTED_PAD, SELECT_BLOCK, BLOCK_T,
            VARLEN, PARTIAL, USE_MASK,
        )  # fmt: skip
        word, bit = _word_and_bit(
            row, first_bucket, block, counts, seq_len, run_rows, bucket_words, VARLEN
        )
        # ENDS also counts the pair's own bit and the bits above it: subtract them.
        from_own = tl.full([BLOCK_T, NUM_SELECTED_PAD], -1, tl.int32) << bit[:, None]
        rest = tl.load(WORDS + word) & from_own
        place = tl.load(ENDS + word) - count_bits(rest)
        token = tl.broadcast_to(offs_t.to(tl.int32)[:, None], [BLOCK_T, NUM_SELECTED_PAD])
        tl.store(TOKENS + place, token, mask=counts)
        choice = tl.arange(0, NUM_SELECTED_PAD)
        pair = (row[:, None] * num_kv_heads + kv_head) * NUM_SELECTED + choice[None, :]
        mask = mask_t[:, None] & (choice < NUM_SELECTED)[None, :]
        tl.store(PLACES + pair, tl.where(counts, place, -1), mask=mask)
    else:
        bucket = (tl.program_id(0) - pair_programs) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        # The pairs before a bucket are those up to the last word of the bucket before it.
        before = (bucket > 0) & (bucket <= num_buckets)
        first = tl.load(ENDS + bucket * bucket_words - 1, mask=before, other=0)
        tl.store(OFFSETS + bucket, first, mask=bucket <= num_buckets)

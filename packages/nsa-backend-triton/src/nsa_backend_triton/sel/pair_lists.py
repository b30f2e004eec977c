"""Sort the (token, block) pairs of a call by block.

Kernels that hold one block and walk the tokens that selected it read these lists.

A bucket is one selection block of one sequence and one kv head. Dense: block j of kv head g in
batch entry b is bucket (b * G + g) * NB + j, with NB blocks in a sequence. Packed: every kv head
has T // l' + num_docs buckets, and those of document i begin at cu_seqlens[i] // l' + i, as in
shared.rows.place. If q holds only some rows of its sequences, buckets cover the keys up to its last
row (Sequences.end). A pair counts once, and only if the token may select the block
(0 <= j <= t // l'). The elements of the lists after the last bucket are undefined.

Documents must be disjoint (Sequences.disjoint): if two of them share a row, they also share
buckets, and a pair then leads outside the tensors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_backend_triton.host.launch_cache import Launch, Memo, cached_by_metadata
from nsa_backend_triton.host.sequences import Sequences
from nsa_backend_triton.sel import pair_bits
from nsa_backend_triton.sel.candidates import pairs_of_tile
from nsa_backend_triton.shared.rows import place
from nsa_core.layout import BlockGeometry

# Limits of a program that writes keys, so that its tile [tokens, n] stays in registers.
MAX_TOKENS, MAX_TILE_PAIRS = 32, 2048
# Positions in the lists are int32, also those past the end in the last tile of a program. The probe
# has the same limit.
MAX_PAIRS = 2**31 - 2**13


class PairLists(NamedTuple):
    """Pairs sorted by bucket; within a bucket, tokens ascend.

    P is the number of all pairs: B*S*G*n, packed T*G*n.

    Attributes:
        tokens: int32 [P] the pair's token, as a position in its sequence.
        places: int32 in the shape of ``blocks``, the place of each pair in ``tokens``, or -1 if it
            does not count.
        offsets: int32 [num_runs * num_buckets + 1] the first pair of each bucket, run by run; the
            last element is the number of pairs that count. There is one run of all pairs unless
            :class:`Runs` divides them.
    """

    tokens: Tensor
    places: Tensor
    offsets: Tensor


class Runs(NamedTuple):
    """Division of the pairs into runs, which are numbered part of heads by part of heads.

    Attributes:
        heads: neighbouring kv heads of a run; the last ones may have fewer.
        rows: neighbouring rows of q of a run, with the sequences concatenated; the last ones may
            have fewer.
    """

    heads: int
    rows: int

    def counts(self, num_kv_heads: int, num_rows: int) -> tuple[int, int]:
        """Return the number of parts of the heads, and of the rows."""
        return triton.cdiv(num_kv_heads, self.heads), triton.cdiv(num_rows, self.rows)


def buckets_per_head(seqs: Sequences, geometry: BlockGeometry) -> int:
    """Return the buckets of one kv head: of one batch entry, packed of all documents."""
    size = geometry.select_block_size
    return seqs.end // size + seqs.n if seqs.packed else -(-seqs.end // size)


def count_pairs(blocks: Tensor) -> int:
    """Return the pairs of ``blocks`` [B, S, G, n] or [T, G, n].

    Raises:
        ValueError: They are more than lists can hold.
    """
    num_kv_heads, n = blocks.shape[-2:]
    num_pairs = blocks.numel()
    if num_pairs > MAX_PAIRS:
        raise ValueError(
            f"{num_pairs // (num_kv_heads * n)} tokens with {num_kv_heads} lists of {n} blocks are"
            f" {num_pairs} pairs, at most {MAX_PAIRS} are supported: pass the queries in parts"
            " (first_query)"
        )
    return num_pairs


def _tokens_per_program(n: int) -> int:
    """Return the tokens of a program that writes the keys of ``n`` blocks each."""
    return int(max(1, min(MAX_TOKENS, MAX_TILE_PAIRS // triton.next_power_of_2(n))))


def build(
    blocks: Tensor,
    seqs: Sequences,
    geometry: BlockGeometry,
    memo: Memo | None = None,
    *,
    mask: Tensor | None = None,
    runs: Runs | None = None,
) -> PairLists:
    """Sort the pairs of ``blocks`` by run and bucket, on the device.

    Short sequences count bits (pair_bits.py). Long ones are bound by a radix sort: two passes over
    int16 keys below 2^15 buckets of all runs, else four.

    Args:
        blocks: int32 or int64 [B, S, G, n], packed [T, G, n].
        seqs: the sequences of the call, disjoint.
        geometry: the block sizes.
        memo: that of the metadata of the other arguments, if the caller has one.
        mask: int8 in the shape of ``blocks``, contiguous: 1 for the pairs that count, all of them
            valid. Without it, every valid pair counts.
        runs: the runs; None: one run of all pairs.
    """
    prepared = (Memo() if memo is None else memo).get_or_make(
        "lists", _prepare, blocks, seqs, geometry, mask is not None, runs
    )
    tokens = blocks.new_empty(prepared.num_pairs, dtype=torch.int32)
    places = blocks.new_empty(blocks.shape, dtype=torch.int32)
    offsets = blocks.new_empty(prepared.num_buckets + 1, dtype=torch.int32)
    lists, mask = PairLists(tokens, places, offsets), blocks if mask is None else mask
    if isinstance(prepared, _Bits):
        _place_by_bits(blocks, mask, seqs, prepared, lists)
    else:
        _sort(blocks, mask, seqs, prepared, lists)
    return lists


def _sort(blocks: Tensor, mask: Tensor, seqs: Sequences, prepared: _Sort, lists: PairLists) -> None:
    sort_keys = blocks.new_empty(prepared.num_pairs, dtype=torch.int32)
    local_tokens = blocks.new_empty(prepared.num_rows, dtype=torch.int32)
    if seqs.packed:  # malformed boundaries may leave rows out: define their keys
        sort_keys.fill_(prepared.num_buckets)
        local_tokens.zero_()
    prepared.write_keys(blocks, mask, sort_keys, local_tokens, seqs.cu)
    sorted_keys, order = torch.sort(sort_keys.to(prepared.sort_dtype), stable=True)
    prepared.write_pairs(order, sorted_keys, local_tokens, *lists)


def _place_by_bits(
    blocks: Tensor, mask: Tensor, seqs: Sequences, prepared: _Bits, lists: PairLists
) -> None:
    if seqs.packed:  # malformed boundaries may leave rows out: define their places
        lists.places.fill_(-1)
    words = blocks.new_zeros(prepared.num_words, dtype=torch.int32)
    prepared.mark(blocks, mask, words, seqs.cu)
    counts = torch.empty_like(words)
    prepared.count(words, counts)
    ends = counts.cumsum(0, dtype=torch.int32)
    prepared.place(blocks, mask, words, ends, *lists, seqs.cu)


class _Sort(NamedTuple):
    """The launches and sizes of a sort, which follow from a call's metadata."""

    num_pairs: int
    num_buckets: int
    num_rows: int
    write_keys: Launch
    write_pairs: Launch
    # The kernel writes int32 keys; the sort runs on int16 where they fit.
    sort_dtype: torch.dtype


class _Bits(NamedTuple):
    """The launches and sizes of pair_bits.py, which follow from a call's metadata."""

    num_pairs: int
    num_buckets: int
    num_words: int
    mark: Launch
    count: Launch
    place: Launch


@cached_by_metadata
def _prepare(
    blocks: Tensor,
    seqs: Sequences,
    geometry: BlockGeometry,
    masked: bool,
    runs: Runs | None,
) -> _Sort | _Bits:
    num_kv_heads, n = blocks.shape[-2:]
    per_head = buckets_per_head(seqs, geometry)
    num_rows = blocks.numel() // (num_kv_heads * n)
    runs = runs or Runs(num_kv_heads, num_rows)
    head_runs, row_runs = runs.counts(num_kv_heads, num_rows)
    run_buckets = per_head * runs.heads * (1 if seqs.packed else seqs.n)
    num_buckets = head_runs * row_runs * run_buckets
    num_pairs = count_pairs(blocks)
    block_t = _tokens_per_program(n)
    programs = seqs.tiles(block_t) * num_kv_heads
    rows = seqs.n, seqs.seq_len, seqs.first_query, *runs, row_runs, num_rows
    strides = 0 if seqs.packed else blocks.stride(0), blocks.stride(-3), blocks.stride(-2)
    constants = {
        "NUM_SELECTED": n,
        "NUM_SELECTED_PAD": triton.next_power_of_2(n),
        "SELECT_BLOCK": geometry.select_block_size,
        "BLOCK_T": block_t,
        "VARLEN": seqs.packed,
        "PARTIAL": seqs.partial,
        "USE_MASK": masked,
        "num_warps": 4,
    }
    bucket_words = pair_bits.words_per_bucket(seqs.seq_len, runs.rows, seqs.packed)
    num_words = num_buckets * bucket_words
    if pair_bits.fits(num_words, num_pairs):
        mark = Launch(
            pair_bits.sel_mark_kernel, (programs,),
            *rows, *strides, per_head, run_buckets, bucket_words, num_kv_heads, **constants,
        )  # fmt: skip
        count = Launch(
            pair_bits.sel_counts_kernel, (triton.cdiv(num_words, pair_bits.COUNT_BLOCK),),
            num_words, BLOCK_SIZE=pair_bits.COUNT_BLOCK, num_warps=4,
        )  # fmt: skip
        place = Launch(
            pair_bits.sel_places_kernel, (programs + triton.cdiv(num_buckets + 1, 1024),),
            *rows, *strides, per_head, run_buckets, bucket_words, num_buckets, programs,
            num_kv_heads, BLOCK_SIZE=1024, **constants,
        )  # fmt: skip
        return _Bits(num_pairs, num_buckets, num_words, mark, count, place)
    write_keys = Launch(
        sel_keys_kernel, (programs,),
        *rows, *strides, per_head, run_buckets, num_buckets, num_kv_heads, **constants,
    )  # fmt: skip
    write_pairs = Launch(
        sel_pairs_kernel, (triton.cdiv(num_pairs, 1024) + triton.cdiv(num_buckets + 1, 1024),),
        num_pairs, num_buckets, num_kv_heads,
        NUM_SELECTED=n, BLOCK_SIZE=1024,
        num_warps=4,
    )  # fmt: skip
    sort_dtype = torch.int16 if num_buckets < 2**15 else torch.int32
    return _Sort(num_pairs, num_buckets, num_rows, write_keys, write_pairs, sort_dtype)


@triton.jit
def locate_bucket(
    bucket, CU_SEQLENS, num_seqs, seq_len, first_query, buckets_per_head, num_heads,
    SELECT_BLOCK: tl.constexpr, VARLEN: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """The sequence and the keys of a bucket of a run of ``num_heads`` kv heads.

    Returns (sequence, kv head of the run, its first row on the axis of the keys, its first row on
    the axis of the queries, the end of its keys, the bucket's first key). The last two are
    positions in the sequence; PARTIAL and the first rows are those of shared.rows.place_queries.
    """
    outer = bucket // buckets_per_head
    index = bucket % buckets_per_head
    if not VARLEN:
        index += outer // num_heads * buckets_per_head
    end = first_query + seq_len if PARTIAL else seq_len
    seq, start, length, first_key = place(index, CU_SEQLENS, num_seqs, end, SELECT_BLOCK, VARLEN)
    query_start = start - first_query if PARTIAL else start
    return seq, outer % num_heads, start, query_start, length, first_key


@triton.jit(
    do_not_specialize=[
        "num_seqs", "seq_len", "first_query", "run_heads", "run_rows", "row_runs", "num_rows",
        "stride_blocks_b", "buckets_per_head", "run_buckets", "num_buckets",
    ]
)  # fmt: skip
def sel_keys_kernel(
    BLOCKS, MASK, SORT_KEYS, LOCAL_TOKENS, CU_SEQLENS,
    num_seqs, seq_len, first_query, run_heads, run_rows, row_runs, num_rows,
    stride_blocks_b, stride_blocks_t, stride_blocks_h,
    buckets_per_head, run_buckets, num_buckets, num_kv_heads,
    NUM_SELECTED: tl.constexpr, NUM_SELECTED_PAD: tl.constexpr,
    SELECT_BLOCK: tl.constexpr, BLOCK_T: tl.constexpr,
    VARLEN: tl.constexpr, PARTIAL: tl.constexpr, USE_MASK: tl.constexpr,
):  # fmt: skip
    """Write the bucket of every pair and the position of every token in its sequence.

    The bucket of a pair that does not count is ``num_buckets``, so that it is sorted last.

    A program owns BLOCK_T tokens of one kv head, [BLOCK_T, NUM_SELECTED_PAD] in registers. It does
    NUM_SELECTED + 1 loads of BLOCK_T rows from L1 and NUM_SELECTED comparisons of the tile. Blocks
    are read and sort keys written once: bound by memory.
    """
    row, offs_t, mask_t, kv_head, first_bucket, block, counts = pairs_of_tile(
        BLOCKS, MASK, CU_SEQLENS, num_seqs, seq_len, first_query, run_heads, run_rows, row_runs,
        num_rows, stride_blocks_b, stride_blocks_t, stride_blocks_h, buckets_per_head, run_buckets,
        num_kv_heads, NUM_SELECTED, NUM_SELECTED_PAD, SELECT_BLOCK, BLOCK_T, VARLEN, PARTIAL,
        USE_MASK,
    )  # fmt: skip
    choice = tl.arange(0, NUM_SELECTED_PAD)
    key_ptrs = SORT_KEYS + (row[:, None] * num_kv_heads + kv_head) * NUM_SELECTED + choice[None, :]
    tl.store(
        key_ptrs,
        tl.where(counts, first_bucket[:, None] + block, num_buckets),
        mask=mask_t[:, None] & (choice < NUM_SELECTED)[None, :],
    )
    tl.store(LOCAL_TOKENS + row, offs_t, mask=mask_t & (kv_head == 0))


@triton.jit(do_not_specialize=["num_pairs", "num_buckets"])
def sel_pairs_kernel(
    ORDER, SORTED_KEYS, LOCAL_TOKENS, TOKENS, PLACES, OFFSETS,
    num_pairs, num_buckets, num_kv_heads,
    NUM_SELECTED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Write the token and the place of each sorted pair, and the first pair of each bucket.

    The first programs own BLOCK_SIZE pairs each: 8 bytes read, 4 gathered and 8 written per pair.
    The programs after them own BLOCK_SIZE buckets each, with one binary search per bucket.
    """
    pair_programs = tl.cdiv(num_pairs, BLOCK_SIZE)
    if tl.program_id(0) < pair_programs:
        offs = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        mask = offs < num_pairs
        pair = tl.load(ORDER + offs, mask=mask, other=0)
        tl.store(
            TOKENS + offs,
            tl.load(LOCAL_TOKENS + pair // (num_kv_heads * NUM_SELECTED), mask=mask, other=0),
            mask=mask,
        )
        counts = tl.load(SORTED_KEYS + offs, mask=mask, other=0) < num_buckets
        tl.store(PLACES + pair, tl.where(counts, offs, -1).to(tl.int32), mask=mask)
    else:
        bucket = (tl.program_id(0) - pair_programs) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        low = tl.zeros([BLOCK_SIZE], tl.int32)
        remaining = tl.zeros([BLOCK_SIZE], tl.int32) + num_pairs
        # The first pair whose bucket is >= this one lies in low .. low + remaining.
        while tl.max(remaining, 0) > 0:
            half = remaining // 2
            key = tl.load(SORTED_KEYS + low + half, mask=remaining > 0, other=0).to(tl.int32)
            below = (key < bucket) & (remaining > 0)
            low = tl.where(below, low + half + 1, low)
            remaining = tl.where(below, remaining - half - 1, half)
        tl.store(OFFSETS + bucket, low, mask=bucket <= num_buckets)

"""Find the blocks that a tile of neighbouring tokens reads together.

Neighbouring tokens select many of the same blocks: the initial and local ones always, the others
where attention is trained. The union of a tile lists each block that enough of its tokens selected,
with a bit mask of these tokens, so that the tile reads the block once. The remaining pairs can be
marked for the path over buckets.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_backend_triton.host.launch_cache import Launch, Memo, cached_by_metadata
from nsa_backend_triton.host.sequences import Sequences
from nsa_backend_triton.sel.candidates import count_bits, load_candidates
from nsa_backend_triton.shared.rows import place_queries, row_of_start, row_offset
from nsa_core.layout import BlockGeometry

# Limit of a tile: a larger sort spills registers and takes long to compile.
MAX_TILE_PAIRS = 4096
_SORT_KEYS = 2**30  # a sort key is block * pairs + pair, below 2^31


class Unions(NamedTuple):
    """The unions of all tiles, kv head by kv head.

    Attributes:
        entries: int32 [G * tiles, 2, BLOCK_T * n]: first the blocks, descending, then for each of
            them the bit mask of its tokens.
        counts: int32 [G * tiles, 2]: the number of entries, and how many of these, the first ones,
            hold keys that some token of the tile may not attend to.
        unshared: int8 [rows, G, n]: 1 for each valid pair that is in no entry. Its contents are
            undefined unless it was requested with at least two sharing tokens: with one, every
            pair is in an entry.
    """

    entries: Tensor
    counts: Tensor
    unshared: Tensor


def fitting_tokens(tokens: int, n: int, num_blocks: int) -> int:
    """Return the tokens of a tile: ``tokens``, or fewer if their pairs exceed the sort.

    Args:
        tokens: tokens of a tile.
        n: blocks of each token.
        num_blocks: upper bound of the blocks of a sequence.
    """
    pairs = min(MAX_TILE_PAIRS, _SORT_KEYS // max(1, num_blocks))
    most = int(max(1, pairs // triton.next_power_of_2(n)))
    return min(tokens, 1 << (most.bit_length() - 1))


def build(
    blocks: Tensor,
    seqs: Sequences,
    geometry: BlockGeometry,
    block_t: int,
    min_sharing: int,
    memo: Memo | None = None,
    *,
    write_unshared: bool = False,
) -> Unions:
    """Build the unions over tiles of ``block_t`` tokens.

    Args:
        blocks: int32 or int64 [B, S, G, n], packed [T, G, n].
        seqs: the sequences of the call.
        geometry: the block sizes.
        block_t: tokens of a tile, at most 32 and :func:`fitting_tokens`.
        min_sharing: tokens of a tile that must select a block for it to become an entry.
        memo: that of the metadata of the other arguments, if the caller has one.
        write_unshared: whether to write ``Unions.unshared``.
    """
    launch, num_tiles = (Memo() if memo is None else memo).get_or_make(
        "unions", _prepare, blocks, seqs, geometry, block_t, min_sharing, write_unshared
    )
    entries = blocks.new_empty((num_tiles, 2, block_t * blocks.shape[-1]), dtype=torch.int32)
    counts = blocks.new_empty((num_tiles, 2), dtype=torch.int32)
    unshared = counts
    if write_unshared:  # with min_sharing = 1 every pair is shared
        new = blocks.new_zeros if min_sharing > 1 else blocks.new_empty
        unshared = new(blocks.shape, dtype=torch.int8)
    launch(blocks, entries, counts, unshared, seqs.cu)
    return Unions(entries, counts, unshared)


@cached_by_metadata
def _prepare(
    blocks: Tensor,
    seqs: Sequences,
    geometry: BlockGeometry,
    block_t: int,
    min_sharing: int,
    write_unshared: bool,
) -> tuple[Launch, int]:
    """Return the launch and the number of tiles of all kv heads."""
    num_kv_heads, n = blocks.shape[-2:]
    tiles = seqs.tiles(block_t)
    num_pairs = triton.next_power_of_2(block_t) * triton.next_power_of_2(n)
    launch = Launch(
        sel_union_kernel, (num_kv_heads * tiles,),
        seqs.n, seqs.seq_len, seqs.first_query, tiles, min_sharing,
        0 if seqs.packed else blocks.stride(0), blocks.stride(-3), blocks.stride(-2),
        num_kv_heads,
        NUM_SELECTED=n, NUM_SELECTED_PAD=triton.next_power_of_2(n),
        SELECT_BLOCK=geometry.select_block_size,
        BLOCK_T=block_t, BLOCK_T_PAD=triton.next_power_of_2(block_t),
        VARLEN=seqs.packed, PARTIAL=seqs.partial, WRITE_UNSHARED=write_unshared,
        num_warps=min(8, max(1, num_pairs // 128)),
    )  # fmt: skip
    return launch, num_kv_heads * tiles


@triton.jit
def _combine_runs(block, bits, next_block, next_bits):
    """Combine two scan elements: join the bits of equal blocks."""
    return next_block, next_bits | tl.where(block == next_block, bits, 0)


@triton.jit(
    do_not_specialize=[
        "num_seqs", "seq_len", "first_query", "tiles", "min_sharing", "stride_blocks_b",
    ]
)  # fmt: skip
def sel_union_kernel(
    BLOCKS, ENTRIES, COUNTS, UNSHARED, CU_SEQLENS,
    num_seqs, seq_len, first_query, tiles, min_sharing,
    stride_blocks_b, stride_blocks_t, stride_blocks_h,
    num_kv_heads,
    NUM_SELECTED: tl.constexpr, NUM_SELECTED_PAD: tl.constexpr,
    SELECT_BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_T_PAD: tl.constexpr,
    VARLEN: tl.constexpr, PARTIAL: tl.constexpr, WRITE_UNSHARED: tl.constexpr,
):  # fmt: skip
    """Write the union of one tile of BLOCK_T tokens of one kv head.

    The program sorts the BLOCK_T_PAD x NUM_SELECTED_PAD pairs of the tile by (block, token, choice)
    in registers, and joins runs of one block by two scans. It reads BLOCK_T * n blocks and writes
    at most 8 * BLOCK_T * n bytes. Bound by the sort.
    """
    pid = tl.program_id(0)
    kv_head = pid // tiles
    seq, _, query_start, length, first_t = place_queries(
        pid % tiles, CU_SEQLENS, num_seqs, seq_len, first_query, BLOCK_T, VARLEN, PARTIAL
    )
    stride_blocks = stride_blocks_b, stride_blocks_t, stride_blocks_h
    blocks_base = BLOCKS + row_offset(seq, query_start, kv_head, stride_blocks)
    NO_BLOCK: tl.constexpr = 2**30 // (BLOCK_T_PAD * NUM_SELECTED_PAD)  # greater than every block
    block = load_candidates(
        blocks_base, first_t, tl.minimum(length, first_t + BLOCK_T), stride_blocks_t,
        NUM_SELECTED, NUM_SELECTED_PAD, SELECT_BLOCK, BLOCK_T_PAD,
    )  # fmt: skip
    pair_index = (
        tl.arange(0, BLOCK_T_PAD)[:, None] * NUM_SELECTED_PAD
        + tl.arange(0, NUM_SELECTED_PAD)[None, :]
    )
    sort_keys = tl.sort(
        tl.reshape(
            tl.where(block < 0, NO_BLOCK, block) * (BLOCK_T_PAD * NUM_SELECTED_PAD) + pair_index,
            [BLOCK_T_PAD * NUM_SELECTED_PAD],
        )
    )
    block = sort_keys // (BLOCK_T_PAD * NUM_SELECTED_PAD)
    local_t = sort_keys // NUM_SELECTED_PAD % BLOCK_T_PAD
    bits = tl.full([BLOCK_T_PAD * NUM_SELECTED_PAD], 1, tl.int32) << local_t
    # The tokens of a run differ, so only at its last pair do the bits up to the pair equal those of
    # the run.
    _, bits_up_to = tl.associative_scan((block, bits), 0, _combine_runs)
    _, bits_from = tl.associative_scan((block, bits), 0, _combine_runs, reverse=True)
    members = bits_up_to | bits_from
    valid = block < NO_BLOCK
    shared = valid & (count_bits(members) >= min_sharing)
    is_entry = (shared & (bits_up_to == members)).to(tl.int32)
    num_entries = tl.sum(is_entry, 0)
    entry_ptrs = (
        ENTRIES
        + pid.to(tl.int64) * (2 * BLOCK_T * NUM_SELECTED)
        + num_entries
        - tl.cumsum(is_entry, 0)
    )
    tl.store(entry_ptrs, block, mask=is_entry != 0)
    tl.store(entry_ptrs + BLOCK_T * NUM_SELECTED, members, mask=is_entry != 0)
    # (block + 1) * SELECT_BLOCK > first_t + 1, in a form that does not overflow for NO_BLOCK
    num_masked = tl.sum(tl.where(block >= (first_t + 1) // SELECT_BLOCK, is_entry, 0), 0)
    tl.store(COUNTS + pid * 2, num_entries)
    tl.store(COUNTS + pid * 2 + 1, num_masked)
    if WRITE_UNSHARED:
        seq_row = row_of_start(seq, query_start, seq_len, VARLEN)
        pair = (
            (seq_row + first_t + local_t) * num_kv_heads + kv_head
        ) * NUM_SELECTED + sort_keys % NUM_SELECTED_PAD
        tl.store(UNSHARED + pair, 1, mask=valid & (shared == 0))

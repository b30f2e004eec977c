"""Selection of blocks for one token of one kv head, from block sums that a walk left in memory.

    p[h, i] = exp(s[h, i] - lse[h])                                 (Eq. 8)
    score[j] = sum over h and i of overlap(i, j) p[h, i]            (Eqs. 9 and 10)
    blocks = the initial and local blocks, then those of the best scores, n in all  (Eqs. 11, 12)

A walk's sums are relative to the running maximum m of its softmax at that tile. The factor
2^(m - lse), one number per head and tile of keys, makes them absolute.

A pass takes RANK_BLOCKS blocks: 8 bytes per head and block from L2, where the walk has just written
them (128 KiB for 16 heads and 64k tokens), in NUM_HEAD_TILES tiles of BLOCK_H heads, as many as
registers hold. The scores of a pass stay in registers. The best are found one at a time: the
maximum of the bit patterns (scores are >= 0, so bit patterns order like scores) and the lowest
index that has it. Each selected block takes two reductions over a few numbers per thread; in later
passes only blocks that are better than the worst of the best so far take them. Latency is the
limit: there are few numbers, processed one after the other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_backend_triton.decode.walk import token_range
from nsa_backend_triton.shared.rows import LOG2E, num_compressed


@triton.jit
def _group_scores(
    SUMS, MAXIMA, LSE, stride_sums, stride_maxima, stride_lse_h, first_tile, tiles, carry_in,
    GROUP: tl.constexpr, BLOCK_H: tl.constexpr, NUM_HEAD_TILES: tl.constexpr,
    RANK_BLOCKS: tl.constexpr, BLOCKS_PER_TILE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Return the scores [RANK_BLOCKS] of the blocks from tile ``first_tile`` on, and a carry.

    Compressed tokens of a block may also overlap the next block. ``carry_in`` is what the preceding
    block adds to the first score; the returned carry is what the last block adds to the next score.
    Compressed tokens are added within a head first, then heads.
    """
    tile = tl.arange(0, RANK_BLOCKS // BLOCKS_PER_TILE) + first_tile
    offs_pair = tl.arange(0, BLOCKS_PER_TILE * 2)
    pairs = tl.zeros([RANK_BLOCKS // BLOCKS_PER_TILE, BLOCKS_PER_TILE * 2], ACC)
    for head_tile in tl.static_range(NUM_HEAD_TILES):
        head = head_tile * BLOCK_H + tl.arange(0, BLOCK_H)
        head_valid = head < GROUP
        valid = head_valid[None, :] & (tile < tiles)[:, None]
        lse = (
            tl.load(LSE + head * stride_lse_h, mask=head_valid, other=0.0, cache_modifier=".cg")
            * LOG2E
        )
        lse_floor = tl.floor(lse)
        reference = tl.load(
            MAXIMA + head[None, :] * stride_maxima + tile[:, None],
            mask=valid,
            other=0.0,
            cache_modifier=".cg",
        )
        # Scales of one head differ by powers of two only: equal sums give equal scores, whatever
        # maximum they are relative to.
        scale = tl.exp2(lse_floor - lse)[None, :] * tl.exp2(
            tl.minimum(reference - lse_floor[None, :], 126.0)
        )
        # Heads are the middle axis, so that they belong to one thread and each score is in one lane
        # only. Triton 3.6 reduces a vector wrongly if several lanes hold copies of it and those
        # lanes are not the highest.
        offs = (head * stride_sums)[None, :, None] + (
            tile[:, None] * (BLOCKS_PER_TILE * 2) + offs_pair[None, :]
        )[:, None, :]
        sums = tl.load(SUMS + offs, mask=valid[:, :, None], other=0.0, cache_modifier=".cg")
        pairs += tl.sum(sums * scale[:, :, None], 1)
    own, carry = tl.split(tl.reshape(pairs, [RANK_BLOCKS, 2]))
    offs = tl.arange(0, RANK_BLOCKS)
    carry_out = tl.sum(tl.where(offs == RANK_BLOCKS - 1, carry, 0.0), 0)
    carry = tl.where(offs == 0, carry_in, tl.gather(carry, tl.maximum(offs - 1, 0), 0))
    return own + carry, carry_out


@triton.jit
def _insert(
    bits, best_bits, best_blocks, count, first_block, begin, end, num_ranked, slot,
    REMOVED_BITS: tl.constexpr,
):  # fmt: skip
    """Merge the scores of a pass into the best ``num_ranked`` so far.

    ``bits`` [RANK_BLOCKS] are the scores' bit patterns of the blocks from ``first_block`` on, of
    which only begin .. end are candidates. ``best_bits`` and ``best_blocks`` [NUM_SELECTED_PAD]
    hold ``count`` blocks. Returns (best_bits, best_blocks, count).

    Blocks come in ascending order, so a block in the list precedes an equal one that comes later.
    Of equal blocks in the list, the last one is replaced.
    """
    MAX_BLOCK: tl.constexpr = 2**31 - 1
    block = tl.arange(0, bits.shape[0]) + first_block
    bits = tl.where((block >= begin) & (block < end), bits, REMOVED_BITS)
    candidates = tl.minimum(end, first_block + bits.shape[0]) - tl.maximum(begin, first_block)
    new_blocks = tl.minimum(num_ranked - count, tl.maximum(candidates, 0))
    for _ in tl.range(new_blocks, num_stages=1):
        best = tl.max(bits, 0)
        best_block = tl.min(tl.where(bits == best, block, MAX_BLOCK), 0)
        best_bits = tl.where(slot == count, best, best_bits)
        best_blocks = tl.where(slot == count, best_block, best_blocks)
        bits = tl.where(block == best_block, REMOVED_BITS, bits)
        count += 1
    best = tl.max(bits, 0)
    worst = tl.min(best_bits, 0)
    while best > worst:
        best_block = tl.min(tl.where(bits == best, block, MAX_BLOCK), 0)
        worst_block = tl.max(tl.where(best_bits == worst, best_blocks, -1), 0)
        replaced = (best_bits == worst) & (best_blocks == worst_block)
        best_bits = tl.where(replaced, best, best_bits)
        best_blocks = tl.where(replaced, best_block, best_blocks)
        bits = tl.where(block == best_block, REMOVED_BITS, bits)
        best = tl.max(bits, 0)
        worst = tl.min(best_bits, 0)
    return best_bits, best_blocks, count


@triton.jit
def choose(
    token, SUMS, MAXIMA, LSE, BLOCKS, stride_sums, stride_maxima, stride_lse_h,
    GROUP: tl.constexpr, BLOCK_H: tl.constexpr, NUM_HEAD_TILES: tl.constexpr,
    RANK_BLOCKS: tl.constexpr, BLOCKS_PER_TILE: tl.constexpr,
    COMPRESS_BLOCK: tl.constexpr, STRIDE: tl.constexpr, SELECT_BLOCK: tl.constexpr,
    NUM_SELECTED: tl.constexpr, NUM_SELECTED_PAD: tl.constexpr,
    INIT_BLOCKS: tl.constexpr, LOCAL_BLOCKS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Write the selected blocks of the token at position ``token``, ascending, -1 at the end.

    A negative position is padding: all blocks are -1. SUMS, MAXIMA, LSE and BLOCKS point at the
    token's rows.
    """
    FP64: tl.constexpr = tl.float64 == ACC
    BITS: tl.constexpr = tl.int64 if FP64 else tl.int32
    # below the bits of -inf
    REMOVED_BITS: tl.constexpr = -(2**52) - 1 if FP64 else -(2**23) - 1
    MAX_BITS: tl.constexpr = 2**63 - 1 if FP64 else 2**31 - 1
    candidates = tl.where(token < 0, 0, token // SELECT_BLOCK + 1)
    init = tl.minimum(candidates, INIT_BLOCKS)
    first_local = tl.maximum(candidates - LOCAL_BLOCKS, init)
    total = tl.minimum(candidates, NUM_SELECTED)
    num_ranked = total - init - (candidates - first_local)
    # shows the compiler that rows are aligned
    stride_sums, stride_maxima = (
        stride_sums // 16 * 16,
        stride_maxima // 16 * 16,
    )
    tiles = tl.cdiv(
        num_compressed(token + 1, COMPRESS_BLOCK, STRIDE),
        BLOCKS_PER_TILE * (SELECT_BLOCK // STRIDE),
    )
    slot = tl.arange(0, NUM_SELECTED_PAD)
    best_bits = tl.full([NUM_SELECTED_PAD], MAX_BITS, BITS)
    best_blocks = slot
    count = 0
    carry = tl.full([], 0.0, ACC)
    for i in tl.range(tl.where(num_ranked > 0, tl.cdiv(first_local, RANK_BLOCKS), 0), num_stages=1):
        score, carry = _group_scores(
            SUMS, MAXIMA, LSE, stride_sums, stride_maxima, stride_lse_h,
            i * (RANK_BLOCKS // BLOCKS_PER_TILE), tiles, carry,
            GROUP, BLOCK_H, NUM_HEAD_TILES, RANK_BLOCKS, BLOCKS_PER_TILE, ACC,
        )  # fmt: skip
        score = tl.where(score == score, score, float("-inf"))  # a NaN ranks last
        best_bits, best_blocks, count = _insert(
            score.to(BITS, bitcast=True), best_bits, best_blocks, count, i * RANK_BLOCKS, init,
            first_local, num_ranked, slot, REMOVED_BITS,
        )  # fmt: skip
    ranked = slot < num_ranked
    precedes = (best_blocks[None, :] < best_blocks[:, None]) & ranked[None, :]
    place = tl.where(ranked, init + tl.sum(precedes.to(tl.int32), 1), slot + init)
    block = tl.where(ranked, best_blocks, first_local - num_ranked + slot)
    block = tl.where(place < total, block, -1)
    tl.store(BLOCKS + place, block, mask=place < NUM_SELECTED)
    tl.store(BLOCKS + slot, slot, mask=slot < init)


@triton.jit(
    do_not_specialize=[
        "first_token", "num_tokens", "max_len", "stride_sums", "stride_maxima", "stride_lse_h",
    ],
    do_not_specialize_on_alignment=["STARTS", "LENGTHS", "BLOCKS", "LSE"],
)  # fmt: skip
def decode_choose(
    SUMS, MAXIMA, LSE, BLOCKS, STARTS, LENGTHS,
    stride_sums, stride_maxima, stride_lse_b: tl.int64, stride_lse_h, stride_blocks_b: tl.int64,
    first_token, num_tokens, max_len,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_H: tl.constexpr,
    NUM_HEAD_TILES: tl.constexpr, RANK_BLOCKS: tl.constexpr, BLOCKS_PER_TILE: tl.constexpr,
    COMPRESS_BLOCK: tl.constexpr, STRIDE: tl.constexpr, SELECT_BLOCK: tl.constexpr,
    NUM_SELECTED: tl.constexpr, NUM_SELECTED_PAD: tl.constexpr,
    INIT_BLOCKS: tl.constexpr, LOCAL_BLOCKS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Select the blocks of one token of one kv head.

    SUMS is [B, num_tokens, Hq, stride_sums], MAXIMA [B, num_tokens, Hq, stride_maxima].
    """
    index = tl.program_id(0)
    kv_head, t, seq = (
        index % NUM_KV_HEADS,
        index // NUM_KV_HEADS % num_tokens,
        index // NUM_KV_HEADS // num_tokens,
    )
    begin, end = token_range(STARTS, LENGTHS, seq, first_token + t, 1, max_len)
    head_row = tl.cast(index, tl.int64) * GROUP
    choose(
        tl.where(begin < end, begin, -1), SUMS + head_row * (stride_sums // 16 * 16),
        MAXIMA + head_row * (stride_maxima // 16 * 16),
        LSE + seq * stride_lse_b + kv_head * GROUP * stride_lse_h + t,
        BLOCKS + seq * stride_blocks_b + (t * NUM_KV_HEADS + kv_head) * NUM_SELECTED,
        stride_sums, stride_maxima, stride_lse_h,
        GROUP, BLOCK_H, NUM_HEAD_TILES, RANK_BLOCKS, BLOCKS_PER_TILE,
        COMPRESS_BLOCK, STRIDE, SELECT_BLOCK, NUM_SELECTED, NUM_SELECTED_PAD,
        INIT_BLOCKS, LOCAL_BLOCKS, ACC,
    )  # fmt: skip

"""The choice of blocks for one token of one kv head, from the logits of its heads that a walk has left in memory.

    p[h, i] = exp(s[h, i] - lse[h]),  score[j] = sum over h and i of weight(i, j) p[h, i]               (Eqs. 8 to 10)

A turn reads heads x BLOCKS x l'/d logits, 4 bytes each and one exp2, from L2, where the walk has just put them: 256 KiB
for 16 heads and 64k tokens, some 5 us for one program; ranking 1024 blocks (select_rank) takes another 2 to 3.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_backend_triton.decode_walk import tokens_of
from nsa_backend_triton.select_rank import rank_rows
from nsa_backend_triton.tile import LOG2E, num_compressed


@triton.jit
def _group_scores(
    SCORES, LSE, PAIRS, visible, score_row, lse_head,
    GROUP: tl.constexpr, HEADS: tl.constexpr, PIECES: tl.constexpr, BLOCKS: tl.constexpr, TAPS: tl.constexpr,
    RATIO: tl.constexpr, OVER: tl.constexpr, SLOTS: tl.constexpr, STAGES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """A pair of numbers for each block, whose sum is its score: from its own compressed tokens, from those before it.

    Compressed token c of a block, of RATIO = l'/d, overlaps its block by min(OVER, RATIO - c) and the next block by the
    rest of OVER = l/d. Heads are taken HEADS at a time.
    """
    tap, of_tile = tl.arange(0, TAPS), tl.arange(0, BLOCKS)
    own = tl.minimum(RATIO - tap, OVER)[None, :]
    carry = tl.where(tap < RATIO, tap - RATIO + OVER, 0)[None, :]
    turns = tl.cdiv(visible, BLOCKS * RATIO)
    aligned = tl.cdiv(visible, 16) * 16  # of the row: so that 16 bytes at a time have one mask
    lse = ()
    for piece in tl.static_range(PIECES):
        head = piece * HEADS + tl.arange(0, HEADS)
        sums = tl.load(LSE + head * lse_head, mask=head < GROUP, other=float("inf"), cache_modifier=".cg")
        lse = lse + (sums * LOG2E,)  # type: ignore[assignment]  # noqa: RUF005  triton knows no stars
    for turn in tl.range(turns, num_stages=STAGES):
        block = turn * BLOCKS + of_tile
        key = block[:, None] * RATIO + tap[None, :]
        here = (key < visible) & (tap < RATIO)[None, :]
        total = tl.zeros([BLOCKS, TAPS], ACC)
        for piece in tl.static_range(PIECES):
            head = piece * HEADS + tl.arange(0, HEADS)
            at = SCORES + head[:, None, None] * score_row + key[None, :, :]
            wanted = (key < aligned)[None, :, :] & (head < GROUP)[:, None, None]
            s = tl.load(at, mask=wanted, other=float("-inf"), cache_modifier=".cg")
            # Not exp2 alone: past the visible ones s is anything, and of -inf less an lse of -inf it would be NaN.
            p = tl.where(here[None, :, :], tl.exp2(s - lse[piece][:, None, None]), 0.0)
            total += tl.sum(p, 0)
        # Not 0 x total: a NaN or inf belongs to the blocks that the token overlaps, and to no other.
        mine = tl.sum(tl.where(own > 0, total * own.to(ACC), 0.0), 1)
        after = tl.sum(tl.where(carry > 0, total * carry.to(ACC), 0.0), 1)
        tl.store(PAIRS + (SLOTS + block) * 2 + 1, mine)
        tl.store(PAIRS + (SLOTS + block + 1) * 2, after)
    # The current block may have no visible compressed token of its own, but part of one before it.
    tl.store(PAIRS + (SLOTS + turns * BLOCKS) * 2 + 1, 0.0)
    tl.store(PAIRS + SLOTS * 2, 0.0)


@triton.jit
def choose(
    token, number, SCORES, LSE, PAIRS, PLACES, OUT, score_row, lse_head, pair_row,
    GROUP: tl.constexpr, HEADS: tl.constexpr, PIECES: tl.constexpr, BLOCKS: tl.constexpr, TAPS: tl.constexpr,
    SIZE: tl.constexpr, STRIDE: tl.constexpr, SELECT: tl.constexpr, N: tl.constexpr, SLOTS: tl.constexpr,
    INIT: tl.constexpr, LOCAL: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Write the blocks of ``token``, negative: padding, all -1. SCORES, LSE, OUT point at it.

    ``number`` tells its scratch from that of others: PAIRS [tokens, pair_row], PLACES [tokens, 2, SLOTS].
    """
    slot = tl.arange(0, SLOTS)
    if token < 0:
        tl.store(OUT + slot, tl.full([SLOTS], -1, tl.int32), mask=slot < N)
    else:
        pair_row = pair_row // 16 * 16  # the compiler sees that rows are aligned
        PAIRS += number * pair_row
        PLACES += number * (2 * SLOTS)
        _group_scores(
            SCORES, LSE, PAIRS, num_compressed(token + 1, SIZE, STRIDE), score_row // 16 * 16, lse_head,
            GROUP, HEADS, PIECES, BLOCKS, TAPS, SELECT // STRIDE, SIZE // STRIDE, SLOTS, STAGES, ACC,
        )  # fmt: skip
        tl.debug_barrier()  # scores written by other threads of the program
        one = token + tl.arange(0, 1)
        rank_rows(PAIRS, PLACES, PLACES + SLOTS, OUT, one, one >= 0, N, pair_row,
                  N, SLOTS, INIT, LOCAL, SELECT, 1, CHUNKS, LANES)  # fmt: skip


@triton.jit(
    do_not_specialize=["first", "rows", "max_len", "score_row", "pair_row", "lse_head"],
    do_not_specialize_on_alignment=["STARTS", "LENGTHS", "OUT", "LSE"],
)
def decode_choose(
    SCORES, LSE, PAIRS, PLACES, OUT, STARTS, LENGTHS, lse_seq: tl.int64, lse_head, out_seq: tl.int64,
    first, rows, max_len, score_row, pair_row,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, PIECES: tl.constexpr, BLOCKS: tl.constexpr,
    TAPS: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, SELECT: tl.constexpr, N: tl.constexpr,
    SLOTS: tl.constexpr, INIT: tl.constexpr, LOCAL: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr,
    STAGES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One program a token and kv head, where a walk's tile holds several tokens; logits [B, rows, Hq, score_row]."""
    number = tl.program_id(0)
    group, row, seq = number % GROUPS, number // GROUPS % rows, number // GROUPS // rows
    begin, end = tokens_of(STARTS, LENGTHS, seq, first + row, 1, max_len)
    token = tl.where(begin < end, begin, -1)
    number = tl.cast(number, tl.int64)
    choose(
        token, number, SCORES + number * GROUP * (score_row // 16 * 16),
        LSE + seq * lse_seq + group * GROUP * lse_head + row, PAIRS, PLACES,
        OUT + seq * out_seq + (row * GROUPS + group) * N, score_row, lse_head, pair_row,
        GROUP, HEADS, PIECES, BLOCKS, TAPS, SIZE, STRIDE, SELECT, N, SLOTS, INIT, LOCAL, CHUNKS, LANES, STAGES, ACC,
    )  # fmt: skip

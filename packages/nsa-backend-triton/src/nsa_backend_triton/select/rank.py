"""The best blocks of a row of scores, found one window of the row at a time (Eq. 11).

A row's scores wait in the program's scratch as pairs of numbers to be added. A window of
CHUNKS x LANES scores is held in registers: those of a lane in one thread, those of a row in one
warp. Bisection of the range of bit patterns finds the n-th best value (scores are >= 0, so their
bits are ordered as they are). It takes three operations per score and step, for n = 64 no more than
for n = 1, and about 8 steps if no scores are equal, else 24 and at most 31. The program checks
whether all rows are done only every STEPS_PER_CHECK steps, since this check alone leaves the warp.
One scan then gives each chosen score its place, and those of the last window go straight to the
output. The first NUM_SELECTED_PAD columns of a window are survivors of earlier windows: pairs of a
score and a block number. Their blocks are lower, so any number of blocks is ranked in one pass and
survivors stay in ascending order.
"""

from __future__ import annotations

import triton
import triton.language as tl

STEPS_PER_CHECK = tl.constexpr(4)


@triton.jit
def _count(flags):
    """Number of set flags [LANES, ROWS, CHUNKS] per row, [ROWS]."""
    return tl.sum(tl.sum(flags.to(tl.int32), 2), 0)


@triton.jit
def _rank(flags):
    """Number of set flags [LANES, ROWS, CHUNKS] of the same row before each one."""
    LANES: tl.constexpr = flags.shape[0]
    ROWS: tl.constexpr = flags.shape[1]
    CHUNKS: tl.constexpr = flags.shape[2]
    PACKS: tl.constexpr = (
        CHUNKS + 7
    ) // 8  # one scan takes four pairs of chunks, of at most 2 x 32 flags each
    PARTS: tl.constexpr = CHUNKS // 2 // PACKS
    shift = tl.arange(0, PARTS) * 8
    left, right = tl.split(tl.reshape(flags.to(tl.int32), [LANES, ROWS, PACKS, PARTS, 2]))
    packed = tl.sum((left + right) << shift[None, None, None, :], 3)
    total = tl.sum(packed, 0)
    until = (
        tl.cumsum(packed, 0) - packed + ((total << 8) + (total << 16) + (total << 24))[None, :, :]
    )
    pack_count = tl.sum((total[:, :, None] >> shift[None, None, :]) & 255, 2)
    pack = tl.arange(0, PACKS)
    before = tl.sum(
        tl.where(pack[None, :, None] < pack[None, None, :], pack_count[:, :, None], 0), 1
    )
    even = ((until[:, :, :, None] >> shift[None, None, None, :]) & 255) + before[None, :, :, None]
    return tl.reshape(tl.join(even, even + left), [LANES, ROWS, CHUNKS])


@triton.jit
def _threshold(bits, num_wanted, num_eligible, lower_bound, NEG_INF_BITS: tl.constexpr):
    """Bits of the worst of the best num_wanted [ROWS], and the number of bits that are not lower.

    bits [LANES, ROWS, CHUNKS]: ``num_eligible`` of a row are >= NEG_INF_BITS, the bits of -inf, as
    which a NaN score counts; the others are NEG_INF_BITS - 1. The result is at least
    ``lower_bound`` [ROWS].
    """
    best = tl.max(bits, 2)
    top = tl.max(best, 0)
    # Each lane holds one at least as good as the worst of the lanes' best: enough for that many.
    lane_bound = tl.min(best, 0)
    low = tl.where(
        (num_wanted <= bits.shape[0]) & (lane_bound > lower_bound), lane_bound, lower_bound
    )
    low = tl.where(
        num_wanted == num_eligible, tl.full(lane_bound.shape, NEG_INF_BITS, bits.dtype), low
    )
    low = tl.where(num_wanted == 0, top + 1, low)
    high = tl.where((num_wanted == 0) | (num_wanted == num_eligible), low + 1, top + 1)
    while tl.max((low + 1 < high).to(tl.int32), 0) > 0:
        for _ in tl.static_range(STEPS_PER_CHECK):  # a finished row stays: its middle is its low
            # of two numbers whose difference may overflow
            middle = (low & high) + ((low ^ high) >> 1)
            count = _count(bits >= middle[None, :, None])
            low = tl.where(count >= num_wanted, middle, low)
            # Exactly the wanted number lies at or above the middle: the row is done.
            high = tl.where(
                count == num_wanted, middle + 1, tl.where(count > num_wanted, high, middle)
            )
    return low, _count(bits >= low[None, :, None])


@triton.jit
def _rank_windows(
    SCORES, OUT, num_init, first_local, num_free, stride_out, stride_scores,
    NUM_SELECTED_PAD: tl.constexpr, INIT_BLOCKS: tl.constexpr, CHUNKS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Write the best ``num_free`` blocks of INIT_BLOCKS .. first_local of each row to OUT.

    They follow the row's first ``num_init`` blocks.
    """
    ROWS: tl.constexpr = num_free.shape[0]
    NEW_BLOCKS: tl.constexpr = CHUNKS * LANES - NUM_SELECTED_PAD
    FP64: tl.constexpr = SCORES.dtype.element_ty == tl.float64
    NEG_INF_BITS: tl.constexpr = -(2**52) if FP64 else -(2**23)  # the bits of -inf
    BITS: tl.constexpr = tl.int64 if FP64 else tl.int32
    row, chunk = tl.arange(0, ROWS), tl.arange(0, CHUNKS)
    # A thread reads two pairs, a warp 2 x LANES in turn.
    offs = row[None, :, None] * stride_scores + tl.arange(0, CHUNKS // 2)[None, None, :] * (
        LANES * 4
    )
    offs += tl.arange(0, LANES * 4)[:, None, None]
    column = (
        tl.arange(0, LANES)[:, None, None] * 2
        + (chunk // 2 * (LANES * 2) + chunk % 2)[None, None, :]
    )
    num_kept = tl.zeros([ROWS], tl.int32)
    threshold = tl.full([ROWS], NEG_INF_BITS, BITS)
    num_windows = tl.cdiv(tl.max(tl.where(num_free > 0, first_local, 0), 0), NEW_BLOCKS)
    for window in tl.range(num_windows, num_stages=1):
        window_scores = SCORES + window * (NEW_BLOCKS * 2)
        begin = NUM_SELECTED_PAD + tl.maximum(INIT_BLOCKS - window * NEW_BLOCKS, 0)
        end = tl.where(
            num_free > 0,
            tl.minimum(
                NUM_SELECTED_PAD + first_local - window * NEW_BLOCKS, NEW_BLOCKS + NUM_SELECTED_PAD
            ),
            0,
        )
        pairs = tl.reshape(tl.load(window_scores + offs), [LANES, 2, 2, ROWS, CHUNKS // 2])
        first, second = tl.split(tl.permute(pairs, [0, 3, 4, 1, 2]))
        first, second = (
            tl.reshape(first, [LANES, ROWS, CHUNKS]),
            tl.reshape(second, [LANES, ROWS, CHUNKS]),
        )
        score = tl.where(column < NUM_SELECTED_PAD, first, first + second)
        score = tl.where(score == score, score, float("-inf"))  # a NaN ranks last
        valid = (column < num_kept[None, :, None]) | (
            (column >= begin) & (column < end[None, :, None])
        )
        bits = tl.where(valid, score.to(BITS, bitcast=True), NEG_INF_BITS - 1)
        num_eligible = num_kept + tl.maximum(end - begin, 0)
        num_kept = tl.minimum(num_free, num_eligible)
        threshold, count = _threshold(bits, num_kept, num_eligible, threshold, NEG_INF_BITS)
        if tl.max(count - num_kept, 0) > 0:
            num_wanted = num_kept - _count(bits > threshold[None, :, None])
            equal = bits == threshold[None, :, None]
            bits = tl.where(
                equal & (_rank(equal) >= num_wanted[None, :, None]), NEG_INF_BITS - 1, bits
            )
        chosen = bits >= threshold[None, :, None]
        position = _rank(chosen)
        block = tl.where(
            column < NUM_SELECTED_PAD,
            second.to(BITS, bitcast=True).to(tl.int32),
            column + (window * NEW_BLOCKS - NUM_SELECTED_PAD),
        )
        if window + 1 < num_windows:
            tl.debug_barrier()  # every pair is read before it is overwritten
            survivors = (
                window_scores + row[None, :, None] * stride_scores + (position + NEW_BLOCKS) * 2
            )
            tl.store(survivors, score, mask=chosen)
            tl.store(survivors + 1, block.to(BITS).to(score.dtype, bitcast=True), mask=chosen)
            tl.debug_barrier()
        else:
            tl.store(
                OUT + (row * stride_out + num_init)[None, :, None] + position, block, mask=chosen
            )


@triton.jit
def rank_rows(
    SCORES, OUT, token, token_exists, stride_out, stride_scores,
    NUM_SELECTED: tl.constexpr, NUM_SELECTED_PAD: tl.constexpr, INIT_BLOCKS: tl.constexpr,
    LOCAL_BLOCKS: tl.constexpr, SELECT_BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Write the blocks of the tokens [ROWS]; ``token_exists``: the token lies in its document.

    SCORES points at the first token's row of pairs: the sum of pair NUM_SELECTED_PAD + j is the
    score of block j. Pairs are overwritten. A token that may select all of its blocks needs no
    scores.
    """
    slot = tl.arange(0, NUM_SELECTED_PAD)[None, :]
    num_candidates = token // SELECT_BLOCK + 1
    num_init = tl.where(num_candidates <= NUM_SELECTED, num_candidates, INIT_BLOCKS)
    first_local = tl.maximum(num_candidates - LOCAL_BLOCKS, num_init)
    total = tl.minimum(num_candidates, NUM_SELECTED)
    num_free = tl.where(token_exists, total - num_init - (num_candidates - first_local), 0)
    forced = (slot < num_init[:, None]) | (slot >= (num_init + num_free)[:, None])
    block = tl.where(
        slot < num_init[:, None], slot, (first_local - num_free - num_init)[:, None] + slot
    )
    block = tl.where(slot < total[:, None], block, -1)
    out = OUT + tl.arange(0, token.shape[0])[:, None] * stride_out + slot
    tl.store(out, block, mask=token_exists[:, None] & (slot < NUM_SELECTED) & forced)
    _rank_windows(
        SCORES, OUT, num_init, first_local, num_free, stride_out, stride_scores,
        NUM_SELECTED_PAD, INIT_BLOCKS, CHUNKS, LANES,
    )  # fmt: skip

"""The best blocks of a row of scores, found one window of the row at a time (Eq. 11).

A row's scores wait in the program's scratch as pairs of numbers to be added. A window of
CHUNKS x LANES scores is held in registers: those of a lane in one thread, those of a row in one
warp. Bisection of the range of bit patterns finds a value with the wanted number of scores at or
above it (scores are >= 0, so their bits are ordered as they are). For n = 64 it takes no more
operations per score and step than for n = 1, and about 6 steps if no scores are equal, else 24 and
at most 31. The program checks whether all rows are done only every STEPS_PER_CHECK steps, since
this check alone leaves the warp. One scan then gives each chosen score its place, and those of the
last window go straight to the output. The first NUM_SELECTED_PAD columns of a window are survivors
of earlier windows: pairs of a score and a block number. Their blocks are lower, so any number of
blocks is ranked in one pass and survivors stay in ascending order. Windows before the last one may
keep more blocks than are wanted, as many as survivors have room, and their search ends at any such
number.

Scores are compared, and their flags counted, in floating point: two instructions per score. The
compiler turns a sum of integer flags into a mask and counts its bits, which takes four. The keys of
a NaN and of a column without a score are bits of a NaN, which no comparison counts.
"""

from __future__ import annotations

import triton
import triton.language as tl

STEPS_PER_CHECK = tl.constexpr(3)
NAN_KEY = tl.constexpr(-1)  # the key of a NaN, which ranks last
NO_KEY = tl.constexpr(-2)  # the key of a column without a score


@triton.jit
def _lane_count(scores, pivot):
    """Number of ``scores`` [LANES, ROWS, CHUNKS] at or above ``pivot`` [ROWS], [LANES, ROWS]."""
    pivot = pivot.to(scores.dtype, bitcast=True)
    return tl.sum(tl.where(scores >= pivot[None, :, None], 1.0, 0.0), 2).to(tl.int32)


@triton.jit
def _places(flags):
    """Number of set flags [LANES, ROWS, CHUNKS] of the same row before each one.

    Columns ascend as (pair of chunks, lane, chunk of the pair).
    """
    LANES: tl.constexpr = flags.shape[0]
    ROWS: tl.constexpr = flags.shape[1]
    CHUNKS: tl.constexpr = flags.shape[2]
    PACKS: tl.constexpr = (
        CHUNKS + 7
    ) // 8  # one scan takes four pairs of chunks, of at most 2 x 32 flags each
    PARTS: tl.constexpr = CHUNKS // 2 // PACKS
    tl.static_assert(CHUNKS <= 32)
    # unsigned, because a full pack overflows
    shift = tl.arange(0, PARTS).to(tl.uint32) * 8
    left, right = tl.split(tl.reshape(flags.to(tl.uint32), [LANES, ROWS, PACKS, PARTS, 2]))
    packed = tl.sum((left + right) << shift[None, None, None, :], 3)
    total = tl.sum(packed, 0)[None, :, :]
    scanned = tl.permute(tl.cumsum(tl.permute(packed, [2, 1, 0]), 2), [2, 1, 0])
    until = scanned - packed + (total << 8) + (total << 16) + (total << 24)
    even = (until[:, :, :, None] >> shift[None, None, None, :]) & 255
    if PACKS > 1:
        # The flags of a row in earlier packs: 16 bits per pack, which stay in the lane's registers.
        pairs = (total & 0xFF00FF) + ((total >> 8) & 0xFF00FF)
        pack_count = ((pairs & 0xFFFF) + (pairs >> 16)).to(tl.uint64)
        pack_shift = (tl.arange(0, PACKS) * 16).to(tl.uint64)[None, None, :]
        counts = tl.sum(pack_count << pack_shift, 2)
        counts = (counts << 16) + (counts << 32) + (counts << 48)
        before = (counts[:, :, None] >> pack_shift) & 0xFFFF
        even += before.to(tl.uint32)[:, :, :, None]
    return tl.reshape(tl.join(even, even + left).to(tl.int32), [LANES, ROWS, CHUNKS])


@triton.jit
def _threshold(
    keys, num_wanted, max_count, num_eligible, lower_bound, SCORE: tl.constexpr
):  # fmt: skip
    """Find a threshold [ROWS] with num_wanted .. max_count keys at or above it.

    If equal keys leave none, it is the key of the worst of the best ``num_wanted``.

    Args:
        keys: [LANES, ROWS, CHUNKS], bits of scores of type SCORE, NAN_KEY or NO_KEY.
        num_wanted: [ROWS].
        max_count: [ROWS], at least ``num_wanted``.
        num_eligible: [ROWS], number of keys other than NO_KEY.
        lower_bound: [ROWS], a value with at least ``num_wanted`` keys at or above it.
        SCORE: float32 or float64.

    Returns:
        (threshold, number of keys at or above it, whether any row has more than max_count).
    """
    scores = keys.to(SCORE, bitcast=True)
    best = tl.max(keys, 2)
    top = tl.max(best, 0)
    # Each lane holds one at least as good as the worst of the lanes' best: enough for that many.
    lane_bound = tl.min(best, 0)
    low = tl.where(
        (num_wanted <= keys.shape[0]) & (lane_bound > lower_bound), lane_bound, lower_bound
    )
    low = tl.where(num_wanted == num_eligible, tl.full(low.shape, NAN_KEY, keys.dtype), low)
    low = tl.where(num_wanted == 0, top + 1, low)
    # A row in which no key is better than the survivors is done at once. No score is below NAN_KEY,
    # and a comparison with it counts none.
    count = tl.where(low == NAN_KEY, num_eligible, tl.sum(_lane_count(scores, low), 0))
    high = top + 1
    num_wanted = tl.maximum(num_wanted, 1)  # a row that wants none stays above its scores
    state = 2  # 2: some row is not done, 1: some row has equal keys at its threshold
    while state > 1:
        for _ in tl.static_range(STEPS_PER_CHECK):
            # A row that is done stays: its middle is not below high.
            middle = low + ((high - low + 1) >> 1)
            middle_count = tl.sum(_lane_count(scores, middle), 0)
            enough = middle_count >= num_wanted
            low = tl.where(enough, middle, low)
            count = tl.where(enough, middle_count, count)
            high = tl.where(enough, high, tl.minimum(high, middle))
            high = tl.where(count <= max_count, low + 1, high)
        state = tl.max(tl.where(low + 1 < high, 2, (count > max_count).to(tl.int32)), 0)
    return low, count, state > 0


@triton.jit
def _rank_window(
    SCORES, OUT, window, last, num_kept, threshold, num_init, first_local, num_free,
    stride_out, stride_scores,
    NUM_SELECTED_PAD: tl.constexpr, INIT_BLOCKS: tl.constexpr, CHUNKS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Rank the new blocks of a window, CHUNKS x LANES with the survivors before them.

    SCORES has a pair of numbers for each column. The pair of a new block holds two parts of its
    score; that of a survivor holds its score and the bits of its block number.

    ``num_kept`` [ROWS] survivors are at or above ``threshold``. Returns both for the next window,
    whose first columns get the survivors. The last window writes OUT.
    """
    ROWS: tl.constexpr = num_free.shape[0]
    NEW_BLOCKS: tl.constexpr = CHUNKS * LANES - NUM_SELECTED_PAD
    SCORE: tl.constexpr = SCORES.dtype.element_ty
    BITS: tl.constexpr = threshold.dtype
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
    window_scores = SCORES + window * (NEW_BLOCKS * 2)
    pairs = tl.reshape(tl.load(window_scores + offs), [LANES, 2, 2, ROWS, CHUNKS // 2])
    first, second = tl.split(tl.permute(pairs, [0, 3, 4, 1, 2]))
    first = tl.reshape(first, [LANES, ROWS, CHUNKS])
    second = tl.reshape(second, [LANES, ROWS, CHUNKS])
    is_survivor = column < NUM_SELECTED_PAD
    score = tl.where(is_survivor, first, first + second)
    keys = tl.where(score >= 0, score.to(BITS, bitcast=True), NAN_KEY)
    begin = NUM_SELECTED_PAD + tl.maximum(INIT_BLOCKS - window * NEW_BLOCKS, 0)
    end = tl.minimum(NUM_SELECTED_PAD + first_local - window * NEW_BLOCKS, CHUNKS * LANES)
    # the middle condition is known at compile time for most columns
    ranked = is_survivor | (column >= NUM_SELECTED_PAD + INIT_BLOCKS) | (column >= begin)
    ranked &= column < tl.where(is_survivor, num_kept[None, :, None], end[None, :, None])
    keys = tl.where(ranked, keys, NO_KEY)
    num_eligible = num_kept + tl.maximum(end - begin, 0)
    num_wanted = tl.minimum(num_free, num_eligible)
    max_count = tl.where(last, num_wanted, NUM_SELECTED_PAD)
    threshold, count, ties = _threshold(keys, num_wanted, max_count, num_eligible, threshold, SCORE)
    num_kept = tl.where(count <= max_count, count, num_wanted)
    if ties:
        better = tl.sum(tl.sum((keys > threshold[None, :, None]).to(tl.int32), 2), 0)
        equal = keys == threshold[None, :, None]
        keys = tl.where(
            equal & (_places(equal) >= (num_kept - better)[None, :, None]), NO_KEY, keys
        )
    chosen = keys >= threshold[None, :, None]
    position = _places(chosen)
    block = tl.where(
        is_survivor,
        second.to(BITS, bitcast=True).to(tl.int32),
        column + (window * NEW_BLOCKS - NUM_SELECTED_PAD),
    )
    if last:
        tl.store(OUT + (row * stride_out + num_init)[None, :, None] + position, block, mask=chosen)
    else:
        tl.debug_barrier()  # every pair is read before it is overwritten
        survivors = window_scores + row[None, :, None] * stride_scores + (position + NEW_BLOCKS) * 2
        tl.store(survivors, keys.to(SCORE, bitcast=True), mask=chosen)
        tl.store(survivors + 1, block.to(BITS).to(SCORE, bitcast=True), mask=chosen)
        tl.debug_barrier()
    return num_kept, threshold


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
    BITS: tl.constexpr = tl.int64 if SCORES.dtype.element_ty == tl.float64 else tl.int32
    num_kept = tl.zeros([ROWS], tl.int32)
    threshold = tl.full([ROWS], NAN_KEY, BITS)
    num_blocks = tl.max(tl.where(num_free > 0, first_local, 0), 0)
    num_windows = tl.cdiv(num_blocks, CHUNKS * LANES - NUM_SELECTED_PAD)
    for window in tl.range(num_windows, num_stages=1):
        num_kept, threshold = _rank_window(
            SCORES, OUT, window, window + 1 == num_windows, num_kept, threshold,
            num_init, first_local, num_free, stride_out, stride_scores,
            NUM_SELECTED_PAD, INIT_BLOCKS, CHUNKS, LANES,
        )  # fmt: skip


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

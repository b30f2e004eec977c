"""The best n of a row of scores, a window of the row at a time.

A row's scores wait in the program's own scratch, as pairs of numbers to be added. A window of
CHUNKS x LANES of them is held in registers (a lane's in one thread, a row's in one warp); the n-th
best value is found by halving the range of its bit pattern (scores are >= 0, so their bits are
ordered as they are): three operations per score and step, no more for n = 64 than for n = 1, about
8 steps where no scores are equal and 24, at most 31, where some are. Whether all rows are done is
asked every STEPS steps, since only that question leaves the warp. One scan then gives every chosen
score its place, and the last window's go straight to the output. The first SLOTS columns of a
window are the survivors of the windows before it, pairs of a score and a block's number, which lie
at lower blocks: so any number of blocks is ranked in one pass, and survivors stay in ascending
order.
"""

from __future__ import annotations

import triton
import triton.language as tl

STEPS = tl.constexpr(4)


@triton.jit
def _count(flags):
    """How many of flags [LANES, ROWS, CHUNKS], per row [ROWS]."""
    return tl.sum(tl.sum(flags.to(tl.int32), 2), 0)


@triton.jit
def _rank(flags):
    """Number of flags [LANES, ROWS, CHUNKS] of its row before each one."""
    LANES: tl.constexpr = flags.shape[0]
    ROWS: tl.constexpr = flags.shape[1]
    CHUNKS: tl.constexpr = flags.shape[2]
    PACKS: tl.constexpr = (
        CHUNKS + 7
    ) // 8  # four pairs of chunks, at most 2 x 32 each, in one scan
    PARTS: tl.constexpr = CHUNKS // 2 // PACKS
    shift = tl.arange(0, PARTS) * 8
    left, right = tl.split(tl.reshape(flags.to(tl.int32), [LANES, ROWS, PACKS, PARTS, 2]))
    packed = tl.sum((left + right) << shift[None, None, None, :], 3)
    total = tl.sum(packed, 0)
    until = (
        tl.cumsum(packed, 0) - packed + ((total << 8) + (total << 16) + (total << 24))[None, :, :]
    )
    of_pack = tl.sum((total[:, :, None] >> shift[None, None, :]) & 255, 2)
    pack = tl.arange(0, PACKS)
    before = tl.sum(tl.where(pack[None, :, None] < pack[None, None, :], of_pack[:, :, None], 0), 1)
    even = ((until[:, :, :, None] >> shift[None, None, None, :]) & 255) + before[None, :, :, None]
    return tl.reshape(tl.join(even, even + left), [LANES, ROWS, CHUNKS])


@triton.jit
def _threshold(bits, need, eligible, least, NOTHING: tl.constexpr):
    """The bits of the worst of the best need [ROWS] of bits [LANES, ROWS, CHUNKS], and how many are
    as good or better.

    Of a row's bits, ``eligible`` are >= NOTHING, the bits of a NaN score; the others are NOTHING -
    1. The result is ``least`` [ROWS] or more.
    """
    best = tl.max(bits, 2)
    top = tl.max(best, 0)
    # Each lane holds one at least as good as the worst of their best: enough for that many.
    sure = tl.min(best, 0)
    low = tl.where((need <= bits.shape[0]) & (sure > least), sure, least)
    low = tl.where(need == eligible, tl.full(sure.shape, NOTHING, bits.dtype), low)
    low = tl.where(need == 0, top + 1, low)
    high = tl.where((need == 0) | (need == eligible), low + 1, top + 1)
    while tl.max((low + 1 < high).to(tl.int32), 0) > 0:
        for _ in tl.static_range(STEPS):  # a row that is done stays so: its middle is its low
            # of two numbers whose difference may overflow
            middle = (low & high) + ((low ^ high) >> 1)
            above = _count(bits >= middle[None, :, None])
            low = tl.where(above >= need, middle, low)
            # As many as are wanted lie at or above the middle: the row is done.
            high = tl.where(above == need, middle + 1, tl.where(above > need, high, middle))
    return low, _count(bits >= low[None, :, None])


@triton.jit
def _rank_windows(
    SCORES, OUT, init, first_local, free, out_row, row_length,
    SLOTS: tl.constexpr, INIT: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write the best ``free`` blocks of INIT .. first_local of each row to OUT, after its first
    ``init``.
    """
    ROWS: tl.constexpr = free.shape[0]
    FRESH: tl.constexpr = CHUNKS * LANES - SLOTS
    WIDE: tl.constexpr = SCORES.dtype.element_ty == tl.float64
    NOTHING: tl.constexpr = -(2**52) if WIDE else -(2**23)  # the bits of -inf
    BITS: tl.constexpr = tl.int64 if WIDE else tl.int32
    row, chunk = tl.arange(0, ROWS), tl.arange(0, CHUNKS)
    # A thread reads two pairs, a warp 2 x LANES in turn.
    at = row[None, :, None] * row_length + tl.arange(0, CHUNKS // 2)[None, None, :] * (LANES * 4)
    at += tl.arange(0, LANES * 4)[:, None, None]
    column = (
        tl.arange(0, LANES)[:, None, None] * 2
        + (chunk // 2 * (LANES * 2) + chunk % 2)[None, None, :]
    )
    kept = tl.zeros([ROWS], tl.int32)
    least = tl.full([ROWS], NOTHING, BITS)
    windows = tl.cdiv(tl.max(tl.where(free > 0, first_local, 0), 0), FRESH)
    for window in tl.range(windows, num_stages=1):
        here = SCORES + window * (FRESH * 2)
        begin = SLOTS + tl.maximum(INIT - window * FRESH, 0)
        end = tl.where(free > 0, tl.minimum(SLOTS + first_local - window * FRESH, FRESH + SLOTS), 0)
        pairs = tl.reshape(tl.load(here + at), [LANES, 2, 2, ROWS, CHUNKS // 2])
        first, second = tl.split(tl.permute(pairs, [0, 3, 4, 1, 2]))
        first, second = (
            tl.reshape(first, [LANES, ROWS, CHUNKS]),
            tl.reshape(second, [LANES, ROWS, CHUNKS]),
        )
        score = tl.where(column < SLOTS, first, first + second)
        score = tl.where(score == score, score, float("-inf"))  # a NaN ranks last
        valid = (column < kept[None, :, None]) | ((column >= begin) & (column < end[None, :, None]))
        bits = tl.where(valid, score.to(BITS, bitcast=True), NOTHING - 1)
        eligible = kept + tl.maximum(end - begin, 0)
        kept = tl.minimum(free, eligible)
        least, count = _threshold(bits, kept, eligible, least, NOTHING)
        if tl.max(count - kept, 0) > 0:
            wanted = kept - _count(bits > least[None, :, None])
            equal = bits == least[None, :, None]
            bits = tl.where(equal & (_rank(equal) >= wanted[None, :, None]), NOTHING - 1, bits)
        chosen = bits >= least[None, :, None]
        place = _rank(chosen)
        block = tl.where(
            column < SLOTS,
            second.to(BITS, bitcast=True).to(tl.int32),
            column + (window * FRESH - SLOTS),
        )
        if window + 1 < windows:
            tl.debug_barrier()  # every pair is read before it is written over
            to = here + row[None, :, None] * row_length + (place + FRESH) * 2
            tl.store(to, score, mask=chosen)
            tl.store(to + 1, block.to(BITS).to(score.dtype, bitcast=True), mask=chosen)
            tl.debug_barrier()
        else:
            tl.store(OUT + (row * out_row + init)[None, :, None] + place, block, mask=chosen)


@triton.jit
def rank_rows(
    SCORES, OUT, token, inside, out_row, row_length,
    N: tl.constexpr, SLOTS: tl.constexpr, INIT: tl.constexpr, LOCAL: tl.constexpr,
    SELECT: tl.constexpr,
    CHUNKS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write the blocks of the tokens [ROWS], ``inside`` their document.

    SCORES points at the first token's row of pairs: the sum of pair SLOTS + j is block j's score.
    Pairs are written over. A token that may choose all of its blocks needs no scores.
    """
    slot = tl.arange(0, SLOTS)[None, :]
    candidates = token // SELECT + 1
    init = tl.where(candidates <= N, candidates, INIT)
    first_local = tl.maximum(candidates - LOCAL, init)
    total = tl.minimum(candidates, N)
    free = tl.where(inside, total - init - (candidates - first_local), 0)
    forced = (slot < init[:, None]) | (slot >= (init + free)[:, None])
    block = tl.where(slot < init[:, None], slot, (first_local - free - init)[:, None] + slot)
    block = tl.where(slot < total[:, None], block, -1)
    to = OUT + tl.arange(0, token.shape[0])[:, None] * out_row + slot
    tl.store(to, block, mask=inside[:, None] & (slot < N) & forced)
    _rank_windows(
        SCORES, OUT, init, first_local, free, out_row, row_length, SLOTS, INIT, CHUNKS, LANES
    )

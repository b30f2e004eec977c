"""The best n of a row of scores, a window of the row at a time.

A row's scores wait in the program's own scratch. A window of CHUNKS x LANES of them is held in registers (a lane's in
one thread, a row's in one warp); the n-th best value is found by halving the range of its bit pattern (scores are
>= 0, so their bits are ordered as they are): three operations per score and step, no more for n = 64 than for n = 1,
about 8 steps where no scores are equal and 24, at most 31, where some are. One scan then gives every chosen score its
place. The first SLOTS columns of a window are the survivors of the windows before it, which lie at lower blocks: so any
number of blocks is ranked in one pass, and survivors stay in ascending order.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _count(flags):
    """How many of flags [LANES, ROWS, CHUNKS], per row [ROWS]."""
    return tl.sum(tl.sum(flags.to(tl.int32), 2), 0)


@triton.jit
def _rank(flags):
    """Each one's number among flags [LANES, ROWS, CHUNKS] of its row, from 1; columns are chunk * LANES + lane."""
    LANES: tl.constexpr = flags.shape[0]
    ROWS: tl.constexpr = flags.shape[1]
    CHUNKS: tl.constexpr = flags.shape[2]
    shift = tl.arange(0, 4) * 8  # four chunks' counts, at most 32 each, in one scan
    parts = tl.reshape(flags.to(tl.int32), [LANES, ROWS, CHUNKS // 4, 4])
    packed = tl.sum(parts << shift[None, None, None, :], 3)
    until = (tl.cumsum(packed, 0)[:, :, :, None] >> shift[None, None, None, :]) & 255
    total = tl.reshape((tl.sum(packed, 0)[:, :, None] >> shift[None, None, :]) & 255, [ROWS, CHUNKS])
    return tl.reshape(until, [LANES, ROWS, CHUNKS]) + (tl.cumsum(total, 1) - total)[None, :, :]


@triton.jit
def _choose(bits, need, eligible, NOTHING: tl.constexpr):
    """Mask of the best need [ROWS] of bits [LANES, ROWS, CHUNKS], lower columns first where equal.

    Of a row's bits, ``eligible`` are >= NOTHING, the bits of a NaN score; the others are NOTHING - 1.
    """
    best = tl.max(bits, 2)
    top = tl.max(best, 0)
    # Each lane holds one at least as good as the worst of their best: enough for that many.
    sure = tl.min(best, 0)
    low = tl.where((need <= bits.shape[0]) & (sure > NOTHING), sure, tl.full(sure.shape, NOTHING, bits.dtype))
    low = tl.where(need == eligible, tl.full(sure.shape, NOTHING, bits.dtype), low)
    low = tl.where(need == 0, top + 1, low)
    high = tl.where((need == 0) | (need == eligible), low + 1, top + 1)
    while tl.max((low + 1 < high).to(tl.int32), 0) > 0:
        middle = (low & high) + ((low ^ high) >> 1)  # of two numbers whose difference may overflow
        above = _count(bits >= middle[None, :, None])
        low = tl.where(above >= need, middle, low)
        # As many as are wanted lie at or above the middle: the row is done.
        high = tl.where(above == need, middle + 1, tl.where(above > need, high, middle))
    chosen = bits >= low[None, :, None]
    if tl.max(_count(chosen) - need, 0) > 0:
        strict = bits > low[None, :, None]
        wanted = need - _count(strict)
        equal = bits == low[None, :, None]
        chosen = strict | (equal & (_rank(equal) <= wanted[None, :, None]))
    return chosen


@triton.jit
def rank_rows(
    SCORES, PLACES, SURVIVORS, OUT, token, inside, out_row, row_length,
    N: tl.constexpr, SLOTS: tl.constexpr, INIT: tl.constexpr, LOCAL: tl.constexpr, SELECT: tl.constexpr,
    ROWS: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write the blocks of ROWS tokens [ROWS], ``inside`` their document.

    SCORES points at the first token's row of pairs: the sum of pair SLOTS + j is block j's score. Pairs that have been
    read, PLACES and SURVIVORS [ROWS, SLOTS] are scratch.
    """
    FRESH: tl.constexpr = CHUNKS * LANES - SLOTS
    WIDE: tl.constexpr = SCORES.dtype.element_ty == tl.float64
    NOTHING: tl.constexpr = -(2**52) if WIDE else -(2**23)  # the bits of -inf
    row, slot = tl.arange(0, ROWS), tl.arange(0, SLOTS)[None, :]
    candidates = token // SELECT + 1
    init = tl.minimum(candidates, INIT)
    first_local = tl.maximum(candidates - LOCAL, init)
    total = tl.minimum(candidates, N)
    free = tl.where(inside, total - init - (candidates - first_local), 0)
    column = tl.arange(0, CHUNKS)[None, None, :] * LANES + tl.arange(0, LANES)[:, None, None]
    at = row[None, :, None] * row_length + column * 2
    of_row, of_slot = row[:, None] * row_length, row[:, None] * SLOTS + slot
    kept = tl.zeros([ROWS], tl.int32)
    windows = tl.cdiv(tl.max(tl.where(free > 0, first_local, 0), 0), FRESH)
    for window in tl.range(windows, num_stages=1):
        here = SCORES + window * (FRESH * 2)
        begin = SLOTS + tl.maximum(INIT - window * FRESH, 0)
        end = tl.where(free > 0, tl.minimum(SLOTS + first_local - window * FRESH, FRESH + SLOTS), 0)
        score = tl.load(here + at) + tl.load(here + 1 + at)
        score = tl.where(score == score, score, float("-inf"))  # a NaN ranks last
        bits = score.to(tl.int64 if WIDE else tl.int32, bitcast=True)
        valid = (column < kept[None, :, None]) | ((column >= begin) & (column < end[None, :, None]))
        bits = tl.where(valid, bits, NOTHING - 1)
        eligible = kept + tl.maximum(end - begin, 0)
        kept = tl.minimum(free, eligible)
        chosen = _choose(bits, kept, eligible, NOTHING)
        tl.store(
            PLACES + row[None, :, None] * SLOTS + _rank(chosen) - 1, column + (row * 0)[None, :, None], mask=chosen
        )
        tl.debug_barrier()
        full = slot < kept[:, None]
        place = tl.load(PLACES + of_slot, mask=full, other=0)
        old = full & (place < SLOTS)
        block = tl.load(SURVIVORS + row[:, None] * SLOTS + place, mask=old, other=0)
        block = tl.where(old, block, window * FRESH + place - SLOTS)
        score = tl.load(here + of_row + place * 2, mask=full, other=0.0)
        score += tl.load(here + of_row + place * 2 + 1, mask=full, other=0.0)
        tl.debug_barrier()  # everything is read before it is written over
        tl.store(SURVIVORS + of_slot, block, mask=full)
        tl.store(here + of_row + (FRESH + slot) * 2, score, mask=full & (window + 1 < windows))
        tl.store(here + of_row + (FRESH + slot) * 2 + 1, tl.zeros_like(score), mask=full & (window + 1 < windows))
        tl.debug_barrier()
    place = slot - init[:, None]
    ranked = (place >= 0) & (place < free[:, None])
    block = tl.load(SURVIVORS + row[:, None] * SLOTS + place, mask=ranked, other=0)
    block = tl.where(ranked, block, (first_local - free)[:, None] + place)
    block = tl.where(place < 0, slot, block)
    block = tl.where(slot < total[:, None], block, -1)
    tl.store(OUT + row[:, None] * out_row + slot, block, mask=inside[:, None] & (slot < N))

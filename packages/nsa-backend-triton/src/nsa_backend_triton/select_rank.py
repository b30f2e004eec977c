"""The best n of a row of scores, a window of the row at a time.

A row's scores wait in the program's own scratch. A window of WIDTH of them is held in registers; the n-th best value is
found by halving the range of its bit pattern (scores are >= 0, so their bits are ordered as they are), two operations
per score and step and no more for n = 64 than for n = 1, about 16 steps where no scores are equal. One scan then gives
every chosen score its place. The first SLOTS columns of a window are the survivors of the windows before it, which
lie at lower blocks: so any number of blocks is ranked in one pass, and survivors stay in ascending order.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _threshold(bits, need, eligible):
    """(value, how many that equal it are wanted) [ROWS] so that need [ROWS] of bits [LANES, ROWS, CHUNKS] are chosen.

    ``eligible`` [ROWS] counts bits >= -1, of which need are wanted; chosen are those above value, then equal ones.
    """
    top = tl.max(tl.max(bits, 2), 0)
    low = tl.where(need == 0, top, tl.full(top.shape, -1, bits.dtype))
    high = tl.where((need == 0) | (need == eligible), low + 1, top + 1)
    while tl.max(high - low, 0) > 1:
        middle = low + ((high - low) >> 1)
        above = tl.sum(tl.sum((bits >= middle[None, :, None]).to(tl.int32), 2), 0)
        low = tl.where(above >= need, middle, low)
        # As many as are wanted lie at or above the middle: the row is done.
        high = tl.where(above == need, middle + 1, tl.where(above > need, high, middle))
    return low, need - tl.sum(tl.sum((bits > low[None, :, None]).to(tl.int32), 2), 0)


@triton.jit
def _places(strict, equal, wanted):
    """(chosen, place among the chosen) of masks [LANES, ROWS, CHUNKS]: strict ones, and the first wanted equal ones."""
    both = strict.to(tl.int32) + equal.to(tl.int32) * 65536  # two counts in one scan; a window is below 2^15 wide
    total = tl.sum(both, 0)
    until = tl.cumsum(both, 0) + (tl.cumsum(total, 1) - total)[None, :, :]
    ties = tl.minimum(until >> 16, wanted[None, :, None])
    chosen = strict | (equal & ((until >> 16) <= wanted[None, :, None]))
    return chosen, (until & 65535) + ties - 1


@triton.jit
def rank_rows(
    SCORES, SURVIVORS, OUT, token, inside, out_row, written, row_length,
    N: tl.constexpr, SLOTS: tl.constexpr, INIT: tl.constexpr, LOCAL: tl.constexpr, SELECT: tl.constexpr,
    ROWS: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Write the blocks of ROWS tokens [ROWS], ``inside`` their document, from the scores of ``written`` blocks.

    SCORES points at the first token's row of pairs: block j's score is the first of pair SLOTS + j and, for j >= 1, the
    second of the pair before. SURVIVORS [ROWS, SLOTS] is scratch, and pairs of SCORES that have been read.
    """
    FRESH: tl.constexpr = CHUNKS * LANES - SLOTS
    row = tl.arange(0, ROWS)
    candidates = token // SELECT + 1
    first_local = tl.maximum(candidates - LOCAL, tl.minimum(candidates, INIT))
    total = tl.minimum(candidates, N)
    free = total - tl.minimum(candidates, INIT) - (candidates - first_local)
    column = tl.arange(0, CHUNKS)[None, None, :] * LANES + tl.arange(0, LANES)[:, None, None]
    at = row[None, :, None] * row_length + column * 2
    kept = tl.zeros([ROWS], tl.int32)
    windows = tl.cdiv(tl.max(tl.where(inside & (free > 0), first_local, 0), 0), FRESH)
    for window in tl.range(windows, num_stages=1):
        first = window * FRESH
        block = first + column - SLOTS
        fresh = (column >= SLOTS) & (block >= INIT) & (block < first_local[None, :, None]) & inside[None, :, None]
        old = column < kept[None, :, None]
        score = tl.load(SCORES + first * 2 + at, mask=old | (fresh & (block < written)), other=0.0)
        # The taps of a block's first compressed tokens come with the block before: they are the lower ones.
        score += tl.load(SCORES + first * 2 - 1 + at, mask=fresh & (block >= 1) & (block <= written), other=0.0)
        if ACC == tl.float64:
            bits = score.to(tl.int64, bitcast=True)
        else:
            bits = score.to(tl.int32, bitcast=True)
        bits = tl.where(old | fresh, tl.where(score == score, bits, -1), -2)
        eligible = tl.sum(tl.sum((bits >= -1).to(tl.int32), 2), 0)
        need = tl.minimum(free, eligible)
        value, wanted = _threshold(bits, need, eligible)
        chosen, place = _places(bits > value[None, :, None], bits == value[None, :, None], wanted)
        index = tl.load(SCORES + first * 2 + 1 + at, mask=old, other=0.0).to(tl.int32)  # a survivor's pair: score, block
        index = tl.where(old, index, block)
        tl.debug_barrier()  # everything is read before it is written over
        last = window + 1 == windows
        tl.store(SURVIVORS + row[None, :, None] * SLOTS + place, index, mask=chosen & last)
        kept_at = SCORES + row[None, :, None] * row_length + (first + FRESH + place) * 2
        tl.store(kept_at, score, mask=chosen & (not last))
        tl.store(kept_at + 1, index.to(score.dtype), mask=chosen & (not last))
        tl.debug_barrier()
        kept = need
    place = tl.arange(0, SLOTS)[None, :]
    init = tl.minimum(candidates, INIT)[:, None]
    ranked = (place >= init) & (place < init + free[:, None])
    block = tl.load(SURVIVORS + row[:, None] * SLOTS + place - init, mask=ranked & inside[:, None], other=0)
    block = tl.where(ranked, block, first_local[:, None] + place - init - free[:, None])
    block = tl.where(place < init, place, block)
    block = tl.where(place < total[:, None], block, -1)
    tl.store(OUT + row[:, None] * out_row + place, block, mask=inside[:, None] & (place < N))

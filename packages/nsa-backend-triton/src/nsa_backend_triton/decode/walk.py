"""Pieces of the decode kernels: keys that lie in a cache, a walk over tiles of them, and the
merging of splits.

Keys have numbers of their own: compressed tokens (CMP), tokens of chosen blocks (SEL), tokens of
the window (WIN). Key i of CMP and SEL lies in row i % page_rows of page TABLE[i // page_rows]; the
ring of WIN is one page a sequence.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_backend_triton.shared.rows import num_compressed

CMP, SEL, WIN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def tokens_of(STARTS, LENGTHS, seq, first, count, max_len):
    """(begin, end) of a run of ``count`` tokens of a step, the first its row ``first``; end <=
    begin: all padding.
    """
    start = tl.load(STARTS + seq)
    begin = start + first
    return begin, tl.minimum(begin + count, tl.minimum(tl.load(LENGTHS + seq), max_len))


@triton.jit
def key_range(
    begin, end, split, splits,
    KIND: tl.constexpr, STEP: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Of the keys that tokens begin .. end see: (the first, one past the last, first and last tile
    of this split).

    A tile has STEP keys.
    """
    low = 0
    high = tl.where(begin < end, num_compressed(end, SIZE, STRIDE), 0)
    if KIND == WIN:
        low = tl.maximum(begin - WINDOW + 1, 0)
        high = tl.where(begin < end, end, 0)
    tiles = tl.cdiv(tl.maximum(high - low, 0), STEP)
    share = tl.cdiv(tiles, splits)
    from_tile = tl.minimum(split * share, tiles)
    return low, high, from_tile, tl.minimum(from_tile + share, tiles)


@triton.jit
def _locate(
    tile, low, high, TABLE, CHOSEN, seq, page_rows, current,
    KEYS: tl.constexpr, KIND: tl.constexpr, N: tl.constexpr, SLOTS: tl.constexpr,
    SELECT: tl.constexpr,
    DISTINCT: tl.constexpr, RATIO: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """(key, page) of the keys of a tile, [KEYS] each; a key that is not there is >= high.

    CMP: whole blocks of RATIO keys, each padded to TAPS.
    """
    flat = tile * KEYS + tl.arange(0, KEYS)
    if KIND == SEL:
        slot = flat // SELECT
        block = tl.load(CHOSEN + slot, mask=slot < N, other=-1, cache_modifier=".cg")
        there = (block >= 0) & (block <= current)
        if not DISTINCT:
            other = tl.arange(0, SLOTS)
            before = tl.load(CHOSEN + other, mask=other < N, other=-1)
            same = (before[None, :] == block[:, None]) & (other[None, :] < slot[:, None])
            there = there & (tl.max(same.to(tl.int32), 1) == 0)
        key = tl.where(there, block.to(tl.int32) * SELECT + flat % SELECT, high)
    elif RATIO < TAPS:
        key = tl.where(flat % TAPS < RATIO, flat // TAPS * RATIO + flat % TAPS, high)
    else:
        key = low + flat
    page = tl.zeros([KEYS], tl.int32) + seq
    if KIND != WIN:
        page = tl.load(TABLE + key // page_rows, mask=key < high, other=0)
    return key, page


@triton.jit
def _rows(X, page, row, there, x_page, x_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """x [KEYS, BLOCK]; 0 where a key is not there: what no sequence owns may be NaN."""
    column = tl.arange(0, BLOCK)
    at = X + (page.to(tl.int64) * x_page + row.to(tl.int64) * x_row)[:, None] + column[None, :]
    return tl.load(at, mask=there[:, None] & (column < WIDTH)[None, :], other=0.0)


@triton.jit
def _keep(
    p, m, SUMS, REFERENCES, sums, references, tile, here,
    RATIO: tl.constexpr, TAPS: tl.constexpr, OVER: tl.constexpr,
):  # fmt: skip
    """Leave a tile's sums of p [M, KEYS] over blocks, and what p is relative to, m [M]; rows that
    are ``here``.

    A pair for each block: what its compressed tokens add to its own score, and what they add to the
    next block's. Compressed token c of a block, of RATIO = l'/d, overlaps its block by min(OVER,
    RATIO - c) and the next block by the rest of OVER = l/d.
    """
    M: tl.constexpr = p.shape[0]
    BLOCKS: tl.constexpr = p.shape[1] // TAPS
    tap = tl.arange(0, TAPS)[None, None, :]
    own = tl.minimum(RATIO - tap, OVER)
    carry = tl.where(tap < RATIO, tap - RATIO + OVER, 0)
    p = tl.reshape(p, [M, BLOCKS, TAPS])
    # Not 0 x p: a NaN or inf belongs to the blocks that the token overlaps, and to no other.
    mine = tl.sum(tl.where(own > 0, p * own.to(p.dtype), 0.0), 2)
    after = tl.sum(tl.where(carry > 0, p * carry.to(p.dtype), 0.0), 2)
    at = sums[:, None] + (tl.arange(0, BLOCKS * 2) + tile * (BLOCKS * 2))[None, :]
    tl.store(SUMS + at, tl.reshape(tl.join(mine, after), [M, BLOCKS * 2]), mask=here[:, None])
    tl.store(REFERENCES + references + tile, m, mask=here)


@triton.jit
def walk(
    q, m, l, acc, K, V, SUMS, REFERENCES, TABLE, CHOSEN, seq, low, high, from_tile, to_tile, left,
    right, current,
    sums, references, page_rows, factor, k_page, k_row, v_page, v_row,
    KIND: tl.constexpr, KEYS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr, PAGE: tl.constexpr, N: tl.constexpr, SLOTS: tl.constexpr,
    SELECT: tl.constexpr,
    DISTINCT: tl.constexpr, RATIO: tl.constexpr, TAPS: tl.constexpr, OVER: tl.constexpr,
    ATTEND: tl.constexpr,
    KEEP: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Online softmax of q [M, Dk] over tiles from_tile .. to_tile; m, l [M] in base 2, acc [M, Dv].

    Row r sees keys left[r] .. right[r]. KEEP: sums of its probabilities over blocks go to SUMS +
    sums[r], what they are relative to to REFERENCES + references[r], where right[r] > 0: m rounded
    up to an integer. Those p are products of exp2(s - floor(s)) and a power of two: the same number
    whatever m was, so equal logits have equal sums. PAGE is page_rows where that is a power of two,
    else 0.
    """
    rows = PAGE if PAGE > 0 else page_rows
    # Pages are read a turn before their keys: an address that waits for a load is not fetched
    # ahead.
    key, page = _locate(
        from_tile,
        low,
        high,
        TABLE,
        CHOSEN,
        seq,
        rows,
        current,
        KEYS,
        KIND,
        N,
        SLOTS,
        SELECT,
        DISTINCT,
        RATIO,
        TAPS,
    )
    for tile in tl.range(from_tile, to_tile):
        next_key, next_page = _locate(
            tl.minimum(tile + 1, to_tile - 1),
            low,
            high,
            TABLE,
            CHOSEN,
            seq,
            rows,
            current,
            KEYS,
            KIND,
            N,
            SLOTS,
            SELECT,
            DISTINCT,
            RATIO,
            TAPS,
        )
        there = key < high
        row = key % rows
        k = _rows(K, page, row, there, k_page, k_row, DK, BLOCK_DK)
        s = tl.dot(q, tl.trans(k), input_precision="ieee", out_dtype=ACC) * factor
        s = tl.where(key[None, :] < right[:, None], s, float("-inf"))
        if KIND == WIN:
            s = tl.where(key[None, :] >= left[:, None], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen nothing yet
        if KEEP:
            reference, whole = tl.ceil(shift), tl.floor(s)
            p = tl.exp2(s - whole) * tl.exp2(whole - reference[:, None])
            p = tl.where(s == float("-inf"), 0.0, p)
            _keep(
                p, reference, SUMS, REFERENCES, sums, references, tile, right > 0, RATIO, TAPS, OVER
            )
            # What meets v is relative to m itself: a row's largest p is 1, and rounding it leans o
            # to no side.
            p *= tl.exp2(reference - shift)[:, None]
        else:
            p = tl.exp2(s - shift[:, None])
        if ATTEND:
            alpha = tl.exp2(m - shift)
            l = l * alpha + tl.sum(p, 1)
            v = _rows(V, page, row, there, v_page, v_row, DV, BLOCK_DV)
            acc = tl.dot(
                p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee", out_dtype=ACC
            )
        m = m_new
        key = next_key
        page = next_page
    return m, l, acc


@triton.jit
def reduce_splits(
    m, l, acc, STATS, PARTS, COUNTERS, program, split, splits,
    STEP: tl.constexpr, M: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """(whether this is the last of ``splits`` programs to come here, m, l, acc of all of them,
    then).

    The splits of a unit are the programs STEP apart; its counter, 0 before the launch, is that of
    its first program. Why the last program sees what the others wrote: each thread's stores come
    before the barrier, the barrier before thread 0's atomic, which releases, at the GPU's scope,
    all that it has seen; the last one's atomic acquires what every earlier one released (they are
    one chain of read-modify-writes), and its value reaches the other threads through a barrier of
    its own. What is read then was never read before by this program, and not through L1 (.cg).
    Splits are added in their order whoever is last: the same bits every run.
    """
    done = splits - 1
    if splits > 1:
        first = tl.cast(program - split * STEP, tl.int64)
        row, column = tl.arange(0, M), tl.arange(0, BLOCK_DV)
        within = row[:, None] * BLOCK_DV + column[None, :]
        mine = first + split * STEP
        tl.store(STATS + mine * (2 * M) + row, m)
        tl.store(STATS + mine * (2 * M) + M + row, l)
        tl.store(PARTS + mine * (M * BLOCK_DV) + within, acc)
        tl.debug_barrier()
        done = tl.atomic_add(COUNTERS + first, 1, sem="acq_rel", scope="gpu")
        if done == splits - 1:
            m = tl.full(m.shape, float("-inf"), m.dtype)
            l = tl.zeros(l.shape, l.dtype)
            acc = tl.zeros(acc.shape, acc.dtype)
            for other in tl.range(splits, loop_unroll_factor=4):
                at = first + other * STEP
                part_m = tl.load(STATS + at * (2 * M) + row, cache_modifier=".cg")
                part_l = tl.load(STATS + at * (2 * M) + M + row, cache_modifier=".cg")
                part = tl.load(PARTS + at * (M * BLOCK_DV) + within, cache_modifier=".cg")
                m_new = tl.maximum(m, part_m)
                shift = tl.where(m_new == float("-inf"), 0.0, m_new)
                old, new = tl.exp2(m - shift), tl.exp2(part_m - shift)
                l = l * old + part_l * new
                acc = acc * old[:, None] + part * new[:, None]
                m = m_new
    return done == splits - 1, m, l, acc


@triton.jit
def signal(FLAG):
    """Tell programs that :func:`wait` for FLAG that what this one has written is there.

    Each thread's stores come before the barrier, the barrier before thread 0's exchange, which
    releases all of them.
    """
    tl.debug_barrier()
    tl.atomic_xchg(FLAG, 1, sem="release", scope="gpu")


@triton.jit
def wait(FLAG):
    """Until a program that has begun before this one has signalled; then read through L2 (.cg) what
    it wrote.
    """
    there = tl.atomic_add(FLAG, 0, sem="acquire", scope="gpu")
    while there == 0:
        there = tl.atomic_add(FLAG, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()

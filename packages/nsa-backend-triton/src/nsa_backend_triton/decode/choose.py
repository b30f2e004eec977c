"""The choice of blocks for one token of one kv head, from the sums over blocks that a walk has left
in memory.

    p[h, i] = exp(s[h, i] - lse[h]),  score[j] = sum over h and i of weight(i, j) p[h, i]
    (Eqs. 8 to 10)

A walk's sums are relative to what its softmax had seen by then: 2^(m - lse), a number for each head
and tile of keys, makes them absolute. A pass takes BLOCKS blocks: 8 bytes a head and block from L2,
where the walk has just put them (128 KiB for 16 heads and 64k tokens), PIECES times as many loads
as registers hold at once. Their scores stay in registers. The best are found one by one, a maximum
of the bit patterns (scores are >= 0, so bits are ordered as they are) and the lowest index that has
it: two reductions over a few numbers a thread for each block chosen, and for later passes only
where a block is better than the worst of those kept. Latency binds: few numbers, one after the
other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_backend_triton.decode.walk import tokens_of
from nsa_backend_triton.shared.rows import LOG2E, num_compressed


@triton.jit
def _group_scores(
    SUMS, REFERENCES, LSE, first, tiles, before, sum_row, reference_row, lse_head,
    GROUP: tl.constexpr, HEADS: tl.constexpr, PIECES: tl.constexpr, BLOCKS: tl.constexpr,
    OF_TILE: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """(score [BLOCKS] of the blocks of tiles ``first`` on, what the last of them adds to the next
    block's).

    ``before``: what the block in front of them adds to the first. Taps are added within a head,
    then heads.
    """
    tile = tl.arange(0, BLOCKS // OF_TILE) + first
    number = tl.arange(0, OF_TILE * 2)
    pairs = tl.zeros([BLOCKS // OF_TILE, OF_TILE * 2], ACC)
    for piece in tl.static_range(PIECES):
        head = piece * HEADS + tl.arange(0, HEADS)
        exists = head < GROUP
        here = exists[None, :] & (tile < tiles)[:, None]
        lse = tl.load(LSE + head * lse_head, mask=exists, other=0.0, cache_modifier=".cg") * LOG2E
        whole = tl.floor(lse)
        reference = tl.load(
            REFERENCES + head[None, :] * reference_row + tile[:, None],
            mask=here,
            other=0.0,
            cache_modifier=".cg",
        )
        # A power of two apart from the first factor: equal sums give equal scores, whatever they
        # are relative to.
        scale = tl.exp2(whole - lse)[None, :] * tl.exp2(
            tl.minimum(reference - whole[None, :], 126.0)
        )
        # Heads in the middle: then they are a thread's own, and each score is in one lane alone.
        # Triton 3.6 reduces a vector of which several lanes hold the same wrongly where those lanes
        # are not the highest.
        at = (head * sum_row)[None, :, None] + (tile[:, None] * (OF_TILE * 2) + number[None, :])[
            :, None, :
        ]
        some = tl.load(SUMS + at, mask=here[:, :, None], other=0.0, cache_modifier=".cg")
        pairs += tl.sum(some * scale[:, :, None], 1)
    own, carry = tl.split(tl.reshape(pairs, [BLOCKS, 2]))
    at = tl.arange(0, BLOCKS)
    after = tl.sum(tl.where(at == BLOCKS - 1, carry, 0.0), 0)
    carry = tl.where(at == 0, before, tl.gather(carry, tl.maximum(at - 1, 0), 0))
    return own + carry, after


@triton.jit
def _insert(bits, kept_bits, kept, count, first, begin, end, free, slot, GONE: tl.constexpr):
    """(bits, blocks, number) of the best ``free`` of those kept [SLOTS] and of bits [BLOCKS],
    blocks ``first`` on.

    Of the latter only blocks begin .. end count.

    Blocks come in ascending order, so one kept goes before an equal one that comes. Of equal ones
    kept the last goes.
    """
    MOST: tl.constexpr = 2**31 - 1
    block = tl.arange(0, bits.shape[0]) + first
    bits = tl.where((block >= begin) & (block < end), bits, GONE)
    there = tl.minimum(end, first + bits.shape[0]) - tl.maximum(begin, first)
    room = tl.minimum(free - count, tl.maximum(there, 0))
    for _ in tl.range(room, num_stages=1):
        best = tl.max(bits, 0)
        at = tl.min(tl.where(bits == best, block, MOST), 0)
        kept_bits = tl.where(slot == count, best, kept_bits)
        kept = tl.where(slot == count, at, kept)
        bits = tl.where(block == at, GONE, bits)
        count += 1
    best = tl.max(bits, 0)
    worst = tl.min(kept_bits, 0)
    while best > worst:
        at = tl.min(tl.where(bits == best, block, MOST), 0)
        last = tl.max(tl.where(kept_bits == worst, kept, -1), 0)
        goes = (kept_bits == worst) & (kept == last)
        kept_bits = tl.where(goes, best, kept_bits)
        kept = tl.where(goes, at, kept)
        bits = tl.where(block == at, GONE, bits)
        best = tl.max(bits, 0)
        worst = tl.min(kept_bits, 0)
    return kept_bits, kept, count


@triton.jit
def choose(
    token, SUMS, REFERENCES, LSE, OUT, sum_row, reference_row, lse_head,
    GROUP: tl.constexpr, HEADS: tl.constexpr, PIECES: tl.constexpr, BLOCKS: tl.constexpr,
    OF_TILE: tl.constexpr,
    SIZE: tl.constexpr, STRIDE: tl.constexpr, SELECT: tl.constexpr, N: tl.constexpr,
    SLOTS: tl.constexpr,
    INIT: tl.constexpr, LOCAL: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Write the blocks of ``token``, negative: padding, all -1. SUMS, REFERENCES, LSE and OUT point
    at it.
    """
    WIDE: tl.constexpr = tl.float64 == ACC
    BITS: tl.constexpr = tl.int64 if WIDE else tl.int32
    GONE: tl.constexpr = -(2**52) - 1 if WIDE else -(2**23) - 1  # less than the bits of -inf
    MOST: tl.constexpr = 2**63 - 1 if WIDE else 2**31 - 1
    candidates = tl.where(token < 0, 0, token // SELECT + 1)
    init = tl.minimum(candidates, INIT)
    first_local = tl.maximum(candidates - LOCAL, init)
    total = tl.minimum(candidates, N)
    free = total - init - (candidates - first_local)
    # the compiler sees that rows are aligned
    sum_row, reference_row = (
        sum_row // 16 * 16,
        reference_row // 16 * 16,
    )
    tiles = tl.cdiv(num_compressed(token + 1, SIZE, STRIDE), OF_TILE * (SELECT // STRIDE))
    slot = tl.arange(0, SLOTS)
    kept_bits = tl.full([SLOTS], MOST, BITS)
    kept = slot
    count = 0
    before = tl.full([], 0.0, ACC)
    for window in tl.range(tl.where(free > 0, tl.cdiv(first_local, BLOCKS), 0), num_stages=1):
        score, before = _group_scores(
            SUMS, REFERENCES, LSE, window * (BLOCKS // OF_TILE), tiles, before, sum_row,
            reference_row, lse_head,
            GROUP, HEADS, PIECES, BLOCKS, OF_TILE, ACC,
        )  # fmt: skip
        score = tl.where(score == score, score, float("-inf"))  # a NaN ranks last
        kept_bits, kept, count = _insert(
            score.to(BITS, bitcast=True), kept_bits, kept, count, window * BLOCKS, init,
            first_local, free, slot, GONE,
        )  # fmt: skip
    ranked = slot < free
    lower = (kept[None, :] < kept[:, None]) & ranked[None, :]
    place = tl.where(ranked, init + tl.sum(lower.to(tl.int32), 1), slot + init)
    block = tl.where(ranked, kept, first_local - free + slot)
    block = tl.where(place < total, block, -1)
    tl.store(OUT + place, block, mask=place < N)
    tl.store(OUT + slot, slot, mask=slot < init)


@triton.jit(
    do_not_specialize=["first", "rows", "max_len", "sum_row", "reference_row", "lse_head"],
    do_not_specialize_on_alignment=["STARTS", "LENGTHS", "OUT", "LSE"],
)
def decode_choose(
    SUMS, REFERENCES, LSE, OUT, STARTS, LENGTHS, lse_seq: tl.int64, lse_head, out_seq: tl.int64,
    first, rows, max_len, sum_row, reference_row,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, PIECES: tl.constexpr,
    BLOCKS: tl.constexpr,
    OF_TILE: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, SELECT: tl.constexpr,
    N: tl.constexpr,
    SLOTS: tl.constexpr, INIT: tl.constexpr, LOCAL: tl.constexpr, ACC: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program a token and kv head; sums [B, rows, Hq, sum_row], references [B, rows, Hq,
    reference_row].

    PDL: between two kernels of which each is launched before the one in front has ended.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    number = tl.program_id(0)
    group, row, seq = number % GROUPS, number // GROUPS % rows, number // GROUPS // rows
    begin, end = tokens_of(STARTS, LENGTHS, seq, first + row, 1, max_len)
    number = tl.cast(number, tl.int64) * GROUP
    choose(
        tl.where(begin < end, begin, -1), SUMS + number * (sum_row // 16 * 16),
        REFERENCES + number * (reference_row // 16 * 16),
        LSE + seq * lse_seq + group * GROUP * lse_head + row,
        OUT + seq * out_seq + (row * GROUPS + group) * N, sum_row, reference_row, lse_head,
        GROUP, HEADS, PIECES, BLOCKS, OF_TILE, SIZE, STRIDE, SELECT, N, SLOTS, INIT, LOCAL, ACC,
    )  # fmt: skip

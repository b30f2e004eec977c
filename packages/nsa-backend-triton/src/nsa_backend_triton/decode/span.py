"""Decode over the compressed tokens and over the window.

    s = scale q k^T,  o = softmax(s) v over what a token sees,  lse = log sum exp s

A program owns a tile of query rows (TOKENS tokens x the heads of a group, padded to M >= 16) and a
share of its keys, KEYS at a time: (Dk + Dv) * KEYS * itemsize bytes from HBM and 2 * M * KEYS * (Dk
+ Dv) operations a tile. At M = 16 that is 16 operations a byte in bf16: HBM binds, so what counts
is bytes in flight: num_stages - 1 tiles of K and V in shared memory, two or more programs a
multiprocessor. What the choice needs of the probabilities goes to memory in fp32, 8 bytes for each
row and block (a sixteenth of the keys' at M = 16, Dk = Dv = 128, l'/d = 4). Kv heads vary fastest
(rows of all heads are neighbours in memory), then splits: so a unit ends while later units still
stream.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_backend_triton.decode.choose import choose
from nsa_backend_triton.decode.walk import (
    CMP,
    WIN,
    key_range,
    reduce_splits,
    signal,
    tokens_of,
    walk,
)
from nsa_backend_triton.shared.rows import finish, num_compressed


@triton.jit
def span_program(
    index, program, Q, K, V, O, LSE, SUMS, REFERENCES, STATS, PARTS, COUNTERS, READY, BLOCKS,
    STARTS, LENGTHS, TABLE,
    q_seq, q_row, q_head, k_page, k_row, k_head, v_page, v_row, v_head, o_seq, o_row, lse_seq,
    lse_head, out_seq,
    table_row, factor, first, rows, max_len, page_rows, splits, sum_row, reference_row,
    KIND: tl.constexpr, PAGE: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    M: tl.constexpr, KEYS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    ATTEND: tl.constexpr,
    KEEP: tl.constexpr, CHOOSE: tl.constexpr, HEADS: tl.constexpr, PIECES: tl.constexpr,
    SELECT: tl.constexpr,
    AT_ONCE: tl.constexpr, RATIO: tl.constexpr, TAPS: tl.constexpr, N: tl.constexpr,
    SLOTS: tl.constexpr,
    INIT: tl.constexpr, LOCAL: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Program ``index`` of a branch; ``program`` numbers its scratch among those of all branches.

    CHOOSE, of tiles of one token: the last program of a token's compressed ones chooses its blocks,
    and that of either branch tells READY [units, 2].
    """
    group, split, unit = index % GROUPS, index // GROUPS % splits, index // GROUPS // splits
    tiles = tl.cdiv(rows, TOKENS)
    seq, tile = unit // tiles, unit % tiles * TOKENS
    begin, end = tokens_of(
        STARTS, LENGTHS, seq, first + tile, tl.minimum(TOKENS, rows - tile), max_len
    )
    low, high, from_tile, to_tile = key_range(
        begin, end, split, splits, KIND, KEYS // TAPS * RATIO, SIZE, STRIDE, WINDOW
    )
    at = tl.arange(0, M)
    local, head = tile + at // GROUP, group * GROUP + at % GROUP
    exists = (at < TOKENS * GROUP) & (local < rows)
    position = begin + at // GROUP
    inside = exists & (position < end)
    last = tl.where(inside, position + 1, 0)
    left = last
    if KIND == WIN:
        right = last
        left = last - WINDOW
    else:
        right = num_compressed(last, SIZE, STRIDE)
    column = tl.arange(0, BLOCK_DK)
    q_at = Q + seq * q_seq + (local * q_row + head * q_head)[:, None] + column[None, :]
    q = tl.load(q_at, mask=inside[:, None] & (column < DK)[None, :], other=0.0)
    # the compiler sees that rows are aligned
    sum_row, reference_row = (
        sum_row // 16 * 16,
        reference_row // 16 * 16,
    )
    number = (tl.cast(seq, tl.int64) * rows + local) * (GROUPS * GROUP) + head
    m = tl.full([M], float("-inf"), ACC)
    l = tl.zeros([M], ACC)
    acc = tl.zeros([M, BLOCK_DV], ACC)
    m, l, acc = walk(
        q, m, l, acc, K + group * k_head, V + group * v_head, SUMS, REFERENCES,
        TABLE + seq * table_row, TABLE, seq,
        low, high, from_tile, to_tile, left, right, 0, number * sum_row, number * reference_row,
        page_rows, factor,
        k_page, k_row, v_page, v_row,
        KIND, KEYS, DK, DV, BLOCK_DK, BLOCK_DV, PAGE, N, SLOTS, SELECT, True, RATIO, TAPS,
        SIZE // STRIDE, ATTEND,
        KEEP, ACC,
    )  # fmt: skip
    if ATTEND:
        is_last, m, l, acc = reduce_splits(
            m, l, acc, STATS, PARTS, COUNTERS, program, split, splits, GROUPS, M, BLOCK_DV
        )
        if is_last:
            divisor, lse = finish(m, l)
            o = acc / divisor[:, None]
            wide = tl.arange(0, BLOCK_DV)
            o_at = O + seq * o_seq + (local * o_row + head * DV)[:, None] + wide[None, :]
            tl.store(o_at, o.to(O.dtype.element_ty), mask=exists[:, None] & (wide < DV)[None, :])
            tl.store(LSE + seq * lse_seq + head * lse_head + local, lse, mask=exists)
            if CHOOSE:
                place = (seq * rows + tile) * GROUPS + group
                if KIND == CMP:
                    # lse, and sums of a program that is alone, written by other threads of it
                    tl.debug_barrier()
                    of_token = tl.cast(place, tl.int64) * GROUP
                    choose(
                        tl.where(begin < end, begin, -1), SUMS + of_token * sum_row,
                        REFERENCES + of_token * reference_row,
                        LSE + seq * lse_seq + group * GROUP * lse_head + tile,
                        BLOCKS + seq * out_seq + (tile * GROUPS + group) * N, sum_row,
                        reference_row, lse_head,
                        GROUP, HEADS, PIECES, AT_ONCE, KEYS // TAPS, SIZE, STRIDE, SELECT, N,
                        SLOTS, INIT, LOCAL, ACC,
                    )  # fmt: skip
                    signal(READY + place * 2)
                else:
                    signal(READY + place * 2 + 1)


@triton.jit(
    do_not_specialize=[
        "first", "rows", "max_len", "splits", "win_splits", "cmp_programs", "sum_row",
        "reference_row",
        "lse_head", "page_rows", "ring", "table_row",
    ],
    do_not_specialize_on_alignment=["STARTS", "LENGTHS", "TABLE", "LSE", "LSE_WIN"],
)  # fmt: skip
def decode_span(
    Q, K, V, K_WIN, V_WIN, O, O_WIN, LSE, LSE_WIN, SUMS, REFERENCES, STATS, PARTS, COUNTERS,
    STARTS, LENGTHS, TABLE,
    q_seq: tl.int64, q_row, q_head, k_page: tl.int64, k_row, k_head, v_page: tl.int64, v_row,
    v_head,
    kw_page: tl.int64, kw_row, kw_head, vw_page: tl.int64, vw_row, vw_head, o_seq: tl.int64, o_row,
    lse_seq: tl.int64,
    lse_head, table_row, factor, first, rows, max_len, page_rows, ring, splits, win_splits,
    cmp_programs, sum_row,
    reference_row,
    HAS_CMP: tl.constexpr, HAS_WIN: tl.constexpr, PAGE: tl.constexpr, GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr, M: tl.constexpr, KEYS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    ATTEND: tl.constexpr, KEEP: tl.constexpr, SELECT: tl.constexpr, TAPS: tl.constexpr,
    ACC: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """See the module. Programs before ``cmp_programs`` walk the compressed tokens, the others the
    window's ring.

    ATTEND: o and lse are wanted; KEEP: sums over blocks are left in SUMS for decode_choose.
    PDL: the launch after this one, which must wait, may come as soon as every program has begun.
    """
    program = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if HAS_CMP:  # noqa: SIM102  a constant, which decides what is compiled
        if program < cmp_programs:
            span_program(
                program, program, Q, K, V, O, LSE, SUMS, REFERENCES, STATS, PARTS, COUNTERS,
                COUNTERS, COUNTERS, STARTS,
                LENGTHS, TABLE, q_seq, q_row, q_head, k_page, k_row, k_head, v_page, v_row, v_head,
                o_seq, o_row,
                lse_seq, lse_head, 0, table_row, factor, first, rows, max_len, page_rows, splits,
                sum_row,
                reference_row, CMP, PAGE, GROUPS, GROUP, TOKENS, M, KEYS, DK, DV, BLOCK_DK,
                BLOCK_DV, SIZE, STRIDE,
                WINDOW, ATTEND, KEEP, False, 1, 1, SELECT, 1, SELECT // STRIDE, TAPS, 1, 1, 0, 0,
                ACC,
            )  # fmt: skip
    if HAS_WIN:  # noqa: SIM102
        if program >= cmp_programs:
            span_program(
                program - cmp_programs, program, Q, K_WIN, V_WIN, O_WIN, LSE_WIN, SUMS, REFERENCES,
                STATS, PARTS,
                COUNTERS, COUNTERS, COUNTERS, STARTS, LENGTHS, TABLE, q_seq, q_row, q_head,
                kw_page, kw_row, kw_head,
                vw_page, vw_row, vw_head, o_seq, o_row, lse_seq, lse_head, 0, table_row, factor,
                first, rows, max_len,
                ring, win_splits, sum_row, reference_row, WIN, 0, GROUPS, GROUP, TOKENS, M, KEYS,
                DK, DV, BLOCK_DK,
                BLOCK_DV, SIZE, STRIDE, WINDOW, True, False, False, 1, 1, SELECT, 1, 1, 1, 1, 1, 0,
                0, ACC,
            )  # fmt: skip

"""Decode over the chosen blocks, and the gates.

    o_sel = softmax(scale q k^T) v over the tokens of the chosen blocks up to t,
    o = sum of g_c o_c over the branches

A program owns the heads of a group of one token (M >= 16 rows) and a share of its n l' keys, KEYS
at a time: (Dk + Dv) * KEYS * itemsize bytes from HBM a tile, 16 operations a byte in bf16 at M =
16. HBM binds. The last program of a unit adds its splits and, GATED, the gated outputs of the other
branches, which were left in fp32, and rounds once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_backend_triton.decode.walk import SEL, reduce_splits, tokens_of, wait, walk
from nsa_backend_triton.shared.rows import finish


@triton.jit
def sel_program(
    index, program, Q, GATES, K, V, CHOSEN, O_CMP, O_WIN, O, LSE, STATS, PARTS, COUNTERS, READY,
    STARTS, LENGTHS, TABLE,
    q_seq, q_row, q_head, g_seq, g_row, g_head, k_page, k_row, k_head, v_page, v_row, v_head,
    c_seq, c_row, c_head,
    o_seq, o_row, lse_seq, lse_head, table_row, factor, first, rows, max_len, page_rows, splits,
    PAGE: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr,
    KEYS: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    SELECT: tl.constexpr,
    N: tl.constexpr, SLOTS: tl.constexpr, DISTINCT: tl.constexpr, GATED: tl.constexpr,
    WAIT: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Program ``index``; ``program`` numbers its scratch. WAIT: for its token's blocks and other
    branches, by READY.

    DISTINCT: blocks are as decode_choose leaves them; else in any order, with duplicates and
    strays.
    """
    group, split, unit = index % GROUPS, index // GROUPS % splits, index // GROUPS // splits
    seq, row = unit // rows, unit % rows
    begin, end = tokens_of(STARTS, LENGTHS, seq, first + row, 1, max_len)
    inside = begin < end
    at = tl.arange(0, M)
    head = group * GROUP + at % GROUP
    exists = at < GROUP
    column = tl.arange(0, BLOCK_DK)
    q_at = Q + seq * q_seq + row * q_row + (head * q_head)[:, None] + column[None, :]
    q = tl.load(q_at, mask=(exists & inside)[:, None] & (column < DK)[None, :], other=0.0)
    place = unit * GROUPS + group
    if WAIT:
        wait(READY + place * 2)
    slots = N
    if DISTINCT:
        slots = tl.minimum(begin // SELECT + 1, N)
    tiles = tl.where(inside, tl.cdiv(slots * SELECT, KEYS), 0)
    share = tl.cdiv(tiles, splits)
    from_tile = tl.minimum(split * share, tiles)
    right = tl.where(exists & inside, end, 0)
    m = tl.full([M], float("-inf"), ACC)
    l = tl.zeros([M], ACC)
    acc = tl.zeros([M, BLOCK_DV], ACC)
    m, l, acc = walk(
        q, m, l, acc, K + group * k_head, V + group * v_head, STATS, STATS, TABLE + seq * table_row,
        CHOSEN + seq * c_seq + row * c_row + group * c_head, seq, 0, end, from_tile,
        tl.minimum(from_tile + share, tiles), right, right, begin // SELECT, right, right,
        page_rows, factor, k_page,
        k_row, v_page, v_row, SEL, KEYS, DK, DV, BLOCK_DK, BLOCK_DV, PAGE, N, SLOTS, SELECT,
        DISTINCT, 1, 1, 1, True,
        False, ACC,
    )  # fmt: skip
    is_last, m, l, acc = reduce_splits(
        m, l, acc, STATS, PARTS, COUNTERS, program, split, splits, GROUPS, M, BLOCK_DV
    )
    if is_last:
        divisor, lse = finish(m, l)
        o = acc / divisor[:, None]
        wide = tl.arange(0, BLOCK_DV)
        mask = exists[:, None] & (wide < DV)[None, :]
        if GATED:
            if WAIT:
                wait(READY + place * 2 + 1)
            other = ((tl.cast(seq, tl.int64) * rows + row) * (GROUPS * GROUP) + head)[
                :, None
            ] * DV + wide[None, :]
            gate = GATES + seq * g_seq + row * g_row + head * g_head
            o *= tl.load(gate + 1, mask=exists, other=0.0)[:, None]
            o_cmp = tl.load(O_CMP + other, mask=mask, other=0.0, cache_modifier=".cg")
            o_win = tl.load(O_WIN + other, mask=mask, other=0.0, cache_modifier=".cg")
            o = tl.load(gate, mask=exists, other=0.0)[:, None] * o_cmp + o
            o += tl.load(gate + 2, mask=exists, other=0.0)[:, None] * o_win
            o = tl.where(inside, o, 0.0)  # a gate of padding may be NaN
        else:
            tl.store(LSE + seq * lse_seq + head * lse_head + row, lse, mask=exists)
        o_at = O + seq * o_seq + row * o_row + (head * DV)[:, None] + wide[None, :]
        tl.store(o_at, o.to(O.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["first", "rows", "max_len", "splits", "lse_head", "page_rows", "table_row"],
    do_not_specialize_on_alignment=["STARTS", "LENGTHS", "TABLE", "CHOSEN", "LSE"],
)
def decode_sel(
    Q, GATES, K, V, CHOSEN, O_CMP, O_WIN, O, LSE, STATS, PARTS, COUNTERS, STARTS, LENGTHS, TABLE,
    q_seq: tl.int64, q_row, q_head, g_seq: tl.int64, g_row, g_head, k_page: tl.int64, k_row,
    k_head, v_page: tl.int64,
    v_row, v_head, c_seq: tl.int64, c_row, c_head, o_seq: tl.int64, o_row, lse_seq: tl.int64,
    lse_head, table_row,
    factor, first, rows, max_len, page_rows, splits,
    PAGE: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr,
    KEYS: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    SELECT: tl.constexpr,
    N: tl.constexpr, SLOTS: tl.constexpr, DISTINCT: tl.constexpr, GATED: tl.constexpr,
    ACC: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """See the module. PDL: launched before the kernel in front has ended; its writes are there
    after the wait.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
    program = tl.program_id(0)
    sel_program(
        program, program, Q, GATES, K, V, CHOSEN, O_CMP, O_WIN, O, LSE, STATS, PARTS, COUNTERS,
        COUNTERS, STARTS,
        LENGTHS, TABLE, q_seq, q_row, q_head, g_seq, g_row, g_head, k_page, k_row, k_head, v_page,
        v_row, v_head, c_seq,
        c_row, c_head, o_seq, o_row, lse_seq, lse_head, table_row, factor, first, rows, max_len,
        page_rows, splits,
        PAGE, GROUPS, GROUP, M, KEYS, DK, DV, BLOCK_DK, BLOCK_DV, SELECT, N, SLOTS, DISTINCT,
        GATED, False, ACC,
    )  # fmt: skip

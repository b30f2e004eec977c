"""A decode step in one launch: compressed tokens and the choice, the window, the chosen blocks and
the gates.

    o = g_cmp o_cmp + g_sel o_sel + g_win o_win,  each branch by span_program and sel_program

Programs of the three branches stand in one grid in that order: while one token's blocks are chosen
by the last program of its compressed tokens, some microseconds in which that program reads next to
nothing, others stream keys, and no branch waits for the end of another's last wave. Programs of the
chosen blocks wait for their own token by a flag. They wait for programs that have begun, whatever
order a GPU starts programs in: a program's number is the ticket that it takes when it begins, and
only higher numbers wait, for lower ones. HBM binds, as in each of the parts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_backend_triton.decode.sel import sel_program
from nsa_backend_triton.decode.span import span_program
from nsa_backend_triton.decode.walk import CMP, WIN


@triton.jit(
    do_not_specialize=[
        "first", "rows", "max_len", "cmp_splits", "win_splits", "sel_splits", "cmp_programs",
        "win_programs",
        "sum_row", "reference_row", "lse_head", "page_rows", "cmp_page_rows", "ring", "table_row",
    ],
    do_not_specialize_on_alignment=["STARTS", "LENGTHS", "TABLE", "BLOCKS", "LSE", "LSE_WIN"],
)  # fmt: skip
def decode_step(
    Q, GATES, K, V, K_SEL, V_SEL, K_WIN, V_WIN, O, O_CMP, O_WIN, LSE, LSE_WIN, SUMS, REFERENCES,
    STATS, PARTS, COUNTERS,
    READY, TICKET, BLOCKS, STARTS, LENGTHS, TABLE,
    q_seq: tl.int64, q_row, q_head, g_seq: tl.int64, g_row, g_head, k_page: tl.int64, k_row, k_head,
    v_page: tl.int64, v_row, v_head, ks_page: tl.int64, ks_row, ks_head, vs_page: tl.int64, vs_row,
    vs_head,
    kw_page: tl.int64, kw_row, kw_head, vw_page: tl.int64, vw_row, vw_head, b_seq: tl.int64, b_row,
    b_head,
    o_seq: tl.int64, o_row, part_seq: tl.int64, part_row, lse_seq: tl.int64, lse_head, table_row,
    factor, first, rows,
    max_len, cmp_page_rows, page_rows, ring, cmp_splits, win_splits, sel_splits, cmp_programs,
    win_programs, sum_row,
    reference_row,
    CMP_PAGE: tl.constexpr, PAGE: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    M: tl.constexpr,
    KEYS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SIZE: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr, HEADS: tl.constexpr,
    PIECES: tl.constexpr,
    SELECT: tl.constexpr, AT_ONCE: tl.constexpr, TAPS: tl.constexpr, N: tl.constexpr,
    SLOTS: tl.constexpr,
    INIT: tl.constexpr, LOCAL: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """See the module. Scratch that is 0 before: COUNTERS [programs], READY [B * rows * GROUPS, 2],
    TICKET [1].

    The first ``cmp_programs`` numbers walk compressed tokens, the next ``win_programs`` the window.
    """
    program = tl.atomic_add(TICKET, 1, sem="relaxed", scope="gpu")
    if program < cmp_programs:
        span_program(
            program, program, Q, K, V, O_CMP, LSE, SUMS, REFERENCES, STATS, PARTS, COUNTERS, READY,
            BLOCKS, STARTS,
            LENGTHS, TABLE, q_seq, q_row, q_head, k_page, k_row, k_head, v_page, v_row, v_head,
            part_seq, part_row,
            lse_seq, lse_head, b_seq, table_row, factor, first, rows, max_len, cmp_page_rows,
            cmp_splits, sum_row,
            reference_row, CMP, CMP_PAGE, GROUPS, GROUP, 1, M, KEYS, DK, DV, BLOCK_DK, BLOCK_DV,
            SIZE, STRIDE, WINDOW,
            True, True, True, HEADS, PIECES, SELECT, AT_ONCE, SELECT // STRIDE, TAPS, N, SLOTS,
            INIT, LOCAL, ACC,
        )  # fmt: skip
    elif program < cmp_programs + win_programs:
        span_program(
            program - cmp_programs, program, Q, K_WIN, V_WIN, O_WIN, LSE_WIN, SUMS, REFERENCES,
            STATS, PARTS, COUNTERS,
            READY, BLOCKS, STARTS, LENGTHS, TABLE, q_seq, q_row, q_head, kw_page, kw_row, kw_head,
            vw_page, vw_row,
            vw_head, part_seq, part_row, lse_seq, lse_head, b_seq, table_row, factor, first, rows,
            max_len, ring,
            win_splits, sum_row, reference_row, WIN, 0, GROUPS, GROUP, 1, M, KEYS, DK, DV,
            BLOCK_DK, BLOCK_DV, SIZE,
            STRIDE, WINDOW, True, False, True, HEADS, PIECES, SELECT, AT_ONCE, 1, 1, N, SLOTS,
            INIT, LOCAL, ACC,
        )  # fmt: skip
    else:
        sel_program(
            program - cmp_programs - win_programs, program, Q, GATES, K_SEL, V_SEL, BLOCKS, O_CMP,
            O_WIN, O, LSE,
            STATS, PARTS, COUNTERS, READY, STARTS, LENGTHS, TABLE, q_seq, q_row, q_head, g_seq,
            g_row, g_head, ks_page,
            ks_row, ks_head, vs_page, vs_row, vs_head, b_seq, b_row, b_head, o_seq, o_row, lse_seq,
            lse_head, table_row,
            factor, first, rows, max_len, page_rows, sel_splits, PAGE, GROUPS, GROUP, M, KEYS, DK,
            DV, BLOCK_DK,
            BLOCK_DV, SELECT, N, SLOTS, True, True, True, ACC,
        )  # fmt: skip

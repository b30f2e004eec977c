"""A decode step in one launch: compressed tokens and selection, window, selected blocks, gates.

    o = g_cmp o_cmp + g_sel o_sel + g_win o_win                     (Eq. 5)

Each branch is computed by span_program or sel_program; their limit, HBM bandwidth, is the limit
here too. Programs of the three branches form one grid, in the order cmp, win, sel. The last program
of a token's compressed branch selects the token's blocks, which takes some microseconds in which it
reads almost nothing; meanwhile other programs stream keys, and no branch waits for the last wave of
another.

Programs of the selected blocks wait for their own token by a flag. They only wait for programs that
have started, whatever order a GPU starts programs in: a program's number is the ticket that it
takes when it starts, and a program waits only for lower numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_backend_triton.decode.sel import sel_program
from nsa_backend_triton.decode.span import span_program
from nsa_backend_triton.decode.walk import CMP, WIN


@triton.jit(
    do_not_specialize=[
        "first_token", "num_tokens", "max_len", "cmp_splits", "win_splits", "sel_splits",
        "cmp_programs", "win_programs", "stride_sums", "stride_maxima", "stride_lse_h",
        "page_size", "cmp_page_size", "win_page_size", "win_columns",
        "num_sequences", "num_cmp_pages", "num_sel_pages", "num_win_pages",
        "stride_cmp_table", "stride_sel_table", "stride_win_table",
        "stride_cmp_scales", "stride_sel_scales", "stride_win_scales",
    ],
    do_not_specialize_on_alignment=[
        "STARTS", "LENGTHS", "SEQUENCES", "CMP_TABLE", "SEL_TABLE", "WIN_TABLE", "BLOCKS", "LSE",
        "LSE_WIN", "CMP_SCALES", "SEL_SCALES", "WIN_SCALES",
    ],
)  # fmt: skip
def decode_step(
    Q, GATES, K, V, K_SEL, V_SEL, K_WIN, V_WIN, O, O_CMP, O_WIN, LSE, LSE_WIN, SUMS, MAXIMA,
    SPLIT_ML, SPLIT_ACC, COUNTERS, READY, TICKET, BLOCKS, STARTS, LENGTHS, SEQUENCES,
    CMP_TABLE, SEL_TABLE, WIN_TABLE, CMP_SCALES, SEL_SCALES, WIN_SCALES,
    stride_q, stride_gates, stride_k, stride_v, stride_k_sel, stride_v_sel,
    stride_k_win, stride_v_win, stride_blocks, stride_o, stride_branch,
    stride_lse_b: tl.int64, stride_lse_h, stride_sums, stride_maxima,
    stride_cmp_table, stride_sel_table, stride_win_table,
    stride_cmp_scales, stride_sel_scales, stride_win_scales,
    qk_scale, first_token, num_tokens, max_len, num_sequences, cmp_page_size, num_cmp_pages,
    page_size, num_sel_pages, win_page_size, win_columns, num_win_pages,
    cmp_splits, win_splits, sel_splits, cmp_programs, win_programs,
    RAGGED: tl.constexpr, RING: tl.constexpr,
    CMP_PAGE_SIZE: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGE_SCALES: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    HEAD_DIM_BAND: tl.constexpr, V_HEAD_DIM_BAND: tl.constexpr,
    COMPRESS_BLOCK: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_H: tl.constexpr, NUM_HEAD_TILES: tl.constexpr, SELECT_BLOCK: tl.constexpr,
    RANK_BLOCKS: tl.constexpr, CMP_PER_BLOCK_PAD: tl.constexpr,
    NUM_SELECTED: tl.constexpr, NUM_SELECTED_PAD: tl.constexpr,
    INIT_BLOCKS: tl.constexpr, LOCAL_BLOCKS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Run a decode step.

    The first ``cmp_programs`` programs walk the compressed tokens, the next ``win_programs`` the
    window, the others the selected blocks. o_cmp and o_win of these tokens have strides
    ``stride_branch`` (batch, token). COUNTERS [programs], READY [B * num_tokens *
    NUM_KV_HEADS, 2] and TICKET [1] must be 0 before the launch.
    """
    program = tl.atomic_add(TICKET, 1, sem="relaxed", scope="gpu")
    stride_blocks_b = tl.cast(stride_blocks[0], tl.int64)
    if program < cmp_programs:
        span_program(
            program, program, Q, K, V, CMP_SCALES, O_CMP, LSE, SUMS, MAXIMA, SPLIT_ML, SPLIT_ACC,
            COUNTERS, READY, BLOCKS, STARTS, LENGTHS, SEQUENCES, CMP_TABLE,
            stride_q, stride_k, stride_v, stride_cmp_scales, stride_branch, stride_lse_b,
            stride_lse_h, stride_sums, stride_maxima, stride_blocks_b, stride_cmp_table,
            qk_scale, first_token, num_tokens, max_len, num_sequences, cmp_page_size, 0,
            num_cmp_pages, cmp_splits,
            CMP, RAGGED, False, CMP_PAGE_SIZE, PAGE_SCALES,
            NUM_KV_HEADS, GROUP, 1, BLOCK_M, BLOCK_N,
            HEAD_DIM, V_HEAD_DIM, HEAD_DIM_BAND, V_HEAD_DIM_BAND,
            COMPRESS_BLOCK, STRIDE, WINDOW, True, True, True, BLOCK_H, NUM_HEAD_TILES,
            SELECT_BLOCK, RANK_BLOCKS, SELECT_BLOCK // STRIDE, CMP_PER_BLOCK_PAD,
            NUM_SELECTED, NUM_SELECTED_PAD, INIT_BLOCKS, LOCAL_BLOCKS, ACC,
        )  # fmt: skip
    elif program < cmp_programs + win_programs:
        span_program(
            program - cmp_programs, program, Q, K_WIN, V_WIN, WIN_SCALES, O_WIN, LSE_WIN, SUMS,
            MAXIMA, SPLIT_ML, SPLIT_ACC, COUNTERS, READY, BLOCKS, STARTS, LENGTHS, SEQUENCES,
            WIN_TABLE,
            stride_q, stride_k_win, stride_v_win, stride_win_scales, stride_branch, stride_lse_b,
            stride_lse_h, stride_sums, stride_maxima, stride_blocks_b, stride_win_table,
            qk_scale, first_token, num_tokens, max_len, num_sequences, win_page_size, win_columns,
            num_win_pages, win_splits,
            WIN, RAGGED, RING, 0, PAGE_SCALES, NUM_KV_HEADS, GROUP, 1, BLOCK_M, BLOCK_N,
            HEAD_DIM, V_HEAD_DIM, HEAD_DIM_BAND, V_HEAD_DIM_BAND,
            COMPRESS_BLOCK, STRIDE, WINDOW, True, False, True, BLOCK_H, NUM_HEAD_TILES,
            SELECT_BLOCK, RANK_BLOCKS, 1, 1,
            NUM_SELECTED, NUM_SELECTED_PAD, INIT_BLOCKS, LOCAL_BLOCKS, ACC,
        )  # fmt: skip
    else:
        sel_program(
            program - cmp_programs - win_programs, program, Q, GATES, K_SEL, V_SEL, SEL_SCALES,
            BLOCKS, O_CMP, O_WIN, O, LSE, SPLIT_ML, SPLIT_ACC, COUNTERS, READY, STARTS, LENGTHS,
            SEQUENCES, SEL_TABLE, stride_q, stride_gates, stride_k_sel, stride_v_sel,
            stride_sel_scales, stride_blocks, stride_o,
            stride_lse_b, stride_lse_h, stride_sel_table,
            qk_scale, first_token, num_tokens, max_len, num_sequences, page_size, num_sel_pages,
            sel_splits,
            PAGE_SIZE, PAGE_SCALES, NUM_KV_HEADS, GROUP, BLOCK_M, BLOCK_N,
            HEAD_DIM, V_HEAD_DIM, HEAD_DIM_BAND, V_HEAD_DIM_BAND, SELECT_BLOCK,
            NUM_SELECTED, NUM_SELECTED_PAD, True, True, True, RAGGED, ACC,
        )  # fmt: skip

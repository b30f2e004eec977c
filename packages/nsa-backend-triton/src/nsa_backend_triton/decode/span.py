"""Decode attention over the compressed tokens and over the window.

    s = scale q k^T,  o = softmax(s) v over the keys that a token sees,  lse = log sum exp s
    (Eq. 5 with Eq. 7 for cmp, with the last w tokens for win)

A program owns a tile of query rows (BLOCK_T tokens x the heads of a group, padded to BLOCK_M >= 16)
and a share of its keys, BLOCK_N at a time. Per tile it reads (Dk + Dv) * BLOCK_N * itemsize bytes
from HBM and does 2 * BLOCK_M * BLOCK_N * (Dk + Dv) operations. At BLOCK_M = 16 that is 16
operations per byte in bf16, so HBM bandwidth is the limit and bytes in flight decide the time:
num_stages - 1 tiles of K and V in shared memory, and two or more programs per multiprocessor.

The sums of probabilities that the selection needs go to memory in fp32: 8 bytes per row and block,
a sixteenth of the keys' bytes at BLOCK_M = 16, Dk = Dv = 128, l'/d = 4.

Among the programs, kv heads vary fastest (the rows of all heads are neighbours in memory), then
splits. So the splits of a unit end while later units still stream.
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
    table_row,
    token_range,
    walk,
)
from nsa_backend_triton.shared.rows import finish_softmax, load_at, num_compressed, store_at


@triton.jit
def span_program(
    index, program, Q, K, V, SCALES, O, LSE, SUMS, MAXIMA, SPLIT_ML, SPLIT_ACC, COUNTERS, READY,
    BLOCKS, STARTS, LENGTHS, SEQUENCES, TABLE,
    stride_q, stride_k, stride_v, stride_scales, stride_o, stride_lse_b, stride_lse_h, stride_sums,
    stride_maxima, stride_blocks_b, stride_table,
    qk_scale, first_token, num_tokens, max_len, num_sequences, page_size, columns, num_pages,
    num_splits,
    BRANCH: tl.constexpr, RAGGED: tl.constexpr, RING: tl.constexpr, PAGE_SIZE: tl.constexpr,
    PAGE_SCALES: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    HEAD_DIM_BAND: tl.constexpr, V_HEAD_DIM_BAND: tl.constexpr,
    COMPRESS_BLOCK: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    ATTEND: tl.constexpr, STORE_SUMS: tl.constexpr, CHOOSE: tl.constexpr,
    BLOCK_H: tl.constexpr, NUM_HEAD_TILES: tl.constexpr, SELECT_BLOCK: tl.constexpr,
    RANK_BLOCKS: tl.constexpr, CMP_PER_BLOCK: tl.constexpr, CMP_PER_BLOCK_PAD: tl.constexpr,
    NUM_SELECTED: tl.constexpr, NUM_SELECTED_PAD: tl.constexpr,
    INIT_BLOCKS: tl.constexpr, LOCAL_BLOCKS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Run program ``index`` of a branch; ``program`` is its number among those of all branches.

    CHOOSE, for tiles of one token: the last program of a token's compressed branch also selects the
    token's blocks, and the last program of either branch sets the branch's flag in READY
    [units, 2].
    """
    kv_head, split, unit = (
        index % NUM_KV_HEADS,
        index // NUM_KV_HEADS % num_splits,
        index // NUM_KV_HEADS // num_splits,
    )
    token_tiles = tl.cdiv(num_tokens, BLOCK_T)
    seq, tile_start = unit // token_tiles, unit % token_tiles * BLOCK_T
    begin, end = token_range(
        STARTS, LENGTHS, seq, first_token + tile_start,
        tl.minimum(BLOCK_T, num_tokens - tile_start), max_len,
    )  # fmt: skip
    low, high, first_tile, end_tile = key_range(
        begin, end, split, num_splits, BRANCH, BLOCK_N // CMP_PER_BLOCK_PAD * CMP_PER_BLOCK,
        COMPRESS_BLOCK, STRIDE, WINDOW,
    )  # fmt: skip
    offs_m = tl.arange(0, BLOCK_M)
    t, head = tile_start + offs_m // GROUP, kv_head * GROUP + offs_m % GROUP
    row_valid = (offs_m < BLOCK_T * GROUP) & (t < num_tokens)
    position = begin + offs_m // GROUP
    token_valid = row_valid & (position < end)
    seen = tl.where(token_valid, position + 1, 0)  # tokens of the sequence that the row sees
    left = seen
    if BRANCH == WIN:
        right = seen
        left = seen - WINDOW
    else:
        right = num_compressed(seen, COMPRESS_BLOCK, STRIDE)
    stride_qb, stride_qt, stride_qh = stride_q
    Q += seq * tl.cast(stride_qb, tl.int64)
    q = load_at(Q, t * stride_qt + head * stride_qh, token_valid, HEAD_DIM, HEAD_DIM_BAND)[0]
    # shows the compiler that rows are aligned
    stride_sums, stride_maxima = (
        stride_sums // 16 * 16,
        stride_maxima // 16 * 16,
    )
    head_row = (tl.cast(seq, tl.int64) * num_tokens + t) * (NUM_KV_HEADS * GROUP) + head
    m_i = tl.full([BLOCK_M], float("-inf"), ACC)
    l_i = tl.zeros([BLOCK_M], ACC)
    acc = tl.zeros([BLOCK_M, V_HEAD_DIM_BAND], ACC)
    m_i, l_i, acc = walk(
        q, m_i, l_i, acc, K, V, SCALES, SUMS, MAXIMA,
        table_row(TABLE, SEQUENCES, seq, stride_table, num_sequences, RAGGED), TABLE,
        stride_k, stride_v, stride_scales,
        kv_head, low, high, first_tile, end_tile, left, right, 0,
        head_row * stride_sums, head_row * stride_maxima,
        page_size, columns, num_pages, qk_scale,
        BRANCH, RING, PAGE_SCALES, BLOCK_N, HEAD_DIM, V_HEAD_DIM, HEAD_DIM_BAND, V_HEAD_DIM_BAND,
        PAGE_SIZE, NUM_SELECTED, NUM_SELECTED_PAD, SELECT_BLOCK, True, CMP_PER_BLOCK,
        CMP_PER_BLOCK_PAD, COMPRESS_BLOCK // STRIDE, ATTEND, STORE_SUMS, ACC,
    )  # fmt: skip
    if ATTEND:
        is_last, m_i, l_i, acc = reduce_splits(
            m_i, l_i, acc, SPLIT_ML, SPLIT_ACC, COUNTERS, program, split, num_splits,
            NUM_KV_HEADS, BLOCK_M, V_HEAD_DIM_BAND,
        )  # fmt: skip
        if is_last:
            divisor, lse = finish_softmax(m_i, l_i)
            o = acc / divisor[:, None]
            stride_ob, stride_ot = stride_o
            store_at(
                O + seq * tl.cast(stride_ob, tl.int64), t * stride_ot + head * V_HEAD_DIM, (o,),
                row_valid, V_HEAD_DIM, V_HEAD_DIM_BAND,
            )  # fmt: skip
            tl.store(LSE + seq * stride_lse_b + head * stride_lse_h + t, lse, mask=row_valid)
            if CHOOSE:
                flags = (seq * num_tokens + tile_start) * NUM_KV_HEADS + kv_head
                if BRANCH == CMP:
                    # Other threads of this program wrote lse, and the sums if it has no splits.
                    tl.debug_barrier()
                    first_head_row = tl.cast(flags, tl.int64) * GROUP
                    choose(
                        tl.where(begin < end, begin, -1), SUMS + first_head_row * stride_sums,
                        MAXIMA + first_head_row * stride_maxima,
                        LSE + seq * stride_lse_b + kv_head * GROUP * stride_lse_h + tile_start,
                        BLOCKS + seq * stride_blocks_b
                        + (tile_start * NUM_KV_HEADS + kv_head) * NUM_SELECTED,
                        stride_sums, stride_maxima, stride_lse_h,
                        GROUP, BLOCK_H, NUM_HEAD_TILES, RANK_BLOCKS, BLOCK_N // CMP_PER_BLOCK_PAD,
                        COMPRESS_BLOCK, STRIDE, SELECT_BLOCK, NUM_SELECTED, NUM_SELECTED_PAD,
                        INIT_BLOCKS, LOCAL_BLOCKS, ACC,
                    )  # fmt: skip
                    signal(READY + flags * 2)
                else:
                    signal(READY + flags * 2 + 1)


@triton.jit(
    do_not_specialize=[
        "first_token", "num_tokens", "max_len", "num_splits", "win_splits", "cmp_programs",
        "stride_sums", "stride_maxima", "stride_lse_h", "page_size", "win_page_size",
        "win_columns", "num_sequences", "num_pages", "num_win_pages",
        "stride_table", "stride_win_table", "stride_scales", "stride_win_scales",
    ],
    do_not_specialize_on_alignment=[
        "STARTS", "LENGTHS", "SEQUENCES", "TABLE", "WIN_TABLE", "LSE", "LSE_WIN", "SCALES",
        "WIN_SCALES",
    ],
)  # fmt: skip
def decode_span(
    Q, K, V, K_WIN, V_WIN, O, O_WIN, LSE, LSE_WIN, SUMS, MAXIMA, SPLIT_ML, SPLIT_ACC, COUNTERS,
    STARTS, LENGTHS, SEQUENCES, TABLE, WIN_TABLE, SCALES, WIN_SCALES,
    stride_q, stride_k, stride_v, stride_k_win, stride_v_win, stride_o,
    stride_lse_b: tl.int64, stride_lse_h, stride_sums, stride_maxima, stride_table,
    stride_win_table, stride_scales, stride_win_scales,
    qk_scale, first_token, num_tokens, max_len, num_sequences,
    page_size, num_pages, win_page_size, win_columns, num_win_pages,
    num_splits, win_splits, cmp_programs,
    HAS_CMP: tl.constexpr, HAS_WIN: tl.constexpr, RAGGED: tl.constexpr, RING: tl.constexpr,
    PAGE_SIZE: tl.constexpr, PAGE_SCALES: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    HEAD_DIM_BAND: tl.constexpr, V_HEAD_DIM_BAND: tl.constexpr,
    COMPRESS_BLOCK: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    ATTEND: tl.constexpr, STORE_SUMS: tl.constexpr, SELECT_BLOCK: tl.constexpr,
    CMP_PER_BLOCK_PAD: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Attend over the compressed tokens (the first ``cmp_programs`` programs) and the window.

    ATTEND: compute o and lse. STORE_SUMS: leave sums over blocks in SUMS for decode_choose.
    """
    program = tl.program_id(0)
    if HAS_CMP:  # noqa: SIM102  a constexpr selects the code that is compiled
        if program < cmp_programs:
            span_program(
                program, program, Q, K, V, SCALES, O, LSE, SUMS, MAXIMA, SPLIT_ML, SPLIT_ACC,
                COUNTERS, COUNTERS, COUNTERS, STARTS, LENGTHS, SEQUENCES, TABLE,
                stride_q, stride_k, stride_v, stride_scales, stride_o, stride_lse_b, stride_lse_h,
                stride_sums, stride_maxima, 0, stride_table,
                qk_scale, first_token, num_tokens, max_len, num_sequences, page_size, 0, num_pages,
                num_splits,
                CMP, RAGGED, False, PAGE_SIZE, PAGE_SCALES,
                NUM_KV_HEADS, GROUP, BLOCK_T, BLOCK_M, BLOCK_N,
                HEAD_DIM, V_HEAD_DIM, HEAD_DIM_BAND, V_HEAD_DIM_BAND,
                COMPRESS_BLOCK, STRIDE, WINDOW, ATTEND, STORE_SUMS, False, 1, 1, SELECT_BLOCK, 1,
                SELECT_BLOCK // STRIDE, CMP_PER_BLOCK_PAD, 1, 1, 0, 0, ACC,
            )  # fmt: skip
    if HAS_WIN:  # noqa: SIM102
        if program >= cmp_programs:
            span_program(
                program - cmp_programs, program, Q, K_WIN, V_WIN, WIN_SCALES, O_WIN, LSE_WIN, SUMS,
                MAXIMA, SPLIT_ML, SPLIT_ACC, COUNTERS, COUNTERS, COUNTERS, STARTS, LENGTHS,
                SEQUENCES, WIN_TABLE,
                stride_q, stride_k_win, stride_v_win, stride_win_scales, stride_o, stride_lse_b,
                stride_lse_h, stride_sums, stride_maxima, 0, stride_win_table,
                qk_scale, first_token, num_tokens, max_len, num_sequences, win_page_size,
                win_columns, num_win_pages, win_splits,
                WIN, RAGGED, RING, 0, PAGE_SCALES,
                NUM_KV_HEADS, GROUP, BLOCK_T, BLOCK_M, BLOCK_N,
                HEAD_DIM, V_HEAD_DIM, HEAD_DIM_BAND, V_HEAD_DIM_BAND,
                COMPRESS_BLOCK, STRIDE, WINDOW, True, False, False, 1, 1, SELECT_BLOCK, 1,
                1, 1, 1, 1, 0, 0, ACC,
            )  # fmt: skip

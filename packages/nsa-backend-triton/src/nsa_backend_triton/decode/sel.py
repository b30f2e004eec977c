"""Decode attention over the selected blocks, and the gated sum of the branches.

    o_sel = softmax(scale q k^T) v over the tokens of the selected blocks up to t
    o = g_cmp o_cmp + g_sel o_sel + g_win o_win                     (Eq. 5)

A program owns the heads of one group of one token (BLOCK_M >= 16 rows) and a share of its n l'
keys, BLOCK_N at a time. Per tile it reads (Dk + Dv) * BLOCK_N * itemsize bytes from HBM: 16
operations per byte in bf16 at BLOCK_M = 16, so HBM bandwidth is the limit. The last program of a
unit merges the splits. GATED, it also adds the gated outputs of the other branches, which are in
memory in fp32, and rounds once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_backend_triton.decode.walk import SEL, reduce_splits, table_row, token_range, wait, walk
from nsa_backend_triton.shared.rows import finish_softmax, load_at, store_at


@triton.jit
def sel_program(
    index, program, Q, GATES, K, V, SCALES, BLOCKS, O_CMP, O_WIN, O, LSE, SPLIT_ML, SPLIT_ACC,
    COUNTERS, READY, STARTS, LENGTHS, SEQUENCES, TABLE,
    stride_q, stride_gates, stride_k, stride_v, stride_scales, stride_blocks, stride_o,
    stride_lse_b, stride_lse_h, stride_table,
    qk_scale, first_token, num_tokens, max_len, num_sequences, page_size, num_pages, num_splits,
    PAGE_SIZE: tl.constexpr, PAGE_SCALES: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    HEAD_DIM_BAND: tl.constexpr, V_HEAD_DIM_BAND: tl.constexpr, SELECT_BLOCK: tl.constexpr,
    NUM_SELECTED: tl.constexpr, NUM_SELECTED_PAD: tl.constexpr, DISTINCT: tl.constexpr,
    GATED: tl.constexpr, WAIT: tl.constexpr, RAGGED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Run program ``index`` of the branch; ``program`` is its number among those of all branches.

    DISTINCT: BLOCKS are ascending and distinct, as decode_choose writes them; otherwise they are in
    any order, may repeat and may be out of range. WAIT: wait for the token's flags in READY before
    reading its blocks and the other branches' outputs.
    """
    kv_head, split, unit = (
        index % NUM_KV_HEADS,
        index // NUM_KV_HEADS % num_splits,
        index // NUM_KV_HEADS // num_splits,
    )
    seq, t = unit // num_tokens, unit % num_tokens
    begin, end = token_range(STARTS, LENGTHS, seq, first_token + t, 1, max_len)
    token_valid = begin < end
    offs_m = tl.arange(0, BLOCK_M)
    head = kv_head * GROUP + offs_m % GROUP
    row_valid = offs_m < GROUP
    stride_qb, stride_qt, stride_qh = stride_q
    Q += seq * tl.cast(stride_qb, tl.int64) + t * stride_qt
    q = load_at(Q, head * stride_qh, row_valid & token_valid, HEAD_DIM, HEAD_DIM_BAND)[0]
    flags = unit * NUM_KV_HEADS + kv_head
    if WAIT:
        wait(READY + flags * 2)
    num_blocks = NUM_SELECTED
    if DISTINCT:
        num_blocks = tl.minimum(begin // SELECT_BLOCK + 1, NUM_SELECTED)
    tiles = tl.where(token_valid, tl.cdiv(num_blocks * SELECT_BLOCK, BLOCK_N), 0)
    tiles_per_split = tl.cdiv(tiles, num_splits)
    first_tile = tl.minimum(split * tiles_per_split, tiles)
    right = tl.where(row_valid & token_valid, end, 0)
    m_i = tl.full([BLOCK_M], float("-inf"), ACC)
    l_i = tl.zeros([BLOCK_M], ACC)
    acc = tl.zeros([BLOCK_M, V_HEAD_DIM_BAND], ACC)
    stride_bb, stride_bt, stride_bh = stride_blocks
    BLOCKS += seq * tl.cast(stride_bb, tl.int64) + t * stride_bt + kv_head * stride_bh
    m_i, l_i, acc = walk(
        q, m_i, l_i, acc, K, V, SCALES, SPLIT_ML, SPLIT_ML,
        table_row(TABLE, SEQUENCES, seq, stride_table, num_sequences, RAGGED), BLOCKS,
        stride_k, stride_v, stride_scales,
        kv_head, 0, end, first_tile, tl.minimum(first_tile + tiles_per_split, tiles),
        right, right, begin // SELECT_BLOCK, right, right, page_size, 0,
        num_pages, qk_scale,
        SEL, False, PAGE_SCALES, BLOCK_N, HEAD_DIM, V_HEAD_DIM, HEAD_DIM_BAND, V_HEAD_DIM_BAND,
        PAGE_SIZE, NUM_SELECTED, NUM_SELECTED_PAD, SELECT_BLOCK, DISTINCT, 1, 1, 1, True, False,
        ACC,
    )  # fmt: skip
    is_last, m_i, l_i, acc = reduce_splits(
        m_i, l_i, acc, SPLIT_ML, SPLIT_ACC, COUNTERS, program, split, num_splits,
        NUM_KV_HEADS, BLOCK_M, V_HEAD_DIM_BAND,
    )  # fmt: skip
    if is_last:
        divisor, lse = finish_softmax(m_i, l_i)
        o = acc / divisor[:, None]
        if GATED:
            if WAIT:
                wait(READY + flags * 2 + 1)
            head_row = (tl.cast(seq, tl.int64) * num_tokens + t) * (NUM_KV_HEADS * GROUP) + head
            offs_dv = tl.arange(0, V_HEAD_DIM_BAND)
            offs_branch = head_row[:, None] * V_HEAD_DIM + offs_dv[None, :]
            mask = row_valid[:, None] & (offs_dv < V_HEAD_DIM)[None, :]
            stride_gb, stride_gt, stride_gh = stride_gates
            gate = GATES + seq * tl.cast(stride_gb, tl.int64) + t * stride_gt + head * stride_gh
            o *= tl.load(gate + 1, mask=row_valid, other=0.0)[:, None]
            o_cmp = tl.load(O_CMP + offs_branch, mask=mask, other=0.0, cache_modifier=".cg")
            o_win = tl.load(O_WIN + offs_branch, mask=mask, other=0.0, cache_modifier=".cg")
            o = tl.load(gate, mask=row_valid, other=0.0)[:, None] * o_cmp + o
            o += tl.load(gate + 2, mask=row_valid, other=0.0)[:, None] * o_win
            o = tl.where(token_valid, o, 0.0)  # the gates of padding may be NaN
        else:
            tl.store(LSE + seq * stride_lse_b + head * stride_lse_h + t, lse, mask=row_valid)
        stride_ob, stride_ot = stride_o
        o_row = O + seq * tl.cast(stride_ob, tl.int64) + t * stride_ot
        store_at(o_row, head * V_HEAD_DIM, (o,), row_valid, V_HEAD_DIM, V_HEAD_DIM_BAND)


@triton.jit(
    do_not_specialize=[
        "first_token", "num_tokens", "max_len", "num_splits", "stride_lse_h", "num_sequences",
        "page_size", "num_pages", "stride_table", "stride_scales",
    ],
    do_not_specialize_on_alignment=[
        "STARTS", "LENGTHS", "SEQUENCES", "TABLE", "SCALES", "BLOCKS", "LSE",
    ],
)  # fmt: skip
def decode_sel(
    Q, GATES, K, V, BLOCKS, O_CMP, O_WIN, O, LSE, SPLIT_ML, SPLIT_ACC, COUNTERS,
    STARTS, LENGTHS, SEQUENCES, TABLE, SCALES,
    stride_q, stride_gates, stride_kp: tl.int64, stride_k, stride_vp: tl.int64, stride_v,
    stride_scales, stride_blocks, stride_o, stride_lse_b: tl.int64, stride_lse_h, stride_table,
    qk_scale, first_token, num_tokens, max_len, num_sequences, page_size, num_pages, num_splits,
    PAGE_SIZE: tl.constexpr, PAGE_SCALES: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    HEAD_DIM_BAND: tl.constexpr, V_HEAD_DIM_BAND: tl.constexpr, SELECT_BLOCK: tl.constexpr,
    NUM_SELECTED: tl.constexpr, NUM_SELECTED_PAD: tl.constexpr, DISTINCT: tl.constexpr,
    GATED: tl.constexpr, RAGGED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Attend over the selected blocks; GATED: write the gated sum of all branches to O.

    The page strides are int64 arguments instead of elements of ``stride_k`` and ``stride_v``
    (row, head), which takes fewer registers on some architectures. Clamped pages take 154 registers
    instead of 115 (sm_90, bf16, Dk = Dv = 128), but shared memory has room for three programs per
    multiprocessor in either case, and a step of four tokens was 4 % faster with them (H200).
    """
    program = tl.program_id(0)
    stride_kr, stride_kh = stride_k
    stride_vr, stride_vh = stride_v
    sel_program(
        program, program, Q, GATES, K, V, SCALES, BLOCKS, O_CMP, O_WIN, O, LSE, SPLIT_ML, SPLIT_ACC,
        COUNTERS, COUNTERS, STARTS, LENGTHS, SEQUENCES, TABLE,
        stride_q, stride_gates,
        (stride_kp, stride_kr, stride_kh), (stride_vp, stride_vr, stride_vh), stride_scales,
        stride_blocks, stride_o, stride_lse_b, stride_lse_h, stride_table,
        qk_scale, first_token, num_tokens, max_len, num_sequences, page_size, num_pages, num_splits,
        PAGE_SIZE, PAGE_SCALES, NUM_KV_HEADS, GROUP, BLOCK_M, BLOCK_N,
        HEAD_DIM, V_HEAD_DIM, HEAD_DIM_BAND, V_HEAD_DIM_BAND, SELECT_BLOCK,
        NUM_SELECTED, NUM_SELECTED_PAD, DISTINCT, GATED, False, RAGGED, ACC,
    )  # fmt: skip

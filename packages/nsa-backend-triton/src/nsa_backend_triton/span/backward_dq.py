"""Backward of attention over a span of keys: dq and the statistics that dk and dv need.

backward.py states the equations.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_backend_triton.shared.rows import (
    add_dot,
    add_rows,
    dot_transposed,
    load_at,
    place_queries,
    read_rows,
    row_offset,
    scale_rows,
    store_at,
    to_base_2,
    with_batch,
    zero_rows,
)
from nsa_backend_triton.span.geometry import key_tiles, locate_keys, mask_scores


@triton.jit
def _walk_keys(
    q, do, lse, delta, dq, K, V, K_DESC, V_DESC, batch, kv_head,
    tiles, seq_keys, first_key, end_key, qk_scale, stride_k, stride_v,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    HEAD_DIM_BAND: tl.constexpr, V_HEAD_DIM_BAND: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, ACC: tl.constexpr, USE_TMA: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dq [M, Dk] plus the sum over the full or MASKED ``tiles``; lse [M] is in base 2.

    Tiles and the limits of rows are those of the forward's walk.
    """
    stride_kt, _ = stride_k
    stride_vt, _ = stride_v
    offs_n = tl.arange(0, BLOCK_N)
    low, full_low, skip_from, skip_to, num_masked = tiles
    first, num_tiles = (low, num_masked) if MASKED else (full_low, skip_to - skip_from)
    for i in tl.range(0, num_tiles):
        start_n = first + i * BLOCK_N
        if MASKED:
            start_n += tl.where(i >= skip_from, skip_to - skip_from, 0) * BLOCK_N
        k = read_rows(
            K, K_DESC, batch, kv_head, start_n, offs_n, seq_keys, stride_kt,
            HEAD_DIM, HEAD_DIM_BAND, MASKED, USE_TMA,
        )  # fmt: skip
        v = read_rows(
            V, V_DESC, batch, kv_head, start_n, offs_n, seq_keys, stride_vt,
            V_HEAD_DIM, V_HEAD_DIM_BAND, MASKED, USE_TMA,
        )  # fmt: skip
        s = dot_transposed(q, k, ACC)
        s = s * qk_scale - lse[:, None]
        if MASKED:
            if WINDOW > 0:  # one unsigned comparison for both limits
                visible = (offs_n[None, :] - (first_key - start_n)[:, None]).to(tl.uint32) < (
                    end_key - first_key
                ).to(tl.uint32)[:, None]
                s = tl.where(visible, s, float("-inf"))
            else:
                s = mask_scores(s, offs_n, first_key - start_n, end_key - start_n, False, True)
        p = tl.exp2(s)
        dp = dot_transposed(do, v, ACC)
        ds = p * (dp - delta[:, None])
        dq = add_dot(dq, ds, k)
    return dq


@triton.jit
def sum_products(x, y, ACC: tl.constexpr):
    """Sums [R] of x y over the columns of rows [R, HEAD_DIM]."""
    NUM_BANDS: tl.constexpr = len(x)
    total = tl.sum(x[0].to(ACC) * y[0].to(ACC), 1)
    for i in tl.static_range(1, NUM_BANDS):
        total += tl.sum(x[i].to(ACC) * y[i].to(ACC), 1)
    return total


@triton.jit(
    do_not_specialize=[
        "num_seqs", "seq_len", "num_keys", "first_query", "stride_lse_b", "stride_lse_h",
        "stride_stats_b", "stride_stats_h", "stride_stats_kind",
    ]
)  # fmt: skip
def span_dq(
    Q, K, V, K_DESC, V_DESC, O, DO, LSE, DQ, STATS, CU_SEQLENS, CU_KEYS,
    stride_qb: tl.int64, stride_q, stride_kb: tl.int64, stride_k, stride_vb: tl.int64, stride_v,
    stride_ob: tl.int64, stride_o, stride_dob: tl.int64, stride_do, stride_dqb: tl.int64, stride_dq,
    stride_lse_b: tl.int64, stride_lse_h: tl.int64,
    stride_stats_b: tl.int64, stride_stats_h: tl.int64, stride_stats_kind: tl.int64,
    qk_scale, scale, num_seqs, seq_len, num_keys, first_query,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    HEAD_DIM_BAND: tl.constexpr, V_HEAD_DIM_BAND: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    COMPRESS_BLOCK: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    VARLEN: tl.constexpr, PARTIAL: tl.constexpr, ACC: tl.constexpr, USE_TMA: tl.constexpr,
    STORE_LSE: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    """dq of BLOCK_T tokens x BLOCK_H heads, and STATS for span_dkdv, which runs afterwards.

    STATS holds delta and, if STORE_LSE, lse in base 2, which is inf in a row without keys. GIVEN:
    STATS already holds both, and dq is added to DQ. q and do
    stay in shared memory or registers, dq [M, Dk] in registers. A tile of BLOCK_N keys takes
    (Dk + Dv) * BLOCK_N * itemsize bytes through L2 and 2 * M * BLOCK_N * (2 Dk + Dv) operations for
    M = BLOCK_T * BLOCK_H rows. The matrix units are the limit, then exp2.
    """
    num_head_tiles: tl.constexpr = NUM_HEADS // BLOCK_H
    tile = tl.num_programs(0) // num_head_tiles - 1 - tl.program_id(0) // num_head_tiles
    head = tl.program_id(0) % num_head_tiles * BLOCK_H
    seq, start, query_start, length, row = place_queries(
        tile, CU_SEQLENS, num_seqs, seq_len, first_query, BLOCK_T, VARLEN, PARTIAL
    )
    if row >= length:
        return
    key_start, seq_keys = locate_keys(
        seq, start, length, CU_KEYS, num_keys, COMPRESS_BLOCK, STRIDE, VARLEN
    )
    batch = 0 if VARLEN else seq
    offs_m = tl.arange(0, BLOCK_T * BLOCK_H)
    offs_t, offs_h = offs_m // BLOCK_H, offs_m % BLOCK_H
    token = row + offs_t
    mask_m = token < length
    Q += row_offset(batch, query_start + row, head, with_batch(stride_qb, stride_q))
    stride_qt, stride_qh = stride_q
    q = load_at(Q, offs_t * stride_qt + offs_h * stride_qh, mask_m, HEAD_DIM, HEAD_DIM_BAND)
    DO += row_offset(batch, query_start + row, head, with_batch(stride_dob, stride_do))
    stride_dot, stride_doh = stride_do
    do = load_at(DO, offs_t * stride_dot + offs_h * stride_doh, mask_m, V_HEAD_DIM, V_HEAD_DIM_BAND)
    stats = STATS + batch * stride_stats_b + query_start + token + (head + offs_h) * stride_stats_h
    if GIVEN:
        delta = tl.load(stats, mask=mask_m)
        lse = tl.load(stats + stride_stats_kind, mask=mask_m, other=float("inf"))
    else:
        O += row_offset(batch, query_start + row, head, with_batch(stride_ob, stride_o))
        stride_ot, stride_oh = stride_o
        o_offs = offs_t * stride_ot + offs_h * stride_oh
        o = load_at(O, o_offs, mask_m, V_HEAD_DIM, V_HEAD_DIM_BAND)
        delta = sum_products(o, do, ACC)
        tl.store(stats, delta, mask=mask_m)
        lse = tl.load(
            LSE + batch * stride_lse_b + query_start + token + (head + offs_h) * stride_lse_h,
            mask=mask_m,
            other=float("inf"),
        )
        lse = tl.where(lse == float("-inf"), float("inf"), to_base_2(lse))  # no keys: p = 0
        if STORE_LSE:
            tl.store(stats + stride_stats_kind, lse, mask=mask_m)

    K += row_offset(batch, key_start, head // GROUP, with_batch(stride_kb, stride_k))
    V += row_offset(batch, key_start, head // GROUP, with_batch(stride_vb, stride_v))
    tiles, first_key, end_key = key_tiles(
        row, token, length, seq_keys, COMPRESS_BLOCK, STRIDE, WINDOW, BLOCK_T, BLOCK_N
    )
    dq = zero_rows(BLOCK_T * BLOCK_H, HEAD_DIM, HEAD_DIM_BAND, ACC)
    kv_head = head // GROUP
    for masked in tl.static_range(2):  # the full tiles first
        dq = _walk_keys(
            q, do, lse, delta, dq, K, V, K_DESC, V_DESC, batch, kv_head,
            tiles, seq_keys, first_key, end_key, qk_scale, stride_k, stride_v,
            HEAD_DIM, V_HEAD_DIM, HEAD_DIM_BAND, V_HEAD_DIM_BAND, BLOCK_N, WINDOW, ACC, USE_TMA,
            masked,
        )  # fmt: skip
    DQ += row_offset(batch, query_start + row, head, with_batch(stride_dqb, stride_dq))
    stride_dqt, stride_dqh = stride_dq
    dq_offs = offs_t * stride_dqt + offs_h * stride_dqh
    dq = scale_rows(dq, scale)
    if GIVEN:
        others = load_at(DQ, dq_offs, mask_m, HEAD_DIM, HEAD_DIM_BAND)
        dq = add_rows(dq, others)
    store_at(DQ, dq_offs, dq, mask_m, HEAD_DIM, HEAD_DIM_BAND)

"""Backward of attention over a span of keys: dk and dv, or their parts.

backward.py states the equations.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_backend_triton.shared.rows import (
    add_dot,
    dot_transposed,
    fetch_rows,
    load_rows,
    place,
    row_offset,
    scale_rows,
    store_rows,
    to_base_2,
    with_batch,
    zero_rows,
)
from nsa_backend_triton.span.geometry import held_queries, locate_keys, mask_scores, query_span


@triton.jit
def _walk_queries(
    k, v, dk, dv, Q, DO, Q_DESC, DO_DESC, LSE, DELTA, STATS_DESC, batch,
    low, skip_from, skip_to, query_tiles, first_head, num_heads, end, visible_from, visible_to,
    qk_scale, stride_q, stride_do, stride_lse_h, stride_delta_h,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    HEAD_DIM_BAND: tl.constexpr, V_HEAD_DIM_BAND: tl.constexpr, BLOCK_M: tl.constexpr,
    WINDOW: tl.constexpr, ACC: tl.constexpr, USE_TMA: tl.constexpr,
    COMPUTE_DK: tl.constexpr, COMPUTE_DV: tl.constexpr, GIVEN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dk [N, Dk], dv [N, Dv] plus the sums over tiles of queries of each head, the last tile first.

    Tile i of ``query_tiles`` starts at query low + i * BLOCK_M. Every query of the tiles skip_from
    .. skip_to sees all keys; they are left out if MASKED, otherwise the others are. Key r is seen
    by the queries visible_from[r] .. visible_to[r]; none from ``end`` on counts. Queries are
    counted from the one at Q. GIVEN: LSE is in base 2, inf in a row without keys.
    """
    num_tiles = query_tiles - (skip_to - skip_from)
    if not MASKED:
        low, num_tiles = low + skip_from * BLOCK_M, skip_to - skip_from
        skip_from, skip_to = 0, 0
    stride_qt, stride_qh = stride_q
    stride_dot, stride_doh = stride_do
    offs_m = tl.arange(0, BLOCK_M)
    if USE_TMA:
        head, i = 0, num_tiles - 1  # counters, which cost less than to divide the step
    for step in tl.range(0, num_heads * num_tiles):
        if USE_TMA:
            start_m = low + (i + tl.where(i >= skip_from, skip_to - skip_from, 0)) * BLOCK_M
            q = fetch_rows(
                Q_DESC, batch, start_m, first_head + head, BLOCK_M, HEAD_DIM, HEAD_DIM_BAND
            )
            do = fetch_rows(
                DO_DESC, batch, start_m, first_head + head, BLOCK_M, V_HEAD_DIM, V_HEAD_DIM_BAND
            )
            # A row past the end reads zeros everywhere, and so adds 0.
            delta = STATS_DESC.load([0, batch, first_head + head, start_m]).reshape(BLOCK_M)
            lse = STATS_DESC.load([1, batch, first_head + head, start_m]).reshape(BLOCK_M)
        else:
            head = step // num_tiles
            i = num_tiles - 1 - step % num_tiles
            i += tl.where(i >= skip_from, skip_to - skip_from, 0)
            start_m = low + i * BLOCK_M
            first_row, head_64 = tl.cast(start_m, tl.int64), tl.cast(head, tl.int64)
            q = load_rows(
                Q + first_row * stride_qt + head_64 * stride_qh,
                offs_m,
                end - start_m,
                stride_qt,
                HEAD_DIM,
                HEAD_DIM_BAND,
                MASKED,
            )
            do = load_rows(
                DO + first_row * stride_dot + head_64 * stride_doh,
                offs_m,
                end - start_m,
                stride_dot,
                V_HEAD_DIM,
                V_HEAD_DIM_BAND,
                MASKED,
            )
            lse_at = LSE + head_64 * stride_lse_h + first_row
            delta_at = DELTA + head_64 * stride_delta_h + first_row
            if MASKED:
                lse = tl.load(lse_at + offs_m, mask=start_m + offs_m < end, other=float("inf"))
                delta = tl.load(delta_at + offs_m, mask=start_m + offs_m < end, other=0.0)
            else:
                lse, delta = tl.load(lse_at + offs_m), tl.load(delta_at + offs_m)
            if not GIVEN:
                lse = tl.where(lse == float("-inf"), float("inf"), to_base_2(lse))
        s = dot_transposed(k, q, ACC)
        if USE_TMA and COMPUTE_DK:  # keeps the matrix units busy before p follows from s
            dp = dot_transposed(v, do, ACC)
        s = s * qk_scale - lse[None, :]
        if MASKED:
            s = mask_scores(
                s, offs_m, visible_from - start_m, visible_to - start_m, True, WINDOW > 0
            )
        p = tl.exp2(s)
        if COMPUTE_DV:
            dv = add_dot(dv, p, do)
        if COMPUTE_DK:
            if not USE_TMA:
                dp = dot_transposed(v, do, ACC)
            ds = p * (dp - delta[None, :])
            dk = add_dot(dk, ds, q)
        if USE_TMA:
            head += tl.where(i == 0, 1, 0)
            i = tl.where(i == 0, num_tiles, i) - 1
    return dk, dv


@triton.jit(
    do_not_specialize=[
        "num_seqs", "seq_len", "num_keys", "first_query", "block_h", "query_splits", "stride_lse_b",
        "stride_lse_h", "stride_delta_b", "stride_delta_h",
    ]
)  # fmt: skip
def span_dkdv(
    Q, K, V, DO, Q_DESC, DO_DESC, LSE, DELTA, STATS_DESC, DK, DV, CU_SEQLENS, CU_KEYS,
    stride_qb: tl.int64, stride_q, stride_kb: tl.int64, stride_k, stride_vb: tl.int64, stride_v,
    stride_dob: tl.int64, stride_do,
    stride_dkb: tl.int64, stride_dk, stride_dvb: tl.int64, stride_dv,
    stride_dk_part: tl.int64, stride_dv_part: tl.int64,
    stride_lse_b: tl.int64, stride_lse_h: tl.int64,
    stride_delta_b: tl.int64, stride_delta_h: tl.int64,
    qk_scale, scale, num_seqs, seq_len, num_keys, first_query, block_h, query_splits,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    HEAD_DIM_BAND: tl.constexpr, V_HEAD_DIM_BAND: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    COMPRESS_BLOCK: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    VARLEN: tl.constexpr, PARTIAL: tl.constexpr, ACC: tl.constexpr, USE_TMA: tl.constexpr,
    COMPUTE_DK: tl.constexpr, COMPUTE_DV: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    """dk, dv of BLOCK_N keys from block_h heads and one of query_splits parts of the queries.

    k and v stay in shared memory, dk and dv in registers. A tile of BLOCK_M queries takes
    (Dk + Dv) * BLOCK_M * itemsize bytes through L2 and 4 * BLOCK_M * BLOCK_N * (Dk + Dv)
    operations. The matrix units are the limit where q and do come from L2. Therefore key tiles vary
    fastest and walk the queries from the end, where all of them begin: neighbouring programs read
    the same tiles at the same time. With USE_TMA the statistics of span_dq come by descriptor as
    well. The output is partial sums in fp32, which sum_parts adds, or the gradients of a window
    if there is only one part. PARTIAL: tiles cover the keys up to the last query, and walk the
    queries that q holds.

    COMPUTE_DK, COMPUTE_DV select the outputs. Together at 256 columns they leave no registers for
    scores: two launches compute s twice (5 products in place of 4), and took 4.2 ms instead of 11.2
    on an H200.
    """
    if WINDOW > 0:
        query_splits = 1  # as a constant: at 128 columns, spills shrink from 424 to 352 bytes
    num_parts = GROUP // block_h * query_splits
    num_tiles = tl.num_programs(0) // (NUM_KV_HEADS * num_parts)
    outer = tl.program_id(0) // num_tiles
    part, kv_head = outer % num_parts, outer // num_parts
    seq, start, length, row = place(
        tl.program_id(0) % num_tiles, CU_SEQLENS, num_seqs,
        first_query + seq_len if PARTIAL else seq_len, BLOCK_N * STRIDE, VARLEN,
    )  # fmt: skip
    key_start, seq_keys = locate_keys(
        seq, start, length, CU_KEYS, num_keys, COMPRESS_BLOCK, STRIDE, VARLEN
    )
    start_n = row // STRIDE
    if start_n >= seq_keys:
        return
    batch = 0 if VARLEN else seq
    offs_n = tl.arange(0, BLOCK_N)
    K += row_offset(batch, key_start + start_n, kv_head, with_batch(stride_kb, stride_k))
    V += row_offset(batch, key_start + start_n, kv_head, with_batch(stride_vb, stride_v))
    stride_kt, _ = stride_k
    stride_vt, _ = stride_v
    k = load_rows(K, offs_n, seq_keys - start_n, stride_kt, HEAD_DIM, HEAD_DIM_BAND, True)
    v = load_rows(V, offs_n, seq_keys - start_n, stride_vt, V_HEAD_DIM, V_HEAD_DIM_BAND, True)

    low, inner_low, inner_high, high = query_span(
        start_n, tl.minimum(start_n + BLOCK_N, seq_keys) - 1, length, COMPRESS_BLOCK, STRIDE, WINDOW
    )
    # Queries are counted from the first one of the sequence, or, if PARTIAL, from row 0 of q.
    query_start = start
    if PARTIAL:
        query_start, first = start * 0, first_query - start
        low, inner_low, inner_high, high = held_queries(low, inner_low, inner_high, high, first)
    if USE_TMA:
        low = low // 4 * 4  # descriptors read statistics from 16-byte boundaries
    split_size = tl.cdiv(tl.cdiv(high - low, query_splits), BLOCK_M) * BLOCK_M
    low += part % query_splits * split_size
    high = tl.minimum(low + split_size, high)
    query_tiles = tl.maximum(tl.cdiv(high - low, BLOCK_M), 0)
    skip_from = tl.minimum(tl.cdiv(tl.maximum(inner_low - low, 0), BLOCK_M), query_tiles)
    skip_to = tl.maximum(tl.maximum(tl.minimum(inner_high, high) - low, 0) // BLOCK_M, skip_from)
    head = kv_head * GROUP + part // query_splits * block_h
    Q += row_offset(batch, query_start, head, with_batch(stride_qb, stride_q))
    DO += row_offset(batch, query_start, head, with_batch(stride_dob, stride_do))
    LSE += batch * stride_lse_b + query_start + head * stride_lse_h
    DELTA += batch * stride_delta_b + query_start + head * stride_delta_h
    dk = zero_rows(BLOCK_N, HEAD_DIM, HEAD_DIM_BAND, ACC)
    dv = zero_rows(BLOCK_N, V_HEAD_DIM, V_HEAD_DIM_BAND, ACC)
    visible_from = (start_n + offs_n) * STRIDE + COMPRESS_BLOCK - 1
    visible_to = start_n + offs_n + WINDOW
    if PARTIAL:
        visible_from, visible_to = visible_from - first, visible_to - first
    for masked in tl.static_range(2):  # the full tiles first
        dk, dv = _walk_queries(
            k, v, dk, dv, Q, DO, Q_DESC, DO_DESC, LSE, DELTA, STATS_DESC, batch,
            low, skip_from, skip_to, query_tiles, head, block_h, high, visible_from, visible_to,
            qk_scale, stride_q, stride_do, stride_lse_h, stride_delta_h,
            HEAD_DIM, V_HEAD_DIM, HEAD_DIM_BAND, V_HEAD_DIM_BAND, BLOCK_M, WINDOW, ACC, USE_TMA,
            COMPUTE_DK, COMPUTE_DV, GIVEN, masked,
        )  # fmt: skip
    DK += part * stride_dk_part + row_offset(
        batch, key_start + start_n, kv_head, with_batch(stride_dkb, stride_dk)
    )
    DV += part * stride_dv_part + row_offset(
        batch, key_start + start_n, kv_head, with_batch(stride_dvb, stride_dv)
    )
    stride_dkt, _ = stride_dk
    stride_dvt, _ = stride_dv
    if COMPUTE_DK:
        dk = scale_rows(dk, scale)
        store_rows(DK, offs_n, seq_keys - start_n, stride_dkt, dk, HEAD_DIM, HEAD_DIM_BAND)
    if COMPUTE_DV:
        store_rows(DV, offs_n, seq_keys - start_n, stride_dvt, dv, V_HEAD_DIM, V_HEAD_DIM_BAND)

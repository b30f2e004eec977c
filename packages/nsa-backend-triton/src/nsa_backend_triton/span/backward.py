"""Backward of attention over a span of keys: the compressed branch and the sliding window.

    p = exp(s - lse),  dv = p^T do,  ds = p (do v^T - delta),  delta = sum over columns of do o
    dq = scale ds k,  dk = scale ds^T q

These are the gradients of one branch of Eq. 5. span_dq owns a tile of queries and walks keys,
span_dkdv owns a tile of keys and walks queries, span_sum adds partial sums of dk and dv. There are
no atomics, so equal inputs give equal bits. Both passes recompute the scores: 7 products where a
fused pass needs 5, which costs less than to add fp32 gradients of every tile through L2 and to
round them afterwards.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_backend_triton.host import configs
from nsa_backend_triton.host.descriptors import descriptors_fit, key_descriptor, stats_descriptor
from nsa_backend_triton.host.launch_cache import Launch, aligned, cached_by_metadata
from nsa_backend_triton.host.sequences import (
    Sequences,
    accumulator,
    architecture,
    band,
    lse_strides,
    new_lse_strides,
    new_strides,
    strides,
)
from nsa_backend_triton.shared.rows import (
    LOG2E,
    add_dot,
    dot_columns,
    load_at,
    num_compressed,
    place,
    row_offset,
    scale_rows,
    store_at,
    transpose,
    zero_rows,
)
from nsa_backend_triton.span.forward import heads_together, launch_options
from nsa_backend_triton.span.geometry import (
    fetch_rows,
    key_span,
    load_rows,
    locate_keys,
    mask_scores,
    query_span,
    store_rows,
)


@triton.jit
def _walk_keys(
    q, do, lse, delta, dq, K, V, K_DESC, V_DESC, batch, kv_head,
    low, skip_from, skip_to, num_tiles, seq_keys, first_key, end_key,
    qk_scale, stride_k, stride_v,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    HEAD_DIM_BAND: tl.constexpr, V_HEAD_DIM_BAND: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, ACC: tl.constexpr, USE_TMA: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dq [M, Dk] plus the sum over ``num_tiles`` tiles of keys; lse [M] is in base 2.

    Tiles and the limits of rows are those of the forward's walk.
    """
    _, stride_kt, _ = stride_k
    _, stride_vt, _ = stride_v
    offs_n = tl.arange(0, BLOCK_N)
    for i in tl.range(0, num_tiles):
        start_n = low + i * BLOCK_N
        if MASKED:
            start_n += tl.where(i >= skip_from, skip_to - skip_from, 0) * BLOCK_N
        if USE_TMA:
            k = fetch_rows(K_DESC, batch, start_n, kv_head, BLOCK_N, HEAD_DIM, HEAD_DIM_BAND)
            v = fetch_rows(V_DESC, batch, start_n, kv_head, BLOCK_N, V_HEAD_DIM, V_HEAD_DIM_BAND)
        else:
            k = load_rows(
                K + tl.cast(start_n, tl.int64) * stride_kt,
                offs_n,
                seq_keys - start_n,
                stride_kt,
                HEAD_DIM,
                HEAD_DIM_BAND,
                MASKED,
            )
            v = load_rows(
                V + tl.cast(start_n, tl.int64) * stride_vt,
                offs_n,
                seq_keys - start_n,
                stride_vt,
                V_HEAD_DIM,
                V_HEAD_DIM_BAND,
                MASKED,
            )
        s = dot_columns(q, transpose(k, HEAD_DIM, HEAD_DIM_BAND), HEAD_DIM, HEAD_DIM_BAND, ACC)
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
        dp = dot_columns(
            do, transpose(v, V_HEAD_DIM, V_HEAD_DIM_BAND), V_HEAD_DIM, V_HEAD_DIM_BAND, ACC
        )
        ds = p * (dp - delta[:, None])
        dq = add_dot(dq, ds.to(k[0].dtype), k, HEAD_DIM, HEAD_DIM_BAND, ACC)
    return dq


@triton.jit
def sum_products(x, y, HEAD_DIM: tl.constexpr, BAND: tl.constexpr, ACC: tl.constexpr):
    """Sums [R] of x y over the columns of rows [R, HEAD_DIM]."""
    total = tl.sum(x[0].to(ACC) * y[0].to(ACC), 1)
    for i in tl.static_range(1, (HEAD_DIM + BAND - 1) // BAND):
        total += tl.sum(x[i].to(ACC) * y[i].to(ACC), 1)
    return total


@triton.jit(
    do_not_specialize=[
        "num_seqs",
        "seq_len",
        "num_keys",
        "stride_lse_b",
        "stride_lse_h",
        "stride_stats_b",
        "stride_stats_h",
        "stride_stats_kind",
    ]
)
def span_dq(
    Q, K, V, K_DESC, V_DESC, O, DO, LSE, DQ, STATS, CU_SEQLENS, CU_KEYS,
    stride_q, stride_k, stride_v, stride_o, stride_do, stride_dq,
    stride_lse_b: tl.int64, stride_lse_h: tl.int64,
    stride_stats_b: tl.int64, stride_stats_h: tl.int64, stride_stats_kind: tl.int64,
    qk_scale, scale, num_seqs, seq_len, num_keys,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    HEAD_DIM_BAND: tl.constexpr, V_HEAD_DIM_BAND: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    COMPRESS_BLOCK: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    VARLEN: tl.constexpr, ACC: tl.constexpr, USE_TMA: tl.constexpr, STORE_LSE: tl.constexpr,
):  # fmt: skip
    """dq of BLOCK_T tokens x BLOCK_H heads, and STATS for span_dkdv, which runs afterwards.

    STATS holds delta and, if STORE_LSE, lse in base 2, which is inf in a row without keys. q and do
    stay in shared memory or registers, dq [M, Dk] in registers. A tile of BLOCK_N keys takes
    (Dk + Dv) * BLOCK_N * itemsize bytes through L2 and 2 * M * BLOCK_N * (2 Dk + Dv) operations for
    M = BLOCK_T * BLOCK_H rows. The matrix units are the limit, then exp2.
    """
    num_head_tiles: tl.constexpr = NUM_HEADS // BLOCK_H
    tile = tl.num_programs(0) // num_head_tiles - 1 - tl.program_id(0) // num_head_tiles
    head = tl.program_id(0) % num_head_tiles * BLOCK_H
    seq, start, length, row = place(tile, CU_SEQLENS, num_seqs, seq_len, BLOCK_T, VARLEN)
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
    Q += row_offset(batch, start + row, head, stride_q)
    _, stride_qt, stride_qh = stride_q
    q = load_at(Q, offs_t * stride_qt + offs_h * stride_qh, mask_m, HEAD_DIM, HEAD_DIM_BAND)
    DO += row_offset(batch, start + row, head, stride_do)
    _, stride_dot, stride_doh = stride_do
    do = load_at(DO, offs_t * stride_dot + offs_h * stride_doh, mask_m, V_HEAD_DIM, V_HEAD_DIM_BAND)
    O += row_offset(batch, start + row, head, stride_o)
    _, stride_ot, stride_oh = stride_o
    delta = sum_products(
        load_at(O, offs_t * stride_ot + offs_h * stride_oh, mask_m, V_HEAD_DIM, V_HEAD_DIM_BAND),
        do,
        V_HEAD_DIM,
        V_HEAD_DIM_BAND,
        ACC,
    )
    stats = STATS + batch * stride_stats_b + start + token + (head + offs_h) * stride_stats_h
    tl.store(stats, delta, mask=mask_m)
    lse = tl.load(
        LSE + batch * stride_lse_b + start + token + (head + offs_h) * stride_lse_h,
        mask=mask_m,
        other=float("inf"),
    )
    lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)  # a row without keys: p = 0
    if STORE_LSE:
        tl.store(stats + stride_stats_kind, lse, mask=mask_m)

    K += row_offset(batch, key_start, head // GROUP, stride_k)
    V += row_offset(batch, key_start, head // GROUP, stride_v)
    last = tl.minimum(row + BLOCK_T, length) - 1
    low, full_low, full_high, high = key_span(
        row, last, seq_keys, COMPRESS_BLOCK, STRIDE, WINDOW, BLOCK_N
    )
    dq = zero_rows(BLOCK_T * BLOCK_H, HEAD_DIM, HEAD_DIM_BAND, ACC)
    first_key = token - WINDOW + 1
    end_key = tl.minimum(num_compressed(token + 1, COMPRESS_BLOCK, STRIDE), seq_keys)
    skip_from, skip_to = (full_low - low) // BLOCK_N, (full_high - low) // BLOCK_N
    num_masked = tl.cdiv(high - low, BLOCK_N) - (skip_to - skip_from)
    kv_head = head // GROUP
    dq = _walk_keys(
        q, do, lse, delta, dq, K, V, K_DESC, V_DESC, batch, kv_head,
        full_low, 0, 0, skip_to - skip_from, seq_keys, first_key, end_key,
        qk_scale, stride_k, stride_v,
        HEAD_DIM, V_HEAD_DIM, HEAD_DIM_BAND, V_HEAD_DIM_BAND, BLOCK_N, WINDOW, ACC, USE_TMA, False,
    )  # fmt: skip
    dq = _walk_keys(
        q, do, lse, delta, dq, K, V, K_DESC, V_DESC, batch, kv_head,
        low, skip_from, skip_to, num_masked, seq_keys, first_key, end_key,
        qk_scale, stride_k, stride_v,
        HEAD_DIM, V_HEAD_DIM, HEAD_DIM_BAND, V_HEAD_DIM_BAND, BLOCK_N, WINDOW, ACC, USE_TMA, True,
    )  # fmt: skip
    DQ += row_offset(batch, start + row, head, stride_dq)
    _, stride_dqt, stride_dqh = stride_dq
    dq = scale_rows(dq, scale, HEAD_DIM, HEAD_DIM_BAND)
    store_at(DQ, offs_t * stride_dqt + offs_h * stride_dqh, dq, mask_m, HEAD_DIM, HEAD_DIM_BAND)


@triton.jit
def _walk_queries(
    k, v, dk, dv, Q, DO, Q_DESC, DO_DESC, LSE, DELTA, STATS_DESC, batch,
    low, skip_from, skip_to, num_tiles, first_head, num_heads, length, first_query, end_query,
    qk_scale, stride_q, stride_do, stride_lse_h, stride_delta_h,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    HEAD_DIM_BAND: tl.constexpr, V_HEAD_DIM_BAND: tl.constexpr, BLOCK_M: tl.constexpr,
    WINDOW: tl.constexpr, ACC: tl.constexpr, USE_TMA: tl.constexpr,
    COMPUTE_DK: tl.constexpr, COMPUTE_DV: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dk [N, Dk], dv [N, Dv] plus the sums over ``num_tiles`` tiles of queries of each head.

    The last tile comes first. Tile i starts at token low + i * BLOCK_M; tiles skip_from .. skip_to
    are left out (the later ones move up). Key r is seen by the queries first_query[r] ..
    end_query[r]; no query exists from ``length`` on.
    """
    _, stride_qt, stride_qh = stride_q
    _, stride_dot, stride_doh = stride_do
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
                length - start_m,
                stride_qt,
                HEAD_DIM,
                HEAD_DIM_BAND,
                MASKED,
            )
            do = load_rows(
                DO + first_row * stride_dot + head_64 * stride_doh,
                offs_m,
                length - start_m,
                stride_dot,
                V_HEAD_DIM,
                V_HEAD_DIM_BAND,
                MASKED,
            )
            lse_at = LSE + head_64 * stride_lse_h + first_row
            delta_at = DELTA + head_64 * stride_delta_h + first_row
            if MASKED:
                lse = tl.load(lse_at + offs_m, mask=start_m + offs_m < length, other=float("inf"))
                delta = tl.load(delta_at + offs_m, mask=start_m + offs_m < length, other=0.0)
            else:
                lse, delta = tl.load(lse_at + offs_m), tl.load(delta_at + offs_m)
            lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
        s = dot_columns(k, transpose(q, HEAD_DIM, HEAD_DIM_BAND), HEAD_DIM, HEAD_DIM_BAND, ACC)
        if USE_TMA and COMPUTE_DK:  # keeps the matrix units busy before p follows from s
            dp = dot_columns(
                v, transpose(do, V_HEAD_DIM, V_HEAD_DIM_BAND), V_HEAD_DIM, V_HEAD_DIM_BAND, ACC
            )
        s = s * qk_scale - lse[None, :]
        if MASKED:
            s = mask_scores(s, offs_m, first_query - start_m, end_query - start_m, True, WINDOW > 0)
        p = tl.exp2(s)
        if COMPUTE_DV:
            dv = add_dot(dv, p.to(do[0].dtype), do, V_HEAD_DIM, V_HEAD_DIM_BAND, ACC)
        if COMPUTE_DK:
            if not USE_TMA:
                dp = dot_columns(
                    v, transpose(do, V_HEAD_DIM, V_HEAD_DIM_BAND), V_HEAD_DIM, V_HEAD_DIM_BAND, ACC
                )
            ds = p * (dp - delta[None, :])
            dk = add_dot(dk, ds.to(q[0].dtype), q, HEAD_DIM, HEAD_DIM_BAND, ACC)
        if USE_TMA:
            head += tl.where(i == 0, 1, 0)
            i = tl.where(i == 0, num_tiles, i) - 1
    return dk, dv


@triton.jit(
    do_not_specialize=[
        "num_seqs",
        "seq_len",
        "num_keys",
        "stride_lse_b",
        "stride_lse_h",
        "stride_delta_b",
        "stride_delta_h",
    ]
)
def span_dkdv(
    Q, K, V, DO, Q_DESC, DO_DESC, LSE, DELTA, STATS_DESC, DK, DV, CU_SEQLENS, CU_KEYS,
    stride_q, stride_k, stride_v, stride_do, stride_dk, stride_dv,
    stride_dk_part: tl.int64, stride_dv_part: tl.int64,
    stride_lse_b: tl.int64, stride_lse_h: tl.int64,
    stride_delta_b: tl.int64, stride_delta_h: tl.int64,
    qk_scale, scale, num_seqs, seq_len, num_keys,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_H: tl.constexpr,
    QUERY_SPLITS: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    HEAD_DIM_BAND: tl.constexpr, V_HEAD_DIM_BAND: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    COMPRESS_BLOCK: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    VARLEN: tl.constexpr, ACC: tl.constexpr, USE_TMA: tl.constexpr,
    COMPUTE_DK: tl.constexpr, COMPUTE_DV: tl.constexpr,
):  # fmt: skip
    """dk, dv of BLOCK_N keys from BLOCK_H heads and one of QUERY_SPLITS parts of the queries.

    k and v stay in shared memory, dk and dv in registers. A tile of BLOCK_M queries takes
    (Dk + Dv) * BLOCK_M * itemsize bytes through L2 and 4 * BLOCK_M * BLOCK_N * (Dk + Dv)
    operations. The matrix units are the limit where q and do come from L2. Therefore key tiles vary
    fastest and walk the queries from the end, where all of them begin: neighbouring programs read
    the same tiles at the same time. With USE_TMA the statistics of span_dq come by descriptor as
    well. The output is partial sums in fp32, which span_sum adds, or the gradients if there is only
    one part.

    COMPUTE_DK, COMPUTE_DV select the outputs. Together at 256 columns they leave no registers for
    scores: two launches compute s twice (5 products in place of 4), and took 4.2 ms instead of 11.2
    on an H200.
    """
    num_parts: tl.constexpr = GROUP // BLOCK_H * QUERY_SPLITS
    num_tiles = tl.num_programs(0) // (NUM_KV_HEADS * num_parts)
    outer = tl.program_id(0) // num_tiles
    part, kv_head = outer % num_parts, outer // num_parts
    seq, start, length, row = place(
        tl.program_id(0) % num_tiles, CU_SEQLENS, num_seqs, seq_len, BLOCK_N * STRIDE, VARLEN
    )
    key_start, seq_keys = locate_keys(
        seq, start, length, CU_KEYS, num_keys, COMPRESS_BLOCK, STRIDE, VARLEN
    )
    start_n = row // STRIDE
    if start_n >= seq_keys:
        return
    batch = 0 if VARLEN else seq
    offs_n = tl.arange(0, BLOCK_N)
    K += row_offset(batch, key_start + start_n, kv_head, stride_k)
    V += row_offset(batch, key_start + start_n, kv_head, stride_v)
    _, stride_kt, _ = stride_k
    _, stride_vt, _ = stride_v
    k = load_rows(K, offs_n, seq_keys - start_n, stride_kt, HEAD_DIM, HEAD_DIM_BAND, True)
    v = load_rows(V, offs_n, seq_keys - start_n, stride_vt, V_HEAD_DIM, V_HEAD_DIM_BAND, True)

    low, inner_low, inner_high, high = query_span(
        start_n, tl.minimum(start_n + BLOCK_N, seq_keys) - 1, length, COMPRESS_BLOCK, STRIDE, WINDOW
    )
    if USE_TMA:
        low = low // 4 * 4  # descriptors read statistics from 16-byte boundaries
    split_size = tl.cdiv(tl.cdiv(high - low, QUERY_SPLITS), BLOCK_M) * BLOCK_M
    low += part % QUERY_SPLITS * split_size
    high = tl.minimum(low + split_size, high)
    query_tiles = tl.maximum(tl.cdiv(high - low, BLOCK_M), 0)
    skip_from = tl.minimum(tl.cdiv(tl.maximum(inner_low - low, 0), BLOCK_M), query_tiles)
    skip_to = tl.maximum(tl.maximum(tl.minimum(inner_high, high) - low, 0) // BLOCK_M, skip_from)
    head = kv_head * GROUP + part // QUERY_SPLITS * BLOCK_H
    Q += row_offset(batch, start, head, stride_q)
    DO += row_offset(batch, start, head, stride_do)
    LSE += batch * stride_lse_b + start + head * stride_lse_h
    DELTA += batch * stride_delta_b + start + head * stride_delta_h
    dk = zero_rows(BLOCK_N, HEAD_DIM, HEAD_DIM_BAND, ACC)
    dv = zero_rows(BLOCK_N, V_HEAD_DIM, V_HEAD_DIM_BAND, ACC)
    first_query = (start_n + offs_n) * STRIDE + COMPRESS_BLOCK - 1
    end_query = start_n + offs_n + WINDOW
    dk, dv = _walk_queries(
        k, v, dk, dv, Q, DO, Q_DESC, DO_DESC, LSE, DELTA, STATS_DESC, batch,
        low + skip_from * BLOCK_M, 0, 0, skip_to - skip_from, head, BLOCK_H, length,
        first_query, end_query,
        qk_scale, stride_q, stride_do, stride_lse_h, stride_delta_h,
        HEAD_DIM, V_HEAD_DIM, HEAD_DIM_BAND, V_HEAD_DIM_BAND, BLOCK_M, WINDOW, ACC, USE_TMA,
        COMPUTE_DK, COMPUTE_DV, False,
    )  # fmt: skip
    dk, dv = _walk_queries(
        k, v, dk, dv, Q, DO, Q_DESC, DO_DESC, LSE, DELTA, STATS_DESC, batch,
        low, skip_from, skip_to, query_tiles - (skip_to - skip_from), head, BLOCK_H, high,
        first_query, end_query,
        qk_scale, stride_q, stride_do, stride_lse_h, stride_delta_h,
        HEAD_DIM, V_HEAD_DIM, HEAD_DIM_BAND, V_HEAD_DIM_BAND, BLOCK_M, WINDOW, ACC, USE_TMA,
        COMPUTE_DK, COMPUTE_DV, True,
    )  # fmt: skip
    DK += part * stride_dk_part + row_offset(batch, key_start + start_n, kv_head, stride_dk)
    DV += part * stride_dv_part + row_offset(batch, key_start + start_n, kv_head, stride_dv)
    _, stride_dkt, _ = stride_dk
    _, stride_dvt, _ = stride_dv
    if COMPUTE_DK:
        store_rows(
            DK,
            offs_n,
            seq_keys - start_n,
            stride_dkt,
            scale_rows(dk, scale, HEAD_DIM, HEAD_DIM_BAND),
            HEAD_DIM,
            HEAD_DIM_BAND,
        )
    if COMPUTE_DV:
        store_rows(DV, offs_n, seq_keys - start_n, stride_dvt, dv, V_HEAD_DIM, V_HEAD_DIM_BAND)


@triton.jit(do_not_specialize=["num_seqs", "num_elements"])
def span_sum(
    PARTIALS, OUT, CU_KEYS,
    num_seqs, num_elements, row_elements,
    NUM_PARTIALS: tl.constexpr, BLOCK_SIZE: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """OUT [num_elements] = sum of PARTIALS [NUM_PARTIALS, num_elements] in order.

    Packed rows that belong to no document get 0; a row has ``row_elements`` elements. An element
    takes NUM_PARTIALS * 4 bytes read and one itemsize written: memory bandwidth is the limit.
    """
    offs = tl.cast(tl.program_id(0), tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offs < num_elements
    if VARLEN:
        mask &= offs < tl.cast(tl.load(CU_KEYS + num_seqs), tl.int64) * row_elements
    total = tl.load(PARTIALS + offs, mask=mask, other=0.0)
    for part in range(1, NUM_PARTIALS):
        total += tl.load(
            PARTIALS + tl.cast(num_elements, tl.int64) * part + offs, mask=mask, other=0.0
        )
    tl.store(OUT + offs, total.to(OUT.dtype.element_ty), mask=offs < num_elements)


def backward(
    do: Tensor,  # [B, S, Hq, Dv], packed [T, Hq, Dv]
    q: Tensor,  # [B, S, Hq, Dk]
    k: Tensor,  # [B, L, G, Dk], packed [L, G, Dk]
    v: Tensor,  # [B, L, G, Dv]
    o: Tensor,  # [B, S, Hq, Dv]
    lse: Tensor,  # [B, Hq, S], packed [Hq, T]
    seqs: Sequences,
    span: tuple[int, int, int],  # COMPRESS_BLOCK, STRIDE, WINDOW
    scale: float,
    settings: tuple[configs.Settings, configs.Settings] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv in the shapes of q, k, v; ``settings`` replace span_dq's and span_dkdv's.

    For a window, one program sums over all heads of a group. The compressed branch has few keys and
    many queries: its partial sums are [h * QUERY_SPLITS, L, G, D] in fp32, for QUERY_SPLITS = 1 and
    d = 16 a quarter of q's bytes.
    """
    dkdv_plan = _launch_dkdv(
        q, k, v, do, lse, seqs, span, scale, aligned(q, do), settings and settings[1]
    )
    dq, stats = _dq(
        do, q, k, v, o, lse, seqs, span, scale, settings and settings[0], bool(dkdv_plan.rows)
    )
    return dq, *_dkdv(dkdv_plan, do, q, k, v, lse, stats, seqs)


def dq_of(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, seqs: Sequences,
    span: tuple[int, int, int], scale: float, settings: configs.Settings | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return dq in q's shape, and the statistics [2, *lse] with rows padded to 16 bytes.

    The statistics are delta = sum over columns of do o, and lse in base 2, inf in a row without
    keys.
    """
    return _dq(do, q, k, v, o, lse, seqs, span, scale, settings, True)


def dkdv_of(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, stats: Tensor, seqs: Sequences,
    span: tuple[int, int, int], scale: float, settings: configs.Settings | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return dk, dv in the shapes of k, v; ``stats`` are those of :func:`dq_of`."""
    dkdv_plan = _launch_dkdv(q, k, v, do, lse, seqs, span, scale, aligned(q, do), settings)
    return _dkdv(dkdv_plan, do, q, k, v, lse, stats, seqs)


def _dq(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, seqs: Sequences,
    span: tuple[int, int, int],
    scale: float, settings: configs.Settings | None, store_lse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return dq and the statistics: delta and, with ``store_lse``, lse in base 2."""
    launch, rows = _launch_dq(
        q, k, v, o, do, lse, seqs, span, scale, aligned(k, v), settings, store_lse
    )
    dq, stats = q.new_empty(q.shape), lse.new_empty((2 if store_lse else 1, *_padded(lse)))
    descriptors = (key_descriptor(k, rows), key_descriptor(v, rows)) if rows else (None, None)
    launch(q, k, v, *descriptors, o, do, lse, dq, stats, seqs.cu, seqs.cu_cmp)
    return dq, stats


def _padded(lse: Tensor) -> tuple[int, ...]:
    """Return the shape of lse [B, H, S] (packed [H, T]) with rows padded to 16 bytes.

    Descriptors require that rows begin on 16 bytes.
    """
    return (*lse.shape[:-1], triton.cdiv(lse.shape[-1], 4) * 4)


def _dkdv(
    plan: _DkdvPlan,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    stats: Tensor,
    seqs: Sequences,
) -> tuple[Tensor, Tensor]:
    grads = k.new_empty(k.shape), v.new_empty(v.shape)
    outputs: tuple[Tensor, ...] = grads
    if plan.num_parts:
        outputs = tuple(
            torch.empty((plan.num_parts, *x.shape), dtype=lse.dtype, device=x.device)
            for x in (k, v)
        )
    q_descriptor, do_descriptor = (
        (key_descriptor(q, plan.rows), key_descriptor(do, plan.rows)) if plan.rows else (None, None)
    )
    stats_desc = stats_descriptor(stats, lse.shape[-1], plan.rows) if plan.rows else None
    for launch in plan.dkdv:
        launch(
            q, k, v, do, q_descriptor, do_descriptor, lse, stats, stats_desc, *outputs,
            seqs.cu, seqs.cu_cmp,
        )  # fmt: skip
    for add, partials, grad in zip(plan.add, outputs, grads):
        add(partials, grad, seqs.cu_cmp)
    return grads


def _pick(kernel: str, q: Tensor, v: Tensor, window: int, described: bool) -> configs.Settings:
    heads, head_dim = q.shape[-2:]
    return configs.pick(
        kernel,
        architecture(q.device),
        head_dim=head_dim,
        v_head_dim=v.shape[-1],
        itemsize=q.itemsize,
        window=window,
        heads=heads,
        pointers=int(not described),
    )


def _widths(head_dim: int, v_head_dim: int) -> dict[str, int]:
    return {
        "HEAD_DIM": head_dim,
        "V_HEAD_DIM": v_head_dim,
        "HEAD_DIM_BAND": band(head_dim),
        "V_HEAD_DIM_BAND": band(v_head_dim),
    }


@cached_by_metadata
def _launch_dq(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, lse: Tensor, seqs: Sequences,
    span: tuple[int, int, int], scale: float, tensors_aligned: bool,
    settings: configs.Settings | None, store_lse: bool,
) -> tuple[Launch, int]:  # fmt: skip
    """Return the launch of span_dq, and the rows of a descriptor's tile (0: pointers)."""
    described = tensors_aligned and descriptors_fit(seqs.packed, k, v)
    settings = settings or _pick("span_dq", q, v, span[2], described)
    heads, group = q.shape[-2], q.shape[-2] // k.shape[-2]
    use_tma = bool(settings.get("USE_TMA"))
    block_h = heads_together(group, settings["BLOCK_H"])
    block_t, stats = settings["BLOCK_M"] // block_h, _padded(lse)
    launch = Launch(
        span_dq, (seqs.tiles(block_t) * (heads // block_h),),
        *(strides(x, seqs.packed) for x in (q, k, v, o, do)), new_strides(q.shape, seqs.packed),
        *lse_strides(lse, seqs.packed), *new_lse_strides(stats, seqs.packed), math.prod(stats),
        scale * LOG2E.value, scale, seqs.n, seqs.seq_len, k.shape[-3],
        NUM_HEADS=heads, GROUP=group, **_widths(q.shape[-1], v.shape[-1]),
        BLOCK_T=block_t, BLOCK_H=block_h, BLOCK_N=settings["BLOCK_N"],
        COMPRESS_BLOCK=span[0], STRIDE=span[1], WINDOW=span[2], VARLEN=seqs.packed,
        ACC=accumulator(q.dtype), USE_TMA=use_tma, STORE_LSE=store_lse,
        **launch_options(settings),
    )  # fmt: skip
    return launch, settings["BLOCK_N"] if use_tma else 0


class _DkdvPlan(NamedTuple):
    """Launches that compute dk and dv.

    Attributes:
        dkdv: span_dkdv once for both gradients, or once for each (SEPARATE_DK_DV).
        add: span_sum for each gradient, if they come in parts.
        num_parts: partial sums; 0: span_dkdv writes the gradients.
        rows: rows of a descriptor's tile; 0: pointers.
    """

    dkdv: tuple[Launch, ...]
    add: tuple[Launch, ...]
    num_parts: int
    rows: int


@cached_by_metadata
def _launch_dkdv(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, seqs: Sequences,
    span: tuple[int, int, int], scale: float, tensors_aligned: bool,
    settings: configs.Settings | None,
) -> _DkdvPlan:  # fmt: skip
    described = tensors_aligned and descriptors_fit(seqs.packed, q, do)
    settings = settings or _pick("span_dkdv", q, v, span[2], described)
    groups, group = k.shape[-2], q.shape[-2] // k.shape[-2]
    block_h = group if span[2] else 1
    query_splits = 1 if span[2] else settings["QUERY_SPLITS"]
    num_parts = group // block_h * query_splits
    direct, use_tma = bool(span[2]), bool(settings.get("USE_TMA"))
    passes = ((True, False), (False, True)) if settings.get("SEPARATE_DK_DV") else ((True, True),)
    launches = tuple(Launch(
        span_dkdv, (seqs.tiles(settings["BLOCK_N"] * span[1]) * groups * num_parts,),
        *(strides(x, seqs.packed) for x in (q, k, v, do)),
        *(new_strides(x.shape, seqs.packed) for x in (k, v)),
        *(0 if direct else x.numel() for x in (k, v)),
        *lse_strides(lse, seqs.packed), *new_lse_strides(_padded(lse), seqs.packed),
        scale * LOG2E.value, scale, seqs.n, seqs.seq_len, k.shape[-3],
        NUM_KV_HEADS=groups, GROUP=group, BLOCK_H=block_h, QUERY_SPLITS=query_splits,
        **_widths(q.shape[-1], v.shape[-1]),
        BLOCK_N=settings["BLOCK_N"], BLOCK_M=settings["BLOCK_M"],
        COMPRESS_BLOCK=span[0], STRIDE=span[1], WINDOW=span[2], VARLEN=seqs.packed,
        ACC=accumulator(q.dtype), USE_TMA=use_tma, COMPUTE_DK=compute_dk, COMPUTE_DV=compute_dv,
        **launch_options(settings),
    ) for compute_dk, compute_dv in passes)  # fmt: skip
    add = [
        Launch(
            span_sum, (triton.cdiv(x.numel(), 1024),), seqs.n, x.numel(), x.shape[-2] * x.shape[-1],
            NUM_PARTIALS=num_parts, BLOCK_SIZE=1024, VARLEN=seqs.packed, num_warps=4,
        )
        for x in (k, v) if not direct
    ]  # fmt: skip
    return _DkdvPlan(
        launches, tuple(add), 0 if direct else num_parts, settings["BLOCK_M"] if use_tma else 0
    )

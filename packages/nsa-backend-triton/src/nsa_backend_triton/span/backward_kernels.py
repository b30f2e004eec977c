"""Kernels of the backward over a span of keys: dq, then dk and dv, then the sum of the latter's
parts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_backend_triton.shared.rows import (
    LOG2E,
    add_dot,
    dot_columns,
    load_at,
    num_compressed,
    place,
    scale_rows,
    store_at,
    transpose,
    zero_rows,
)
from nsa_backend_triton.span.geometry import (
    fetch_rows,
    hide,
    key_place,
    key_span,
    load_rows,
    query_span,
    store_rows,
)


@triton.jit
def _walk_keys(
    q, do, lse, delta, dq, K, V, K_TMA, V_TMA, batch, kv_head, low, skip_from, skip_to, tiles,
    keys, left, right,
    factor, k_row, v_row,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, ACC: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dq [M, Dk] with ``tiles`` tiles of keys added; lse [M] in base 2; tiles and rows' limits as
    in the forward.
    """
    column = tl.arange(0, BLOCK_N)
    for i in tl.range(0, tiles):
        j = low + i * BLOCK_N
        if MASKED:
            j += tl.where(i >= skip_from, skip_to - skip_from, 0) * BLOCK_N
        if TMA:
            k = fetch_rows(K_TMA, batch, j, kv_head, BLOCK_N, DK, BLOCK_DK)
            v = fetch_rows(V_TMA, batch, j, kv_head, BLOCK_N, DV, BLOCK_DV)
        else:
            k = load_rows(
                K + tl.cast(j, tl.int64) * k_row, column, keys - j, k_row, DK, BLOCK_DK, MASKED
            )
            v = load_rows(
                V + tl.cast(j, tl.int64) * v_row, column, keys - j, v_row, DV, BLOCK_DV, MASKED
            )
        s = dot_columns(q, transpose(k, DK, BLOCK_DK), DK, BLOCK_DK, ACC)
        s = s * factor - lse[:, None]
        if MASKED:
            if WINDOW > 0:  # one unsigned comparison for both sides
                seen = (column[None, :] - (left - j)[:, None]).to(tl.uint32) < (right - left).to(
                    tl.uint32
                )[:, None]
                s = tl.where(seen, s, float("-inf"))
            else:
                s = hide(s, column, left - j, right - j, False, True)
        p = tl.exp2(s)
        dp = dot_columns(do, transpose(v, DV, BLOCK_DV), DV, BLOCK_DV, ACC)
        ds = p * (dp - delta[:, None])
        dq = add_dot(dq, ds.to(k[0].dtype), k, DK, BLOCK_DK, ACC)
    return dq


@triton.jit
def sum_products(x, y, D: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr):
    """Sums [R] of x y over the columns of rows [R, D]."""
    total = tl.sum(x[0].to(ACC) * y[0].to(ACC), 1)
    for i in tl.static_range(1, (D + BLOCK - 1) // BLOCK):
        total += tl.sum(x[i].to(ACC) * y[i].to(ACC), 1)
    return total


@triton.jit(
    do_not_specialize=[
        "n_seqs",
        "seq_len",
        "key_rows",
        "lse_seq",
        "lse_head",
        "stats_seq",
        "stats_head",
        "stats_plane",
    ]
)
def span_dq(
    Q, K, V, K_TMA, V_TMA, O, DO, LSE, DQ, STATS, CU, CU_KEYS,
    q_seq: tl.int64, q_row, q_head, k_seq: tl.int64, k_row, k_head, v_seq: tl.int64, v_row, v_head,
    o_seq: tl.int64, o_row, o_head, do_seq: tl.int64, do_row, do_head, dq_seq: tl.int64, dq_row,
    dq_head,
    lse_seq: tl.int64, lse_head: tl.int64, stats_seq: tl.int64, stats_head: tl.int64,
    stats_plane: tl.int64,
    factor, scale, n_seqs, seq_len, key_rows,
    N_HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SIZE: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr, VARLEN: tl.constexpr,
    ACC: tl.constexpr,
    TMA: tl.constexpr, BOTH: tl.constexpr,
):  # fmt: skip
    """dq, and STATS for span_dkdv, which runs afterwards: delta, and if BOTH lse in base 2, inf
    where no key is seen.

    One program: TOKENS tokens x HEADS heads = M rows.

    q, do in shared memory or registers, dq [M, Dk] in registers; a tile of BLOCK_N keys is (Dk +
    Dv) * BLOCK_N * itemsize bytes through L2 and 2 * M * BLOCK_N * (2 Dk + Dv) operations. The
    matrix units bind, then exp2.
    """
    slices: tl.constexpr = N_HEADS // HEADS
    index = tl.num_programs(0) // slices - 1 - tl.program_id(0) // slices
    head = tl.program_id(0) % slices * HEADS
    seq, start, length, row = place(index, CU, n_seqs, seq_len, TOKENS, VARLEN)
    if row >= length:
        return
    key_start, keys = key_place(seq, start, length, CU_KEYS, key_rows, SIZE, STRIDE, VARLEN)
    batch = 0 if VARLEN else seq
    first = tl.cast(start + row, tl.int64)
    at = tl.arange(0, TOKENS * HEADS)
    local, h = at // HEADS, at % HEADS
    token = row + local
    inside = token < length
    Q += batch * q_seq + first * q_row + head * q_head
    q = load_at(Q, local * q_row + h * q_head, inside, DK, BLOCK_DK)
    DO += batch * do_seq + first * do_row + head * do_head
    do = load_at(DO, local * do_row + h * do_head, inside, DV, BLOCK_DV)
    O += batch * o_seq + first * o_row + head * o_head
    delta = sum_products(
        load_at(O, local * o_row + h * o_head, inside, DV, BLOCK_DV), do, DV, BLOCK_DV, ACC
    )
    at_stats = STATS + batch * stats_seq + start + token + (head + h) * stats_head
    tl.store(at_stats, delta, mask=inside)
    lse = tl.load(
        LSE + batch * lse_seq + start + token + (head + h) * lse_head,
        mask=inside,
        other=float("inf"),
    )
    lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)  # a row without keys: p = 0
    if BOTH:
        tl.store(at_stats + stats_plane, lse, mask=inside)

    K += batch * k_seq + tl.cast(key_start, tl.int64) * k_row + head // GROUP * k_head
    V += batch * v_seq + tl.cast(key_start, tl.int64) * v_row + head // GROUP * v_head
    last = tl.minimum(row + TOKENS, length) - 1
    low, all_low, all_high, high = key_span(row, last, keys, SIZE, STRIDE, WINDOW, BLOCK_N)
    dq = zero_rows(TOKENS * HEADS, DK, BLOCK_DK, ACC)
    left = token - WINDOW + 1
    right = tl.minimum(num_compressed(token + 1, SIZE, STRIDE), keys)
    skip_from, skip_to = (all_low - low) // BLOCK_N, (all_high - low) // BLOCK_N
    masked = tl.cdiv(high - low, BLOCK_N) - (skip_to - skip_from)
    kv_head = head // GROUP
    dq = _walk_keys(
        q, do, lse, delta, dq, K, V, K_TMA, V_TMA, batch, kv_head, all_low, 0, 0,
        skip_to - skip_from, keys, left,
        right, factor, k_row, v_row, DK, DV, BLOCK_DK, BLOCK_DV, BLOCK_N, WINDOW, ACC, TMA, False,
    )  # fmt: skip
    dq = _walk_keys(
        q, do, lse, delta, dq, K, V, K_TMA, V_TMA, batch, kv_head, low, skip_from, skip_to, masked,
        keys, left, right,
        factor, k_row, v_row, DK, DV, BLOCK_DK, BLOCK_DV, BLOCK_N, WINDOW, ACC, TMA, True,
    )  # fmt: skip
    DQ += batch * dq_seq + first * dq_row + head * dq_head
    dq = scale_rows(dq, scale, DK, BLOCK_DK)
    store_at(DQ, local * dq_row + h * dq_head, dq, inside, DK, BLOCK_DK)


@triton.jit
def _walk_queries(
    k, v, dk, dv, Q, DO, Q_TMA, DO_TMA, LSE, DELTA, STATS_TMA, batch, low, skip_from, skip_to,
    tiles, head_0, heads,
    length, left, right, factor, q_row, q_head, do_row, do_head, lse_head, delta_head,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WINDOW: tl.constexpr, ACC: tl.constexpr, TMA: tl.constexpr, WITH_DK: tl.constexpr,
    WITH_DV: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """dk [N, Dk], dv [N, Dv] with ``tiles`` tiles of queries of each of ``heads`` heads added, last
    tile first.

    Tile i starts at token low + i * BLOCK_M; tiles skip_from .. skip_to are left out (the others
    move up). Row r is seen by the queries left[r] .. right[r]; there is none from ``length`` on.
    """
    row = tl.arange(0, BLOCK_M)
    if TMA:
        head, i = 0, tiles - 1  # counted on, not divided out of the step
    for step in tl.range(0, heads * tiles):
        if TMA:
            t = low + (i + tl.where(i >= skip_from, skip_to - skip_from, 0)) * BLOCK_M
            q = fetch_rows(Q_TMA, batch, t, head_0 + head, BLOCK_M, DK, BLOCK_DK)
            do = fetch_rows(DO_TMA, batch, t, head_0 + head, BLOCK_M, DV, BLOCK_DV)
            # A row that is not there: all of it 0, and so is what it adds.
            delta = STATS_TMA.load([0, batch, head_0 + head, t]).reshape(BLOCK_M)
            lse = STATS_TMA.load([1, batch, head_0 + head, t]).reshape(BLOCK_M)
        else:
            head = step // tiles
            i = tiles - 1 - step % tiles
            i += tl.where(i >= skip_from, skip_to - skip_from, 0)
            t = low + i * BLOCK_M
            at, h = tl.cast(t, tl.int64), tl.cast(head, tl.int64)
            q = load_rows(Q + at * q_row + h * q_head, row, length - t, q_row, DK, BLOCK_DK, MASKED)
            do = load_rows(
                DO + at * do_row + h * do_head, row, length - t, do_row, DV, BLOCK_DV, MASKED
            )
            LSE_H, DELTA_H = LSE + h * lse_head + at, DELTA + h * delta_head + at
            if MASKED:
                lse = tl.load(LSE_H + row, mask=t + row < length, other=float("inf"))
                delta = tl.load(DELTA_H + row, mask=t + row < length, other=0.0)
            else:
                lse, delta = tl.load(LSE_H + row), tl.load(DELTA_H + row)
            lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
        s = dot_columns(k, transpose(q, DK, BLOCK_DK), DK, BLOCK_DK, ACC)
        if TMA and WITH_DK:  # while the units are busy, before p is made of the first product
            dp = dot_columns(v, transpose(do, DV, BLOCK_DV), DV, BLOCK_DV, ACC)
        s = s * factor - lse[None, :]
        if MASKED:
            s = hide(s, row, left - t, right - t, True, WINDOW > 0)
        p = tl.exp2(s)
        if WITH_DV:
            dv = add_dot(dv, p.to(do[0].dtype), do, DV, BLOCK_DV, ACC)
        if WITH_DK:
            if not TMA:
                dp = dot_columns(v, transpose(do, DV, BLOCK_DV), DV, BLOCK_DV, ACC)
            ds = p * (dp - delta[None, :])
            dk = add_dot(dk, ds.to(q[0].dtype), q, DK, BLOCK_DK, ACC)
        if TMA:
            head += tl.where(i == 0, 1, 0)
            i = tl.where(i == 0, tiles, i) - 1
    return dk, dv


@triton.jit(
    do_not_specialize=[
        "n_seqs",
        "seq_len",
        "key_rows",
        "lse_seq",
        "lse_head",
        "delta_seq",
        "delta_head",
    ]
)
def span_dkdv(
    Q, K, V, DO, Q_TMA, DO_TMA, LSE, DELTA, STATS_TMA, DK_OUT, DV_OUT, CU, CU_KEYS,
    q_seq: tl.int64, q_row, q_head, k_seq: tl.int64, k_row, k_head, v_seq: tl.int64, v_row, v_head,
    do_seq: tl.int64, do_row, do_head, dk_seq: tl.int64, dk_row, dk_head, dv_seq: tl.int64, dv_row,
    dv_head,
    dk_part: tl.int64, dv_part: tl.int64, lse_seq: tl.int64, lse_head: tl.int64,
    delta_seq: tl.int64, delta_head: tl.int64, factor, scale, n_seqs, seq_len, key_rows,
    N_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, CHUNKS: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    SIZE: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr, VARLEN: tl.constexpr,
    ACC: tl.constexpr,
    TMA: tl.constexpr, WITH_DK: tl.constexpr, WITH_DV: tl.constexpr,
):  # fmt: skip
    """dk, dv of BLOCK_N keys from HEADS of the group's heads and one of CHUNKS parts of the queries
    that see them.

    k, v in shared memory, dk, dv in registers; a tile of BLOCK_M queries is (Dk + Dv) * BLOCK_M *
    itemsize bytes through L2 and 4 * BLOCK_M * BLOCK_N * (Dk + Dv) operations: the matrix units
    bind where q and do come from L2. For that, key tiles vary fastest and walk the queries from the
    end, where all of them begin: neighbours read the same tiles at the same time. TMA: span_dq's
    statistics come by descriptor as well. Parts are sums in fp32, added by span_sum, or the result
    where there is one part.

    WITH_DK, WITH_DV: which of the two are made. Both of 256 columns leave no registers for scores:
    one after the other makes s twice, 5 products where 4 would do, and took 4.2 ms where 11.2 on an
    H200.
    """
    parts: tl.constexpr = GROUP // HEADS * CHUNKS
    n_tiles = tl.num_programs(0) // (N_KV_HEADS * parts)
    outer = tl.program_id(0) // n_tiles
    part, kv_head = outer % parts, outer // parts
    seq, start, length, row = place(
        tl.program_id(0) % n_tiles, CU, n_seqs, seq_len, BLOCK_N * STRIDE, VARLEN
    )
    key_start, keys = key_place(seq, start, length, CU_KEYS, key_rows, SIZE, STRIDE, VARLEN)
    j = row // STRIDE
    if j >= keys:
        return
    batch = 0 if VARLEN else seq
    first = tl.cast(key_start + j, tl.int64)
    column = tl.arange(0, BLOCK_N)
    K += batch * k_seq + first * k_row + kv_head * k_head
    V += batch * v_seq + first * v_row + kv_head * v_head
    k = load_rows(K, column, keys - j, k_row, DK, BLOCK_DK, True)
    v = load_rows(V, column, keys - j, v_row, DV, BLOCK_DV, True)

    low, inner_low, inner_high, high = query_span(
        j, tl.minimum(j + BLOCK_N, keys) - 1, length, SIZE, STRIDE, WINDOW
    )
    if TMA:
        low = low // 4 * 4  # statistics are fetched from 16-byte boundaries
    size = tl.cdiv(tl.cdiv(high - low, CHUNKS), BLOCK_M) * BLOCK_M
    low += part % CHUNKS * size
    high = tl.minimum(low + size, high)
    tiles = tl.maximum(tl.cdiv(high - low, BLOCK_M), 0)
    skip_from = tl.minimum(tl.cdiv(tl.maximum(inner_low - low, 0), BLOCK_M), tiles)
    skip_to = tl.maximum(tl.maximum(tl.minimum(inner_high, high) - low, 0) // BLOCK_M, skip_from)
    head = kv_head * GROUP + part // CHUNKS * HEADS
    Q += batch * q_seq + tl.cast(start, tl.int64) * q_row + head * q_head
    DO += batch * do_seq + tl.cast(start, tl.int64) * do_row + head * do_head
    LSE += batch * lse_seq + start + head * lse_head
    DELTA += batch * delta_seq + start + head * delta_head
    dk = zero_rows(BLOCK_N, DK, BLOCK_DK, ACC)
    dv = zero_rows(BLOCK_N, DV, BLOCK_DV, ACC)
    left = (j + column) * STRIDE + SIZE - 1
    right = j + column + WINDOW
    dk, dv = _walk_queries(
        k, v, dk, dv, Q, DO, Q_TMA, DO_TMA, LSE, DELTA, STATS_TMA, batch,
        low + skip_from * BLOCK_M, 0, 0,
        skip_to - skip_from, head, HEADS, length, left, right, factor, q_row, q_head, do_row,
        do_head, lse_head,
        delta_head, DK, DV, BLOCK_DK, BLOCK_DV, BLOCK_M, WINDOW, ACC, TMA, WITH_DK, WITH_DV, False,
    )  # fmt: skip
    dk, dv = _walk_queries(
        k, v, dk, dv, Q, DO, Q_TMA, DO_TMA, LSE, DELTA, STATS_TMA, batch, low, skip_from, skip_to,
        tiles - (skip_to - skip_from), head, HEADS, high, left, right, factor, q_row, q_head,
        do_row, do_head,
        lse_head, delta_head, DK, DV, BLOCK_DK, BLOCK_DV, BLOCK_M, WINDOW, ACC, TMA, WITH_DK,
        WITH_DV, True,
    )  # fmt: skip
    DK_OUT += part * dk_part + batch * dk_seq + first * dk_row + kv_head * dk_head
    DV_OUT += part * dv_part + batch * dv_seq + first * dv_row + kv_head * dv_head
    if WITH_DK:
        store_rows(
            DK_OUT, column, keys - j, dk_row, scale_rows(dk, scale, DK, BLOCK_DK), DK, BLOCK_DK
        )
    if WITH_DV:
        store_rows(DV_OUT, column, keys - j, dv_row, dv, DV, BLOCK_DV)


@triton.jit(do_not_specialize=["n_seqs", "size"])
def span_sum(
    PARTS,
    OUT,
    CU_KEYS,
    n_seqs,
    size,
    row_size,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    VARLEN: tl.constexpr,
):
    """OUT [size] = the sum of PARTS [N, size] in order; 0 in packed rows that no document owns.
    Memory binds.

    A row is ``row_size`` elements; N * 4 bytes are read and one itemsize written an element.
    """
    at = tl.cast(tl.program_id(0), tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    if VARLEN:
        mask &= at < tl.cast(tl.load(CU_KEYS + n_seqs), tl.int64) * row_size
    total = tl.load(PARTS + at, mask=mask, other=0.0)
    for part in range(1, N):
        total += tl.load(PARTS + tl.cast(size, tl.int64) * part + at, mask=mask, other=0.0)
    tl.store(OUT + at, total.to(OUT.dtype.element_ty), mask=at < size)

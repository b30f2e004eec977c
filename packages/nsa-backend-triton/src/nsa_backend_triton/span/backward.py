"""Backward of attention over a span of keys: the compressed branch and the sliding window.

    p = exp(s - lse),  dv = p^T do,  ds = p (do v^T - delta),  delta = sum(do o),  dq = scale ds k,
    dk = scale ds^T q

Three kernels, no atomics, so the same bits every time; scores are recomputed in both passes (7
products where 5 are counted), which costs less than adding fp32 gradients of every tile through L2
and rounding them afterwards.
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
from nsa_backend_triton.host.launch_cache import Launch, aligned, remembered
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
    scale_rows,
    store_at,
    transpose,
    zero_rows,
)
from nsa_backend_triton.span.forward import heads_together, launch_options
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


def backward(
    do: Tensor,  # [B, S, Hq, Dv], packed [T, Hq, Dv]
    q: Tensor,  # [B, S, Hq, Dk]
    k: Tensor,  # [B, L, G, Dk], packed [L, G, Dk]
    v: Tensor,  # [B, L, G, Dv]
    o: Tensor,  # [B, S, Hq, Dv]
    lse: Tensor,  # [B, Hq, S], packed [Hq, T]
    seqs: Sequences,
    span: tuple[int, int, int],  # SIZE, STRIDE, WINDOW
    scale: float,
    settings: tuple[configs.Settings, configs.Settings] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in the shapes of q, k, v; ``settings`` (span_dq, span_dkdv) replace the tuned
    ones.

    A window sums over the heads inside a program. The compressed branch has few keys and many
    queries: its parts are [h * CHUNKS, L, G, D] in fp32, for CHUNKS = 1 and d = 16 a quarter of q's
    bytes.
    """
    made = _launch_dkdv(
        q, k, v, do, lse, seqs, span, scale, aligned(q, do), settings and settings[1]
    )
    dq, stats = _dq(
        do, q, k, v, o, lse, seqs, span, scale, settings and settings[0], bool(made.rows)
    )
    return dq, *_dkdv(made, do, q, k, v, lse, stats, seqs)


def dq_of(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, seqs: Sequences,
    span: tuple[int, int, int], scale: float, settings: configs.Settings | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dq as q, and stats [2, *lse], rows padded: delta = sum(do o), and lse in base 2, inf in a row
    without keys.
    """
    return _dq(do, q, k, v, o, lse, seqs, span, scale, settings, True)


def dkdv_of(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, stats: Tensor, seqs: Sequences,
    span: tuple[int, int, int], scale: float, settings: configs.Settings | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dk, dv as k, v."""
    made = _launch_dkdv(q, k, v, do, lse, seqs, span, scale, aligned(q, do), settings)
    return _dkdv(made, do, q, k, v, lse, stats, seqs)


def _dq(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, seqs: Sequences,
    span: tuple[int, int, int],
    scale: float, settings: configs.Settings | None, both: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``both``: stats hold lse in base 2 as well."""
    launch, rows = _launch_dq(q, k, v, o, do, lse, seqs, span, scale, aligned(k, v), settings, both)
    dq, stats = q.new_empty(q.shape), lse.new_empty((2 if both else 1, *_padded(lse)))
    of_keys = (key_descriptor(k, rows), key_descriptor(v, rows)) if rows else (None, None)
    launch(q, k, v, *of_keys, o, do, lse, dq, stats, seqs.cu, seqs.cu_cmp)
    return dq, stats


def _padded(lse: Tensor) -> tuple[int, ...]:
    """The shape of lse [B, H, S] (packed [H, T]) with rows that begin on 16 bytes, as descriptors
    ask.
    """
    return (*lse.shape[:-1], triton.cdiv(lse.shape[-1], 4) * 4)


def _dkdv(
    made: _Sums,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    stats: Tensor,
    seqs: Sequences,
) -> tuple[Tensor, Tensor]:
    grads = k.new_empty(k.shape), v.new_empty(v.shape)
    sums: tuple[Tensor, ...] = grads
    if made.parts:
        sums = tuple(
            torch.empty((made.parts, *x.shape), dtype=lse.dtype, device=x.device) for x in (k, v)
        )
    of_q, of_do = (
        (key_descriptor(q, made.rows), key_descriptor(do, made.rows)) if made.rows else (None, None)
    )
    of_stats = stats_descriptor(stats, lse.shape[-1], made.rows) if made.rows else None
    for launch in made.dkdv:
        launch(q, k, v, do, of_q, of_do, lse, stats, of_stats, *sums, seqs.cu, seqs.cu_cmp)
    for add, part, grad in zip(made.add, sums, grads):
        add(part, grad, seqs.cu_cmp)
    return grads


def _pick(kernel: str, q: Tensor, v: Tensor, window: int, described: bool) -> configs.Settings:
    heads, dk = q.shape[-2:]
    return configs.pick(
        kernel,
        architecture(q.device),
        head_dim=dk,
        v_head_dim=v.shape[-1],
        itemsize=q.itemsize,
        window=window,
        heads=heads,
        pointers=int(not described),
    )


def _blocks(dk: int, dv: int) -> dict[str, int]:
    return {"DK": dk, "DV": dv, "BLOCK_DK": band(dk), "BLOCK_DV": band(dv)}


@remembered
def _launch_dq(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, lse: Tensor, seqs: Sequences,
    span: tuple[int, int, int], scale: float, tensors_aligned: bool,
    settings: configs.Settings | None, both: bool,
) -> tuple[Launch, int]:  # fmt: skip
    """The launch of span_dq, and the rows of a descriptor's tile (0: no descriptors)."""
    described = tensors_aligned and descriptors_fit(seqs.packed, k, v)
    settings = settings or _pick("span_dq", q, v, span[2], described)
    heads, group = q.shape[-2], q.shape[-2] // k.shape[-2]
    tma = bool(settings.get("TMA"))
    together = heads_together(group, settings["HEADS"])
    tokens, stats = settings["BLOCK_M"] // together, _padded(lse)
    launch = Launch(
        span_dq, (seqs.tiles(tokens) * (heads // together),),
        *(n for x in (q, k, v, o, do) for n in strides(x, seqs.packed)), *new_strides(q.shape,
        seqs.packed),
        *lse_strides(lse, seqs.packed), *new_lse_strides(stats, seqs.packed), math.prod(stats),
        scale * LOG2E.value, scale, seqs.n, seqs.seq_len, k.shape[-3],
        N_HEADS=heads, GROUP=group, **_blocks(q.shape[-1], v.shape[-1]),
        TOKENS=tokens, HEADS=together, BLOCK_N=settings["BLOCK_N"],
        SIZE=span[0], STRIDE=span[1], WINDOW=span[2], VARLEN=seqs.packed, ACC=accumulator(q.dtype),
        TMA=tma,
        BOTH=both, **launch_options(settings),
    )  # fmt: skip
    return launch, settings["BLOCK_N"] if tma else 0


class _Sums(NamedTuple):
    """How dk and dv are made: span_dkdv, once or for each (APART), and span_sum for each where they
    come in parts.
    """

    dkdv: tuple[Launch, ...]
    add: tuple[Launch, ...]
    parts: int  # 0: the first launch writes the gradients
    rows: int  # of a descriptor's tile; 0: none


@remembered
def _launch_dkdv(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, seqs: Sequences,
    span: tuple[int, int, int], scale: float, tensors_aligned: bool,
    settings: configs.Settings | None,
) -> _Sums:  # fmt: skip
    described = tensors_aligned and descriptors_fit(seqs.packed, q, do)
    settings = settings or _pick("span_dkdv", q, v, span[2], described)
    groups, group = k.shape[-2], q.shape[-2] // k.shape[-2]
    together = group if span[2] else 1
    chunks = 1 if span[2] else settings["CHUNKS"]
    parts = group // together * chunks
    direct, tma = bool(span[2]), bool(settings.get("TMA"))
    passes = ((True, False), (False, True)) if settings.get("APART") else ((True, True),)
    launches = tuple(Launch(
        span_dkdv, (seqs.tiles(settings["BLOCK_N"] * span[1]) * groups * parts,),
        *(n for x in (q, k, v, do) for n in strides(x, seqs.packed)),
        *(n for x in (k, v) for n in new_strides(x.shape, seqs.packed)),
        *(0 if direct else x.numel() for x in (k, v)),
        *lse_strides(lse, seqs.packed), *new_lse_strides(_padded(lse), seqs.packed),
        scale * LOG2E.value, scale, seqs.n, seqs.seq_len, k.shape[-3],
        N_KV_HEADS=groups, GROUP=group, HEADS=together, CHUNKS=chunks, **_blocks(q.shape[-1],
        v.shape[-1]),
        BLOCK_N=settings["BLOCK_N"], BLOCK_M=settings["BLOCK_M"],
        SIZE=span[0], STRIDE=span[1], WINDOW=span[2], VARLEN=seqs.packed, ACC=accumulator(q.dtype),
        TMA=tma,
        WITH_DK=with_dk, WITH_DV=with_dv, **launch_options(settings),
    ) for with_dk, with_dv in passes)  # fmt: skip
    add = [
        Launch(
            span_sum, (triton.cdiv(x.numel(), 1024),), seqs.n, x.numel(), x.shape[-2] * x.shape[-1],
            N=parts, BLOCK=1024, VARLEN=seqs.packed, num_warps=4,
        )
        for x in (k, v) if not direct
    ]  # fmt: skip
    return _Sums(launches, tuple(add), 0 if direct else parts, settings["BLOCK_M"] if tma else 0)

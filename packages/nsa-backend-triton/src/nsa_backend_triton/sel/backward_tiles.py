"""dq of the selected branch, tile by tile: no sum leaves a program, so the same input gives the
same bits.

A program takes a tile of T neighbouring tokens of one kv head, all h heads: T h rows padded to
ROWS. It walks the union of the blocks they chose (sel_union), as the forward does:

    S = q k^T, dP = do v^T, dq += dS k
    [ROWS, KEYS], [ROWS, D] in registers; q, do, num_stages times K, V on chip

A step reads KEYS (Dk + Dv) elements from L2 for 2 ROWS KEYS (2 Dk + Dv) operations: at 64 rows in
bf16 48 times as many operations as bytes. Bound by the tensor cores where neighbours share their
blocks; what they do not share is masked away, and that work is lost.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_backend_triton.sel.backward_blocks import sel_load, sel_put, sel_scores_backward
from nsa_backend_triton.shared.rows import (
    add_dot,
    dot_columns,
    place,
    scale_rows,
    transpose,
    zero_rows,
)
from nsa_backend_triton.span.geometry import fetch_rows


@triton.jit
def sel_union_backward(
    dq, q, do, lse, delta, t, bit, K, V, K_TMA, V_TMA, seq, group, ENTRIES, low, high, k_t, v_t,
    length, scale,
    MOST: tl.constexpr, DIM_K: tl.constexpr, DIM_V: tl.constexpr, WIDTH_K: tl.constexpr,
    WIDTH_V: tl.constexpr,
    SIZE: tl.constexpr, KEYS: tl.constexpr, TMA: tl.constexpr, CUT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dq [ROWS, Dk] with the entries low .. high of the tile's list added, KEYS keys at a time.

    CUT: some of their keys lie behind a token or the sequence's end. ``bit`` [ROWS]: the row's
    token in an entry. TMA, for whole blocks of KEYS: an entry is read a turn before its keys, whose
    address then waits for no load; where keys come by pointers, that costs more than it gains.
    """
    PARTS: tl.constexpr = (SIZE + KEYS - 1) // KEYS
    if TMA:
        block = tl.load(ENTRIES + low, mask=low < high, other=0)
        members = tl.load(ENTRIES + MOST + low, mask=low < high, other=0)
    for i in tl.range(low * PARTS, high * PARTS):
        if TMA:
            following = tl.minimum(i + 1, high * PARTS - 1) // PARTS
            next_block, next_members = (
                tl.load(ENTRIES + following),
                tl.load(ENTRIES + MOST + following),
            )
        else:
            block = tl.load(ENTRIES + i // PARTS)
            members = tl.load(ENTRIES + MOST + i // PARTS)
        chosen = (members & bit) != 0
        inside = i % PARTS * KEYS + tl.arange(0, KEYS)
        key = block * SIZE + inside
        real = inside < SIZE
        if CUT:
            real &= key < length
        if TMA:
            k = fetch_rows(K_TMA, seq, block * SIZE + i % PARTS * KEYS, group, KEYS, DIM_K, WIDTH_K)
            v = fetch_rows(V_TMA, seq, block * SIZE + i % PARTS * KEYS, group, KEYS, DIM_V, WIDTH_V)
        else:
            base = (block * SIZE).to(tl.int64)
            k = sel_load(K + base * k_t, inside * k_t, None, real, DIM_K, WIDTH_K)
            v = sel_load(V + base * v_t, inside * v_t, None, real, DIM_V, WIDTH_V)
        s = dot_columns(q, transpose(k, DIM_K, WIDTH_K), DIM_K, WIDTH_K, ACC)
        dp = dot_columns(do, transpose(v, DIM_V, WIDTH_V), DIM_V, WIDTH_V, ACC)
        if TMA and not CUT:
            # A row that did not choose the block costs no operation a key: infinity takes its p to
            # 0.
            _, ds = sel_scores_backward(
                s, dp, None, tl.where(chosen, lse, float("inf"))[:, None], delta[:, None], scale
            )
        else:
            seen = chosen[:, None] & real[None, :]
            if CUT:
                seen &= key[None, :] <= t[:, None]
            _, ds = sel_scores_backward(s, dp, seen, lse[:, None], delta[:, None], scale)
        dq = add_dot(dq, ds.to(k[0].dtype), k, DIM_K, WIDTH_K, ACC)
        if TMA:
            block, members = next_block, next_members
    return dq


@triton.jit(do_not_specialize=["n_seqs", "seq_len", "tiles"])
def sel_tile_backward(
    Q, K, V, K_TMA, V_TMA, DO, LSE, DELTA, ENTRIES, COUNTS, CU, DQ,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, d_b, d_t, d_h,
    scale, n_seqs, seq_len, tiles,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM_K: tl.constexpr, DIM_V: tl.constexpr,
    WIDTH_K: tl.constexpr,
    WIDTH_V: tl.constexpr, SIZE: tl.constexpr, KEYS: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    MOST: tl.constexpr, TMA: tl.constexpr, VARLEN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """LSE, DELTA [B, S, Hq]; ENTRIES, COUNTS of sel_union; DQ [B, S, Hq, DIM_K], rounded once.

    Kv heads vary slowest: one head's K and V stay in L2. Entries without a causal mask come last.
    """
    group = tl.program_id(0) // tiles
    seq, start, length, first = place(tl.program_id(0) % tiles, CU, n_seqs, seq_len, TOKENS, VARLEN)
    if first >= length:
        return
    row = tl.arange(0, ROWS)
    local = row // HEADS
    t = first + local
    ok = (local < TOKENS) & (t < length)
    base, head = seq.to(tl.int64), group * HEADS + row % HEADS
    wide = start.to(tl.int64) + t
    q = sel_load(Q, base * q_b + wide * q_t, head * q_h, ok, DIM_K, WIDTH_K)
    do = sel_load(DO, base * d_b + wide * d_t, head * d_h, ok, DIM_V, WIDTH_V)
    at = (wide if VARLEN else base * seq_len + wide) * (GROUPS * HEADS) + head
    lse = tl.load(LSE + at, mask=ok, other=float("inf"))
    delta = tl.load(DELTA + at, mask=ok, other=0.0)
    bit = tl.where(ok, tl.full([ROWS], 1, tl.int32) << local, 0)
    K += base * k_b + start.to(tl.int64) * k_t + group * k_h
    V += base * v_b + start.to(tl.int64) * v_t + group * v_h
    entries = ENTRIES + tl.program_id(0).to(tl.int64) * (2 * MOST)
    count = tl.load(COUNTS + tl.program_id(0) * 2)
    cut = tl.load(COUNTS + tl.program_id(0) * 2 + 1)
    dq = zero_rows(ROWS, DIM_K, WIDTH_K, ACC)
    dq = sel_union_backward(
        dq, q, do, lse, delta, t, bit, K, V, K_TMA, V_TMA, seq, group, entries, 0, cut, k_t, v_t,
        length, scale,
        MOST, DIM_K, DIM_V, WIDTH_K, WIDTH_V, SIZE, KEYS, TMA, True, ACC,
    )  # fmt: skip
    dq = sel_union_backward(
        dq, q, do, lse, delta, t, bit, K, V, K_TMA, V_TMA, seq, group, entries, cut, count, k_t,
        v_t, length, scale,
        MOST, DIM_K, DIM_V, WIDTH_K, WIDTH_V, SIZE, KEYS, TMA, False, ACC,
    )  # fmt: skip
    sel_put(DQ, at * DIM_K, None, scale_rows(dq, scale, DIM_K, WIDTH_K), ok, DIM_K, WIDTH_K, False)

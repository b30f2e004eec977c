"""dq of the selected branch, token by token: no sum leaves a program, so the same input gives the same bits.

A program takes one token and kv head, all h heads (padded to ROWS >= 16), and walks the token's blocks:

    S = q k^T, dP = do v^T, dq += dS k    [ROWS, KEYS] and [ROWS, D] in registers

A step reads 2 KEYS D elements for 6 ROWS KEYS D operations, 1.5 ROWS operations a byte in bf16: bound by L2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_backend_triton.sel_blocks_backward import sel_load, sel_put, sel_scores_backward
from nsa_backend_triton.sel_lists import candidates
from nsa_backend_triton.tile import place


@triton.jit(do_not_specialize=["n_seqs", "seq_len"])
def sel_token_backward(
    Q, K, V, DO, LSE, DELTA, BLOCKS, CU, DQ,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, d_b, d_t, d_h, b_b, b_t, b_h,
    scale, n_seqs, seq_len,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM_K: tl.constexpr, DIM_V: tl.constexpr, WIDTH_K: tl.constexpr,
    WIDTH_V: tl.constexpr, SIZE: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr,
    NP: tl.constexpr, VARLEN: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """LSE, DELTA [B, S, Hq]; DQ [B, S, Hq, DIM_K], rounded once. KEYS >= SIZE; kv heads vary slowest."""
    tiles = seq_len + n_seqs if VARLEN else n_seqs * seq_len
    group = tl.program_id(0) // tiles
    seq, start, length, token = place(tl.program_id(0) % tiles, CU, n_seqs, seq_len, 1, VARLEN)
    base, wide = seq.to(tl.int64), start.to(tl.int64) + token
    head = tl.arange(0, ROWS)
    ok = (head < HEADS) & (token < length)
    at_group = (group * HEADS + head).to(tl.int64)
    q = sel_load(Q, base * q_b + wide * q_t + at_group * q_h, ok, DIM_K, WIDTH_K)
    do = sel_load(DO, base * d_b + wide * d_t + at_group * d_h, ok, DIM_V, WIDTH_V)
    row = (wide if VARLEN else base * seq_len + wide) * (GROUPS * HEADS) + at_group
    lse = tl.load(LSE + row, mask=ok, other=float("inf"))
    delta = tl.load(DELTA + row, mask=ok, other=0.0)
    first = BLOCKS + base * b_b + start.to(tl.int64) * b_t + group * b_h
    blocks = candidates(first, token, length, N, NP, SIZE, 1, b_t)
    slot = tl.arange(0, NP)[None, :]
    K += base * k_b + start.to(tl.int64) * k_t + group * k_h
    V += base * v_b + start.to(tl.int64) * v_t + group * v_h
    inside = tl.arange(0, KEYS)
    dq = tl.zeros([ROWS, WIDTH_K], dtype=ACC)
    for i in range(N):
        block = tl.sum(tl.where(slot == i, blocks, 0))
        key = block * SIZE + inside
        seen = (inside < SIZE) & (key <= token) & (block >= 0)
        k = sel_load(K, key.to(tl.int64) * k_t, seen, DIM_K, WIDTH_K)
        v = sel_load(V, key.to(tl.int64) * v_t, seen, DIM_V, WIDTH_V)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=ACC)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION, out_dtype=ACC)
        _, ds = sel_scores_backward(s, dp, seen[None, :], lse[:, None], delta[:, None], scale)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION, out_dtype=ACC)
    sel_put(DQ, row * DIM_K, (dq * scale).to(DQ.dtype.element_ty), ok, DIM_K, WIDTH_K, False)

"""Partial outputs of the selected branch, block by block: of the pairs that no tile of tokens
shares.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_backend_triton.shared.rows import dot_columns, finish, load_at, place, transpose


@triton.jit(do_not_specialize=["n_seqs", "seq_len", "buckets", "pairs", "first_row"])
def sel_bucket_kernel(
    Q, K, V, TOKENS, SLOTS, OFFSETS, PARTS, PART_LSE, CU, n_seqs, seq_len, buckets, pairs,
    first_row, groups, factor,
    sq_b: tl.int64, sq_t, sq_h, sk_b: tl.int64, sk_t, sk_h, sv_b: tl.int64, sv_t, sv_h,
    DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, DVP: tl.constexpr, H: tl.constexpr,
    VARLEN: tl.constexpr,
    ACC: tl.constexpr, N: tl.constexpr, L: tl.constexpr, KEYS: tl.constexpr, T: tl.constexpr,
    M: tl.constexpr,
    TILES: tl.constexpr, NEGATIVE: tl.constexpr,
):  # fmt: skip
    """One block of one kv head and up to TILES tiles of T tokens that chose it, T*H rows padded to
    M each.

    Shared memory: K [KEYS, DK], V [KEYS, DV], once; num_stages times Q [M, DK], gathered, rows of
    H*DK elements. Registers: scores [M, KEYS], o [M, DV]. A tile moves M*(DK + DV) elements, Q from
    L2 and partial outputs to memory, and costs 2*M*KEYS*(DK + DV) operations: bound by the writes.
    """
    bucket, first_pair, count, pair = place(
        tl.program_id(0), OFFSETS, buckets, pairs, T * TILES, True
    )
    if pair >= count:
        return
    if VARLEN:
        per_head = seq_len // L + n_seqs
        group = bucket // per_head
        seq, start, length, key_row = place(bucket % per_head, CU, n_seqs, seq_len, L, True)
        flat = start.to(tl.int64) - first_row
    else:
        per_head = tl.cdiv(seq_len, L)
        group = bucket // per_head % groups
        seq = bucket // per_head // groups
        start = 0
        length = seq_len
        key_row = bucket % per_head * L
        flat = seq.to(tl.int64) * seq_len - first_row
    start = tl.cast(start, tl.int64)
    lane = tl.arange(0, KEYS)
    key = key_row + lane
    there = (lane < L) & (key < length)
    at_k = K + seq * sk_b + (start + key_row) * sk_t + group * sk_h
    at_v = V + seq * sv_b + (start + key_row) * sv_t + group * sv_h
    k = transpose(load_at(at_k, lane * sk_t, there, DK, DKP), DK, DKP)
    v = load_at(at_v, lane * sv_t, there, DV, DVP)
    at_q = Q + seq * sq_b + start * sq_t + group * H * sq_h
    tokens = TOKENS + first_pair.to(tl.int64)
    slots = SLOTS + first_pair.to(tl.int64)
    tiles = tl.minimum(tl.cdiv(count - pair, T), TILES)
    cut = tiles
    if L == KEYS:  # tokens ascend: only a block's first L pairs can be of tokens inside it
        cut = tl.minimum(tl.cdiv(tl.maximum(L - pair, 0), T), tiles)
    sel_attend_pairs(
        at_q, k, v, tokens, slots, PARTS, PART_LSE, flat, group, groups, pair, cut, count, key,
        there,
        sq_t, sq_h, factor, DK, DV, DKP, DVP, H, N, T, M, NEGATIVE, True, ACC,
    )  # fmt: skip
    if L == KEYS:
        sel_attend_pairs(
            at_q, k, v, tokens, slots, PARTS, PART_LSE, flat, group, groups, pair + cut * T,
            tiles - cut, count,
            key, there, sq_t, sq_h, factor, DK, DV, DKP, DVP, H, N, T, M, NEGATIVE, False, ACC,
        )  # fmt: skip


@triton.jit
def sel_attend_pairs(
    at_q, k, v, tokens, slots, PARTS, PART_LSE, flat, group, groups, first, tiles, count, key,
    there, sq_t, sq_h,
    factor,
    DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, DVP: tl.constexpr, H: tl.constexpr,
    N: tl.constexpr,
    T: tl.constexpr, M: tl.constexpr, NEGATIVE: tl.constexpr, CUT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Partial outputs of ``tiles`` tiles from pair ``first`` on, of a bucket of ``count``; CUT:
    keys may lie behind.
    """
    rows = tl.arange(0, M)
    head = rows % H
    # A tile's tokens are read a turn before its queries: an address that waits for a load is not
    # fetched ahead.
    at = first + rows // H
    inside = (rows < T * H) & (at < count)
    t = tl.load(tokens + at, mask=inside, other=0)
    slot = tl.load(slots + at, mask=inside, other=0)
    for _ in tl.range(0, tiles):
        at += T
        next_inside = (rows < T * H) & (at < count)
        next_t = tl.load(tokens + at, mask=next_inside, other=0)
        next_slot = tl.load(slots + at, mask=next_inside, other=0)
        # A row that is not there reads token 0's queries, and is not stored: no mask.
        q = load_at(at_q, t.to(tl.int64) * sq_t + head * sq_h, None, DK, DKP)
        dots = dot_columns(q, k, DK, DKP, ACC)
        scores = dots * factor
        m = (tl.min(dots, 1) if NEGATIVE else tl.max(dots, 1)) * factor  # as in _walk
        if CUT:
            scores = tl.where(there[None, :] & (key[None, :] <= t[:, None]), scores, float("-inf"))
            m = tl.max(scores, 1)
        p = tl.exp2(scores - tl.where(m == float("-inf"), 0.0, m)[:, None])
        l = tl.sum(p, 1)
        divisor, lse = finish(m, l)
        inverse = (1.0 / divisor)[:, None]
        part = ((flat + t) * groups + group) * N + slot
        into = (part * H + head) * DV
        for i in tl.static_range((DV + DVP - 1) // DVP):
            o = tl.dot(p.to(v[i].dtype), v[i], out_dtype=ACC, input_precision="ieee") * inverse
            columns = i * DVP + tl.arange(0, DVP)
            tl.store(
                PARTS + into[:, None] + columns[None, :], o.to(PARTS.dtype.element_ty),
                mask=inside[:, None] & (columns < DV)[None, :], eviction_policy="evict_first",
            )  # fmt: skip
        tl.store(PART_LSE + part * H + head, lse, mask=inside)
        inside = next_inside
        t = next_t
        slot = next_slot

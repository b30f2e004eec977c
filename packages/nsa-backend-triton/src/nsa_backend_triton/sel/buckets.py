"""Attention of the selected branch over one block at a time, for pairs that no tile shares.

For a token t that selected block j, with K and V the keys <= t of this block (Eq. 12, one block):

    o_tj = softmax(scale q_t K^T) V,    lse_tj = log of the sum of exp(scale q_t K^T)

merge.py adds the partial outputs of a token to the output of its tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_backend_triton.sel.pair_lists import locate_bucket
from nsa_backend_triton.shared.rows import (
    dot_transposed,
    finish_softmax,
    finite_shift,
    load_at,
    place,
    row_offset,
)


@triton.jit(
    do_not_specialize=[
        "num_seqs", "seq_len", "first_query", "num_buckets", "buckets_per_head", "num_pairs",
        "run", "first_head", "run_heads",
    ]
)  # fmt: skip
def sel_bucket_kernel(
    Q, K, V, TOKENS, OFFSETS, PARTIAL_O, PARTIAL_LSE, CU_SEQLENS,
    num_seqs, seq_len, first_query, num_buckets, buckets_per_head, num_pairs, run, first_head,
    run_heads, qk_scale,
    stride_q, stride_k, stride_v,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    HEAD_DIM_BAND: tl.constexpr, V_HEAD_DIM_BAND: tl.constexpr,
    GROUP: tl.constexpr, VARLEN: tl.constexpr, PARTIAL: tl.constexpr, ACC: tl.constexpr,
    SELECT_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr,
    TILES_PER_PROGRAM: tl.constexpr, NEGATIVE_SCALE: tl.constexpr,
):  # fmt: skip
    """Attend to one block of one kv head from up to TILES_PER_PROGRAM tiles of its tokens.

    A tile has BLOCK_T tokens with all their heads: BLOCK_T * GROUP rows, padded to BLOCK_M. Shared
    memory holds K [BLOCK_N, HEAD_DIM] and V [BLOCK_N, V_HEAD_DIM] once, and num_stages times Q
    [BLOCK_M, HEAD_DIM], gathered in rows of GROUP * HEAD_DIM elements. Registers hold the scores
    [BLOCK_M, BLOCK_N] and o [BLOCK_M, V_HEAD_DIM]. A tile moves BLOCK_M * (HEAD_DIM + V_HEAD_DIM)
    elements, Q from L2 and partial outputs to memory, and takes 2 * BLOCK_M * BLOCK_N *
    (HEAD_DIM + V_HEAD_DIM) operations: bound by the writes. A launch takes one run, of
    ``run_heads`` kv heads from ``first_head`` on. OFFSETS has ``num_buckets`` buckets for each run,
    and partial outputs are in the order of its pairs.
    """
    PAIRS: tl.constexpr = BLOCK_T * TILES_PER_PROGRAM
    OFFSETS += run * num_buckets
    run_start = tl.load(OFFSETS)
    index = tl.program_id(0) + run_start // PAIRS
    bucket, bucket_start, bucket_pairs, first_pair = place(
        index, OFFSETS, num_buckets, num_pairs, PAIRS, True
    )
    if first_pair >= bucket_pairs:
        return
    seq, run_head, start, query_start, length, first_key = locate_bucket(
        bucket, CU_SEQLENS, num_seqs, seq_len, first_query, buckets_per_head, run_heads,
        SELECT_BLOCK, VARLEN, PARTIAL,
    )  # fmt: skip
    kv_head = first_head + run_head
    _, stride_qt, stride_qh = stride_q
    _, stride_kt, _ = stride_k
    _, stride_vt, _ = stride_v
    # The sequence's first token whose query exists.
    first_token = tl.maximum(-query_start, 0) if PARTIAL else 0
    offs_n = tl.arange(0, BLOCK_N)
    key = first_key + offs_n
    mask_n = (offs_n < SELECT_BLOCK) & (key < length)
    k_base = K + row_offset(seq, start + first_key, kv_head, stride_k)
    v_base = V + row_offset(seq, start + first_key, kv_head, stride_v)
    k = load_at(k_base, offs_n * stride_kt, mask_n, HEAD_DIM, HEAD_DIM_BAND)
    v = load_at(v_base, offs_n * stride_vt, mask_n, V_HEAD_DIM, V_HEAD_DIM_BAND)
    q_base = Q + row_offset(seq, query_start, kv_head * GROUP, stride_q)
    tokens = TOKENS + bucket_start.to(tl.int64)
    first_partial = (bucket_start - run_start + first_pair).to(tl.int64) * GROUP
    PARTIAL_O += first_partial * V_HEAD_DIM
    PARTIAL_LSE += first_partial
    tiles = tl.minimum(tl.cdiv(bucket_pairs - first_pair, BLOCK_T), TILES_PER_PROGRAM)
    masked_tiles = tiles
    # Tokens ascend, so only the first SELECT_BLOCK pairs of a block can be of tokens inside it.
    if SELECT_BLOCK == BLOCK_N:
        masked_tiles = tl.minimum(tl.cdiv(tl.maximum(SELECT_BLOCK - first_pair, 0), BLOCK_T), tiles)
    _attend_pairs(
        q_base, k, v, tokens, PARTIAL_O, PARTIAL_LSE, first_pair, masked_tiles, bucket_pairs,
        key, mask_n, first_token, stride_qt, stride_qh, qk_scale,
        HEAD_DIM, V_HEAD_DIM, HEAD_DIM_BAND, V_HEAD_DIM_BAND,
        GROUP, BLOCK_T, BLOCK_M, NEGATIVE_SCALE, True, ACC,
    )  # fmt: skip
    if SELECT_BLOCK == BLOCK_N:
        _attend_pairs(
            q_base, k, v, tokens, PARTIAL_O + masked_tiles * (BLOCK_T * GROUP * V_HEAD_DIM),
            PARTIAL_LSE + masked_tiles * (BLOCK_T * GROUP), first_pair + masked_tiles * BLOCK_T,
            tiles - masked_tiles, bucket_pairs, key, mask_n, first_token,
            stride_qt, stride_qh, qk_scale,
            HEAD_DIM, V_HEAD_DIM, HEAD_DIM_BAND, V_HEAD_DIM_BAND,
            GROUP, BLOCK_T, BLOCK_M, NEGATIVE_SCALE, False, ACC,
        )  # fmt: skip


@triton.jit
def _attend_pairs(
    q_base, k, v, tokens, PARTIAL_O, PARTIAL_LSE, first_pair, tiles, bucket_pairs, key, mask_n,
    first_token, stride_qt, stride_qh, qk_scale,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    HEAD_DIM_BAND: tl.constexpr, V_HEAD_DIM_BAND: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr,
    NEGATIVE_SCALE: tl.constexpr, MASKED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Write the partial outputs of ``tiles`` tiles of a bucket, from its pair ``first_pair`` on.

    PARTIAL_O and PARTIAL_LSE point at those of ``first_pair``; the others follow in order.
    ``key`` [BLOCK_N] are the positions of the keys and ``mask_n`` which of them exist. Unless
    MASKED, every row attends to every key.
    """
    offs_m = tl.arange(0, BLOCK_M)
    head = offs_m % GROUP
    # The tokens of a tile are loaded one iteration before their queries: an address that depends on
    # a load is not prefetched.
    pair = first_pair + offs_m // GROUP
    mask_m = (offs_m < BLOCK_T * GROUP) & (pair < bucket_pairs)
    t = tl.load(tokens + pair, mask=mask_m, other=first_token)
    for _ in tl.range(0, tiles):
        pair += BLOCK_T
        next_mask_m = (offs_m < BLOCK_T * GROUP) & (pair < bucket_pairs)
        next_t = tl.load(tokens + pair, mask=next_mask_m, other=first_token)
        # Padding rows load the queries of ``first_token`` and are not stored: no mask is needed.
        q = load_at(
            q_base, t.to(tl.int64) * stride_qt + head * stride_qh, None, HEAD_DIM, HEAD_DIM_BAND
        )
        qk = dot_transposed(q, k, ACC)
        s = qk * qk_scale
        # The maximum is taken of the unscaled products, as in forward._attend_entries.
        m_i = (tl.min(qk, 1) if NEGATIVE_SCALE else tl.max(qk, 1)) * qk_scale
        if MASKED:
            s = tl.where(mask_n[None, :] & (key[None, :] <= t[:, None]), s, float("-inf"))
            m_i = tl.max(s, 1)
        p = tl.exp2(s - finite_shift(m_i)[:, None])
        l_i = tl.sum(p, 1)
        divisor, lse = finish_softmax(m_i, l_i)
        inverse = (1.0 / divisor)[:, None]
        for i in tl.static_range((V_HEAD_DIM + V_HEAD_DIM_BAND - 1) // V_HEAD_DIM_BAND):
            o = tl.dot(p.to(v[i].dtype), v[i], out_dtype=ACC, input_precision="ieee") * inverse
            offs_d = i * V_HEAD_DIM_BAND + tl.arange(0, V_HEAD_DIM_BAND)
            tl.store(
                PARTIAL_O + (offs_m * V_HEAD_DIM)[:, None] + offs_d[None, :],
                o.to(PARTIAL_O.dtype.element_ty),
                mask=mask_m[:, None] & (offs_d < V_HEAD_DIM)[None, :],
                eviction_policy="evict_first",
            )  # fmt: skip
        tl.store(PARTIAL_LSE + offs_m, lse, mask=mask_m)
        PARTIAL_O += BLOCK_T * GROUP * V_HEAD_DIM
        PARTIAL_LSE += BLOCK_T * GROUP
        mask_m = next_mask_m
        t = next_t

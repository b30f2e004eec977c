"""Backward of the selected branch in short sequences: a bit per token and block, no lists.

    P = exp(scale q k^T - lse) where the token selected the key's block, dS = P (do v^T - delta)
    dq = scale dS k,  dv = P^T do,  dk = scale dS^T q

Up to NUM_BITS blocks, the blocks that a token selected for a kv head fit one int64. Two kernels
compute the gradients in a fixed order, so that equal inputs give equal bits:

    sel_bitmask_dq     A program owns a tile of neighbouring tokens with all heads of a group. It
                       computes the bits of its tokens from their blocks and stores them, and walks
                       the blocks that at least one of them selected.
    sel_bitmask_dkdv   A program owns BLOCK_N keys of a block, and walks all later tokens of some
                       heads of the group, whether they selected the block or not.
    sum_parts          adds dk and dv of the parts of a group, if the heads are divided.

The rows of a tile whose token did not select the block are masked, so their products are lost. At
n l' tokens nothing is lost, at 2 n l' tokens a quarter, at 4 n l' tokens more than half. The lists
of the other forms lose nothing, but building them takes longer than the products of a short
sequence.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_backend_triton.sel.backward_blocks import gather_rows, scatter_rows, softmax_backward
from nsa_backend_triton.shared.rows import (
    add_dot,
    dot_transposed,
    load_rows,
    place,
    place_queries,
    row_of_start,
    row_offset,
    scale_rows,
    zero_rows,
)

NUM_BITS = tl.constexpr(64)


@triton.jit
def _lowest_bit(bits):
    """Index of the lowest bit of ``bits``, an int64 that is not 0."""
    # A power of two is exact in fp32; the exponent is the index.
    exponent = (bits & -bits).to(tl.float32).to(tl.int32, bitcast=True) >> 23
    return (exponent & 255) - 127


@triton.jit
def _selected_blocks(
    BLOCKS, offs_t, mask_t,
    NUM_SELECTED: tl.constexpr, NUM_SELECTED_PAD: tl.constexpr, SELECT_BLOCK: tl.constexpr,
):  # fmt: skip
    """The blocks that each token selected, as the bits of an int64 [R].

    BLOCKS [R] points at the first block of each token. Blocks that the token may not select have no
    bit. They are compared before they are narrowed.
    """
    choice = tl.arange(0, NUM_SELECTED_PAD)[None, :]
    block = tl.load(
        BLOCKS[:, None] + choice, mask=mask_t[:, None] & (choice < NUM_SELECTED), other=-1
    )
    valid = (block >= 0) & (block <= (offs_t // SELECT_BLOCK)[:, None])
    return tl.reduce_or(
        tl.where(valid, tl.full(block.shape, 1, tl.int64) << tl.where(valid, block, 0), 0), 1
    )


@triton.jit
def _walk_blocks(
    dq, bits, rest, count, q, do, lse2, delta, offs_t, K, V, stride_kt, stride_vt, length, scale,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    HEAD_DIM_BAND: tl.constexpr, V_HEAD_DIM_BAND: tl.constexpr,
    SELECT_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dq [BLOCK_M, Dk] plus its part from ``count`` blocks, and the bits that remain.

    ``rest`` has a bit for each block to walk, from the lowest on, and ``bits`` [BLOCK_M] the blocks
    of each row's token. MASKED: some keys of the blocks lie after a token, or past the end of the
    sequence.
    """
    KEY_TILES: tl.constexpr = (SELECT_BLOCK + BLOCK_N - 1) // BLOCK_N
    for i in tl.range(0, count * KEY_TILES):
        block, key_tile = _lowest_bit(rest), i % KEY_TILES
        rest = tl.where(key_tile == KEY_TILES - 1, rest & (rest - 1), rest)
        selected = ((bits >> block) & 1) != 0
        offs_n = key_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        key = block * SELECT_BLOCK + offs_n
        mask_n = offs_n < SELECT_BLOCK
        if MASKED:
            mask_n &= key < length
        first_key = tl.cast(block * SELECT_BLOCK, tl.int64)
        k = gather_rows(
            K + first_key * stride_kt, offs_n * stride_kt, None, mask_n, HEAD_DIM, HEAD_DIM_BAND
        )
        v = gather_rows(
            V + first_key * stride_vt, offs_n * stride_vt, None, mask_n,
            V_HEAD_DIM, V_HEAD_DIM_BAND,
        )  # fmt: skip
        qk = dot_transposed(q, k, ACC)
        dp = dot_transposed(do, v, ACC)
        if MASKED:
            mask = selected[:, None] & (key[None, :] <= offs_t[:, None])
            _, ds = softmax_backward(qk, dp, mask, lse2[:, None], delta[:, None], scale)
        else:
            # Infinity takes p to 0, without an operation per key. Missing keys are rows of zeros.
            lse2_selected = tl.where(selected, lse2, float("inf"))
            _, ds = softmax_backward(qk, dp, None, lse2_selected[:, None], delta[:, None], scale)
        dq = add_dot(dq, ds, k)
    return dq, rest


@triton.jit(do_not_specialize=["num_seqs", "seq_len", "first_query", "tiles", "stride_blocks_b"])
def sel_bitmask_dq(
    Q, K, V, DO, LSE2, DELTA, BLOCKS, CU_SEQLENS, DQ, BITS,
    stride_q, stride_k, stride_v, stride_do,
    stride_blocks_b: tl.int64, stride_blocks,
    scale, num_seqs, seq_len, first_query, tiles,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    HEAD_DIM_BAND: tl.constexpr, V_HEAD_DIM_BAND: tl.constexpr,
    NUM_SELECTED: tl.constexpr, NUM_SELECTED_PAD: tl.constexpr, SELECT_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr,
    VARLEN: tl.constexpr, PARTIAL: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Write DQ [B, S, Hq, HEAD_DIM] of BLOCK_T tokens of one kv head, and their BITS [B, S, G].

    LSE2, DELTA [B, S, Hq]; ``stride_blocks``: those of tokens and kv heads. A tile of BLOCK_N keys
    takes BLOCK_N (Dk + Dv) elements from L2 and 2 BLOCK_M BLOCK_N (2 Dk + Dv) operations: 48
    operations a byte at BLOCK_M = 64 in bf16. Kv heads are the outermost index, and the tiles with
    the most keys start first.
    """
    kv_head = tl.program_id(0) // tiles
    seq, start, query_start, length, first_t = place_queries(
        tiles - 1 - tl.program_id(0) % tiles, CU_SEQLENS, num_seqs, seq_len, first_query,
        BLOCK_T, VARLEN, PARTIAL,
    )  # fmt: skip
    if first_t >= length:
        return
    stride_qb, stride_qt, stride_qh = stride_q
    stride_dob, stride_dot, stride_doh = stride_do
    offs_m = tl.arange(0, BLOCK_M)
    local_t, local_head = offs_m // GROUP, offs_m % GROUP
    offs_t = first_t + local_t
    mask_m = (local_t < BLOCK_T) & (offs_t < length)
    batch, head = seq.to(tl.int64), kv_head * GROUP + local_head
    row_t = query_start.to(tl.int64) + offs_t
    q = gather_rows(
        Q, batch * stride_qb + row_t * stride_qt, head * stride_qh, mask_m, HEAD_DIM, HEAD_DIM_BAND
    )
    do = gather_rows(
        DO, batch * stride_dob + row_t * stride_dot, head * stride_doh, mask_m,
        V_HEAD_DIM, V_HEAD_DIM_BAND,
    )  # fmt: skip
    row = row_of_start(seq, query_start, seq_len, VARLEN) + offs_t
    offs_row = row * (NUM_KV_HEADS * GROUP) + head
    lse2 = tl.load(LSE2 + offs_row, mask=mask_m, other=float("inf"))
    delta = tl.load(DELTA + offs_row, mask=mask_m, other=0.0)
    stride_blocks_t, stride_blocks_h = stride_blocks
    bits = _selected_blocks(
        BLOCKS + batch * stride_blocks_b + row_t * stride_blocks_t + kv_head * stride_blocks_h,
        offs_t, mask_m, NUM_SELECTED, NUM_SELECTED_PAD, SELECT_BLOCK,
    )  # fmt: skip
    tl.store(BITS + row * NUM_KV_HEADS + kv_head, bits, mask=mask_m & (local_head == 0))
    rest = tl.reduce_or(bits, 0)
    index = tl.arange(0, NUM_BITS)
    walked = ((rest >> index) & 1).to(tl.int32)
    count = tl.sum(walked, 0)
    # Every token of the tile may attend to every key of these blocks.
    count_full = tl.sum(tl.where(index < (first_t + 1) // SELECT_BLOCK, walked, 0), 0)
    K += row_offset(batch, start, kv_head, stride_k)
    V += row_offset(batch, start, kv_head, stride_v)
    _, stride_kt, _ = stride_k
    _, stride_vt, _ = stride_v
    dq = zero_rows(BLOCK_M, HEAD_DIM, HEAD_DIM_BAND, ACC)
    dq, rest = _walk_blocks(
        dq, bits, rest, count_full, q, do, lse2, delta, offs_t, K, V, stride_kt, stride_vt,
        length, scale,
        HEAD_DIM, V_HEAD_DIM, HEAD_DIM_BAND, V_HEAD_DIM_BAND, SELECT_BLOCK, BLOCK_N, False, ACC,
    )  # fmt: skip
    dq, _ = _walk_blocks(
        dq, bits, rest, count - count_full, q, do, lse2, delta, offs_t, K, V, stride_kt, stride_vt,
        length, scale,
        HEAD_DIM, V_HEAD_DIM, HEAD_DIM_BAND, V_HEAD_DIM_BAND, SELECT_BLOCK, BLOCK_N, True, ACC,
    )  # fmt: skip
    dq = scale_rows(dq, scale)
    scatter_rows(DQ, offs_row * HEAD_DIM, None, dq, mask_m, HEAD_DIM, False)


@triton.jit
def _walk_tokens(
    dk, dv, k, v, visible_from, block, Q, DO, LSE2, DELTA, BITS, first, tiles, end,
    stride_qt, stride_qh, stride_dot, stride_doh, scale, num_heads,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    HEAD_DIM_BAND: tl.constexpr, V_HEAD_DIM_BAND: tl.constexpr,
    BLOCK_M: tl.constexpr, MASKED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dk and dv plus the sums over ``tiles`` tiles of BLOCK_M tokens of ``num_heads`` heads.

    The tiles begin at token ``first``, none from ``end`` on counts. Key r is seen by the tokens
    from visible_from[r] on; unless MASKED, by all. All pointers are at token 0 of the sequence, Q,
    DO, LSE2 and DELTA at the first head, BITS at the kv head.
    """
    offs_m = tl.arange(0, BLOCK_M)
    for step in tl.range(0, num_heads * tiles):
        head = tl.cast(step // tiles, tl.int64)
        first_t = first + step % tiles * BLOCK_M
        row = tl.cast(first_t, tl.int64)
        mask_m = first_t + offs_m < end
        q = load_rows(
            Q + row * stride_qt + head * stride_qh, offs_m, end - first_t, stride_qt,
            HEAD_DIM, HEAD_DIM_BAND, True,
        )  # fmt: skip
        do = load_rows(
            DO + row * stride_dot + head * stride_doh, offs_m, end - first_t, stride_dot,
            V_HEAD_DIM, V_HEAD_DIM_BAND, True,
        )  # fmt: skip
        offs_row = (row + offs_m) * NUM_HEADS + head
        lse2 = tl.load(LSE2 + offs_row, mask=mask_m, other=0.0)
        delta = tl.load(DELTA + offs_row, mask=mask_m, other=0.0)
        bits = tl.load(BITS + (row + offs_m) * NUM_KV_HEADS, mask=mask_m, other=0)
        # Infinity takes p to 0, without an operation per key.
        lse2 = tl.where(((bits >> block) & 1) != 0, lse2, float("inf"))
        qk = dot_transposed(k, q, ACC)
        dp = dot_transposed(v, do, ACC)
        mask = None
        if MASKED:
            mask = visible_from[:, None] <= (first_t + offs_m)[None, :]
        p, ds = softmax_backward(qk, dp, mask, lse2[None, :], delta[None, :], scale)
        dv = add_dot(dv, p, do)
        dk = add_dot(dk, ds, q)
    return dk, dv


@triton.jit(do_not_specialize=["num_seqs", "seq_len", "first_query", "num_keys", "num_parts"])
def sel_bitmask_dkdv(
    Q, K, V, DO, LSE2, DELTA, BITS, CU_SEQLENS, DK, DV,
    stride_q, stride_k, stride_v, stride_do,
    stride_dk_part: tl.int64, stride_dv_part: tl.int64,
    scale, num_seqs, seq_len, first_query, num_keys, num_parts,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    HEAD_DIM_BAND: tl.constexpr, V_HEAD_DIM_BAND: tl.constexpr,
    SELECT_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    VARLEN: tl.constexpr, PARTIAL: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dk and dv of BLOCK_N keys of a block from one of ``num_parts`` parts of the group's heads.

    k, v, dk and dv stay on chip. A tile of BLOCK_M tokens takes BLOCK_M (Dk + Dv) elements from L2
    and 4 BLOCK_M BLOCK_N (Dk + Dv) operations. The first blocks, which the most tokens see, start
    first. DK and DV [B, num_keys, G, D] are the gradients if there is one part, otherwise the parts
    [num_parts, B, num_keys, G, D] of sum_parts in fp32.
    """
    KEY_TILES: tl.constexpr = (SELECT_BLOCK + BLOCK_N - 1) // BLOCK_N
    part = tl.program_id(0) % num_parts
    kv_head = tl.program_id(0) // num_parts % NUM_KV_HEADS
    key_tile = tl.program_id(0) // (num_parts * NUM_KV_HEADS)
    num_heads = GROUP // num_parts
    seq, start, length, first_key = place(
        key_tile // KEY_TILES, CU_SEQLENS, num_seqs,
        first_query + seq_len if PARTIAL else seq_len, SELECT_BLOCK, VARLEN,
    )  # fmt: skip
    offs_n = key_tile % KEY_TILES * BLOCK_N + tl.arange(0, BLOCK_N)
    key = first_key + offs_n
    if first_key >= length:
        return
    mask_n = (offs_n < SELECT_BLOCK) & (key < length)
    # Tokens are counted from the first one of the sequence; q holds those from first_t on.
    query_start, first_t = start, first_key
    if PARTIAL:
        query_start = start - first_query
        first_t = tl.maximum(first_key, -query_start)
    _, stride_qt, stride_qh = stride_q
    _, stride_dot, stride_doh = stride_do
    _, stride_kt, _ = stride_k
    _, stride_vt, _ = stride_v
    batch, head = seq.to(tl.int64), kv_head * GROUP + part * num_heads
    K += row_offset(batch, start, kv_head, stride_k)
    V += row_offset(batch, start, kv_head, stride_v)
    k = gather_rows(K, key.to(tl.int64) * stride_kt, None, mask_n, HEAD_DIM, HEAD_DIM_BAND)
    v = gather_rows(V, key.to(tl.int64) * stride_vt, None, mask_n, V_HEAD_DIM, V_HEAD_DIM_BAND)
    Q += row_offset(batch, query_start, head, stride_q)
    DO += row_offset(batch, query_start, head, stride_do)
    row = row_of_start(seq, query_start, seq_len, VARLEN)
    LSE2 += row * (NUM_KV_HEADS * GROUP) + head
    DELTA += row * (NUM_KV_HEADS * GROUP) + head
    BITS += row * NUM_KV_HEADS + kv_head
    tiles = tl.cdiv(tl.maximum(length - first_t, 0), BLOCK_M)
    # Only tokens before the last key do not see all keys.
    masked_tiles = tl.minimum(tl.cdiv(tl.maximum(tl.max(key, 0) - first_t, 0), BLOCK_M), tiles)
    dk = zero_rows(BLOCK_N, HEAD_DIM, HEAD_DIM_BAND, ACC)
    dv = zero_rows(BLOCK_N, V_HEAD_DIM, V_HEAD_DIM_BAND, ACC)
    block = first_key // SELECT_BLOCK
    dk, dv = _walk_tokens(
        dk, dv, k, v, key, block, Q, DO, LSE2, DELTA, BITS, first_t, masked_tiles, length,
        stride_qt, stride_qh, stride_dot, stride_doh, scale, num_heads,
        NUM_KV_HEADS * GROUP, NUM_KV_HEADS,
        HEAD_DIM, V_HEAD_DIM, HEAD_DIM_BAND, V_HEAD_DIM_BAND, BLOCK_M, True, ACC,
    )  # fmt: skip
    dk, dv = _walk_tokens(
        dk, dv, k, v, key, block, Q, DO, LSE2, DELTA, BITS,
        first_t + masked_tiles * BLOCK_M, tiles - masked_tiles, length,
        stride_qt, stride_qh, stride_dot, stride_doh, scale, num_heads,
        NUM_KV_HEADS * GROUP, NUM_KV_HEADS,
        HEAD_DIM, V_HEAD_DIM, HEAD_DIM_BAND, V_HEAD_DIM_BAND, BLOCK_M, False, ACC,
    )  # fmt: skip
    dk = scale_rows(dk, scale)
    key_row = (row_of_start(seq, start, num_keys, VARLEN) + key) * NUM_KV_HEADS + kv_head
    DK += part * stride_dk_part
    DV += part * stride_dv_part
    scatter_rows(DK, key_row * HEAD_DIM, None, dk, mask_n, HEAD_DIM, False)
    scatter_rows(DV, key_row * V_HEAD_DIM, None, dv, mask_n, V_HEAD_DIM, False)

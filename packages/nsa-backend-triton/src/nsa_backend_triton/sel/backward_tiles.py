"""dq of the selected branch, tile by tile, in a fixed order.

    dq = scale * sum over the selected keys of dS K,    dS = P (do V^T - delta)

A program owns a tile of BLOCK_T neighbouring tokens of one kv head with all GROUP heads: BLOCK_T *
GROUP rows, padded to BLOCK_M. It walks the union of the blocks that they selected, as the forward
does:

    S = q k^T, dP = do v^T, dq += dS k
    [BLOCK_M, BLOCK_N], [BLOCK_M, D] in registers; q, do and num_stages times K, V on chip

A step reads BLOCK_N (Dk + Dv) elements from L2 for 2 BLOCK_M BLOCK_N (2 Dk + Dv) operations: at
BLOCK_M = 64 in bf16, 48 operations per byte. The tensor cores are the limit where
neighbouring tokens share their blocks; work on blocks that a token does not share is masked and
lost. No sum leaves a program, so equal inputs give equal bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_backend_triton.sel.backward_blocks import gather_rows, scatter_rows, softmax_backward
from nsa_backend_triton.shared.rows import (
    add_dot,
    dot_transposed,
    fetch_rows,
    place_queries,
    row_of_start,
    row_offset,
    scale_rows,
    zero_rows,
)


@triton.jit
def _accumulate_entries(
    dq, q, do, lse2, delta, offs_t, token_bit, K, V, K_DESC, V_DESC, seq, kv_head, ENTRIES,
    begin, end, stride_kt, stride_vt, length, scale,
    MAX_ENTRIES: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    HEAD_DIM_BAND: tl.constexpr, V_HEAD_DIM_BAND: tl.constexpr,
    SELECT_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
    USE_TMA: tl.constexpr, MASKED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Add the entries begin .. end of the tile's union to dq [BLOCK_M, Dk], BLOCK_N keys at a time.

    MASKED: some of their keys lie after a token or past the end of the sequence. ``token_bit``
    [BLOCK_M] is the bit of the row's token in an entry. USE_TMA requires BLOCK_N to divide a block.
    It loads an entry one iteration before its keys, whose address then depends on no load; with
    pointers, this costs more than it gains.
    """
    KEY_TILES: tl.constexpr = (SELECT_BLOCK + BLOCK_N - 1) // BLOCK_N
    if USE_TMA:
        block = tl.load(ENTRIES + begin, mask=begin < end, other=0)
        members = tl.load(ENTRIES + MAX_ENTRIES + begin, mask=begin < end, other=0)
    for i in tl.range(begin * KEY_TILES, end * KEY_TILES):
        if USE_TMA:
            next_entry = tl.minimum(i + 1, end * KEY_TILES - 1) // KEY_TILES
            next_block, next_members = (
                tl.load(ENTRIES + next_entry),
                tl.load(ENTRIES + MAX_ENTRIES + next_entry),
            )
        else:
            block = tl.load(ENTRIES + i // KEY_TILES)
            members = tl.load(ENTRIES + MAX_ENTRIES + i // KEY_TILES)
        selected = (members & token_bit) != 0
        offs_n = i % KEY_TILES * BLOCK_N + tl.arange(0, BLOCK_N)
        key = block * SELECT_BLOCK + offs_n
        mask_n = offs_n < SELECT_BLOCK
        if MASKED:
            mask_n &= key < length
        if USE_TMA:
            k = fetch_rows(
                K_DESC, seq, block * SELECT_BLOCK + i % KEY_TILES * BLOCK_N, kv_head,
                BLOCK_N, HEAD_DIM, HEAD_DIM_BAND,
            )  # fmt: skip
            v = fetch_rows(
                V_DESC, seq, block * SELECT_BLOCK + i % KEY_TILES * BLOCK_N, kv_head,
                BLOCK_N, V_HEAD_DIM, V_HEAD_DIM_BAND,
            )  # fmt: skip
        else:
            first_key = (block * SELECT_BLOCK).to(tl.int64)
            k = gather_rows(
                K + first_key * stride_kt, offs_n * stride_kt, None, mask_n,
                HEAD_DIM, HEAD_DIM_BAND,
            )  # fmt: skip
            v = gather_rows(
                V + first_key * stride_vt, offs_n * stride_vt, None, mask_n,
                V_HEAD_DIM, V_HEAD_DIM_BAND,
            )  # fmt: skip
        qk = dot_transposed(q, k, ACC)
        dp = dot_transposed(do, v, ACC)
        if USE_TMA and not MASKED:
            # A row whose token did not select the block takes no operation per key: infinity takes
            # its p to 0.
            _, ds = softmax_backward(
                qk, dp, None, tl.where(selected, lse2, float("inf"))[:, None], delta[:, None], scale
            )
        else:
            mask = selected[:, None] & mask_n[None, :]
            if MASKED:
                mask &= key[None, :] <= offs_t[:, None]
            _, ds = softmax_backward(qk, dp, mask, lse2[:, None], delta[:, None], scale)
        dq = add_dot(dq, ds, k)
        if USE_TMA:
            block, members = next_block, next_members
    return dq


@triton.jit(do_not_specialize=["num_seqs", "seq_len", "first_query", "tiles"])
def sel_tile_backward(
    Q, K, V, K_DESC, V_DESC, DO, LSE2, DELTA, ENTRIES, COUNTS, CU_SEQLENS, DQ,
    stride_q, stride_k, stride_v, stride_do,
    scale, num_seqs, seq_len, first_query, tiles,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    HEAD_DIM_BAND: tl.constexpr, V_HEAD_DIM_BAND: tl.constexpr,
    SELECT_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr,
    MAX_ENTRIES: tl.constexpr, USE_TMA: tl.constexpr,
    VARLEN: tl.constexpr, PARTIAL: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Write DQ [B, S, Hq, HEAD_DIM], rounded once, for one tile of tokens of one kv head.

    LSE2, DELTA [B, S, Hq]; ENTRIES and COUNTS are those of unions.build: entries that need no
    causal mask come last. Kv heads are the outermost index, so that K and V of one head stay in L2,
    and the tiles with the most entries start first.
    """
    kv_head = tl.program_id(0) // tiles
    tile = tiles - 1 - tl.program_id(0) % tiles
    seq, start, query_start, length, first_t = place_queries(
        tile, CU_SEQLENS, num_seqs, seq_len, first_query, BLOCK_T, VARLEN, PARTIAL
    )
    if first_t >= length:
        return
    stride_qb, stride_qt, stride_qh = stride_q
    _, stride_kt, _ = stride_k
    _, stride_vt, _ = stride_v
    stride_dob, stride_dot, stride_doh = stride_do
    offs_m = tl.arange(0, BLOCK_M)
    local_t = offs_m // GROUP
    offs_t = first_t + local_t
    mask_m = (local_t < BLOCK_T) & (offs_t < length)
    batch, head = seq.to(tl.int64), kv_head * GROUP + offs_m % GROUP
    row_t = query_start.to(tl.int64) + offs_t
    q = gather_rows(
        Q, batch * stride_qb + row_t * stride_qt, head * stride_qh, mask_m, HEAD_DIM, HEAD_DIM_BAND
    )
    do = gather_rows(
        DO, batch * stride_dob + row_t * stride_dot, head * stride_doh, mask_m,
        V_HEAD_DIM, V_HEAD_DIM_BAND,
    )  # fmt: skip
    first_row = row_of_start(seq, query_start, seq_len, VARLEN)
    offs_row = (first_row + offs_t) * (NUM_KV_HEADS * GROUP) + head
    lse2 = tl.load(LSE2 + offs_row, mask=mask_m, other=float("inf"))
    delta = tl.load(DELTA + offs_row, mask=mask_m, other=0.0)
    token_bit = tl.where(mask_m, tl.full([BLOCK_M], 1, tl.int32) << local_t, 0)
    K += row_offset(batch, start, kv_head, stride_k)
    V += row_offset(batch, start, kv_head, stride_v)
    union = kv_head * tiles + tile
    entries = ENTRIES + union.to(tl.int64) * (2 * MAX_ENTRIES)
    num_entries = tl.load(COUNTS + union * 2)
    num_masked = tl.load(COUNTS + union * 2 + 1)
    dq = zero_rows(BLOCK_M, HEAD_DIM, HEAD_DIM_BAND, ACC)
    dq = _accumulate_entries(
        dq, q, do, lse2, delta, offs_t, token_bit, K, V, K_DESC, V_DESC, seq, kv_head, entries,
        0, num_masked, stride_kt, stride_vt, length, scale,
        MAX_ENTRIES, HEAD_DIM, V_HEAD_DIM, HEAD_DIM_BAND, V_HEAD_DIM_BAND,
        SELECT_BLOCK, BLOCK_N, USE_TMA, True, ACC,
    )  # fmt: skip
    dq = _accumulate_entries(
        dq, q, do, lse2, delta, offs_t, token_bit, K, V, K_DESC, V_DESC, seq, kv_head, entries,
        num_masked, num_entries, stride_kt, stride_vt, length, scale,
        MAX_ENTRIES, HEAD_DIM, V_HEAD_DIM, HEAD_DIM_BAND, V_HEAD_DIM_BAND,
        SELECT_BLOCK, BLOCK_N, USE_TMA, False, ACC,
    )  # fmt: skip
    dq = scale_rows(dq, scale)
    scatter_rows(DQ, offs_row * HEAD_DIM, None, dq, mask_m, HEAD_DIM, False)

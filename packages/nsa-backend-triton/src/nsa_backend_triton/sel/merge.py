"""Add the partial outputs of a token's pairs to the output of its tile.

    o = sum over i of exp(lse_i - lse) o_i,    lse = log of the sum over i of exp(lse_i)

Softmax attention over a union of disjoint key sets i, from the attention over each of them: the
tile's shared blocks are one set, each pair of the path over buckets is another.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_backend_triton.shared.rows import finite_shift


@triton.jit(
    do_not_specialize=[
        "seq_len", "first_row", "num_rows", "first_head", "first_bucket", "stride_lse_b",
        "stride_lse_h",
    ]
)  # fmt: skip
def sel_merge_kernel(
    PARTIAL_O, PARTIAL_LSE, PLACES, OFFSETS, O, LSE,
    seq_len, first_row, num_rows, first_head, first_bucket, num_kv_heads,
    stride_lse_b: tl.int64, stride_lse_h: tl.int64,
    V_HEAD_DIM: tl.constexpr, V_HEAD_DIM_PAD: tl.constexpr,
    GROUP: tl.constexpr, VARLEN: tl.constexpr, ACC: tl.constexpr,
    NUM_SELECTED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Merge the pairs with a place into O and LSE, for BLOCK_T tokens of one kv head.

    A launch takes one run: ``num_rows`` rows from ``first_row`` on, kv heads from ``first_head``
    on, and buckets from ``first_bucket`` on. PARTIAL_O and PARTIAL_LSE hold its pairs in order.

    The program holds acc [BLOCK_M, V_HEAD_DIM_PAD] in registers. It reads O and, of the
    NUM_SELECTED partial outputs of a token, the marked ones; it writes O and LSE. Two passes read
    the partial LSE: first for the maximum, then for the weights. They are a V_HEAD_DIM-th of the
    bytes. Bound by memory.
    """
    tiles = tl.cdiv(num_rows, BLOCK_T)
    kv_head = first_head + tl.program_id(0) // tiles
    offs_m = tl.arange(0, BLOCK_M)
    local_t = tl.program_id(0) % tiles * BLOCK_T + offs_m // GROUP
    mask_m = (offs_m < BLOCK_T * GROUP) & (local_t < num_rows)
    head = offs_m % GROUP
    row = local_t.to(tl.int64) + first_row
    place_ptrs = PLACES + (row * num_kv_heads + kv_head) * NUM_SELECTED
    run_start = tl.load(OFFSETS + first_bucket)
    if VARLEN:
        lse_ptrs = LSE + (kv_head * GROUP + head) * stride_lse_h + row
    else:
        lse_ptrs = (
            LSE
            + row // seq_len * stride_lse_b
            + (kv_head * GROUP + head) * stride_lse_h
            + row % seq_len
        )
    offs_d = tl.arange(0, V_HEAD_DIM_PAD)
    o_ptrs = (
        O + ((row * num_kv_heads + kv_head) * GROUP + head)[:, None] * V_HEAD_DIM + offs_d[None, :]
    )
    mask_o = mask_m[:, None] & (offs_d < V_HEAD_DIM)[None, :]
    tile_lse = tl.load(lse_ptrs, mask=mask_m, other=float("-inf"))
    m_i = tile_lse
    any_marked = mask_m & (offs_m < 0)
    for i in tl.range(NUM_SELECTED, loop_unroll_factor=UNROLL):
        place = tl.load(place_ptrs + i, mask=mask_m, other=-1)
        partial = (place - run_start).to(tl.int64) * GROUP + head
        m_i = tl.maximum(m_i, tl.load(PARTIAL_LSE + partial, mask=place >= 0, other=float("-inf")))
        any_marked |= place >= 0
    if tl.max(any_marked.to(tl.int32), 0) == 0:
        return
    shift = finite_shift(m_i)
    l_i = tl.exp(tile_lse - shift)
    acc = tl.load(o_ptrs, mask=mask_o, other=0.0).to(ACC) * l_i[:, None]
    for i in tl.range(NUM_SELECTED, loop_unroll_factor=UNROLL):
        place = tl.load(place_ptrs + i, mask=mask_m, other=-1)
        partial = (place - run_start).to(tl.int64) * GROUP + head
        lse = tl.load(PARTIAL_LSE + partial, mask=place >= 0, other=float("-inf"))
        weight = tl.exp(lse - shift)
        partial_ptrs = PARTIAL_O + partial[:, None] * V_HEAD_DIM + offs_d[None, :]
        mask = (place >= 0)[:, None] & (offs_d < V_HEAD_DIM)[None, :]
        acc += (
            tl.load(partial_ptrs, mask=mask, other=0.0, eviction_policy="evict_first").to(ACC)
            * weight[:, None]
        )
        l_i += weight
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    tl.store(o_ptrs, (acc / l_safe[:, None]).to(O.dtype.element_ty), mask=mask_o)
    tl.store(lse_ptrs, tl.where(l_i == 0.0, float("-inf"), m_i + tl.log(l_safe)), mask=mask_m)

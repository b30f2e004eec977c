"""Prepare two numbers per row for the backward: delta and the LSE in base 2.

    delta = sum over columns of do * o,    lse2 = lse * log2(e)

dS = P * (dP - delta) uses delta, and exp2(s - lse2) is P. A row is one head of one token, and a
program owns BLOCK_M rows. It reads do and o once and writes two numbers per row in fp32 (fp64 for
fp64), token by token, so that the heads of a token are adjacent. Bound by memory.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from nsa_backend_triton.host.constexprs import accumulator
from nsa_backend_triton.host.launch_cache import Launch, cached_by_metadata
from nsa_backend_triton.host.strides import lse_strides, strides
from nsa_backend_triton.shared.rows import load_heads, row_positions, to_base_2


@triton.jit(do_not_specialize=["num_rows", "seq_len", "stride_lse_b", "stride_lse_h"])
def attention_delta(
    DO, O, LSE, DELTA, LSE2,
    stride_do, stride_o,
    stride_lse_b: tl.int64, stride_lse_h: tl.int64,
    num_rows, seq_len,
    NUM_HEADS: tl.constexpr, V_HEAD_DIM: tl.constexpr, V_HEAD_DIM_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Write DELTA and LSE2 [num_rows], rows in the order (sequence, token, head).

    LSE2 is inf in a row without keys.
    """
    row, seq, token, head, row_exists = row_positions(num_rows, seq_len, NUM_HEADS, BLOCK_M)
    offs_d = tl.arange(0, V_HEAD_DIM_PAD)
    mask = row_exists[:, None] & (offs_d < V_HEAD_DIM)[None, :]
    do = load_heads(DO, seq, token, head, stride_do, offs_d, mask).to(ACC)
    o = load_heads(O, seq, token, head, stride_o, offs_d, mask).to(ACC)
    tl.store(DELTA + row, tl.sum(do * o, 1), mask=row_exists)
    offs_lse = seq * stride_lse_b + head * stride_lse_h + token
    lse = tl.load(LSE + offs_lse, mask=row_exists, other=0.0)
    lse2 = tl.where(lse == float("-inf"), float("inf"), to_base_2(lse))
    tl.store(LSE2 + row, lse2, mask=row_exists)


@cached_by_metadata
def _prepare(do: Tensor, o: Tensor, lse: Tensor, packed: bool) -> Launch:
    *lead, tokens, num_heads, v_head_dim = do.shape
    padded = triton.next_power_of_2(v_head_dim)
    block_m, num_rows = max(1, 8192 // padded), math.prod(lead) * tokens * num_heads
    return Launch(
        attention_delta, (triton.cdiv(num_rows, block_m),),
        strides(do, packed, int64_products=True), strides(o, packed, int64_products=True),
        *lse_strides(lse, packed),
        num_rows, tokens,
        NUM_HEADS=num_heads, V_HEAD_DIM=v_head_dim, V_HEAD_DIM_PAD=padded,
        BLOCK_M=block_m, ACC=accumulator(do.dtype),
        num_warps=8,
    )  # fmt: skip


def rows(do: Tensor, o: Tensor, lse: Tensor, *, packed: bool) -> tuple[Tensor, Tensor]:
    """Return delta and lse2 [B, S, Hq] (packed [T, Hq]) in the dtype of ``lse``.

    do and o are [B, S, Hq, Dv], lse [B, Hq, S] in natural logarithm. lse2 is in base 2, and inf in
    a row without keys, so that exp2(s - lse2) is P in every row.
    """
    delta, lse2 = lse.new_empty(do.shape[:-1]), lse.new_empty(do.shape[:-1])
    _prepare(do, o, lse, packed)(do, o, lse, delta, lse2)
    return delta, lse2

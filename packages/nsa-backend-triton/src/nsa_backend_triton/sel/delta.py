"""delta = sum over d of do * o, per row in fp32 (fp64 for fp64): what dS = P * (dP - delta)
subtracts.

A program takes ROWS rows, a row being one head of one token: do and o are read once, two numbers a
row are written, delta and the row's lse, so that a token's h numbers lie together. Bound by memory.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from nsa_backend_triton.host.launch_cache import Launch, remembered
from nsa_backend_triton.host.sequences import accumulator, lse_strides, strides
from nsa_backend_triton.shared.rows import LOG2E


@triton.jit(do_not_specialize=["n_rows", "seq_len", "l_b", "l_h"])
def attention_delta(
    DO, O, LSE, DELTA, LSE_ROWS,
    d_b, d_t, d_h, o_b, o_t, o_h, l_b: tl.int64, l_h: tl.int64, n_rows, seq_len,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """DELTA, LSE_ROWS [n_rows] in the order of (sequence, token, head); WIDTH is DIM padded to a
    power of two.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head, col = row // HEADS, row % HEADS, tl.arange(0, WIDTH)
    seq, token = token // seq_len, token % seq_len
    mask = (row < n_rows)[:, None] & (col < DIM)[None, :]
    do = tl.load(
        DO + (seq * d_b + token * d_t + head * d_h)[:, None] + col[None, :], mask=mask, other=0.0
    )
    o = tl.load(
        O + (seq * o_b + token * o_t + head * o_h)[:, None] + col[None, :], mask=mask, other=0.0
    )
    tl.store(DELTA + row, tl.sum(do.to(ACC) * o.to(ACC), 1), mask=row < n_rows)
    lse = tl.load(LSE + seq * l_b + head * l_h + token, mask=row < n_rows, other=0.0)
    tl.store(
        LSE_ROWS + row, tl.where(lse == float("-inf"), float("inf"), lse * LOG2E), mask=row < n_rows
    )


@remembered
def _prepare(do: Tensor, o: Tensor, lse: Tensor, packed: bool) -> Launch:
    *lead, tokens, heads, dim = do.shape
    width = triton.next_power_of_2(dim)
    size, count = max(1, 8192 // width), math.prod(lead) * tokens * heads
    return Launch(
        attention_delta, (triton.cdiv(count, size),),
        *strides(do, packed, far=True), *strides(o, packed, far=True), *lse_strides(lse, packed),
        count, tokens,
        HEADS=heads, DIM=dim, WIDTH=width, ROWS=size, ACC=accumulator(do.dtype), num_warps=8,
    )  # fmt: skip


def rows(do: Tensor, o: Tensor, lse: Tensor, *, packed: bool) -> tuple[Tensor, Tensor]:
    """delta and lse [B, S, Hq] (packed [T, Hq]) of do and o [B, S, Hq, Dv] and lse [B, Hq, S], in
    lse's dtype.

    The lse to base 2, and inf in a row without keys: then exp2(s - lse) is P in every row.
    """
    delta, turned = lse.new_empty(do.shape[:-1]), lse.new_empty(do.shape[:-1])
    _prepare(do, o, lse, packed)(do, o, lse, delta, turned)
    return delta, turned

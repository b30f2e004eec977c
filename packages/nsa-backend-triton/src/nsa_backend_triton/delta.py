"""delta = sum over d of do * o, per row in fp32 (fp64 for fp64): what dS = P * (dP - delta) subtracts.

A program takes ROWS rows, a row being one head of one token: do and o are read once, two numbers a row are written:
delta, and the lse as backward takes it, in base 2 and inf for a row without keys, whose P is then 0. Bound by memory.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from nsa_backend_triton.launch import accumulator, lse_strides, strides
from nsa_backend_triton.prepared import Launch, remembered
from nsa_backend_triton.tile import LOG2E


@triton.jit(do_not_specialize=["n_rows", "seq_len", "lse_b", "lse_h"])
def attention_delta(
    DO, O, LSE, DELTA, STATS,
    d_b, d_t, d_h, o_b, o_t, o_h, lse_b: tl.int64, lse_h: tl.int64, n_rows, seq_len,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BY_HEAD: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """DELTA, STATS [n_rows] in the order of (sequence, token, head), BY_HEAD of (sequence, head, token).

    WIDTH is DIM padded to a power of two.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, WIDTH)
    if BY_HEAD:
        head, token = row // seq_len % HEADS, row % seq_len
        seq = row // seq_len // HEADS
    else:
        head, token = row % HEADS, row // HEADS % seq_len
        seq = row // HEADS // seq_len
    mask = (row < n_rows)[:, None] & (col < DIM)[None, :]
    do = tl.load(DO + (seq * d_b + token * d_t + head * d_h)[:, None] + col[None, :], mask=mask, other=0.0)
    o = tl.load(O + (seq * o_b + token * o_t + head * o_h)[:, None] + col[None, :], mask=mask, other=0.0)
    tl.store(DELTA + row, tl.sum(do.to(ACC) * o.to(ACC), 1), mask=row < n_rows)
    lse = tl.load(LSE + seq * lse_b + head * lse_h + token, mask=row < n_rows, other=0.0)
    tl.store(STATS + row, tl.where(lse == float("-inf"), float("inf"), lse * LOG2E), mask=row < n_rows)


@remembered
def _prepare(do: Tensor, o: Tensor, lse: Tensor, packed: bool, by_head: bool) -> Launch:
    *lead, tokens, heads, dim = do.shape
    width = triton.next_power_of_2(dim)
    size, count = max(1, 8192 // width), math.prod(lead) * tokens * heads
    return Launch(
        attention_delta, (triton.cdiv(count, size),),
        *strides(do, packed), *strides(o, packed), *lse_strides(lse, packed), count, tokens,
        HEADS=heads, DIM=dim, WIDTH=width, ROWS=size, BY_HEAD=by_head, ACC=accumulator(do.dtype), num_warps=8,
    )  # fmt: skip


def rows(do: Tensor, o: Tensor, lse: Tensor, *, packed: bool, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """delta, and lse in base 2, inf where it is -inf: [B, S, Hq] (packed [T, Hq]) in fp32 (fp64 for fp64).

    do, o [B, S, Hq, Dv], lse [B, Hq, S] (packed [Hq, T]). ``out`` [2, *lse]: take both there, in lse's order.
    """
    delta, stats = out.unbind() if out is not None else (lse.new_empty(do.shape[:-1]), lse.new_empty(do.shape[:-1]))
    _prepare(do, o, lse, packed, out is not None)(do, o, lse, delta, stats)
    return delta, stats

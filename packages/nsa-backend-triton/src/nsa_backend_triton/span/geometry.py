"""Geometry of a span: which keys a run of queries sees, which queries see a run of keys, and one
masked tile of rows.

Query t sees key j where j * STRIDE + SIZE - 1 <= t and, with WINDOW > 0, t < j + WINDOW. The window
is SIZE = STRIDE = 1; the compressed branch (SIZE = l, STRIDE = d) has WINDOW = 0. All positions are
local to a sequence.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_backend_triton.shared.rows import load_at, num_compressed, store_at


@triton.jit
def key_place(
    seq,
    start,
    length,
    CU_KEYS,
    key_rows,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    VARLEN: tl.constexpr,
):
    """(first key row, number of keys) of a sequence; never a row past ``key_rows``, whatever the
    boundaries say.
    """
    keys = num_compressed(length, SIZE, STRIDE)
    if VARLEN and SIZE * STRIDE > 1:
        first = tl.minimum(tl.load(CU_KEYS + seq), key_rows)
        return first, tl.minimum(keys, key_rows - first)
    return start, keys


@triton.jit
def key_span(
    first,
    last,
    keys,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Keys of the queries first .. last: (low, all_low, all_high, high).

    Somebody sees [low, high); everybody sees [all_low, all_high), which lies on BLOCK's grid from
    low and may be empty.
    """
    low = 0
    high = tl.minimum(num_compressed(last + 1, SIZE, STRIDE), keys)
    inner_low = 0
    inner_high = tl.minimum(num_compressed(first + 1, SIZE, STRIDE), keys)
    if WINDOW > 0:
        low = tl.maximum(first - WINDOW + 1, 0)
        inner_low = tl.maximum(last - WINDOW + 1, 0)
    all_low = tl.minimum(low + tl.cdiv(inner_low - low, BLOCK) * BLOCK, high)
    all_high = tl.maximum(low + tl.maximum(inner_high - low, 0) // BLOCK * BLOCK, all_low)
    return low, all_low, all_high, high


@triton.jit
def query_span(first, last, length, SIZE: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr):
    """Queries that see the keys first .. last: (low, inner_low, inner_high, high).

    Somebody in [low, high) does; every query of [inner_low, inner_high), which may be empty, sees
    them all.
    """
    low = tl.minimum(first * STRIDE + SIZE - 1, length)
    inner_low = last * STRIDE + SIZE - 1
    high = length
    inner_high = length
    if WINDOW > 0:
        high = tl.minimum(last + WINDOW, length)
        inner_high = tl.minimum(first + WINDOW, length)
    return low, inner_low, inner_high, high


@triton.jit
def hide(s, index, first, end, FIRST: tl.constexpr, END: tl.constexpr):
    """s [R, C] where first[r] <= index[c] < end[r], -inf elsewhere; FIRST, END: whether that side
    counts.

    Side by side, not with &: the compiler would keep both predicates of every element in registers.
    """
    if END:
        s = tl.where(index[None, :] < end[:, None], s, float("-inf"))
    if FIRST:
        s = tl.where(index[None, :] >= first[:, None], s, float("-inf"))
    return s


@triton.jit
def load_rows(
    X, rows, limit, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr
):
    """Rows [R, WIDTH] of X in bands; 0 right of WIDTH and, MASKED, where a row is not in [0,
    limit).
    """
    ok = ((rows >= 0) & (rows < limit)) if MASKED else None
    return load_at(X, rows * stride, ok, WIDTH, BLOCK)


@triton.jit
def fetch_rows(X, batch, row, head, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Rows row .. row + ROWS of a head of X, a descriptor of [B, L, H, WIDTH], in bands."""
    x = ()
    for first in tl.static_range(0, WIDTH, BLOCK):
        x = x + (X.load([batch, row, head, first]).reshape(ROWS, BLOCK),)
    return x


@triton.jit
def store_rows(X, rows, limit, stride, x, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Store x [R, WIDTH], in bands, rounded to X's dtype, into the rows of X below ``limit``."""
    store_at(X, rows * stride, x, rows < limit, WIDTH, BLOCK)

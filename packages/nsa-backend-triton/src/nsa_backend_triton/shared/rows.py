"""What every kernel shares: where a tile lies, rows of a head's width, and the end of an online
softmax.

Rows of D columns are a tuple of bands of BLOCK columns, a power of two: one band, or three where D
would fill at most three quarters of one (192 as 3 x 64, not as 256, see launch.band). Columns past
D's end hold zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def owner(BOUNDS, runs, index, TILE):
    """Which of ``runs`` runs, that begin at BOUNDS, owns tile ``index``: run i those from BOUNDS[i]
    // TILE + i on.
    """
    low = 0
    high = runs  # the last run whose first tile is <= index lies in [low, high)
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(BOUNDS + middle) // TILE + middle <= index:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def place(index, CU, n_seqs, seq_len, TILE: tl.constexpr, VARLEN: tl.constexpr):
    """Tile ``index`` of the sequences cut into tiles of TILE rows, sequences after each other.

    Returns (sequence, its first row in the packed axis, its length, the tile's first row inside
    it). Dense: the first row is 0 and the sequence addresses the batch axis. Packed: document i
    owns tiles from cu[i] // TILE + i on, which is never too few for it; a tile past its end has its
    first row >= length, and has nothing to do. ``seq_len`` is T.
    """
    if VARLEN:
        seq = owner(CU, n_seqs, index, TILE)
        # Boundaries are only seen on the device: malformed ones may give wrong rows, never an
        # address outside.
        start = tl.minimum(tl.maximum(tl.load(CU + seq), 0), seq_len)
        length = tl.maximum(tl.minimum(tl.load(CU + seq + 1), seq_len) - start, 0)
        first = start // TILE + seq
        row = tl.where(index < first, length, (index - first) * TILE)
    else:
        tiles = tl.cdiv(seq_len, TILE)
        seq = index // tiles
        start = seq * 0
        length = seq_len
        row = (index % tiles) * TILE
    return seq, start, length, row


@triton.jit
def num_compressed(length, SIZE: tl.constexpr, STRIDE: tl.constexpr):
    """Compressed tokens of a document of ``length`` tokens: max(0, floor((length - l) / d) + 1)."""
    return tl.where(length < SIZE, 0, (length - SIZE) // STRIDE + 1)


@triton.jit
def finite_shift(m):
    """m [M], 0 where it is -inf: scores of a row without keys stay -inf when it is subtracted."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def online_softmax_update(m, l, s, row_max, rows, MASKED: tl.constexpr):
    """Add a tile of scores to an online softmax in base 2; returns (m, l, p, alpha).

    m, l [M] are the running maximum and sum, s [M, N] the tile's scores times log2(e) and row_max
    [M] their maximum. p [M, N] = exp2(s - new m); alpha [M] = exp2(old m - new m) rescales what was
    accumulated before. ``rows`` [M] selects the rows that see the tile, p is 0 in the others; None:
    every row. MASKED: a row may have seen no key so far, so that its m is -inf.
    """
    m_new = tl.maximum(m, row_max)
    if rows is not None:
        m_new = tl.where(rows, m_new, m)
    shift = finite_shift(m_new) if MASKED else m_new
    if rows is not None:  # exp2(-inf) = 0 costs no operation per key
        p = tl.exp2(s - tl.where(rows, shift, float("inf"))[:, None])
    else:
        p = tl.exp2(s - shift[:, None])
    alpha = tl.exp2(m - shift)
    return m_new, l * alpha + tl.sum(p, 1), p, alpha


@triton.jit
def finish(m, l):
    """What divides the output [M] and the natural-log LSE [M] of an online softmax; a row without
    keys: 1 and -inf.
    """
    l_safe = tl.where(l == 0.0, 1.0, l)
    return l_safe, tl.where(l == 0.0, float("-inf"), (m + tl.log2(l_safe)) * LN2)


@triton.jit
def load_at(X, at, ok, D: tl.constexpr, BLOCK: tl.constexpr):
    """Rows [R, D] of X that begin at offsets ``at`` [R], 0 where not ``ok`` [R]; ok None: every row
    is there.
    """
    x = ()
    for first in tl.static_range(0, D, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        where = X + at[:, None] + columns[None, :]
        if ok is not None:
            band = tl.load(where, mask=ok[:, None] & (columns < D)[None, :], other=0.0)
        elif first + BLOCK > D:
            band = tl.load(where, mask=(columns < D)[None, :], other=0.0)
        else:
            band = tl.load(where)
        x = x + (band,)
    return x


@triton.jit
def store_at(X, at, x, ok, D: tl.constexpr, BLOCK: tl.constexpr):
    """Store rows x [R, D], rounded to X's dtype, where ``ok`` [R], at offsets ``at`` [R]."""
    for i in tl.static_range((D + BLOCK - 1) // BLOCK):
        columns = i * BLOCK + tl.arange(0, BLOCK)
        where = X + at[:, None] + columns[None, :]
        tl.store(where, x[i].to(X.dtype.element_ty), mask=ok[:, None] & (columns < D)[None, :])


@triton.jit
def zero_rows(ROWS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr):
    """Rows [ROWS, D] of zeros."""
    x = ()
    for _ in tl.static_range(0, D, BLOCK):
        x = x + (tl.zeros([ROWS, BLOCK], ACC),)
    return x


@triton.jit
def transpose(x, D: tl.constexpr, BLOCK: tl.constexpr):
    """Rows [R, D] as columns, bands of [BLOCK, R]."""
    turned = ()
    for i in tl.static_range((D + BLOCK - 1) // BLOCK):
        turned = turned + (tl.trans(x[i]),)
    return turned


@triton.jit
def dot_columns(x, y, D: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr):
    """x y [M, N] of rows x [M, D] and columns y [D, N] in bands."""
    s = tl.dot(x[0], y[0], input_precision="ieee", out_dtype=ACC)
    for i in tl.static_range(1, (D + BLOCK - 1) // BLOCK):
        s = tl.dot(x[i], y[i], s, input_precision="ieee", out_dtype=ACC)
    return s


@triton.jit
def add_dot(acc, p, x, D: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr):
    """Rows acc + p x [M, D] of p [M, N] and rows x [N, D]."""
    more = ()
    for i in tl.static_range((D + BLOCK - 1) // BLOCK):
        more = more + (tl.dot(p, x[i], acc[i], input_precision="ieee", out_dtype=ACC),)
    return more


@triton.jit
def divide_rows(x, divisor, D: tl.constexpr, BLOCK: tl.constexpr):
    """Rows x [R, D] over divisor [R]."""
    over = ()
    for i in tl.static_range((D + BLOCK - 1) // BLOCK):
        over = over + (x[i] / divisor[:, None],)
    return over


@triton.jit
def scale_rows(x, factor, D: tl.constexpr, BLOCK: tl.constexpr):
    """Rows x [R, D] times factor: [R, 1], or a number."""
    scaled = ()
    for i in tl.static_range((D + BLOCK - 1) // BLOCK):
        scaled = scaled + (x[i] * factor,)
    return scaled

"""Device code that all kernels share: tile positions, rows in bands, and the online softmax.

Rows of HEAD_DIM columns are a tuple of bands of BAND columns, a power of two: one band, or three
where HEAD_DIM fills at most three quarters of one (192 columns are 3 x 64, not 256; see
host.constexprs.band and value_band). Columns past HEAD_DIM hold zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LOG2E_REST = tl.constexpr(1.925962991126617e-8)  # log2(e) - float32(log2(e))
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def clamped(x, low, high):
    """x, at least ``low`` and at most ``high``."""
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def owner(BOUNDS, num_runs, index, TILE, first=0, rows=0, PARTIAL: tl.constexpr = False):
    """The run that owns tile ``index``: the last one whose first tile is <= index.

    Run i begins at BOUNDS[i], and its first tile is BOUNDS[i] // TILE + i. PARTIAL: only the rows
    first .. first + rows - 1 are cut into tiles, and run i begins at its first one of these.
    """
    low = 0
    high = num_runs  # the result lies in [low, high)
    while high - low > 1:
        middle = (low + high) // 2
        bound = tl.load(BOUNDS + middle)
        if PARTIAL:
            bound = clamped(bound - first, 0, rows)
        if bound // TILE + middle <= index:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def place(index, CU_SEQLENS, num_seqs, seq_len, TILE: tl.constexpr, VARLEN: tl.constexpr):
    """Position of tile ``index`` when all sequences are cut into tiles of TILE rows, in order.

    Returns (sequence, its first row in the packed axis, its length, the tile's first row inside
    it). Dense: the first row is 0 and the sequence addresses the batch axis. Packed: ``seq_len`` is
    T, and document i owns the tiles from CU_SEQLENS[i] // TILE + i on, which are never too few for
    it. A tile past the end of its document has its first row >= length and no work.
    """
    if VARLEN:
        seq = owner(CU_SEQLENS, num_seqs, index, TILE)
        # The host never sees the boundaries: malformed ones may give wrong rows, but never an
        # address outside the tensor.
        start = tl.minimum(tl.maximum(tl.load(CU_SEQLENS + seq), 0), seq_len)
        length = tl.maximum(tl.minimum(tl.load(CU_SEQLENS + seq + 1), seq_len) - start, 0)
        first = start // TILE + seq
        row = tl.where(index < first, length, (index - first) * TILE)
    else:
        num_tiles = tl.cdiv(seq_len, TILE)
        seq = index // num_tiles
        start = seq * 0
        length = seq_len
        row = (index % num_tiles) * TILE
    return seq, start, length, row


@triton.jit
def place_queries(
    index, CU_SEQLENS, num_seqs, seq_len, first_query,
    TILE: tl.constexpr, VARLEN: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Position of tile ``index`` of the queries; PARTIAL: q holds only some rows of its sequences.

    Returns (sequence, its first row on the axis of the keys, its first row on the axis of the
    queries, the end of its queries, the tile's first token). The last two are positions in the
    sequence. Rows of q and of tensors like it lie at "first row on the axis of the queries" +
    position, which is >= 0 for every token of the tile; the first row itself may be negative.
    Without PARTIAL this is :func:`place`, and ``first_query`` is not read.

    ``seq_len`` is S of q, packed T of q. Row 0 of q is the token ``first_query`` of each sequence,
    packed the row ``first_query`` of the axis that CU_SEQLENS divides.
    """
    if not PARTIAL:
        seq, start, length, row = place(index, CU_SEQLENS, num_seqs, seq_len, TILE, VARLEN)
        return seq, start, start, length, row
    if VARLEN:
        seq = owner(CU_SEQLENS, num_seqs, index, TILE, first_query, seq_len, True)
        start = tl.maximum(tl.load(CU_SEQLENS + seq), 0)
        # The document's rows of q; malformed boundaries never lead outside q.
        begin = clamped(start - first_query, 0, seq_len)
        stop = tl.maximum(clamped(tl.load(CU_SEQLENS + seq + 1) - first_query, 0, seq_len), begin)
        query_start = start - first_query
        first = begin // TILE + seq
        end = stop - query_start
        row = tl.where(index < first, end, begin - query_start + (index - first) * TILE)
    else:
        num_tiles = tl.cdiv(seq_len, TILE)
        seq = index // num_tiles
        start = seq * 0
        query_start = start - first_query
        end = first_query + seq_len
        row = first_query + (index % num_tiles) * TILE
    return seq, start, query_start, end, row


@triton.jit
def row_of_start(seq, start, rows, VARLEN: tl.constexpr):
    """Row, in 64 bits, of position 0 of a sequence in a tensor that joins all sequences.

    ``start`` is the sequence's first row on its axis and ``rows`` the rows of a dense sequence.
    """
    start = start.to(tl.int64)
    return start if VARLEN else seq.to(tl.int64) * rows + start


@triton.jit
def row_offset(batch, token, head, stride):
    """Offset of a row in a tensor of strides (batch, token, head); batch and token in 64 bits."""
    stride_b, stride_t, stride_h = stride
    return (
        batch * tl.cast(stride_b, tl.int64) + tl.cast(token, tl.int64) * stride_t + head * stride_h
    )


@triton.jit
def row_positions(num_rows, seq_len, NUM_HEADS: tl.constexpr, BLOCK_M: tl.constexpr):
    """(row, sequence, token, head) of the program's rows, int64 [BLOCK_M], and which rows exist.

    A row is one head of one token.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    token = row // NUM_HEADS
    return row, token // seq_len, token % seq_len, row % NUM_HEADS, row < num_rows


@triton.jit
def load_heads(X, seq, token, head, stride, offs_d, mask):
    """Rows [M, columns ``offs_d``] of X, 0 outside ``mask``."""
    offs = row_offset(seq, token, head, stride)
    return tl.load(X + offs[:, None] + offs_d[None, :], mask=mask, other=0.0)


@triton.jit
def with_batch(stride_b, stride):
    """Strides (batch, token, head) of a batch stride and the strides (token, head).

    Some kernels take the batch stride on its own, because an int64 argument keeps its type and an
    element of a tuple does not: a small number becomes 32 bits wide, and the registers of its
    conversion make ptxas spill.
    """
    return stride_b, stride[0], stride[1]


@triton.jit
def num_compressed(length, COMPRESS_BLOCK: tl.constexpr, STRIDE: tl.constexpr):
    """Compressed tokens of ``length`` tokens (Eq. 7): max(0, floor((length - l) / d) + 1)."""
    return tl.where(length < COMPRESS_BLOCK, 0, (length - COMPRESS_BLOCK) // STRIDE + 1)


@triton.jit
def finite_shift(m_i):
    """m_i [M], 0 where it is -inf: scores of a row without keys stay -inf when it is subtracted."""
    return tl.where(m_i == float("-inf"), 0.0, m_i)


@triton.jit
def online_softmax_update(
    m_i, l_i, s, row_max, rows, MASKED: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """Add a tile of scores to an online softmax in base 2; returns (m_i, l_i, p, alpha).

    m_i, l_i [M] are the running maximum and sum, s [M, N] the tile's scores times log2(e) and
    row_max [M] their maximum. p [M, N] = exp2(s - new m_i); alpha [M] = exp2(old m_i - new m_i)
    rescales earlier sums. ``rows`` [M] selects the rows that see the tile, p is 0 in the others;
    None: every row. MASKED: a row may have seen no key so far, so that its m_i is -inf.

    DTYPE is that of v. If it is that of the scores, m_i is rounded up to an integer, so that alpha
    is a power of two and exact: the GPU's exp2 is too small by 0.85 u on average, and otherwise
    each change of m_i would move l_i, and with it the LSE, by that much. If p is rounded to a
    narrower DTYPE, the largest p of a row stays 1, which is exact in every dtype.
    """
    m_new = tl.maximum(m_i, row_max)
    if s.dtype == DTYPE:
        m_new = tl.ceil(m_new)
    if rows is not None:
        m_new = tl.where(rows, m_new, m_i)
    shift = finite_shift(m_new) if MASKED else m_new
    if rows is not None:  # exp2(-inf) = 0 costs no operation per key
        p = tl.exp2(s - tl.where(rows, shift, float("inf"))[:, None])
    else:
        p = tl.exp2(s - shift[:, None])
    alpha = tl.exp2(m_i - shift)
    return m_new, l_i * alpha + tl.sum(p, 1), p, alpha


@triton.jit
def to_base_2(lse):
    """An LSE in base 2, from the natural logarithm.

    log2(e) in fp32 is too small by 0.22 u. Alone it would move the LSE of all rows in one
    direction, and at an LSE of 8 all probabilities of the backward by 1.4 u.
    """
    if lse.dtype == tl.float64:
        return lse * LOG2E
    return tl.fma(lse, LOG2E, lse * LOG2E_REST)


@triton.jit
def finish_softmax(m_i, l_i):
    """(divisor of the output [M], natural-log LSE [M]) of an online softmax in base 2.

    A row without keys gets (1, -inf).
    """
    divisor = tl.where(l_i == 0.0, 1.0, l_i)
    return divisor, tl.where(l_i == 0.0, float("-inf"), (m_i + tl.log2(divisor)) * LN2)


@triton.jit
def load_at(X, offs, mask, HEAD_DIM: tl.constexpr, BAND: tl.constexpr):
    """Rows [R, HEAD_DIM] of X at ``offs`` [R], 0 outside ``mask`` [R]; None: all rows exist."""
    x = ()
    for first in tl.static_range(0, HEAD_DIM, BAND):
        offs_d = first + tl.arange(0, BAND)
        pointers = X + offs[:, None] + offs_d[None, :]
        if mask is not None:
            band = tl.load(pointers, mask=mask[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)
        elif first + BAND > HEAD_DIM:
            band = tl.load(pointers, mask=(offs_d < HEAD_DIM)[None, :], other=0.0)
        else:
            band = tl.load(pointers)
        x = x + (band,)
    return x


@triton.jit
def store_at(X, offs, x, mask, HEAD_DIM: tl.constexpr, BAND: tl.constexpr):
    """Store rows x [R, HEAD_DIM], rounded to X's dtype, at ``offs`` [R] where ``mask`` [R]."""
    for i in tl.static_range((HEAD_DIM + BAND - 1) // BAND):
        offs_d = i * BAND + tl.arange(0, BAND)
        pointers = X + offs[:, None] + offs_d[None, :]
        tl.store(
            pointers,
            x[i].to(X.dtype.element_ty),
            mask=mask[:, None] & (offs_d < HEAD_DIM)[None, :],
        )


@triton.jit
def load_rows(
    X, rows, limit, stride, HEAD_DIM: tl.constexpr, BAND: tl.constexpr, MASKED: tl.constexpr
):
    """Rows [R, HEAD_DIM] of X in bands; if MASKED, a row outside [0, limit) is 0."""
    mask = ((rows >= 0) & (rows < limit)) if MASKED else None
    return load_at(X, rows * stride, mask, HEAD_DIM, BAND)


@triton.jit
def fetch_rows(
    X_DESC, batch, row, head, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BAND: tl.constexpr
):
    """ROWS rows of a head from ``row`` on, in bands; X_DESC describes [B, L, H, HEAD_DIM]."""
    x = ()
    for first in tl.static_range(0, HEAD_DIM, BAND):
        x = x + (X_DESC.load([batch, row, head, first]).reshape(ROWS, BAND),)
    return x


@triton.jit
def read_rows(
    X, X_DESC, batch, head, first, offs, limit, stride,
    HEAD_DIM: tl.constexpr, BAND: tl.constexpr, MASKED: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    """Rows ``first`` + ``offs`` [R] of a head, in bands: by descriptor if USE_TMA, else from X.

    X points at the first row of the sequence and head; if MASKED, its rows from ``limit`` on are 0.
    """
    if USE_TMA:
        return fetch_rows(X_DESC, batch, first, head, offs.shape[0], HEAD_DIM, BAND)
    X += tl.cast(first, tl.int64) * stride
    return load_rows(X, offs, limit - first, stride, HEAD_DIM, BAND, MASKED)


@triton.jit
def store_rows(X, rows, limit, stride, x, HEAD_DIM: tl.constexpr, BAND: tl.constexpr):
    """Store x [R, HEAD_DIM], in bands, rounded to X's dtype, into the rows of X below ``limit``."""
    store_at(X, rows * stride, x, rows < limit, HEAD_DIM, BAND)


@triton.jit
def zero_rows(ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BAND: tl.constexpr, ACC: tl.constexpr):
    """Rows [ROWS, HEAD_DIM] of zeros."""
    x = ()
    for _ in tl.static_range(0, HEAD_DIM, BAND):
        x = x + (tl.zeros([ROWS, BAND], ACC),)
    return x


@triton.jit
def dot_transposed(x, y, ACC: tl.constexpr):
    """x y^T [M, N] of rows x [M, HEAD_DIM] and y [N, HEAD_DIM]."""
    NUM_BANDS: tl.constexpr = len(x)
    s = tl.dot(x[0], tl.trans(y[0]), input_precision="ieee", out_dtype=ACC)
    for i in tl.static_range(1, NUM_BANDS):
        s = tl.dot(x[i], tl.trans(y[i]), s, input_precision="ieee", out_dtype=ACC)
    return s


@triton.jit
def add_dot(acc, p, x):
    """acc + p x [M, HEAD_DIM] of p [M, N], rounded to x's dtype, and rows x [N, HEAD_DIM]."""
    NUM_BANDS: tl.constexpr = len(x)
    p = p.to(x[0].dtype)
    total = ()
    for i in tl.static_range(NUM_BANDS):
        dot = tl.dot(p, x[i], acc[i], input_precision="ieee", out_dtype=acc[i].dtype)
        total = total + (dot,)
    return total


@triton.jit
def divide_rows(x, divisor):
    """Rows x [R, HEAD_DIM] over divisor [R]."""
    NUM_BANDS: tl.constexpr = len(x)
    quotient = ()
    for i in tl.static_range(NUM_BANDS):
        quotient = quotient + (x[i] / divisor[:, None],)
    return quotient


@triton.jit
def scale_rows(x, factor):
    """Rows x [R, HEAD_DIM] times factor: [R, 1], or a number."""
    NUM_BANDS: tl.constexpr = len(x)
    scaled = ()
    for i in tl.static_range(NUM_BANDS):
        scaled = scaled + (x[i] * factor,)
    return scaled


@triton.jit
def add_rows(x, y):
    """Rows x + y [R, HEAD_DIM], in the wider of their dtypes."""
    NUM_BANDS: tl.constexpr = len(x)
    total = ()
    for i in tl.static_range(NUM_BANDS):
        total = total + (x[i] + y[i],)
    return total

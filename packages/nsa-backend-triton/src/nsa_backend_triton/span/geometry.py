"""Geometry of a span: which keys a tile of queries sees, which queries see a tile of keys.

Query t sees key j where j * STRIDE + COMPRESS_BLOCK - 1 <= t and, with WINDOW > 0, t < j + WINDOW.
The compressed branch has COMPRESS_BLOCK = l, STRIDE = d and WINDOW = 0 (Eq. 7); the sliding window
has COMPRESS_BLOCK = STRIDE = 1 and WINDOW = w. All positions are local to a sequence.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_backend_triton.shared.rows import num_compressed


@triton.jit
def locate_keys(
    seq, start, length, CU_KEYS, num_keys,
    COMPRESS_BLOCK: tl.constexpr, STRIDE: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """(first row in K, number of keys) of a sequence of ``length`` tokens that begins at ``start``.

    K has ``num_keys`` rows; malformed boundaries never lead past them.
    """
    seq_keys = num_compressed(length, COMPRESS_BLOCK, STRIDE)
    if VARLEN and COMPRESS_BLOCK * STRIDE > 1:
        key_start = tl.minimum(tl.load(CU_KEYS + seq), num_keys)
        return key_start, tl.minimum(seq_keys, num_keys - key_start)
    return start, seq_keys


@triton.jit
def key_span(
    first, last, seq_keys,
    COMPRESS_BLOCK: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Keys of the queries first .. last: (low, full_low, full_high, high).

    At least one query sees each key of [low, high). Every query sees all keys of [full_low,
    full_high), which may be empty; its bounds are multiples of BLOCK_N from low.
    """
    low = 0
    high = tl.minimum(num_compressed(last + 1, COMPRESS_BLOCK, STRIDE), seq_keys)
    inner_low = 0
    inner_high = tl.minimum(num_compressed(first + 1, COMPRESS_BLOCK, STRIDE), seq_keys)
    if WINDOW > 0:
        low = tl.maximum(first - WINDOW + 1, 0)
        inner_low = tl.maximum(last - WINDOW + 1, 0)
    full_low = tl.minimum(low + tl.cdiv(inner_low - low, BLOCK_N) * BLOCK_N, high)
    full_high = tl.maximum(low + tl.maximum(inner_high - low, 0) // BLOCK_N * BLOCK_N, full_low)
    return low, full_low, full_high, high


@triton.jit
def key_tiles(
    row, token, length, seq_keys,
    COMPRESS_BLOCK: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Tiles of BLOCK_N keys that the BLOCK_T queries from ``row`` on see, and the limits of rows.

    Returns ((first key of the masked tiles, first key of the full tiles, the full tiles as two
    indices among all tiles, number of masked tiles), first key of each row, end of its keys). Every
    query sees all keys of a full tile. ``token`` [M]: the query of each row.
    """
    last = tl.minimum(row + BLOCK_T, length) - 1
    low, full_low, full_high, high = key_span(
        row, last, seq_keys, COMPRESS_BLOCK, STRIDE, WINDOW, BLOCK_N
    )
    first_key = token - WINDOW + 1
    end_key = tl.minimum(num_compressed(token + 1, COMPRESS_BLOCK, STRIDE), seq_keys)
    skip_from, skip_to = (full_low - low) // BLOCK_N, (full_high - low) // BLOCK_N
    num_masked = tl.cdiv(high - low, BLOCK_N) - (skip_to - skip_from)
    return (low, full_low, skip_from, skip_to, num_masked), first_key, end_key


@triton.jit
def query_span(
    first, last, length,
    COMPRESS_BLOCK: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Queries that see the keys first .. last: (low, inner_low, inner_high, high).

    Each query of [low, high) sees at least one of the keys. Each query of [inner_low, inner_high),
    which may be empty, sees all of them.
    """
    low = tl.minimum(first * STRIDE + COMPRESS_BLOCK - 1, length)
    inner_low = last * STRIDE + COMPRESS_BLOCK - 1
    high = length
    inner_high = length
    if WINDOW > 0:
        high = tl.minimum(last + WINDOW, length)
        inner_high = tl.minimum(first + WINDOW, length)
    return low, inner_low, inner_high, high


@triton.jit
def held_queries(low, inner_low, inner_high, high, first):
    """The limits of :func:`query_span` in rows of q, which holds no query before ``first``.

    ``first`` is the position of row 0 of q in the sequence; it is negative if the sequence begins
    after row 0. [low, high) is empty if q holds none of its queries.
    """
    low = tl.maximum(low - first, 0)
    return low, inner_low - first, inner_high - first, tl.maximum(high - first, low)


@triton.jit
def mask_scores(s, offs, first, end, CHECK_FIRST: tl.constexpr, CHECK_END: tl.constexpr):
    """s [R, C] where first[r] <= offs[c] < end[r], -inf elsewhere; each limit only if CHECKed.

    Two selections in place of one with &: the compiler would keep both predicates of every element
    in registers.
    """
    if CHECK_END:
        s = tl.where(offs[None, :] < end[:, None], s, float("-inf"))
    if CHECK_FIRST:
        s = tl.where(offs[None, :] >= first[:, None], s, float("-inf"))
    return s

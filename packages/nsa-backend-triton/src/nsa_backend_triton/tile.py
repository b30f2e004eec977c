"""Pieces that every kernel shares: where a tile lies, and the end of an online softmax."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def owner(BOUNDS, runs, index, TILE):
    """Which of ``runs`` runs, that begin at BOUNDS, owns tile ``index``: run i those from BOUNDS[i] // TILE + i on."""
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

    Returns (sequence, its first row in the packed axis, its length, the tile's first row inside it). Dense: the first
    row is 0 and the sequence addresses the batch axis. Packed: document i owns tiles from cu[i] // TILE + i on, which
    is never too few for it; a tile past its end has its first row >= length, and has nothing to do. ``seq_len`` is T.
    """
    if VARLEN:
        seq = owner(CU, n_seqs, index, TILE)
        # Boundaries are only seen on the device: malformed ones may give wrong rows, never an address outside.
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
def finish(m, l, acc):
    """o [M, D] and the natural-log LSE [M] of an online softmax; a row without keys: 0 and -inf."""
    l_safe = tl.where(l == 0.0, 1.0, l)
    lse = tl.where(l == 0.0, float("-inf"), (m + tl.log2(l_safe)) * LN2)
    return acc / l_safe[:, None], lse

"""Which blocks a tile of neighbouring tokens reads together: the sorted union of their choices, and
who chose what.

Neighbours share blocks: the first and the local ones always, the others where attention is trained.
A block that many tokens of a tile chose is read once for all of them; a pair left over, when there
is somewhere else to do it, is told.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_backend_triton.host.launch_cache import Launch, remembered
from nsa_backend_triton.host.sequences import Sequences
from nsa_backend_triton.sel.pair_lists import candidates
from nsa_backend_triton.shared.rows import place
from nsa_core.layout import BlockGeometry


class Unions(NamedTuple):
    """Per kv head and tile, tiles of one head after each other.

    Attributes:
        entries: int32 [G * tiles, 2, T * n] blocks, descending, and behind them for each its tokens
            as bits.
        counts: int32 [G * tiles, 2] how many entries; how many of them, the first ones, hold keys
            that some token of the tile may not see.
        left: int8 [rows, G, n] 1 where a pair counts and is in no entry. Any numbers with least =
            1, where every pair is in one, and when not asked for.
    """

    entries: Tensor
    counts: Tensor
    left: Tensor


def build(
    blocks: Tensor,
    seqs: Sequences,
    geometry: BlockGeometry,
    size: int,
    least: int,
    *,
    leave: bool = False,
) -> Unions:
    """Unions over tiles of ``size`` <= 32 tokens of blocks int32 or int64 [B, S, G, n] (packed [T,
    G, n]).

    An entry is a block that at least ``least`` tokens of the tile chose; ``leave``: write ``left``.
    """
    launch, tiles = _prepare(blocks, seqs, geometry, size, least, leave)
    entries = blocks.new_empty((tiles, 2, size * blocks.shape[-1]), dtype=torch.int32)
    counts = blocks.new_empty((tiles, 2), dtype=torch.int32)
    left = counts
    if leave:  # with least = 1 no pair is left
        left = (blocks.new_zeros if least > 1 else blocks.new_empty)(blocks.shape, dtype=torch.int8)
    launch(blocks, entries, counts, left, seqs.cu)
    return Unions(entries, counts, left)


@remembered
def _prepare(
    blocks: Tensor, seqs: Sequences, geometry: BlockGeometry, size: int, least: int, leave: bool
) -> tuple[Launch, int]:
    """The launch, and how many tiles all kv heads have."""
    groups, n = blocks.shape[-2:]
    tiles = seqs.tiles(size)
    pairs = triton.next_power_of_2(size) * triton.next_power_of_2(n)
    launch = Launch(
        sel_union_kernel, (groups * tiles,), seqs.n, seqs.seq_len, tiles, least,
        0 if seqs.packed else blocks.stride(0), blocks.stride(-3), blocks.stride(-2), groups,
        N=n, NP=triton.next_power_of_2(n), L=geometry.select_block_size, T=size,
        TP=triton.next_power_of_2(size),
        VARLEN=seqs.packed, LEAVE=leave, num_warps=min(8, max(1, pairs // 128)),
    )  # fmt: skip
    return launch, groups * tiles


@triton.jit
def _join(block, bits, next_block, next_bits):
    return next_block, next_bits | tl.where(block == next_block, bits, 0)


@triton.jit(do_not_specialize=["n_seqs", "seq_len", "tiles", "least", "stride_b"])
def sel_union_kernel(
    BLOCKS, ENTRIES, COUNTS, LEFT, CU, n_seqs, seq_len, tiles, least, stride_b, stride_t, stride_g,
    groups,
    N: tl.constexpr, NP: tl.constexpr, L: tl.constexpr, T: tl.constexpr, TP: tl.constexpr,
    VARLEN: tl.constexpr,
    LEAVE: tl.constexpr,
):  # fmt: skip
    """Sort the TP x NP pairs of a tile by (block, token, place) in registers; join runs of one
    block by two scans.

    A program: one tile of T tokens of one kv head. Bytes: T*n blocks read, at most 8 T*n written.
    Bound by the sort.
    """
    program = tl.program_id(0)
    group = program // tiles
    seq, start, length, row = place(program % tiles, CU, n_seqs, seq_len, T, VARLEN)
    first = start.to(tl.int64)
    base = BLOCKS + seq.to(tl.int64) * stride_b + first * stride_t + group * stride_g
    NONE: tl.constexpr = 2**30 // (TP * NP)  # beyond every block
    block = candidates(base, row, tl.minimum(length, row + T), N, NP, L, TP, stride_t)
    own = tl.arange(0, TP)[:, None] * NP + tl.arange(0, NP)[None, :]
    keys = tl.sort(tl.reshape(tl.where(block < 0, NONE, block) * (TP * NP) + own, [TP * NP]))
    block = keys // (TP * NP)
    token = keys // NP % TP
    bits = tl.full([TP * NP], 1, tl.int32) << token
    # Tokens of a run differ, so its last pair is the only one whose bits so far are those of the
    # whole run.
    _, until = tl.associative_scan((block, bits), 0, _join)
    _, since = tl.associative_scan((block, bits), 0, _join, reverse=True)
    members = until | since
    # 32 tokens' bits: pairs of them added overflow an int32
    chosen_by = members.to(tl.uint32, bitcast=True)
    chosen_by = (chosen_by & 0x55555555) + ((chosen_by >> 1) & 0x55555555)
    chosen_by = (chosen_by & 0x33333333) + ((chosen_by >> 2) & 0x33333333)
    chosen_by = (chosen_by & 0x0F0F0F0F) + ((chosen_by >> 4) & 0x0F0F0F0F)
    chosen_by = (chosen_by & 0x00FF00FF) + ((chosen_by >> 8) & 0x00FF00FF)
    chosen_by = (chosen_by & 0x0000FFFF) + ((chosen_by >> 16) & 0x0000FFFF)
    valid = block < NONE
    shared = valid & (chosen_by.to(tl.int32) >= least)
    entry = (shared & (until == members)).to(tl.int32)
    count = tl.sum(entry, 0)
    into = ENTRIES + program.to(tl.int64) * (2 * T * N) + count - tl.cumsum(entry, 0)
    tl.store(into, block, mask=entry != 0)
    tl.store(into + T * N, members, mask=entry != 0)
    # (block + 1) * L > row + 1, in int32 for NONE too
    cut = tl.sum(tl.where(block >= (row + 1) // L, entry, 0), 0)
    tl.store(COUNTS + program * 2, count)
    tl.store(COUNTS + program * 2 + 1, cut)
    if LEAVE:
        flat = first if VARLEN else seq.to(tl.int64) * seq_len
        pair = ((flat + row + token) * groups + group) * N + keys % NP
        tl.store(LEFT + pair, 1, mask=valid & (shared == 0))

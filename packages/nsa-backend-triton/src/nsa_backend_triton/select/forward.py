"""Choice of blocks from the probabilities of the compressed branch.

    p[h,t,i] = exp(scale q.k_cmp[i] - lse)                                          (Eq. 8)
    score[t,j] = sum over i of weight(i, j) sum over heads of p                      (Eq. 9, 10)

A program owns TOKENS tokens of one kv head with all their heads: N = TOKENS x HEADS columns, a
piece of HEADS heads at a time, in PIECES pieces, all of q in shared memory. It walks the compressed
keys in tiles of KEYS rows. Keys are the rows of the product and (head, token) its columns, head
slowest: so the sum over heads stays inside a thread, and what is left of a tile is [KEYS, TOKENS].
Its rows are ordered [tap, block, tap, block], so that most of a block's taps meet in one thread
too. Per tile: KEYS x D x itemsize bytes through L2, 2 x KEYS x N x PIECES x D operations, KEYS x N
x PIECES exp2; in bf16 at D = 128 the matrix units and exp2 bind about equally, at D = 64 exp2 does.

The scores of the program's tokens go to its own scratch row, linear in S and kept in L2, and are
ranked there (select_rank). Programs are as many as fit on the GPU and take tiles in turn, long ones
first.

Order of the sums: heads within the product's columns, then pieces ascending, then the taps of block
j that lie inside it, and last the sum of those that began in block j - 1. It is the same for every
block and token, so blocks whose logits are equal tap by tap have equal scores, bit for bit; Eq.
10's order, taps before heads, differs by rounding alone, and would move every head's last taps
across threads. No prefix sums.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_backend_triton.host import configs
from nsa_backend_triton.host.launch_cache import Launch, remembered
from nsa_backend_triton.host.sequences import (
    Sequences,
    accumulator,
    architecture,
    band,
    lse_strides,
    multiprocessors,
    strides,
)
from nsa_backend_triton.select.rank import rank_rows
from nsa_backend_triton.shared.rows import (
    LOG2E,
    dot_columns,
    load_at,
    num_compressed,
    place,
    transpose,
)
from nsa_backend_triton.span.forward import launch_options
from nsa_core.contract import SlotCall


@triton.jit
def _sum_heads(
    k, q, lse, factor, seen, DK: tl.constexpr, BLOCK_D: tl.constexpr, HEADS: tl.constexpr,
    PIECES: tl.constexpr,
    ACC: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """sum over heads of p, [KEYS, TOKENS]: k [KEYS, D], q PIECES of [HEADS * TOKENS, D], lse in
    base 2.
    """
    for piece in tl.static_range(PIECES):
        s = dot_columns(k, transpose(q[piece], DK, BLOCK_D), DK, BLOCK_D, ACC)
        x = s * factor - lse[piece][None, :]
        part = tl.sum(tl.exp2(tl.reshape(x, [s.shape[0], HEADS, x.shape[1] // HEADS])), 1)
        total = part if piece == 0 else total + part  # type: ignore[has-type]  # noqa: F821
    if MASKED:
        total = tl.where(seen, total, 0.0)
    return total


@triton.constexpr_function
def _order(keys, taps, warps):
    """(OUTER, HIGH, PAIR, MIDDLE, LOW): the sizes of the rows of a tile, [tap, block, tap, tap,
    block].

    In the layout of the product a thread holds rows 8 apart and rows 16 * warps apart, eight
    neighbours are in one warp. So the taps of a block are added inside a thread as far as there are
    rows of its own, the rest in the warp.
    """
    blocks, pair = keys // taps, min(2, taps)
    outer = min(max(1, keys // (16 * warps)), taps // pair)
    middle = taps // pair // outer
    low = min(max(1, 8 // middle), blocks)
    return outer, blocks // low, pair, middle, low


@triton.jit
def _sum_taps(
    total, OUTER: tl.constexpr, HIGH: tl.constexpr, PAIR: tl.constexpr, MIDDLE: tl.constexpr,
    LOW: tl.constexpr,
    RATIO: tl.constexpr, OVER: tl.constexpr,
):  # fmt: skip
    """[BLOCKS, TOKENS, 2]: what the tile's blocks get from their own taps, and what the blocks
    after them get.

    Compressed token c of a block, of RATIO = l'/d, overlaps its block by min(OVER, RATIO - c) and
    the next block by the rest of OVER = l/d.
    """
    TOKENS: tl.constexpr = total.shape[1]
    total = tl.reshape(total, [OUTER, HIGH, PAIR, MIDDLE, LOW, TOKENS])
    tap = tl.arange(0, OUTER)[:, None, None, None, None, None] * (MIDDLE * PAIR)
    tap += tl.arange(0, PAIR)[None, None, :, None, None, None]
    tap += tl.arange(0, MIDDLE)[None, None, None, :, None, None] * PAIR
    own = tl.minimum(RATIO - tap, OVER)
    carry = tl.where(tap < RATIO, tap - RATIO + OVER, 0)
    # Not 0 x total: a NaN or inf belongs to the blocks that the token overlaps, and to no other.
    mine = tl.where(own > 0, total * own.to(total.dtype), 0.0)
    after = tl.where(carry > 0, total * carry.to(total.dtype), 0.0)
    mine = tl.reshape(tl.sum(tl.sum(tl.sum(mine, 2), 0), 1), [HIGH * LOW, TOKENS])
    return tl.join(mine, tl.reshape(tl.sum(tl.sum(tl.sum(after, 2), 0), 1), [HIGH * LOW, TOKENS]))


@triton.jit
def _walk(
    q, lse, K, SCORES, begin, end, visible, token, factor, k_row, row_length,
    DK: tl.constexpr, BLOCK_D: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr,
    PIECES: tl.constexpr,
    SIZE: tl.constexpr, STRIDE: tl.constexpr, RATIO: tl.constexpr, TAPS: tl.constexpr,
    TOKENS: tl.constexpr,
    WARPS: tl.constexpr, ACC: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Scores of tiles begin .. end of BLOCKS = KEYS // TAPS blocks each; token [TOKENS];
    ``visible`` keys at most.
    """
    BLOCKS: tl.constexpr = KEYS // TAPS
    ORDER: tl.constexpr = _order(KEYS, TAPS, WARPS)
    HIGH: tl.constexpr = ORDER[1]
    PAIR: tl.constexpr = ORDER[2]
    MIDDLE: tl.constexpr = ORDER[3]
    LOW: tl.constexpr = ORDER[4]
    at = tl.arange(0, KEYS)
    tap = (
        at // (BLOCKS * PAIR * MIDDLE) * (MIDDLE * PAIR)
        + at // LOW % MIDDLE * PAIR
        + at // (LOW * MIDDLE) % PAIR
    )
    of_tile = at // (LOW * MIDDLE * PAIR) % HIGH * LOW + at % LOW
    # taps that pad RATIO to a power of two weigh nothing
    of_tile = of_tile * RATIO + tl.minimum(tap, RATIO - 1)
    to = tl.arange(0, TOKENS)[None, :, None] * row_length + tl.arange(0, BLOCKS)[:, None, None] * 2
    # the second of a block's pair, the first of the next one's
    to += tl.arange(1, 3)[None, None, :]
    for tile in tl.range(begin, end):
        key = tile * (BLOCKS * RATIO) + of_tile
        there = (key < visible) if MASKED else None
        k = load_at(
            K + tl.cast(tile, tl.int64) * (BLOCKS * RATIO) * k_row,
            of_tile * k_row,
            there,
            DK,
            BLOCK_D,
        )
        seen = (key * STRIDE + SIZE - 1)[:, None] <= token[None, :]
        total = _sum_heads(k, q, lse, factor, seen, DK, BLOCK_D, HEADS, PIECES, ACC, MASKED)
        scores = _sum_taps(total, ORDER[0], HIGH, PAIR, MIDDLE, LOW, RATIO, SIZE // STRIDE)
        tl.store(SCORES + tile * (BLOCKS * 2) + to, scores)


@triton.jit
def _load_queries(
    Q, LSE, inside, q_row, q_head, lse_head,
    GROUP: tl.constexpr, DK: tl.constexpr, BLOCK_D: tl.constexpr, HEADS: tl.constexpr,
    PIECES: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """PIECES of q [HEADS * TOKENS, D], head slowest, and of lse in base 2; heads past GROUP add
    nothing: lse inf.
    """
    at = tl.arange(0, HEADS * TOKENS)
    row = at % TOKENS
    q, lse = (), ()
    for piece in tl.static_range(PIECES):
        head = piece * HEADS + at // TOKENS
        here = inside & (head < GROUP)
        rows = load_at(Q, row * q_row + head * q_head, here, DK, BLOCK_D)
        sums = tl.load(LSE + row + head * lse_head, mask=here, other=float("inf")) * LOG2E
        q, lse = q + (rows,), lse + (sums,)
    return q, lse


@triton.jit
def _choose(
    index, Q, K, LSE, OUT, SCORES, CU, CU_CMP,
    q_seq, q_row, q_head, k_seq, k_row, k_head, lse_seq, lse_head, factor, n_seqs, seq_len,
    longest, key_rows,
    row_length, tiles,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, BLOCK_D: tl.constexpr,
    KEYS: tl.constexpr,
    HEADS: tl.constexpr, PIECES: tl.constexpr, TOKENS: tl.constexpr, TAPS: tl.constexpr,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr, SELECT: tl.constexpr, N: tl.constexpr, SLOTS: tl.constexpr,
    INIT: tl.constexpr,
    LOCAL: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr,
    VARLEN: tl.constexpr, WARPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The blocks of tile ``index``; kv heads vary fastest, then tiles from the last to the
    first.
    """
    RATIO: tl.constexpr = SELECT // STRIDE
    group = index % GROUPS
    seq, start, length, row = place(
        tiles - 1 - index // GROUPS, CU, n_seqs, seq_len, TOKENS, VARLEN
    )
    length = tl.minimum(length, longest)
    if row < length:
        batch = 0 if VARLEN else seq
        key_start = tl.minimum(tl.load(CU_CMP + seq), key_rows) if VARLEN else 0
        keys = tl.minimum(num_compressed(length, SIZE, STRIDE), key_rows - key_start)
        first = tl.cast(start + row, tl.int64)
        K += batch * k_seq + tl.cast(key_start, tl.int64) * k_row + group * k_head
        last = tl.minimum(row + TOKENS, length)  # keys that a row t sees are those of t + 1 tokens
        if last > N * SELECT:  # else every token chooses all of its blocks
            local = tl.arange(0, HEADS * TOKENS) % TOKENS
            q, lse = _load_queries(
                Q + batch * q_seq + first * q_row + group * GROUP * q_head,
                LSE + batch * lse_seq + first + group * GROUP * lse_head, row + local < length,
                q_row, q_head, lse_head,
                GROUP, DK, BLOCK_D, HEADS, PIECES, TOKENS,
            )  # fmt: skip
            visible = tl.minimum(num_compressed(last, SIZE, STRIDE), keys)
            whole = tl.minimum(num_compressed(row + 1, SIZE, STRIDE), keys) // (
                KEYS // TAPS * RATIO
            )
            end = tl.cdiv(visible, KEYS // TAPS * RATIO)
            token = row + tl.arange(0, TOKENS)
            _walk(
                q,
                lse,
                K,
                SCORES + SLOTS * 2,
                0,
                whole,
                visible,
                token,
                factor,
                k_row,
                row_length,
                DK,
                BLOCK_D,
                KEYS,
                HEADS,
                PIECES,
                SIZE,
                STRIDE,
                RATIO,
                TAPS,
                TOKENS,
                WARPS,
                ACC,
                False,
            )
            _walk(
                q,
                lse,
                K,
                SCORES + SLOTS * 2,
                whole,
                end,
                visible,
                token,
                factor,
                k_row,
                row_length,
                DK,
                BLOCK_D,
                KEYS,
                HEADS,
                PIECES,
                SIZE,
                STRIDE,
                RATIO,
                TAPS,
                TOKENS,
                WARPS,
                ACC,
                True,
            )
            # The last token's current block may have no visible compressed token of its own, but
            # part of one before it.
            tl.store(
                SCORES + (token - row) * row_length + (SLOTS + end * (KEYS // TAPS)) * 2 + 1,
                tl.zeros([TOKENS], ACC),
            )
            tl.store(SCORES + (token - row) * row_length + SLOTS * 2, tl.zeros([TOKENS], ACC))
            tl.debug_barrier()  # scores written by other threads of the program
        OUT += ((batch * seq_len + first) * GROUPS + group) * N
        for part in tl.range(0, TOKENS, ROWS, num_stages=1):
            ranked = row + part + tl.arange(0, ROWS)
            rank_rows(
                SCORES + part * row_length,
                OUT + part * GROUPS * N,
                ranked,
                ranked < length,
                GROUPS * N,
                row_length,
                N,
                SLOTS,
                INIT,
                LOCAL,
                SELECT,
                CHUNKS,
                LANES,
            )
        tl.debug_barrier()  # scores are read before the next tile's overwrite them


@triton.jit(
    do_not_specialize=[
        "n_seqs",
        "seq_len",
        "longest",
        "key_rows",
        "row_length",
        "tiles",
        "lse_seq",
        "lse_head",
    ]
)
def select_forward(
    Q, K, LSE, OUT, SCORES, CU, CU_CMP,
    q_seq: tl.int64, q_row, q_head, k_seq: tl.int64, k_row, k_head, lse_seq: tl.int64,
    lse_head: tl.int64, factor,
    n_seqs, seq_len, longest, key_rows, row_length, tiles,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, BLOCK_D: tl.constexpr,
    KEYS: tl.constexpr,
    HEADS: tl.constexpr, PIECES: tl.constexpr, TOKENS: tl.constexpr, TAPS: tl.constexpr,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr, SELECT: tl.constexpr, N: tl.constexpr, SLOTS: tl.constexpr,
    INIT: tl.constexpr,
    LOCAL: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr,
    VARLEN: tl.constexpr, WARPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """See the module. Scratch: SCORES [programs, TOKENS, row_length]."""
    programs, mine = tl.num_programs(0), tl.program_id(0)
    row_length = row_length // 16 * 16  # the compiler sees that rows are aligned
    SCORES += tl.cast(mine, tl.int64) * TOKENS * row_length
    for lap in tl.range(tl.cdiv(tiles * GROUPS, programs), num_stages=1):
        # There and back: each program gets long and short tiles alike.
        index = lap * programs + tl.where(lap % 2 == 0, mine, programs - 1 - mine)
        if index < tiles * GROUPS:
            _choose(
                index,
                Q,
                K,
                LSE,
                OUT,
                SCORES,
                CU,
                CU_CMP,
                q_seq,
                q_row,
                q_head,
                k_seq,
                k_row,
                k_head,
                lse_seq,
                lse_head,
                factor,
                n_seqs,
                seq_len,
                longest,
                key_rows,
                row_length,
                tiles,
                GROUPS,
                GROUP,
                DK,
                BLOCK_D,
                KEYS,
                HEADS,
                PIECES,
                TOKENS,
                TAPS,
                SIZE,
                STRIDE,
                SELECT,
                N,
                SLOTS,
                INIT,
                LOCAL,
                ROWS,
                CHUNKS,
                LANES,
                VARLEN,
                WARPS,
                ACC,
            )


def split_heads(group: int, columns: int, most: int) -> tuple[int, int]:
    """(heads of a piece, pieces) for ``group`` heads in products of ``columns`` columns, at most
    ``most`` in all.

    Least padding first, then the most tokens, which is the fewest reads of the keys.
    """
    choices = []
    for heads in (1 << bit for bit in range(columns.bit_length())):
        pieces = triton.cdiv(group, heads)
        if heads == 1 or heads < 2 * group:
            choices.append((max(pieces * columns, most), pieces * heads, heads, pieces))
    _, _, heads, pieces = min(choices)
    return heads, pieces


class _Call(NamedTuple):
    """The launch, and the shapes of the blocks and of the scratch."""

    launch: Launch
    out: tuple[int, ...]
    scores: tuple[int, ...]


@remembered
def _prepare(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    seqs: Sequences,
    call: SlotCall,
    settings: configs.Settings | None,
) -> _Call:
    geometry = call.geometry
    groups, dk = k_cmp.shape[-2:]
    group, n = q.shape[-2] // groups, geometry.num_selected_blocks
    taps, slots = configs.taps(geometry), max(16, triton.next_power_of_2(n))
    traits = {"head_dim": dk, "itemsize": q.itemsize, "heads": group, "taps": taps}
    settings = settings or configs.pick("select_forward", architecture(q.device), **traits)
    block_d = band(dk)
    most = settings["Q_BYTES"] // (triton.cdiv(dk, block_d) * block_d * q.itemsize)
    heads, pieces = split_heads(group, settings["COLUMNS"], most)
    tokens = settings["COLUMNS"] // heads
    keys = max(settings["KEYS"], taps)
    chunks = max(settings["CHUNKS"], triton.cdiv(2 * slots, settings["LANES"]))
    longest = min(call.max_seqlen, seqs.seq_len) if seqs.packed else seqs.seq_len
    row_length = scratch_row(
        geometry.num_select_blocks(longest), keys // taps, slots, chunks * settings["LANES"]
    )
    tiles = seqs.tiles(tokens)
    programs = min(tiles * groups, multiprocessors(q.device) * settings["PROGRAMS"])
    launch = Launch(
        select_forward, (programs,),
        *strides(q, seqs.packed), *strides(k_cmp, seqs.packed), *lse_strides(lse, seqs.packed),
        call.scale * LOG2E.value, seqs.n, seqs.seq_len, longest, k_cmp.shape[-3], row_length, tiles,
        GROUPS=groups, GROUP=group, DK=dk, BLOCK_D=block_d, KEYS=keys, HEADS=heads,
        PIECES=pieces, TOKENS=tokens, TAPS=taps, SIZE=geometry.compress_block_size,
        STRIDE=geometry.compress_stride,
        SELECT=geometry.select_block_size, N=n, SLOTS=slots, INIT=geometry.init_blocks,
        LOCAL=geometry.local_blocks,
        ROWS=min(tokens, settings["ROWS"]), CHUNKS=chunks, LANES=settings["LANES"],
        VARLEN=seqs.packed, WARPS=settings["num_warps"], ACC=accumulator(q.dtype),
        **launch_options(settings),
    )  # fmt: skip
    return _Call(launch, (*q.shape[:-2], groups, n), (programs, tokens, row_length))


def forward(
    q: Tensor,  # [B, S, Hq, Dk], packed [T, Hq, Dk]
    k_cmp: Tensor,  # [B, n_c, G, Dk], packed [T // d, G, Dk]
    lse: Tensor,  # [B, Hq, S], packed [Hq, T]
    *,
    call: SlotCall,
    settings: configs.Settings | None = None,
) -> Tensor:
    """blocks int32 [B, S, G, n] (packed [T, G, n]), ascending, -1 at the end; ``settings`` replace
    the tuned ones.
    """
    seqs = Sequences.of(q, call, compressed=True)
    made = _prepare(q, k_cmp, lse, seqs, call, settings)
    out = q.new_empty(made.out, dtype=torch.int32)
    scores = lse.new_empty(made.scores)
    made.launch(q, k_cmp, lse, out, scores, seqs.cu, seqs.cu_cmp)
    return out


def scratch_row(blocks: int, tile: int, slots: int, window: int) -> int:
    """Numbers in a token's scratch row: a pair per survivor and block, in whole tiles and windows;
    a multiple of 16.
    """
    fresh = window - slots
    pairs = slots + max(-(-blocks // tile) * tile + 1, -(-blocks // fresh) * fresh)
    return -(-pairs // 8) * 16

"""Selection of blocks from the probabilities of the compressed branch.

    p[h,t,i] = exp(scale q[h,t] . k_cmp[i] - lse[h,t])                     (Eq. 8)
    score[t,j] = sum over i of weight(i, j) sum over heads of p[h,t,i]     (Eq. 9, 10)
    blocks[t] = initial and local blocks, and the best others              (Eq. 11)

A program owns BLOCK_T tokens of one kv head with all heads of the group, in NUM_HEAD_TILES tiles of
BLOCK_H heads: BLOCK_M = BLOCK_T x BLOCK_H columns a tile, all of q in shared memory. It walks the
compressed keys in tiles of BLOCK_N. Keys are the rows of the product and (head, token) its columns,
head slowest: so the sum over heads stays inside a thread, and a tile reduces to [BLOCK_N, BLOCK_T].
Its rows are ordered [tap, block, tap, block] (a tap is a compressed token of a block), so that most
taps of a block meet in one thread too. A tile takes BLOCK_N x D x itemsize bytes through L2,
2 x BLOCK_N x BLOCK_M x NUM_HEAD_TILES x D operations and BLOCK_N x BLOCK_M x NUM_HEAD_TILES exp2.
In bf16 the matrix units and exp2 are about equally the limit at D = 128, exp2 at D = 64.

Scores of a program's tokens go to its own scratch row, linear in S, which stays in L2; rank.py
ranks them there. As many programs run as fit on the GPU. They take tiles in turn, long ones first.

The order of the sums is fixed: heads within the columns of a product, then head tiles ascending,
then the taps of block j that lie inside it, and last the sum of those that began in block j - 1.
It is the same for every block and token, so blocks whose logits are equal tap by tap have equal
scores, bit for bit. Eq. 10 sums taps before heads, which differs by rounding only, and would move
the last taps of every head across threads. There are no prefix sums.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_backend_triton.host import configs
from nsa_backend_triton.host.constexprs import accumulator, band
from nsa_backend_triton.host.device import architecture, multiprocessors
from nsa_backend_triton.host.launch_cache import Launch, cached_by_metadata
from nsa_backend_triton.host.sequences import Sequences
from nsa_backend_triton.host.strides import batch_apart, lse_strides, strides
from nsa_backend_triton.select.rank import rank_rows
from nsa_backend_triton.shared.rows import (
    LOG2E,
    dot_transposed,
    load_at,
    num_compressed,
    place_queries,
    row_offset,
    with_batch,
)
from nsa_core.contract import SlotCall


@triton.jit
def _sum_heads(
    k, q, lse, qk_scale, visible,
    BLOCK_H: tl.constexpr, NUM_HEAD_TILES: tl.constexpr, ACC: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Sum over heads of p, [BLOCK_N, BLOCK_T]; 0 where not ``visible`` if MASKED.

    k [BLOCK_N, D]; q and lse (base 2) hold NUM_HEAD_TILES tiles of [BLOCK_H * BLOCK_T, D] and
    [BLOCK_H * BLOCK_T].
    """
    for i in tl.static_range(NUM_HEAD_TILES):
        s = dot_transposed(k, q[i], ACC)
        x = s * qk_scale - lse[i][None, :]
        partial = tl.sum(tl.exp2(tl.reshape(x, [s.shape[0], BLOCK_H, x.shape[1] // BLOCK_H])), 1)
        total = partial if i == 0 else total + partial  # type: ignore[has-type]  # noqa: F821
    if MASKED:
        total = tl.where(visible, total, 0.0)
    return total


@triton.constexpr_function
def _order(block_n, cmp_per_block, num_warps):
    """(OUTER, HIGH, PAIR, MIDDLE, LOW): a tile's rows are ordered [tap, block, tap, tap, block].

    In the layout of the product a thread holds rows 8 apart and rows 16 * num_warps apart, and a
    warp holds eight neighbours. So the taps of a block are added inside a thread as far as it has
    rows, and the others inside the warp.
    """
    blocks, pair = block_n // cmp_per_block, min(2, cmp_per_block)
    outer = min(max(1, block_n // (16 * num_warps)), cmp_per_block // pair)
    middle = cmp_per_block // pair // outer
    low = min(max(1, 8 // middle), blocks)
    return outer, blocks // low, pair, middle, low


@triton.jit
def _sum_taps(
    total,
    OUTER: tl.constexpr, HIGH: tl.constexpr, PAIR: tl.constexpr, MIDDLE: tl.constexpr,
    LOW: tl.constexpr, CMP_PER_BLOCK: tl.constexpr, CMP_STRIDES: tl.constexpr,
):  # fmt: skip
    """[blocks, BLOCK_T, 2]: shares of the tile's blocks and of the blocks after them.

    Compressed token c of a block, of CMP_PER_BLOCK = l'/d, overlaps its block by
    min(CMP_STRIDES, CMP_PER_BLOCK - c) strides and the next block by the rest of CMP_STRIDES = l/d.
    """
    BLOCK_T: tl.constexpr = total.shape[1]
    total = tl.reshape(total, [OUTER, HIGH, PAIR, MIDDLE, LOW, BLOCK_T])
    tap = tl.arange(0, OUTER)[:, None, None, None, None, None] * (MIDDLE * PAIR)
    tap += tl.arange(0, PAIR)[None, None, :, None, None, None]
    tap += tl.arange(0, MIDDLE)[None, None, None, :, None, None] * PAIR
    own = tl.minimum(CMP_PER_BLOCK - tap, CMP_STRIDES)
    carry = tl.where(tap < CMP_PER_BLOCK, tap - CMP_PER_BLOCK + CMP_STRIDES, 0)
    # Not 0 x total: a NaN or inf belongs to the blocks that the token overlaps, and to no other.
    own_share = tl.where(own > 0, total * own.to(total.dtype), 0.0)
    next_share = tl.where(carry > 0, total * carry.to(total.dtype), 0.0)
    own_share = tl.reshape(tl.sum(tl.sum(tl.sum(own_share, 2), 0), 1), [HIGH * LOW, BLOCK_T])
    return tl.join(
        own_share, tl.reshape(tl.sum(tl.sum(tl.sum(next_share, 2), 0), 1), [HIGH * LOW, BLOCK_T])
    )


@triton.jit
def _walk(
    q, lse, K, SCORES, begin, end, visible_keys, token, qk_scale, stride_k, stride_scores,
    HEAD_DIM: tl.constexpr, HEAD_DIM_BAND: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr, NUM_HEAD_TILES: tl.constexpr, BLOCK_T: tl.constexpr,
    COMPRESS_BLOCK: tl.constexpr, STRIDE: tl.constexpr,
    CMP_PER_BLOCK: tl.constexpr, CMP_PER_BLOCK_PAD: tl.constexpr,
    NUM_WARPS: tl.constexpr, ACC: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Store the scores of tiles begin .. end, of BLOCKS = BLOCK_N // CMP_PER_BLOCK_PAD blocks each.

    token [BLOCK_T]; no token sees more than ``visible_keys`` keys.
    """
    BLOCKS: tl.constexpr = BLOCK_N // CMP_PER_BLOCK_PAD
    ORDER: tl.constexpr = _order(BLOCK_N, CMP_PER_BLOCK_PAD, NUM_WARPS)
    HIGH: tl.constexpr = ORDER[1]
    PAIR: tl.constexpr = ORDER[2]
    MIDDLE: tl.constexpr = ORDER[3]
    LOW: tl.constexpr = ORDER[4]
    _, stride_kt, _ = stride_k
    offs_n = tl.arange(0, BLOCK_N)
    tap = (
        offs_n // (BLOCKS * PAIR * MIDDLE) * (MIDDLE * PAIR)
        + offs_n // LOW % MIDDLE * PAIR
        + offs_n // (LOW * MIDDLE) % PAIR
    )
    tile_key = offs_n // (LOW * MIDDLE * PAIR) % HIGH * LOW + offs_n % LOW
    # taps that pad CMP_PER_BLOCK to a power of two weigh nothing
    tile_key = tile_key * CMP_PER_BLOCK + tl.minimum(tap, CMP_PER_BLOCK - 1)
    offs_scores = (
        tl.arange(0, BLOCK_T)[None, :, None] * stride_scores
        + tl.arange(0, BLOCKS)[:, None, None] * 2
    )
    # the second number of a block's pair, and the first of the next block's
    offs_scores += tl.arange(1, 3)[None, None, :]
    for tile in tl.range(begin, end):
        key = tile * (BLOCKS * CMP_PER_BLOCK) + tile_key
        mask_n = (key < visible_keys) if MASKED else None
        k = load_at(
            K + tl.cast(tile, tl.int64) * (BLOCKS * CMP_PER_BLOCK) * stride_kt,
            tile_key * stride_kt,
            mask_n,
            HEAD_DIM,
            HEAD_DIM_BAND,
        )
        visible = (key * STRIDE + COMPRESS_BLOCK - 1)[:, None] <= token[None, :]
        total = _sum_heads(k, q, lse, qk_scale, visible, BLOCK_H, NUM_HEAD_TILES, ACC, MASKED)
        scores = _sum_taps(
            total, ORDER[0], HIGH, PAIR, MIDDLE, LOW, CMP_PER_BLOCK, COMPRESS_BLOCK // STRIDE
        )
        tl.store(SCORES + tile * (BLOCKS * 2) + offs_scores, scores)


@triton.jit
def _load_queries(
    Q, LSE, token_exists, stride_q, stride_lse_h,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_BAND: tl.constexpr,
    BLOCK_H: tl.constexpr, NUM_HEAD_TILES: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """NUM_HEAD_TILES tiles of q [BLOCK_H * BLOCK_T, D], head slowest, and of lse in base 2.

    Heads past GROUP add nothing: their lse is inf.
    """
    _, stride_qt, stride_qh = stride_q
    offs_m = tl.arange(0, BLOCK_H * BLOCK_T)
    offs_t = offs_m % BLOCK_T
    q, lse = (), ()
    for i in tl.static_range(NUM_HEAD_TILES):
        head = i * BLOCK_H + offs_m // BLOCK_T
        mask_m = token_exists & (head < GROUP)
        q_tile = load_at(Q, offs_t * stride_qt + head * stride_qh, mask_m, HEAD_DIM, HEAD_DIM_BAND)
        lse_tile = (
            tl.load(LSE + offs_t + head * stride_lse_h, mask=mask_m, other=float("inf")) * LOG2E
        )
        q, lse = q + (q_tile,), lse + (lse_tile,)
    return q, lse


@triton.jit
def _score(
    Q, K, LSE, SCORES, row, last, seq_keys,
    qk_scale, stride_q, stride_k, stride_lse_h, stride_scores,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_BAND: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, NUM_HEAD_TILES: tl.constexpr,
    BLOCK_T: tl.constexpr, COMPRESS_BLOCK: tl.constexpr, STRIDE: tl.constexpr,
    CMP_PER_BLOCK: tl.constexpr, CMP_PER_BLOCK_PAD: tl.constexpr,
    NUM_SELECTED_PAD: tl.constexpr, NUM_WARPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Store the scores of the tokens from ``row`` on before ``last``, for one kv head.

    Q and LSE point at the first token and head, K at the first of ``seq_keys`` keys.
    """
    TILE_KEYS: tl.constexpr = BLOCK_N // CMP_PER_BLOCK_PAD * CMP_PER_BLOCK
    offs_t = tl.arange(0, BLOCK_H * BLOCK_T) % BLOCK_T
    q, lse = _load_queries(
        Q, LSE, row + offs_t < last, stride_q, stride_lse_h,
        GROUP, HEAD_DIM, HEAD_DIM_BAND, BLOCK_H, NUM_HEAD_TILES, BLOCK_T,
    )  # fmt: skip
    visible_keys = tl.minimum(num_compressed(last, COMPRESS_BLOCK, STRIDE), seq_keys)
    full_keys = tl.minimum(num_compressed(row + 1, COMPRESS_BLOCK, STRIDE), seq_keys)
    full_tiles, end = full_keys // TILE_KEYS, tl.cdiv(visible_keys, TILE_KEYS)
    token = row + tl.arange(0, BLOCK_T)
    _walk(
        q, lse, K, SCORES + NUM_SELECTED_PAD * 2, 0, full_tiles, visible_keys, token,
        qk_scale, stride_k, stride_scores,
        HEAD_DIM, HEAD_DIM_BAND, BLOCK_N, BLOCK_H, NUM_HEAD_TILES, BLOCK_T,
        COMPRESS_BLOCK, STRIDE, CMP_PER_BLOCK, CMP_PER_BLOCK_PAD, NUM_WARPS, ACC, False,
    )  # fmt: skip
    _walk(
        q, lse, K, SCORES + NUM_SELECTED_PAD * 2, full_tiles, end, visible_keys, token,
        qk_scale, stride_k, stride_scores,
        HEAD_DIM, HEAD_DIM_BAND, BLOCK_N, BLOCK_H, NUM_HEAD_TILES, BLOCK_T,
        COMPRESS_BLOCK, STRIDE, CMP_PER_BLOCK, CMP_PER_BLOCK_PAD, NUM_WARPS, ACC, True,
    )  # fmt: skip
    # The current block of the last token may have no visible compressed token of its own, but a
    # share of one that began before it.
    first_score = SCORES + (token - row) * stride_scores + NUM_SELECTED_PAD * 2
    zeros = tl.zeros([BLOCK_T], ACC)
    tl.store(first_score + end * (BLOCK_N // CMP_PER_BLOCK_PAD) * 2 + 1, zeros)
    tl.store(first_score, zeros)


@triton.jit(
    do_not_specialize=[
        "num_seqs", "seq_len", "max_seqlen", "num_keys", "first_query", "stride_scores",
        "num_tiles", "stride_lse_b", "stride_lse_h",
    ]
)  # fmt: skip
def select_forward(
    Q, K, LSE, OUT, SCORES, CU_SEQLENS, CU_KEYS,
    stride_qb: tl.int64, stride_q, stride_kb: tl.int64, stride_k,
    stride_lse_b: tl.int64, stride_lse_h: tl.int64,
    qk_scale, num_seqs, seq_len, max_seqlen, num_keys, first_query, stride_scores, num_tiles,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_BAND: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, NUM_HEAD_TILES: tl.constexpr,
    BLOCK_T: tl.constexpr, CMP_PER_BLOCK_PAD: tl.constexpr,
    COMPRESS_BLOCK: tl.constexpr, STRIDE: tl.constexpr, SELECT_BLOCK: tl.constexpr,
    NUM_SELECTED: tl.constexpr, NUM_SELECTED_PAD: tl.constexpr,
    INIT_BLOCKS: tl.constexpr, LOCAL_BLOCKS: tl.constexpr,
    RANK_ROWS: tl.constexpr, RANK_CHUNKS: tl.constexpr, RANK_LANES: tl.constexpr,
    VARLEN: tl.constexpr, PARTIAL: tl.constexpr, NUM_WARPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Blocks [.., NUM_KV_HEADS, NUM_SELECTED] of all tokens, see the module.

    Scratch: SCORES [programs, BLOCK_T, stride_scores].
    """
    stride_q, stride_k = with_batch(stride_qb, stride_q), with_batch(stride_kb, stride_k)
    num_programs, program = tl.num_programs(0), tl.program_id(0)
    stride_scores = stride_scores // 16 * 16  # shows the compiler that rows are aligned
    SCORES += tl.cast(program, tl.int64) * BLOCK_T * stride_scores
    for lap in tl.range(tl.cdiv(num_tiles * NUM_KV_HEADS, num_programs), num_stages=1):
        # Every other lap runs backwards, so that each program gets long and short tiles. Kv heads
        # vary fastest over indices, then tiles from the last to the first.
        index = lap * num_programs + tl.where(lap % 2 == 0, program, num_programs - 1 - program)
        if index < num_tiles * NUM_KV_HEADS:
            kv_head = index % NUM_KV_HEADS
            seq, _, query_start, length, row = place_queries(
                num_tiles - 1 - index // NUM_KV_HEADS, CU_SEQLENS, num_seqs, seq_len, first_query,
                BLOCK_T, VARLEN, PARTIAL,
            )  # fmt: skip
            length = tl.minimum(length, max_seqlen)
            if row < length:
                batch = 0 if VARLEN else seq
                key_start = tl.minimum(tl.load(CU_KEYS + seq), num_keys) if VARLEN else 0
                compressed = num_compressed(length, COMPRESS_BLOCK, STRIDE)
                seq_keys = tl.minimum(compressed, num_keys - key_start)
                first_row = tl.cast(query_start + row, tl.int64)
                last = tl.minimum(row + BLOCK_T, length)  # a token t sees the keys of t + 1 tokens
                # Up to this length every token selects all of its blocks.
                if last > NUM_SELECTED * SELECT_BLOCK:
                    _score(
                        Q + row_offset(batch, first_row, kv_head * GROUP, stride_q),
                        K + row_offset(batch, key_start, kv_head, stride_k),
                        LSE + batch * stride_lse_b + first_row + kv_head * GROUP * stride_lse_h,
                        SCORES, row, last, seq_keys,
                        qk_scale, stride_q, stride_k, stride_lse_h, stride_scores,
                        GROUP, HEAD_DIM, HEAD_DIM_BAND, BLOCK_N, BLOCK_H, NUM_HEAD_TILES,
                        BLOCK_T, COMPRESS_BLOCK, STRIDE, SELECT_BLOCK // STRIDE,
                        CMP_PER_BLOCK_PAD, NUM_SELECTED_PAD, NUM_WARPS, ACC,
                    )  # fmt: skip
                    tl.debug_barrier()  # other threads of the program wrote scores
                out = OUT + ((batch * seq_len + first_row) * NUM_KV_HEADS + kv_head) * NUM_SELECTED
                for part in tl.range(0, BLOCK_T, RANK_ROWS, num_stages=1):
                    token = row + part + tl.arange(0, RANK_ROWS)
                    rank_rows(
                        SCORES + part * stride_scores, out + part * NUM_KV_HEADS * NUM_SELECTED,
                        token, token < length, NUM_KV_HEADS * NUM_SELECTED, stride_scores,
                        NUM_SELECTED, NUM_SELECTED_PAD, INIT_BLOCKS, LOCAL_BLOCKS, SELECT_BLOCK,
                        RANK_CHUNKS, RANK_LANES,
                    )  # fmt: skip
                tl.debug_barrier()  # scores are read before those of the next tile overwrite them


def split_heads(group: int, columns: int, max_columns: int) -> tuple[int, int]:
    """Return (heads of a tile, tiles) for ``group`` heads in products of ``columns`` columns.

    All tiles together take at most ``max_columns`` columns. The least padding wins, then the most
    tokens, which reads the keys the fewest times.
    """
    choices = []
    for heads in (1 << bit for bit in range(columns.bit_length())):
        num_tiles = triton.cdiv(group, heads)
        if heads == 1 or heads < 2 * group:
            choices.append(
                (max(num_tiles * columns, max_columns), num_tiles * heads, heads, num_tiles)
            )
    _, _, heads, num_tiles = min(choices)
    return heads, num_tiles


class _Call(NamedTuple):
    """The launch, and the shapes of the blocks and of the scratch."""

    launch: Launch
    out: tuple[int, ...]
    scores: tuple[int, ...]


@cached_by_metadata
def _prepare(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    seqs: Sequences,
    call: SlotCall,
    settings: configs.Settings | None,
) -> _Call:
    geometry = call.geometry
    groups, head_dim = k_cmp.shape[-2:]
    group, num_selected = q.shape[-2] // groups, geometry.num_selected_blocks
    cmp_per_block = configs.cmp_per_block_pad(geometry)
    num_selected_pad = max(16, triton.next_power_of_2(num_selected))
    max_seqlen = min(call.max_seqlen, seqs.end) if seqs.packed else seqs.end
    blocks = geometry.num_select_blocks(max_seqlen)
    traits = {
        "head_dim": head_dim,
        "itemsize": q.itemsize,
        "heads": group,
        "cmp_per_block": cmp_per_block,
        "blocks": blocks,
    }
    settings = settings or configs.pick("select_forward", architecture(q.device), **traits)
    head_dim_band = band(head_dim)
    max_columns = settings["Q_BYTES"] // (
        triton.cdiv(head_dim, head_dim_band) * head_dim_band * q.itemsize
    )
    block_h, num_head_tiles = split_heads(group, settings["BLOCK_M"], max_columns)
    block_t = settings["BLOCK_M"] // block_h
    block_n = max(settings["BLOCK_N"], cmp_per_block)
    chunks = max(settings["RANK_CHUNKS"], triton.cdiv(2 * num_selected_pad, settings["RANK_LANES"]))
    stride_scores = scratch_row(
        blocks,
        block_n // cmp_per_block,
        num_selected_pad,
        chunks * settings["RANK_LANES"],
    )
    num_tiles = seqs.tiles(block_t)
    num_programs = min(num_tiles * groups, multiprocessors(q.device) * settings["PROGRAMS_PER_SM"])
    launch = Launch(
        select_forward, (num_programs,),
        *batch_apart(strides(q, seqs.packed)), *batch_apart(strides(k_cmp, seqs.packed)),
        *lse_strides(lse, seqs.packed),
        call.scale * LOG2E.value, seqs.n, seqs.seq_len, max_seqlen, k_cmp.shape[-3],
        seqs.first_query, stride_scores, num_tiles,
        NUM_KV_HEADS=groups, GROUP=group, HEAD_DIM=head_dim, HEAD_DIM_BAND=head_dim_band,
        BLOCK_N=block_n, BLOCK_H=block_h, NUM_HEAD_TILES=num_head_tiles, BLOCK_T=block_t,
        CMP_PER_BLOCK_PAD=cmp_per_block, COMPRESS_BLOCK=geometry.compress_block_size,
        STRIDE=geometry.compress_stride, SELECT_BLOCK=geometry.select_block_size,
        NUM_SELECTED=num_selected, NUM_SELECTED_PAD=num_selected_pad,
        INIT_BLOCKS=geometry.init_blocks, LOCAL_BLOCKS=geometry.local_blocks,
        RANK_ROWS=min(block_t, settings["RANK_ROWS"]), RANK_CHUNKS=chunks,
        RANK_LANES=settings["RANK_LANES"],
        VARLEN=seqs.packed, PARTIAL=seqs.partial,
        NUM_WARPS=settings["num_warps"], ACC=accumulator(q.dtype),
        **configs.launch_options(settings),
    )  # fmt: skip
    return _Call(
        launch, (*q.shape[:-2], groups, num_selected), (num_programs, block_t, stride_scores)
    )


def forward(
    q: Tensor,  # [B, S, Hq, Dk], packed [T, Hq, Dk]
    k_cmp: Tensor,  # [B, n_c, G, Dk], packed [T // d, G, Dk]
    lse: Tensor,  # [B, Hq, S], packed [Hq, T]
    *,
    call: SlotCall,
    settings: configs.Settings | None = None,
) -> Tensor:
    """Return blocks int32 [B, S, G, n] (packed [T, G, n]), ascending, padded with -1.

    ``settings`` replace the tuned ones.
    """
    seqs = Sequences.of(q, k_cmp, call, compressed=True)
    prepared = _prepare(q, k_cmp, lse, seqs, call, settings)
    out = q.new_empty(prepared.out, dtype=torch.int32)
    scores = lse.new_empty(prepared.scores)
    prepared.launch(q, k_cmp, lse, out, scores, seqs.cu, seqs.cu_cmp)
    return out


def scratch_row(blocks: int, tile_blocks: int, num_selected_pad: int, window: int) -> int:
    """Return the length of a token's scratch row, a multiple of 16.

    It holds a pair of numbers per survivor and block, in whole tiles and whole ranking windows.
    """
    new_blocks = window - num_selected_pad
    pairs = num_selected_pad + max(
        -(-blocks // tile_blocks) * tile_blocks + 1, -(-blocks // new_blocks) * new_blocks
    )
    return -(-pairs // 8) * 16

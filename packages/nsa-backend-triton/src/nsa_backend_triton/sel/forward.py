"""Forward of the selected branch: attention of each token over the blocks it selected.

    o_t = softmax(scale q_t K_t^T) V_t,    lse_t = log of the sum of exp(scale q_t K_t^T)

K_t and V_t are the keys <= t of the blocks that token t selected for its kv head (Eq. 11, 12).

Two kernels share the attention. ``sel_forward_kernel`` holds the queries of a tile of neighbouring
tokens and walks the union of their blocks: a block that several of them selected is read once.
``sel_bucket_kernel`` holds one block and walks the tokens that selected it and do not share it with
their tile. Each such (token, block) pair yields a partial output, and ``sel_merge_kernel`` adds the
partial outputs of a token to the output of its tile by their LSE. With many heads per group, a tile
uses the matrix units as well as a bucket does, so tiles share every block (min_sharing = 1).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_backend_triton.host.configs import Tuned, launch_options
from nsa_backend_triton.host.constexprs import common_constants
from nsa_backend_triton.host.descriptors import descriptors_fit, key_descriptors
from nsa_backend_triton.host.fork import Fork
from nsa_backend_triton.host.launch_cache import Launch, Memo, aligned, cached_by_metadata
from nsa_backend_triton.host.sequences import Sequences
from nsa_backend_triton.host.strides import batch_apart, new_lse_strides, new_strides, strides
from nsa_backend_triton.sel import pair_lists
from nsa_backend_triton.sel import unions as sel_union
from nsa_backend_triton.sel.problem import tuned_settings
from nsa_backend_triton.sel.runs import attend_buckets
from nsa_backend_triton.shared.rows import (
    LOG2E,
    add_dot,
    divide_rows,
    dot_transposed,
    fetch_rows,
    finish_softmax,
    load_at,
    online_softmax_update,
    place_queries,
    row_offset,
    scale_rows,
    store_at,
    with_batch,
    zero_rows,
)
from nsa_core.contract import SlotCall

KERNELS = ("sel_forward", "sel_bucket", "sel_merge")
MAX_BLOCK_T = 32  # tokens of a tile: one bit each of an int32


def tile_tokens(block_m: int, group: int, n: int, num_blocks: int) -> int:
    """Return the number of tokens whose ``group`` queries each fill a tile of ``block_m`` rows.

    It is rounded down to a power of two if that loses at most a tenth of the tokens. ``n`` and
    ``num_blocks`` limit it as in :func:`nsa_backend_triton.sel.unions.fitting_tokens`.
    """
    tokens = min(max(1, block_m // group), MAX_BLOCK_T)
    power_of_two = 1 << (tokens.bit_length() - 1)
    tokens = power_of_two if power_of_two * 10 >= tokens * 9 else tokens
    return sel_union.fitting_tokens(tokens, n, num_blocks)


def min_sharing_tokens(tuned: Tuned, num_keys: int) -> int:
    """Return how many tokens of a tile must select a block for the tile to read it.

    One in short sequences, so that tiles read every block and the path over buckets is skipped.
    """
    tile_settings = tuned["sel_forward"]
    if num_keys > tile_settings["SHARE_ALL_MAX_LEN"]:
        return tile_settings["MIN_SHARING_TOKENS"]
    return 1


class _TileLaunch(NamedTuple):
    """The launch of ``sel_forward_kernel`` and the sizes that follow from a call's metadata."""

    launch: Launch
    desc_block_n: int  # keys of a descriptor's tile; 0: no descriptors
    block_t: int  # tokens of a tile
    # Tokens of a tile that must select a block for it to be read; 1: no pair is left to buckets.
    min_sharing: int
    # Whether Unions.unshared is written. It follows from the settings alone: one binary for all
    # lengths.
    write_unshared: bool
    o_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    memo: Memo  # of the other launches


@cached_by_metadata
def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    seqs: Sequences,
    call: SlotCall,
    tuned: Tuned | None,
    tensors_aligned: bool,
) -> tuple[_TileLaunch, Tuned]:
    num_kv_heads, n = k.shape[-2], blocks.shape[-1]
    select_block = call.geometry.select_block_size
    group = q.shape[-2] // num_kv_heads
    tuned = tuned or {name: tuned_settings(q, k, v, call.geometry, name) for name in KERNELS}
    tile_settings, min_sharing = tuned["sel_forward"], min_sharing_tokens(tuned, seqs.end)
    num_blocks = triton.cdiv(seqs.end, select_block)
    block_t = tile_tokens(tile_settings["BLOCK_M"], group, n, num_blocks)
    if min(min_sharing, block_t) > 1:
        pair_lists.count_pairs(blocks)  # refused before the tiles run
    tiles = seqs.tiles(block_t)
    o_shape = (*q.shape[:-1], v.shape[-1])
    lse_shape = (q.shape[1], q.shape[0]) if seqs.packed else (q.shape[0], q.shape[2], q.shape[1])
    block_n = min(tile_settings["BLOCK_N"], max(16, triton.next_power_of_2(select_block)))
    use_tma = (
        bool(tile_settings.get("USE_TMA"))
        and select_block % block_n == 0
        and tensors_aligned
        and descriptors_fit(seqs.packed, k, v)
    )
    launch = Launch(
        sel_forward_kernel, (num_kv_heads * tiles,),
        seqs.n, seqs.seq_len, seqs.first_query, tiles, call.scale * LOG2E.value,
        *(n for x in (q, k, v) for n in batch_apart(strides(x, seqs.packed))),
        *batch_apart(new_strides(o_shape, seqs.packed)),
        *new_lse_strides(lse_shape, seqs.packed),
        **common_constants(q, v, group, seqs, use_tma=use_tma),
        NUM_SELECTED=n, SELECT_BLOCK=select_block,
        BLOCK_T=block_t, BLOCK_M=max(16, triton.next_power_of_2(block_t * group)),
        BLOCK_N=block_n, NEGATIVE_SCALE=call.scale < 0, USE_TMA=use_tma,
        **launch_options(tile_settings),
    )  # fmt: skip
    return _TileLaunch(
        launch,
        block_n if use_tma else 0,
        block_t,
        min(min_sharing, block_t),
        tile_settings["MIN_SHARING_TOKENS"] > 1,
        o_shape,
        lse_shape,
        Memo(),
    ), tuned


def forward(
    q: Tensor,  # [B, S, Hq, Dk], packed [T, Hq, Dk]
    k: Tensor,  # [B, S, G, Dk]
    v: Tensor,  # [B, S, G, Dv]
    blocks: Tensor,  # int32 or int64 [B, S, G, n]
    *,
    call: SlotCall,
    tuned: Tuned | None = None,
) -> tuple[Tensor, Tensor]:
    """Return o [B, S, Hq, Dv] and lse [B, Hq, S] (packed [T, Hq, Dv] and [Hq, T]).

    ``tuned`` replaces the settings that the table of this GPU holds.
    """
    seqs = Sequences.of(q, k, call)
    tiles, tuned = _prepare(q, k, v, blocks, seqs, call, tuned, aligned(k, v))
    if tiles.min_sharing > 1:
        seqs = seqs.disjoint()  # as the lists of pairs require
    unions = sel_union.build(
        blocks,
        seqs,
        call.geometry,
        tiles.block_t,
        tiles.min_sharing,
        tiles.memo,
        write_unshared=tiles.write_unshared,
    )
    o = q.new_empty(tiles.o_shape)
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = q.new_empty(tiles.lse_shape, dtype=lse_dtype)
    described = key_descriptors(k, v, tiles.desc_block_n, seqs.end)
    attended = q, k, v, *described, unions.entries, unions.counts, o, lse, seqs.cu
    if tiles.min_sharing == 1:
        tiles.launch(*attended)
        return o, lse
    buckets = q, k, v, blocks, unions.unshared, o, lse, seqs, call, tuned, tiles.memo
    with Fork(q.device) as fork:
        with fork.beside(*described, *unions):  # sorting the pairs occupies little of the GPU
            tiles.launch(*attended)
        attend_buckets(*buckets, fork)
    return o, lse


@triton.jit
def _attend_entries(
    q, K, V, K_DESC, V_DESC, seq, kv_head, ENTRIES, m_i, l_i, acc, seen_tokens, begin, end,
    offs_t, token_bit, length, qk_scale, stride_kt, stride_vt,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    HEAD_DIM_BAND: tl.constexpr, V_HEAD_DIM_BAND: tl.constexpr,
    MAX_ENTRIES: tl.constexpr, SELECT_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, NEGATIVE_SCALE: tl.constexpr, USE_TMA: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Add the entries begin .. end of the tile's union to m_i, l_i and acc, BLOCK_N keys at a time.

    MASKED: some of their keys lie after a token or past the end of the sequence. NEGATIVE_SCALE:
    qk_scale < 0. Where nothing is masked, a row whose token did not select the block takes no
    operation per key: infinity is subtracted from its scores, so that its p is 0. ``seen_tokens``
    collects the bits of the tokens that selected an entry.
    """
    KEY_TILES: tl.constexpr = (SELECT_BLOCK + BLOCK_N - 1) // BLOCK_N
    EVEN_N: tl.constexpr = SELECT_BLOCK % BLOCK_N == 0
    tile_n = tl.arange(0, BLOCK_N)
    # An entry is loaded one iteration before its keys: an address that depends on a load is not
    # prefetched.
    block = tl.load(ENTRIES + begin, mask=begin < end, other=0)
    members = tl.load(ENTRIES + MAX_ENTRIES + begin, mask=begin < end, other=0)
    for i in tl.range(begin * KEY_TILES, end * KEY_TILES):
        next_entry = tl.minimum(i + 1, end * KEY_TILES - 1) // KEY_TILES
        next_block = tl.load(ENTRIES + next_entry)
        next_members = tl.load(ENTRIES + MAX_ENTRIES + next_entry)
        first_key = block.to(tl.int64) * SELECT_BLOCK
        offs_n = i % KEY_TILES * BLOCK_N + tile_n
        key = block * SELECT_BLOCK + offs_n
        mask_n = None
        if MASKED:
            mask_n = (key < length) & (offs_n < SELECT_BLOCK)
        elif not EVEN_N:
            mask_n = offs_n < SELECT_BLOCK
        if USE_TMA:
            k = fetch_rows(
                K_DESC, seq, block * SELECT_BLOCK + i % KEY_TILES * BLOCK_N, kv_head,
                BLOCK_N, HEAD_DIM, HEAD_DIM_BAND,
            )  # fmt: skip
        else:
            k = load_at(
                K + first_key * stride_kt, offs_n * stride_kt, mask_n, HEAD_DIM, HEAD_DIM_BAND
            )
        qk = dot_transposed(q, k, ACC)
        s = qk * qk_scale
        # The maximum is taken of the unscaled products: the compiler can then fuse the
        # multiplication above with the subtraction below.
        row_max = (tl.min(qk, 1) if NEGATIVE_SCALE else tl.max(qk, 1)) * qk_scale
        if MASKED:
            s = tl.where(key[None, :] <= offs_t[:, None], s, float("-inf"))
        if not EVEN_N:
            s = tl.where((offs_n < SELECT_BLOCK)[None, :], s, float("-inf"))
        if MASKED or not EVEN_N:
            row_max = tl.max(s, 1)
        selected = (members & token_bit) != 0
        m_i, l_i, p, alpha = online_softmax_update(m_i, l_i, s, row_max, selected, True, q[0].dtype)
        if USE_TMA:
            v = fetch_rows(
                V_DESC, seq, block * SELECT_BLOCK + i % KEY_TILES * BLOCK_N, kv_head,
                BLOCK_N, V_HEAD_DIM, V_HEAD_DIM_BAND,
            )  # fmt: skip
        else:
            v = load_at(
                V + first_key * stride_vt, offs_n * stride_vt, mask_n, V_HEAD_DIM, V_HEAD_DIM_BAND
            )
        acc = scale_rows(acc, alpha[:, None])
        acc = add_dot(acc, p, v)
        seen_tokens |= members
        block = next_block
        members = next_members
    return m_i, l_i, acc, seen_tokens


@triton.jit
def _zero_rows_unless(x, mask_m):
    """Rows x [M, WIDTH], 0 where not ``mask_m`` [M]."""
    NUM_BANDS: tl.constexpr = len(x)
    masked = ()
    for i in tl.static_range(NUM_BANDS):
        masked = masked + (tl.where(mask_m[:, None], x[i], 0.0),)
    return masked


@triton.jit(
    do_not_specialize=[
        "num_seqs", "seq_len", "first_query", "tiles", "stride_lse_b", "stride_lse_h",
    ]
)  # fmt: skip
def sel_forward_kernel(
    Q, K, V, K_DESC, V_DESC, ENTRIES, COUNTS, O, LSE, CU_SEQLENS,
    num_seqs, seq_len, first_query, tiles, qk_scale,
    stride_qb: tl.int64, stride_q, stride_kb: tl.int64, stride_k,
    stride_vb: tl.int64, stride_v, stride_ob: tl.int64, stride_o,
    stride_lse_b: tl.int64, stride_lse_h: tl.int64,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    HEAD_DIM_BAND: tl.constexpr, V_HEAD_DIM_BAND: tl.constexpr,
    GROUP: tl.constexpr, VARLEN: tl.constexpr, PARTIAL: tl.constexpr, ACC: tl.constexpr,
    NUM_SELECTED: tl.constexpr, SELECT_BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    NEGATIVE_SCALE: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    """Attend from a tile of tokens of one kv head to the union of their blocks.

    A program owns BLOCK_T neighbouring tokens with all GROUP heads: BLOCK_T * GROUP rows, padded to
    BLOCK_M. Registers hold the scores [BLOCK_M, BLOCK_N], acc [BLOCK_M, V_HEAD_DIM] and m, l
    [BLOCK_M]; shared memory holds Q [BLOCK_M, HEAD_DIM], and num_stages times K [BLOCK_N, HEAD_DIM]
    and V [BLOCK_N, V_HEAD_DIM]. An entry takes l' * (HEAD_DIM + V_HEAD_DIM) elements from L2 and
    2 * BLOCK_M * l' * (HEAD_DIM + V_HEAD_DIM) operations: L2 is the limit below BLOCK_M = 64, the
    matrix units above. Entries whose keys all lie before the first token of the tile come last and
    need no causal mask. Kv heads are the outermost index, so that K and V of one head stay in L2,
    and the tiles with the most entries start first.
    """
    kv_head = tl.program_id(0) // tiles
    tile = tiles - 1 - tl.program_id(0) % tiles
    seq, start, query_start, length, first_t = place_queries(
        tile, CU_SEQLENS, num_seqs, seq_len, first_query, BLOCK_T, VARLEN, PARTIAL
    )
    if first_t >= length:
        return
    stride_qt, stride_qh = stride_q
    stride_kt, _ = stride_k
    stride_vt, _ = stride_v
    stride_ot, stride_oh = stride_o
    batch = seq.to(tl.int64)
    offs_m = tl.arange(0, BLOCK_M)
    local_t = offs_m // GROUP
    offs_t = first_t + local_t
    mask_m = (offs_t < length) & (offs_m < BLOCK_T * GROUP)
    query_start = query_start.to(tl.int64)
    head = kv_head * GROUP + offs_m % GROUP
    q_base = Q + batch * stride_qb + (query_start + first_t) * stride_qt
    q = load_at(q_base, local_t * stride_qt + head * stride_qh, mask_m, HEAD_DIM, HEAD_DIM_BAND)
    k_base = K + row_offset(batch, start, kv_head, with_batch(stride_kb, stride_k))
    v_base = V + row_offset(batch, start, kv_head, with_batch(stride_vb, stride_v))
    union = kv_head * tiles + tile
    entries = ENTRIES + union.to(tl.int64) * (2 * BLOCK_T * NUM_SELECTED)
    num_entries = tl.load(COUNTS + union * 2)
    num_masked = tl.load(COUNTS + union * 2 + 1)
    token_bit = tl.where(mask_m, tl.full([BLOCK_M], 1, tl.int32) << local_t, 0)
    m_i = tl.full([BLOCK_M], float("-inf"), ACC)
    l_i = tl.zeros([BLOCK_M], ACC)
    acc = zero_rows(BLOCK_M, V_HEAD_DIM, V_HEAD_DIM_BAND, ACC)
    seen_tokens = tl.full([], 0, tl.int32)
    m_i, l_i, acc, seen_tokens = _attend_entries(
        q, k_base, v_base, K_DESC, V_DESC, seq, kv_head, entries, m_i, l_i, acc, seen_tokens,
        0, num_masked, offs_t, token_bit, length, qk_scale, stride_kt, stride_vt,
        HEAD_DIM, V_HEAD_DIM, HEAD_DIM_BAND, V_HEAD_DIM_BAND,
        BLOCK_T * NUM_SELECTED, SELECT_BLOCK, BLOCK_N, True, NEGATIVE_SCALE, USE_TMA, ACC,
    )  # fmt: skip
    m_i, l_i, acc, seen_tokens = _attend_entries(
        q, k_base, v_base, K_DESC, V_DESC, seq, kv_head, entries, m_i, l_i, acc, seen_tokens,
        num_masked, num_entries, offs_t, token_bit, length, qk_scale, stride_kt, stride_vt,
        HEAD_DIM, V_HEAD_DIM, HEAD_DIM_BAND, V_HEAD_DIM_BAND,
        BLOCK_T * NUM_SELECTED, SELECT_BLOCK, BLOCK_N, False, NEGATIVE_SCALE, USE_TMA, ACC,
    )  # fmt: skip
    # A token that selected no entry has m = -inf, l = 0 and acc = 0, or NaN where its query is NaN.
    has_keys = (seen_tokens & token_bit) != 0
    divisor, lse = finish_softmax(m_i, tl.where(has_keys, l_i, 0.0))
    o_base = O + batch * stride_ob + (query_start + first_t) * stride_ot
    acc = _zero_rows_unless(acc, has_keys)
    o = divide_rows(acc, divisor)
    store_at(o_base, local_t * stride_ot + head * stride_oh, o, mask_m, V_HEAD_DIM, V_HEAD_DIM_BAND)
    lse_base = LSE + seq * stride_lse_b + query_start
    tl.store(lse_base + head * stride_lse_h + offs_t, lse, mask=mask_m)

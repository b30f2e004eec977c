"""Forward of the selected branch: blocks that a tile of tokens shares are read once for it; the
others by bucket.

Two kernels do the attention. ``sel_forward_kernel`` holds the queries of a tile of tokens and walks
the union of their blocks. ``sel_bucket_kernel`` holds one block and walks the tokens that chose it
and do not share it with their tile; each such (token, block) pair yields a partial output, and
``sel_merge_kernel`` adds a token's partials to the tile's output by their LSE. With many heads a
group a tile is as good as a bucket, so everything is shared (least = 1).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_backend_triton.host import configs
from nsa_backend_triton.host.descriptors import descriptors_fit, key_descriptor
from nsa_backend_triton.host.launch_cache import Launch, aligned, remembered
from nsa_backend_triton.host.sequences import (
    Sequences,
    accumulator,
    architecture,
    band,
    lse_strides,
    new_lse_strides,
    new_strides,
    strides,
)
from nsa_backend_triton.sel import pair_lists, unions
from nsa_backend_triton.sel.buckets import sel_bucket_kernel
from nsa_backend_triton.sel.merge import sel_merge_kernel
from nsa_backend_triton.shared.rows import (
    LOG2E,
    add_dot,
    divide_rows,
    dot_columns,
    finish,
    load_at,
    place,
    scale_rows,
    store_at,
    transpose,
    zero_rows,
)
from nsa_backend_triton.span.geometry import fetch_rows
from nsa_core.contract import SlotCall

PARTIAL_BYTES = 2**31  # of partial outputs at a time: rows are done in runs that need no more
MAX_TILE = 32  # tokens: one bit each of an int32

Settings = Mapping[str, Mapping[str, int]]


def settings(q: Tensor, v: Tensor, heads: int, call: SlotCall) -> Settings:
    """Tile shapes of the kernels for ``heads`` query heads a group, from the table of this GPU."""
    traits = {
        "head_dim": q.shape[-1],
        "v_head_dim": v.shape[-1],
        "itemsize": q.itemsize,
        "heads": heads,
    }
    traits |= {
        "block": call.geometry.select_block_size,
        "selected": call.geometry.num_selected_blocks,
    }
    names = ("sel_forward", "sel_bucket", "sel_merge")
    return {name: configs.pick(name, architecture(q.device), **traits) for name in names}


def tile_tokens(rows: int, heads: int) -> int:
    """Tokens whose ``heads`` queries fill a tile of ``rows``; a whole power of two if that loses a
    tenth at most.
    """
    tokens = min(max(1, rows // heads), MAX_TILE)
    whole = 1 << (tokens.bit_length() - 1)
    return whole if whole * 10 >= tokens * 9 else tokens


def least_shared(tuned: Settings, seq_len: int) -> int:
    """How many tokens of a tile must choose a block for the tile to read it; short sequences share
    everything.
    """
    chosen = tuned["sel_forward"]
    return chosen["LEAST"] if seq_len > chosen["SHORT"] else 1


class _Tiles(NamedTuple):
    """What a call's metadata decide of the first kernel."""

    launch: Launch
    keys: int  # of a descriptor's tile; 0: no descriptors
    size: int  # tokens of a tile
    # how many of them must choose a block for the tile to read it; 1: nothing is left to the
    # buckets
    least: int
    leave: bool  # whether what the tiles do not read may matter at another length
    o: tuple[int, ...]
    lse: tuple[int, ...]


@remembered
def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    seqs: Sequences,
    call: SlotCall,
    tuned: Settings | None,
    tensors_aligned: bool,
) -> tuple[_Tiles, Settings]:
    groups, n, length = k.shape[-2], blocks.shape[-1], call.geometry.select_block_size
    heads = q.shape[-2] // groups
    tuned = tuned or settings(q, v, heads, call)
    chosen, least = tuned["sel_forward"], least_shared(tuned, seqs.seq_len)
    size = tile_tokens(chosen["ROWS"], heads)
    tiles = seqs.tiles(size)
    o = (*q.shape[:-1], v.shape[-1])
    lse = (q.shape[1], q.shape[0]) if seqs.packed else (q.shape[0], q.shape[2], q.shape[1])
    keys = min(chosen["KEYS"], max(16, triton.next_power_of_2(length)))
    tma = (
        bool(chosen.get("TMA"))
        and length % keys == 0
        and tensors_aligned
        and descriptors_fit(seqs.packed, k, v)
    )
    launch = Launch(
        sel_forward_kernel, (groups * tiles,), seqs.n, seqs.seq_len, tiles,
        call.scale * LOG2E.value,
        *(number for x in (q, k, v) for number in strides(x, seqs.packed)), *new_strides(o,
        seqs.packed),
        *new_lse_strides(lse, seqs.packed), **_shapes(q, v, heads, seqs), N=n, L=length,
        T=size, M=max(16, triton.next_power_of_2(size * heads)),
        KEYS=keys, NEGATIVE=call.scale < 0, TMA=tma,
        **_options(chosen),
    )  # fmt: skip
    return _Tiles(
        launch, keys if tma else 0, size, min(least, size), chosen["LEAST"] > 1, o, lse
    ), tuned


def forward(
    q: Tensor,  # [B, S, Hq, Dk], packed [T, Hq, Dk]
    k: Tensor,  # [B, S, G, Dk]
    v: Tensor,  # [B, S, G, Dv]
    blocks: Tensor,  # int32 or int64 [B, S, G, n]
    *,
    call: SlotCall,
    tuned: Settings | None = None,
) -> tuple[Tensor, Tensor]:
    """o [B, S, Hq, Dv] and lse [B, Hq, S] (packed [T, Hq, Dv] and [Hq, T]), Eq. 11 over the chosen
    blocks.
    """
    seqs = Sequences.of(q, call)
    tiles, tuned = _prepare(q, k, v, blocks, seqs, call, tuned, aligned(k, v))
    joined = unions.build(blocks, seqs, call.geometry, tiles.size, tiles.least, leave=tiles.leave)
    o = q.new_empty(tiles.o)
    lse = q.new_empty(tiles.lse, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    described = (key_descriptor(x, tiles.keys) if tiles.keys else None for x in (k, v))
    tiles.launch(q, k, v, *described, joined.entries, joined.counts, o, lse, seqs.cu)
    if tiles.least > 1:
        for rows in _runs(o, q.shape[-2] // k.shape[-2], blocks.shape[-1]):
            _attend_buckets(q, k, v, blocks, joined.left, o, lse, seqs, call, rows, tuned)
    return o, lse


def _runs(o: Tensor, heads: int, n: int) -> Iterator[tuple[int, int]]:
    """Runs (first, count) of rows over all sequences whose partial outputs fit PARTIAL_BYTES."""
    width = o.shape[-1] * o.shape[-2] * n * o.itemsize
    rows = o.numel() // (o.shape[-1] * o.shape[-2])
    count = max(1, PARTIAL_BYTES // width)
    for first in range(0, rows, count):
        yield first, min(count, rows - first)


def _options(chosen: Mapping[str, int]) -> dict[str, int]:
    """The compiler's part of a table row."""
    return {name: chosen[name] for name in ("num_warps", "num_stages", "maxnreg") if name in chosen}


def _shapes(q: Tensor, v: Tensor, heads: int, seqs: Sequences) -> dict[str, object]:
    """Constants that every kernel here takes."""
    dk, dv = q.shape[-1], v.shape[-1]
    bands = {"DK": dk, "DV": dv, "DKP": band(dk), "DVP": band(dv)}
    return {**bands, "H": heads, "VARLEN": seqs.packed, "ACC": accumulator(q.dtype)}


class _Buckets(NamedTuple):
    """What a call's metadata decide of the kernels over buckets, and the shape of the partial
    outputs.
    """

    attend: Launch
    merge: Launch
    parts: tuple[int, int, int]


@remembered
def _prepare_buckets(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, seqs: Sequences, call: SlotCall, rows: tuple[int,
    int], n: int,
    pairs: int, buckets: int, tuned: Settings,
) -> _Buckets:  # fmt: skip
    groups, length = k.shape[-2], call.geometry.select_block_size
    heads = q.shape[-2] // groups
    shapes, chosen = _shapes(q, v, heads, seqs), tuned["sel_bucket"]
    size = max(1, chosen["ROWS"] // heads)
    attend = Launch(
        sel_bucket_kernel, (pairs // (size * chosen["TILES"]) + buckets,),
        seqs.n, seqs.seq_len, buckets, pairs, rows[0], groups, call.scale * LOG2E.value,
        *(number for x in (q, k, v) for number in strides(x, seqs.packed)),
        **shapes, N=n, L=length, KEYS=max(16, triton.next_power_of_2(length)),
        T=size, M=max(16, triton.next_power_of_2(size * heads)), TILES=chosen["TILES"],
        NEGATIVE=call.scale < 0, **_options(chosen),
    )  # fmt: skip
    chosen = tuned["sel_merge"]
    size = max(1, chosen["ROWS"] // heads)
    merge = Launch(
        sel_merge_kernel, (triton.cdiv(rows[1], size) * groups,),
        seqs.seq_len, *rows, groups, *lse_strides(lse, seqs.packed),
        DV=v.shape[-1], DVP=max(16, triton.next_power_of_2(v.shape[-1])), H=heads,
        VARLEN=seqs.packed,
        ACC=shapes["ACC"], N=n,
        T=size, M=triton.next_power_of_2(size * heads), UNROLL=chosen["UNROLL"], **_options(chosen),
    )  # fmt: skip
    return _Buckets(attend, merge, (rows[1] * groups * n, heads, v.shape[-1]))


def _attend_buckets(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, left: Tensor, o: Tensor, lse: Tensor,
    seqs: Sequences,
    call: SlotCall, rows: tuple[int, int], tuned: Settings,
) -> None:  # fmt: skip
    """Add the pairs that no tile shares, of rows (first, count), to o and lse."""
    lists = pair_lists.build(blocks, seqs, call.geometry, kept=left, rows=rows)
    n, pairs, buckets = blocks.shape[-1], lists.tokens.numel(), lists.offsets.numel() - 1
    made = _prepare_buckets(q, k, v, lse, seqs, call, rows, n, pairs, buckets, tuned)
    parts, part_lse = q.new_empty(made.parts), lse.new_empty(made.parts[:2])
    made.attend(q, k, v, *lists, parts, part_lse, seqs.cu)
    made.merge(parts, part_lse, left, o, lse)


@triton.jit
def _walk(
    q, K, V, K_TMA, V_TMA, seq, group, LIST, m, l, acc, ever, low, high, t, member_bit, length,
    factor, stride_k,
    stride_v,
    DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, DVP: tl.constexpr, N_LIST: tl.constexpr,
    L: tl.constexpr,
    KEYS: tl.constexpr, CUT: tl.constexpr, NEGATIVE: tl.constexpr, TMA: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Entries low..high of a tile's list, KEYS keys at a time; CUT: some keys lie behind a token or
    the end.

    NEGATIVE: factor is. Where nothing is cut, a row that did not choose a block costs no operation
    a key: it is shifted by infinity, so its p is 0. ``ever`` gathers the tokens that chose
    something.
    """
    PARTS: tl.constexpr = (L + KEYS - 1) // KEYS
    WHOLE: tl.constexpr = L % KEYS == 0
    lane = tl.arange(0, KEYS)
    # An entry is read a turn before its keys: an address that waits for a load is not fetched
    # ahead.
    block = tl.load(LIST + low, mask=low < high, other=0)
    members = tl.load(LIST + N_LIST + low, mask=low < high, other=0)
    for i in tl.range(low * PARTS, high * PARTS):
        following = tl.minimum(i + 1, high * PARTS - 1) // PARTS
        next_block = tl.load(LIST + following)
        next_members = tl.load(LIST + N_LIST + following)
        at_block = block.to(tl.int64) * L
        inner = i % PARTS * KEYS + lane
        key = block * L + inner
        there = None
        if CUT:
            there = (key < length) & (inner < L)
        elif not WHOLE:
            there = inner < L
        if TMA:
            k = fetch_rows(K_TMA, seq, block * L + i % PARTS * KEYS, group, KEYS, DK, DKP)
        else:
            k = load_at(K + at_block * stride_k, inner * stride_k, there, DK, DKP)
        dots = dot_columns(q, transpose(k, DK, DKP), DK, DKP, ACC)
        scores = dots * factor
        # Of the products as they are: the multiplication above then joins the subtraction below.
        top = (tl.min(dots, 1) if NEGATIVE else tl.max(dots, 1)) * factor
        if CUT:
            scores = tl.where(key[None, :] <= t[:, None], scores, float("-inf"))
        if not WHOLE:
            scores = tl.where((inner < L)[None, :], scores, float("-inf"))
        if CUT or not WHOLE:
            top = tl.max(scores, 1)
        member = (members & member_bit) != 0
        m_new = tl.where(member, tl.maximum(m, top), m)
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(scores - tl.where(member, m_safe, float("inf"))[:, None])
        alpha = tl.exp2(m - m_safe)
        l = l * alpha + tl.sum(p, 1)
        if TMA:
            v = fetch_rows(V_TMA, seq, block * L + i % PARTS * KEYS, group, KEYS, DV, DVP)
        else:
            v = load_at(V + at_block * stride_v, inner * stride_v, there, DV, DVP)
        acc = scale_rows(acc, alpha[:, None], DV, DVP)
        acc = add_dot(acc, p.to(v[0].dtype), v, DV, DVP, ACC)
        m = m_new
        ever |= members
        block = next_block
        members = next_members
    return m, l, acc, ever


@triton.jit
def _keep(x, ok, D: tl.constexpr, BLOCK: tl.constexpr):
    """Rows x [R, D], 0 where not ``ok`` [R]."""
    kept = ()
    for i in tl.static_range((D + BLOCK - 1) // BLOCK):
        kept = kept + (tl.where(ok[:, None], x[i], 0.0),)
    return kept


@triton.jit(do_not_specialize=["n_seqs", "seq_len", "tiles", "sl_b", "sl_h"])
def sel_forward_kernel(
    Q, K, V, K_TMA, V_TMA, ENTRIES, COUNTS, O, LSE, CU, n_seqs, seq_len, tiles, factor,
    sq_b: tl.int64, sq_t, sq_h, sk_b: tl.int64, sk_t, sk_h, sv_b: tl.int64, sv_t, sv_h,
    so_b: tl.int64, so_t, so_h,
    sl_b: tl.int64, sl_h: tl.int64,
    DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, DVP: tl.constexpr, H: tl.constexpr,
    VARLEN: tl.constexpr,
    ACC: tl.constexpr, N: tl.constexpr, L: tl.constexpr, T: tl.constexpr, M: tl.constexpr,
    KEYS: tl.constexpr,
    NEGATIVE: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """T neighbouring tokens of one kv head, all H heads: T*H rows padded to M, over the union of
    the tokens' blocks.

    Registers: scores [M, KEYS], acc [M, DV], m, l [M]; shared memory: Q [M, DK], and num_stages
    times K [KEYS, DK] and V [KEYS, DV]. An entry costs L*(DK + DV) elements from L2 and 2*M*L*(DK +
    DV) operations: below M = 64 it is bound by L2, above by the tensor cores. Entries whose keys
    all lie before the tile's first token come last, and need no causal mask. Kv heads are
    outermost, so that one head's K and V stay in L2.
    """
    program = tl.program_id(0)
    group = program // tiles
    seq, start, length, row = place(program % tiles, CU, n_seqs, seq_len, T, VARLEN)
    if row >= length:
        return
    rows = tl.arange(0, M)
    local = rows // H
    t = row + local
    inside = (t < length) & (rows < T * H)
    first = start.to(tl.int64)
    head = group * H + rows % H
    at_q = Q + seq * sq_b + (first + row) * sq_t
    q = load_at(at_q, local * sq_t + head * sq_h, inside, DK, DKP)
    k = K + seq * sk_b + first * sk_t + group * sk_h
    v = V + seq * sv_b + first * sv_t + group * sv_h
    entries = ENTRIES + program.to(tl.int64) * (2 * T * N)
    count = tl.load(COUNTS + program * 2)
    cut = tl.load(COUNTS + program * 2 + 1)
    bit = tl.where(inside, tl.full([M], 1, tl.int32) << local, 0)
    m = tl.full([M], float("-inf"), ACC)
    l = tl.zeros([M], ACC)
    acc = zero_rows(M, DV, DVP, ACC)
    ever = tl.full([], 0, tl.int32)
    m, l, acc, ever = _walk(
        q, k, v, K_TMA, V_TMA, seq, group, entries, m, l, acc, ever, 0, cut, t, bit, length,
        factor, sk_t, sv_t,
        DK, DV, DKP, DVP, T * N, L, KEYS, True, NEGATIVE, TMA, ACC,
    )  # fmt: skip
    m, l, acc, ever = _walk(
        q, k, v, K_TMA, V_TMA, seq, group, entries, m, l, acc, ever, cut, count, t, bit, length,
        factor, sk_t, sv_t,
        DK, DV, DKP, DVP, T * N, L, KEYS, False, NEGATIVE, TMA, ACC,
    )  # fmt: skip
    # A token without blocks got nothing but, from a query that is NaN, NaN.
    chose = (ever & bit) != 0
    divisor, lse = finish(m, tl.where(chose, l, 0.0))
    at_o = O + seq * so_b + (first + row) * so_t
    out = divide_rows(_keep(acc, chose, DV, DVP), divisor, DV, DVP)
    store_at(at_o, local * so_t + head * so_h, out, inside, DV, DVP)
    tl.store(LSE + seq * sl_b + head * sl_h + first + t, lse, mask=inside)

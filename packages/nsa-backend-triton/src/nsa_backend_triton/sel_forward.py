"""Forward of the selected branch: blocks that a tile of tokens shares are read once for it; the others by bucket.

Two kernels do the attention. ``sel_forward_kernel`` holds the queries of a tile of tokens and walks the union of their
blocks. ``sel_bucket_kernel`` holds one block and walks the tokens that chose it and do not share it with their tile;
each such (token, block) pair yields a partial output, and ``sel_merge_kernel`` adds a token's partials to the tile's
output by their LSE. With many heads a group a tile is as good as a bucket, so everything is shared (least = 1).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_backend_triton import configs, sel_lists, sel_union, tile
from nsa_backend_triton.launch import Sequences, accumulator, architecture, lse_strides, strides
from nsa_backend_triton.span_forward import descriptors_fit, key_descriptor
from nsa_core.contract import SlotCall

PARTIAL_BYTES = 2**31  # of partial outputs at a time: rows are done in runs that need no more
MAX_TILE = 32  # tokens: one bit each of an int32

Settings = Mapping[str, Mapping[str, int]]


def settings(q: Tensor, v: Tensor, heads: int, call: SlotCall) -> Settings:
    """Tile shapes of the kernels for ``heads`` query heads a group, from the table of this GPU."""
    traits = {"head_dim": q.shape[-1], "v_head_dim": v.shape[-1], "itemsize": q.itemsize, "heads": heads}
    traits |= {"block": call.geometry.select_block_size, "selected": call.geometry.num_selected_blocks}
    names = ("sel_forward", "sel_bucket", "sel_merge")
    return {name: configs.pick(name, architecture(q.device), **traits) for name in names}


def tile_tokens(rows: int, heads: int) -> int:
    """Tokens whose ``heads`` queries fill a tile of ``rows``; a whole power of two if that loses a tenth at most."""
    tokens = min(max(1, rows // heads), MAX_TILE)
    whole = 1 << (tokens.bit_length() - 1)
    return whole if whole * 10 >= tokens * 9 else tokens


def least_shared(tuned: Settings, seq_len: int) -> int:
    """How many tokens of a tile must choose a block for the tile to read it; short sequences share everything."""
    chosen = tuned["sel_forward"]
    return chosen["LEAST"] if seq_len > chosen["SHORT"] else 1


def forward(
    q: Tensor,  # [B, S, Hq, Dk], packed [T, Hq, Dk]
    k: Tensor,  # [B, S, G, Dk]
    v: Tensor,  # [B, S, G, Dv]
    blocks: Tensor,  # int32 or int64 [B, S, G, n]
    *,
    call: SlotCall,
    tuned: Settings | None = None,
) -> tuple[Tensor, Tensor]:
    """o [B, S, Hq, Dv] and lse [B, Hq, S] (packed [T, Hq, Dv] and [Hq, T]), Eq. 11 over the chosen blocks."""
    seqs = Sequences.of(q, call)
    heads = q.shape[-2] // k.shape[-2]
    tuned = tuned or settings(q, v, heads, call)
    least = least_shared(tuned, seqs.seq_len)
    size = tile_tokens(tuned["sel_forward"]["ROWS"], heads)
    unions = sel_union.build(
        blocks, seqs, call.geometry, size, min(least, size), leave=tuned["sel_forward"]["LEAST"] > 1
    )
    o = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)
    lse_shape = (q.shape[1], q.shape[0]) if seqs.packed else (q.shape[0], q.shape[2], q.shape[1])
    lse = torch.empty(lse_shape, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    _attend_tiles(q, k, v, unions, o, lse, seqs, call, size, tuned["sel_forward"])
    if least > 1:
        for rows in _runs(o, heads, blocks.shape[-1]):
            _attend_buckets(q, k, v, blocks, unions.left, o, lse, seqs, call, rows, tuned)
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
    dims = {"DK": q.shape[-1], "DV": v.shape[-1]}
    padded = {f"{name}P": max(16, triton.next_power_of_2(width)) for name, width in dims.items()}
    return {**dims, **padded, "H": heads, "VARLEN": seqs.packed, "ACC": accumulator(q.dtype)}


def _attend_tiles(
    q: Tensor, k: Tensor, v: Tensor, unions: sel_union.Unions, o: Tensor, lse: Tensor, seqs: Sequences,
    call: SlotCall, size: int, chosen: Mapping[str, int],
) -> None:  # fmt: skip
    groups = k.shape[-2]
    heads = q.shape[-2] // groups
    length = call.geometry.select_block_size
    keys = min(chosen["KEYS"], max(16, triton.next_power_of_2(length)))
    tiles = seqs.tiles(size)
    tma = bool(chosen.get("TMA")) and length % keys == 0 and descriptors_fit(seqs.packed, k, v)
    described = (key_descriptor(x, keys) if tma else None for x in (k, v))
    sel_forward_kernel[(groups * tiles,)](
        q, k, v, *described, unions.entries, unions.counts, o, lse, seqs.cu, seqs.n, seqs.seq_len, tiles,
        call.scale * tile.LOG2E.value,
        *strides(q, seqs.packed), *strides(k, seqs.packed), *strides(v, seqs.packed), *strides(o, seqs.packed),
        *lse_strides(lse, seqs.packed), **_shapes(q, v, heads, seqs), N=unions.entries.shape[-1] // size, L=length,
        T=size, M=max(16, triton.next_power_of_2(size * heads)), KEYS=keys, NEGATIVE=call.scale < 0,
        TMA=tma, **_options(chosen),
    )  # fmt: skip


def _attend_buckets(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, left: Tensor, o: Tensor, lse: Tensor, seqs: Sequences,
    call: SlotCall, rows: tuple[int, int], tuned: Settings,
) -> None:  # fmt: skip
    """Add the pairs that no tile shares, of rows (first, count), to o and lse."""
    groups, n = blocks.shape[-2:]
    heads = q.shape[-2] // groups
    length = call.geometry.select_block_size
    lists = sel_lists.build(blocks, seqs, call.geometry, kept=left, rows=rows)
    shapes = _shapes(q, v, heads, seqs)
    parts = torch.empty((rows[1] * groups * n, heads, v.shape[-1]), dtype=q.dtype, device=q.device)
    part_lse = torch.empty(parts.shape[:2], dtype=lse.dtype, device=q.device)
    chosen = tuned["sel_bucket"]
    size = max(1, chosen["ROWS"] // heads)
    run = size * chosen["TILES"]
    buckets = lists.offsets.numel() - 1
    sel_bucket_kernel[(len(lists.tokens) // run + buckets,)](
        q, k, v, *lists, parts, part_lse, seqs.cu, seqs.n, seqs.seq_len, buckets, len(lists.tokens), rows[0],
        groups, call.scale * tile.LOG2E.value,
        *strides(q, seqs.packed), *strides(k, seqs.packed), *strides(v, seqs.packed),
        **shapes, N=n, L=length, KEYS=max(16, triton.next_power_of_2(length)),
        T=size, M=max(16, triton.next_power_of_2(size * heads)), TILES=chosen["TILES"],
        NEGATIVE=call.scale < 0, **_options(chosen),
    )  # fmt: skip
    chosen = tuned["sel_merge"]
    size = max(1, chosen["ROWS"] // heads)
    sel_merge_kernel[(triton.cdiv(rows[1], size) * groups,)](
        parts, part_lse, left, o, lse, seqs.seq_len, *rows, groups, *lse_strides(lse, seqs.packed),
        DV=shapes["DV"], DVP=shapes["DVP"], H=heads, VARLEN=seqs.packed, ACC=shapes["ACC"], N=n,
        T=size, M=triton.next_power_of_2(size * heads), UNROLL=chosen["UNROLL"], **_options(chosen),
    )  # fmt: skip


@triton.jit
def _load(X, at, columns, D: tl.constexpr, DP: tl.constexpr, mask):
    """Rows ``at`` of X padded to DP columns, 0 where ``mask`` [rows, 1] is off; mask None: every row is there."""
    where = X + at[:, None] + columns[None, :]
    if mask is not None:
        x = tl.load(where, mask=mask & (columns < D)[None, :], other=0.0)
    elif D != DP:
        x = tl.load(where, mask=(columns < D)[None, :], other=0.0)
    else:
        x = tl.load(where)
    return x


@triton.jit
def _walk(
    q, K, V, K_TMA, V_TMA, seq, group, LIST, m, l, acc, ever, low, high, t, member_bit, length, factor, stride_k,
    stride_v,
    DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, DVP: tl.constexpr, N_LIST: tl.constexpr, L: tl.constexpr,
    KEYS: tl.constexpr, CUT: tl.constexpr, NEGATIVE: tl.constexpr, TMA: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Entries low..high of a tile's list, KEYS keys at a time; CUT: some keys lie behind a token or the end.

    NEGATIVE: factor is. Where nothing is cut, a row that did not choose a block costs no operation a key: it is
    shifted by infinity, so its p is 0. ``ever`` gathers the tokens that chose something.
    """
    PARTS: tl.constexpr = (L + KEYS - 1) // KEYS
    WHOLE: tl.constexpr = L % KEYS == 0
    lane = tl.arange(0, KEYS)
    columns_k = tl.arange(0, DKP)
    columns_v = tl.arange(0, DVP)
    # An entry is read a turn before its keys: an address that waits for a load is not fetched ahead.
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
            there = ((key < length) & (inner < L))[:, None]
        elif not WHOLE:
            there = (inner < L)[:, None]
        if TMA:
            k = K_TMA.load([seq, block * L + i % PARTS * KEYS, group, 0]).reshape(KEYS, DKP)
        else:
            k = _load(K + at_block * stride_k, inner * stride_k, columns_k, DK, DKP, there)
        dots = tl.dot(q, tl.trans(k), out_dtype=ACC, input_precision="ieee")
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
            v = V_TMA.load([seq, block * L + i % PARTS * KEYS, group, 0]).reshape(KEYS, DVP)
        else:
            v = _load(V + at_block * stride_v, inner * stride_v, columns_v, DV, DVP, there)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], out_dtype=ACC, input_precision="ieee")
        m = m_new
        ever |= members
        block = next_block
        members = next_members
    return m, l, acc, ever


@triton.jit(do_not_specialize=["n_seqs", "seq_len", "tiles", "sl_b", "sl_h"])
def sel_forward_kernel(
    Q, K, V, K_TMA, V_TMA, ENTRIES, COUNTS, O, LSE, CU, n_seqs, seq_len, tiles, factor,
    sq_b: tl.int64, sq_t, sq_h, sk_b: tl.int64, sk_t, sk_h, sv_b: tl.int64, sv_t, sv_h, so_b: tl.int64, so_t, so_h,
    sl_b: tl.int64, sl_h: tl.int64,
    DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, DVP: tl.constexpr, H: tl.constexpr, VARLEN: tl.constexpr,
    ACC: tl.constexpr, N: tl.constexpr, L: tl.constexpr, T: tl.constexpr, M: tl.constexpr, KEYS: tl.constexpr,
    NEGATIVE: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """T neighbouring tokens of one kv head, all H heads: T*H rows padded to M, over the union of the tokens' blocks.

    Registers: scores [M, KEYS], acc [M, DVP], m, l [M]; shared memory: Q [M, DKP], and num_stages times K [KEYS, DKP]
    and V [KEYS, DVP]. An entry costs L*(DK + DV) elements from L2 and 2*M*L*(DKP + DVP) operations: below M = 64 it is
    bound by L2, above by the tensor cores. Entries whose keys all lie before the tile's first token come last, and
    need no causal mask. Kv heads are outermost, so that one head's K and V stay in L2.
    """
    program = tl.program_id(0)
    group = program // tiles
    seq, start, length, row = tile.place(program % tiles, CU, n_seqs, seq_len, T, VARLEN)
    if row >= length:
        return
    rows = tl.arange(0, M)
    local = rows // H
    t = row + local
    inside = (t < length) & (rows < T * H)
    first = start.to(tl.int64)
    head = group * H + rows % H
    at_q = Q + seq * sq_b + (first + row) * sq_t
    q = _load(at_q, local * sq_t + head * sq_h, tl.arange(0, DKP), DK, DKP, inside[:, None])
    k = K + seq * sk_b + first * sk_t + group * sk_h
    v = V + seq * sv_b + first * sv_t + group * sv_h
    entries = ENTRIES + program.to(tl.int64) * (2 * T * N)
    count = tl.load(COUNTS + program * 2)
    cut = tl.load(COUNTS + program * 2 + 1)
    bit = tl.where(inside, tl.full([M], 1, tl.int32) << local, 0)
    m = tl.full([M], float("-inf"), ACC)
    l = tl.zeros([M], ACC)
    acc = tl.zeros([M, DVP], ACC)
    ever = tl.full([], 0, tl.int32)
    m, l, acc, ever = _walk(
        q, k, v, K_TMA, V_TMA, seq, group, entries, m, l, acc, ever, 0, cut, t, bit, length, factor, sk_t, sv_t,
        DK, DV, DKP, DVP, T * N, L, KEYS, True, NEGATIVE, TMA, ACC,
    )  # fmt: skip
    m, l, acc, ever = _walk(
        q, k, v, K_TMA, V_TMA, seq, group, entries, m, l, acc, ever, cut, count, t, bit, length, factor, sk_t, sv_t,
        DK, DV, DKP, DVP, T * N, L, KEYS, False, NEGATIVE, TMA, ACC,
    )  # fmt: skip
    # A token without blocks got nothing but, from a query that is NaN, NaN.
    chose = (ever & bit) != 0
    out, lse = tile.finish(m, tl.where(chose, l, 0.0), tl.where(chose[:, None], acc, 0.0))
    columns = tl.arange(0, DVP)
    at_o = O + seq * so_b + (first + row) * so_t + (local * so_t + head * so_h)[:, None] + columns[None, :]
    tl.store(at_o, out.to(O.dtype.element_ty), mask=inside[:, None] & (columns < DV)[None, :])
    tl.store(LSE + seq * sl_b + head * sl_h + first + t, lse, mask=inside)


@triton.jit(do_not_specialize=["n_seqs", "seq_len", "buckets", "pairs", "first_row"])
def sel_bucket_kernel(
    Q, K, V, TOKENS, SLOTS, OFFSETS, PARTS, PART_LSE, CU, n_seqs, seq_len, buckets, pairs, first_row, groups, factor,
    sq_b: tl.int64, sq_t, sq_h, sk_b: tl.int64, sk_t, sk_h, sv_b: tl.int64, sv_t, sv_h,
    DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, DVP: tl.constexpr, H: tl.constexpr, VARLEN: tl.constexpr,
    ACC: tl.constexpr, N: tl.constexpr, L: tl.constexpr, KEYS: tl.constexpr, T: tl.constexpr, M: tl.constexpr,
    TILES: tl.constexpr, NEGATIVE: tl.constexpr,
):  # fmt: skip
    """One block of one kv head and up to TILES tiles of T tokens that chose it, T*H rows padded to M each.

    Shared memory: K [KEYS, DKP], V [KEYS, DVP], once; num_stages times Q [M, DKP], gathered, rows of H*DK elements.
    Registers: scores [M, KEYS], o [M, DVP]. A tile moves M*(DK + DV) elements, Q from L2 and partial outputs to
    memory, and costs 2*M*KEYS*(DKP + DVP) operations: bound by the writes.
    """
    bucket, first_pair, count, pair = tile.place(tl.program_id(0), OFFSETS, buckets, pairs, T * TILES, True)
    if pair >= count:
        return
    if VARLEN:
        per_head = seq_len // L + n_seqs
        group = bucket // per_head
        seq, start, length, key_row = tile.place(bucket % per_head, CU, n_seqs, seq_len, L, True)
        flat = start.to(tl.int64) - first_row
    else:
        per_head = tl.cdiv(seq_len, L)
        group = bucket // per_head % groups
        seq = bucket // per_head // groups
        start = 0
        length = seq_len
        key_row = bucket % per_head * L
        flat = seq.to(tl.int64) * seq_len - first_row
    start = tl.cast(start, tl.int64)
    lane = tl.arange(0, KEYS)
    key = key_row + lane
    there = (lane < L) & (key < length)
    columns_k = tl.arange(0, DKP)
    columns_v = tl.arange(0, DVP)
    at_k = K + seq * sk_b + (start + key_row) * sk_t + group * sk_h
    at_v = V + seq * sv_b + (start + key_row) * sv_t + group * sv_h
    k = tl.trans(_load(at_k, lane * sk_t, columns_k, DK, DKP, there[:, None]))
    v = _load(at_v, lane * sv_t, columns_v, DV, DVP, there[:, None])
    at_q = Q + seq * sq_b + start * sq_t + group * H * sq_h
    tokens = TOKENS + first_pair.to(tl.int64)
    slots = SLOTS + first_pair.to(tl.int64)
    tiles = tl.minimum(tl.cdiv(count - pair, T), TILES)
    # Tokens ascend: only a block's first L pairs can be of tokens inside it.
    cut = tiles
    if L == KEYS:
        cut = tl.minimum(tl.cdiv(tl.maximum(L - pair, 0), T), tiles)
    _pairs(
        at_q, k, v, tokens, slots, PARTS, PART_LSE, flat, group, groups, pair, pair + cut * T, count, key, there,
        sq_t, sq_h, factor, DK, DV, DKP, DVP, H, N, T, M, NEGATIVE, True, ACC,
    )  # fmt: skip
    _pairs(
        at_q, k, v, tokens, slots, PARTS, PART_LSE, flat, group, groups, pair + cut * T, pair + tiles * T, count, key,
        there, sq_t, sq_h, factor, DK, DV, DKP, DVP, H, N, T, M, NEGATIVE, False, ACC,
    )  # fmt: skip


@triton.jit
def _pairs(
    at_q, k, v, tokens, slots, PARTS, PART_LSE, flat, group, groups, begin, end, count, key, there, sq_t, sq_h, factor,
    DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, DVP: tl.constexpr, H: tl.constexpr, N: tl.constexpr,
    T: tl.constexpr, M: tl.constexpr, NEGATIVE: tl.constexpr, CUT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Partial outputs of the pairs begin .. end, whole tiles, of a bucket of ``count``; CUT: keys may lie behind."""
    rows = tl.arange(0, M)
    head = rows % H
    columns_k, columns_v = tl.arange(0, DKP), tl.arange(0, DVP)
    # A tile's tokens are read a turn before its queries: an address that waits for a load is not fetched ahead.
    at = begin + rows // H
    inside = (rows < T * H) & (at < count)
    t = tl.load(tokens + at, mask=inside, other=0)
    slot = tl.load(slots + at, mask=inside, other=0)
    for _ in tl.range(begin, end, T):
        at += T
        next_inside = (rows < T * H) & (at < count)
        next_t = tl.load(tokens + at, mask=next_inside, other=0)
        next_slot = tl.load(slots + at, mask=next_inside, other=0)
        # A row that is not there reads token 0's queries, and is not stored.
        q = _load(at_q, t.to(tl.int64) * sq_t + head * sq_h, columns_k, DK, DKP, None)
        dots = tl.dot(q, k, out_dtype=ACC, input_precision="ieee")
        scores = dots * factor
        m = (tl.min(dots, 1) if NEGATIVE else tl.max(dots, 1)) * factor  # as in _walk
        if CUT:
            scores = tl.where(there[None, :] & (key[None, :] <= t[:, None]), scores, float("-inf"))
            m = tl.max(scores, 1)
        p = tl.exp2(scores - tl.where(m == float("-inf"), 0.0, m)[:, None])
        o = tl.dot(p.to(v.dtype), v, out_dtype=ACC, input_precision="ieee")
        o, lse = tile.finish(m, tl.sum(p, 1), o)
        part = ((flat + t) * groups + group) * N + slot
        into = (part * H + head) * DV
        tl.store(
            PARTS + into[:, None] + columns_v[None, :], o.to(PARTS.dtype.element_ty),
            mask=inside[:, None] & (columns_v < DV)[None, :], eviction_policy="evict_first",
        )  # fmt: skip
        tl.store(PART_LSE + part * H + head, lse, mask=inside)
        inside = next_inside
        t = next_t
        slot = next_slot


@triton.jit(do_not_specialize=["seq_len", "first_row", "count", "sl_b", "sl_h"])
def sel_merge_kernel(
    PARTS, PART_LSE, LEFT, O, LSE, seq_len, first_row, count, groups, sl_b: tl.int64, sl_h: tl.int64,
    DV: tl.constexpr, DVP: tl.constexpr, H: tl.constexpr, VARLEN: tl.constexpr, ACC: tl.constexpr, N: tl.constexpr,
    T: tl.constexpr, M: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Add the partial outputs of T tokens of one kv head to o, weighted by exp(lse - the largest).

    Registers: acc [M, DVP]. Reads o, and of N places a token only those that LEFT marks; writes o and lse. Two passes
    over lse, which are a DV-th of the bytes. Bound by memory.
    """
    program = tl.program_id(0)
    group = program % groups
    rows = tl.arange(0, M)
    local = program // groups * T + rows // H
    inside = (rows < T * H) & (local < count)
    head = rows % H
    token = local.to(tl.int64) * groups + group  # within the run
    row = local.to(tl.int64) + first_row
    at_left = LEFT + (token + first_row * groups.to(tl.int64)) * N
    at_part = token * N * H + head
    if VARLEN:
        at_lse = LSE + (group * H + head) * sl_h + row
    else:
        at_lse = LSE + row // seq_len * sl_b + (group * H + head) * sl_h + row % seq_len
    columns = tl.arange(0, DVP)
    at_o = O + ((row * groups + group) * H + head)[:, None] * DV + columns[None, :]
    valid = inside[:, None] & (columns < DV)[None, :]
    base = tl.load(at_lse, mask=inside, other=float("-inf"))
    m = base
    any_marked = inside & (rows < 0)
    for i in tl.range(N, loop_unroll_factor=UNROLL):
        marked = inside & (tl.load(at_left + i, mask=inside, other=0) != 0)
        m = tl.maximum(m, tl.load(PART_LSE + at_part + i * H, mask=marked, other=float("-inf")))
        any_marked |= marked
    if tl.max(any_marked.to(tl.int32), 0) == 0:
        return
    m_safe = tl.where(m == float("-inf"), 0.0, m)
    l = tl.exp(base - m_safe)
    acc = tl.load(at_o, mask=valid, other=0.0).to(ACC) * l[:, None]
    for i in tl.range(N, loop_unroll_factor=UNROLL):
        marked = inside & (tl.load(at_left + i, mask=inside, other=0) != 0)
        lse = tl.load(PART_LSE + at_part + i * H, mask=marked, other=float("-inf"))
        weight = tl.exp(lse - m_safe)
        at = PARTS + (at_part + i * H)[:, None] * DV + columns[None, :]
        mask = marked[:, None] & (columns < DV)[None, :]
        acc += tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first").to(ACC) * weight[:, None]
        l += weight
    l_safe = tl.where(l == 0.0, 1.0, l)
    tl.store(at_o, (acc / l_safe[:, None]).to(O.dtype.element_ty), mask=valid)
    tl.store(at_lse, tl.where(l == 0.0, float("-inf"), m + tl.log(l_safe)), mask=inside)

"""Backward of the selected branch, block by block: dk and dv of a block, and its part of dq.

A program owns BLOCK_N keys of one block, whose K and V [BLOCK_N, D] stay on chip, and walks some of
the tokens that selected the block. It gathers their rows (token, head) in tiles of BLOCK_M rows,
all heads of a token at once:

    S^T = k q^T, dP^T = v do^T     [BLOCK_N, BLOCK_M]
    S = q k^T, dP = do v^T         [BLOCK_M, BLOCK_N] if QUERY_MAJOR: shared memory transposes P, dS
    P = exp(scale S - lse), dS = P (dP - delta)
    dv += P^T do, dk += dS^T q     [BLOCK_N, D] in registers over all tiles
    dq += dS k                     [BLOCK_M, D] added to fp32 memory, unless ORDERED
    dk, dq times scale             at the end

A tile reads 2 BLOCK_M D elements and 2 BLOCK_M fp32 numbers, adds BLOCK_M D fp32 numbers and takes
10 BLOCK_M BLOCK_N D operations: 80 operations per byte at BLOCK_N = 64 in bf16. Programs run
segment after segment of tokens, so that q, do and dq of a segment stay in L2. Registers allow 2
programs of 4 warps per multiprocessor. Profiled on an H200 while offsets still had 64 bits, no pipe
and no memory was above 60 %, so latency is the limit; ordered, where programs do not share
segments, the limit is L2 at 92 %. A tile therefore takes few instructions: 32-bit offsets unless
INT64_OFFSETS, and one load for lse and delta of its rows.

Distribution of a block's tokens over programs:

    unordered   One program per (block, segment of tokens); sel_segments finds the bounds. dq, dk
                and dv are added to fp32 memory in no fixed order, and sel_round rounds them.
    ORDERED     One program per chunk of at most chunk_pairs tokens of a block. sel_add_chunks adds
                dk and dv of the chunks in order. No dq.

A tile holds BLOCK_M // GROUP whole tokens, or a part of one token. Head offsets are therefore
constants of the loop, and tokens are loaded one tile ahead. Only the first SELECT_BLOCK pairs of a
block can belong to tokens inside the block and need a causal mask; most programs have none of them
and skip the masked loop. Padding rows, BLOCK_M % GROUP of a tile and those after the last pair,
are rows of zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_backend_triton.host.device import interpreted
from nsa_backend_triton.sel.pair_lists import locate_bucket
from nsa_backend_triton.shared.rows import (
    LOG2E,
    add_dot,
    add_rows,
    dot_transposed,
    owner,
    row_of_start,
    row_offset,
    scale_rows,
    zero_rows,
)

INTERPRETED = tl.constexpr(interpreted())  # fixed when triton is imported


@triton.jit(do_not_specialize=["segment_tokens", "num_segments", "first_token"])
def sel_segments(
    TOKENS, OFFSETS, BOUNDS, segment_tokens, num_segments, first_token,
    NUM_BOUNDS_PAD: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Write BOUNDS [num_buckets, num_segments + 1]: each bucket's first pair of each segment.

    The tokens of a bucket ascend in TOKENS. The first segment begins at 0; PARTIAL: at
    ``first_token``, before which no bucket has a token. A program owns one bucket and searches all
    its segments at once: log2(pairs) loads that depend on each other. Bound by latency.
    """
    bucket = tl.program_id(0)
    segment = tl.arange(0, NUM_BOUNDS_PAD)
    low = tl.load(OFFSETS + bucket) + tl.zeros([NUM_BOUNDS_PAD], tl.int32)
    high = tl.load(OFFSETS + bucket + 1) + tl.zeros([NUM_BOUNDS_PAD], tl.int32)
    low = tl.where(segment >= num_segments, high, low)
    first = segment * segment_tokens
    if PARTIAL:
        first += first_token
    while tl.max(high - low, 0) > 0:
        middle = (low + high) // 2
        searching = low < high
        before = searching & (tl.load(TOKENS + middle, mask=searching, other=0) < first)
        low, high = (
            tl.where(before, middle + 1, low),
            tl.where(before, high, tl.where(searching, middle, high)),
        )
    tl.store(
        BOUNDS + bucket.to(tl.int64) * (num_segments + 1) + segment,
        low,
        mask=segment <= num_segments,
    )


@triton.jit
def _locate_chunk(OFFSETS, item, num_buckets, chunk_pairs):
    """(bucket, first pair, end) of a chunk.

    Bucket b owns the items from OFFSETS[b] // chunk_pairs + b on, which are enough for it. It is
    cut into as few chunks of equal size as ``chunk_pairs`` allows; its remaining items are empty.
    """
    bucket = owner(OFFSETS, num_buckets, item, chunk_pairs)
    first = tl.load(OFFSETS + bucket)
    end = tl.load(OFFSETS + bucket + 1)
    size = tl.cdiv(end - first, tl.maximum(tl.cdiv(end - first, chunk_pairs), 1))
    begin = first + (item - (first // chunk_pairs + bucket)) * size
    return bucket, tl.minimum(begin, end), tl.minimum(begin + size, end)


@triton.jit
def gather_rows(X, offs, head_offs, mask_m, WIDTH: tl.constexpr, BAND: tl.constexpr):
    """Rows [M, WIDTH] of X in bands, 0 where not ``mask_m`` [M].

    They begin at ``offs`` + ``head_offs`` [M]; ``head_offs`` (None: 0) is constant in the caller's
    loop. The backward uses this and scatter_rows instead of load_at and store_at, with which
    sel_block_backward spills more registers (128/128 on sm_80: 56 bytes instead of 24).
    """
    x = ()
    for first in tl.static_range(0, WIDTH, BAND):
        offs_d = first + tl.arange(0, BAND)
        mask = (
            mask_m[:, None]
            if first + BAND <= WIDTH
            else mask_m[:, None] & (offs_d < WIDTH)[None, :]
        )
        # Constants are added to each other first: an offset then takes one multiplication and one
        # addition in the loop.
        inner = offs_d[None, :] if head_offs is None else head_offs[:, None] + offs_d[None, :]
        x = x + (tl.load(X + (offs[:, None] + inner), mask=mask, other=0.0),)
    return x


@triton.jit
def scatter_rows(X, offs, head_offs, x, mask_m, WIDTH: tl.constexpr, ATOMIC: tl.constexpr):
    """Inverse of gather_rows: store rows, or add them if ATOMIC. ``mask_m`` None: every row."""
    NUM_BANDS: tl.constexpr = len(x)
    BAND: tl.constexpr = x[0].shape[1]
    for i in tl.static_range(NUM_BANDS):
        offs_d = i * BAND + tl.arange(0, BAND)
        mask = None if (i + 1) * BAND <= WIDTH else (offs_d < WIDTH)[None, :]
        if mask_m is not None:
            mask = mask_m[:, None] if mask is None else mask_m[:, None] & mask
        inner = offs_d[None, :] if head_offs is None else head_offs[:, None] + offs_d[None, :]
        ptrs = X + (offs[:, None] + inner)
        if ATOMIC:
            tl.atomic_add(ptrs, x[i], mask=mask, sem="relaxed")
        else:
            tl.store(ptrs, x[i].to(X.dtype.element_ty), mask=mask)


@triton.jit
def softmax_backward(qk, dp, mask, lse2, delta, scale):
    """P and dS / scale from the products qk and dp; 0 where not ``mask`` (None: no mask).

    ``lse2`` and ``delta`` are those of delta.rows.
    """
    s = qk * (scale * LOG2E) - lse2
    if mask is not None:
        s = tl.where(mask, s, float("-inf"))
    p = tl.exp2(s)
    return p, p * (dp - delta)


@triton.jit
def _wait_for_products(x):
    """Return the fp32 sums x unchanged, and wait until the products added to them are complete.

    On sm_90 a product is asynchronous (wgmma), and Triton lets the last one of a loop stay in
    flight into the next iteration. In this kernel ptxas cannot follow that: it serializes every
    product of the loop (warning C7515). Each band therefore passes through an inline assembly
    statement without instructions, which reads the sums, so Triton waits for the products before
    it. The interpreter has no inline assembly and nothing to wait for.
    """
    NUM_BANDS: tl.constexpr = len(x)
    complete = ()
    for i in tl.static_range(NUM_BANDS):
        band = x[i]
        if not INTERPRETED:
            band = tl.inline_asm_elementwise(
                "", "=f,0", [band], dtype=tl.float32, is_pure=True, pack=1
            )
        complete = complete + (band,)
    return complete


@triton.jit
def _tile_rows(tile, num_pairs, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """(pair, head, mask), each [BLOCK_M], of the rows of a tile of whole tokens.

    pair and head are valid indices in padding rows too.
    """
    offs_m = tl.arange(0, BLOCK_M)
    if GROUP > BLOCK_M:
        TILES_PER_TOKEN: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
        pair = offs_m * 0 + tile // TILES_PER_TOKEN
        head = tile % TILES_PER_TOKEN * BLOCK_M + offs_m
        mask_m = head < GROUP
        head = tl.minimum(head, GROUP - 1)
    else:
        pair = tile * (BLOCK_M // GROUP) + offs_m // GROUP
        head = offs_m % GROUP
        mask_m = (pair < num_pairs) & (offs_m < BLOCK_M // GROUP * GROUP)
    return tl.minimum(pair, num_pairs - 1), head, mask_m


@triton.jit
def _load_lse2_delta(LSE2, DELTA, offs, mask_m, BLOCK_M: tl.constexpr):
    """lse2 and delta [BLOCK_M] of the rows at ``offs`` [BLOCK_M]: 0 where not ``mask_m``.

    One load of [4, BLOCK_M], half of it masked, reads both. The scores' layout holds each number in
    several threads, and each of them would repeat a load that has fewer numbers than the program
    has threads.
    """
    kind = tl.arange(0, 4)[:, None]
    base = tl.where(kind == 0, LSE2, DELTA)
    both = tl.load(base + offs[None, :], mask=(kind < 2) & mask_m[None, :], other=0.0)
    even, odd = tl.split(tl.reshape(tl.trans(both), [BLOCK_M, 2, 2]))
    lse2, _ = tl.split(even)
    delta, _ = tl.split(odd)
    return lse2, delta


@triton.jit
def _accumulate_tile(
    dk, dv, k, v, key, token, head, mask_m,
    Q, DO, LSE2, DELTA, DQ, stride_qt, stride_qh, stride_dot, stride_doh, scale,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    HEAD_DIM_BAND: tl.constexpr, V_HEAD_DIM_BAND: tl.constexpr,
    BLOCK_M: tl.constexpr, ORDERED: tl.constexpr, QUERY_MAJOR: tl.constexpr,
    INT64_OFFSETS: tl.constexpr, MASKED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Add one tile to dk and dv and, unless ORDERED, to DQ.

    ``token``, ``head`` and ``mask_m`` [BLOCK_M] are its rows; ``key`` [BLOCK_N] are the keys'
    positions, beyond every token for a missing key. LSE2, DELTA, DQ are [tokens, Hq, ..]. Unless
    MASKED, every row attends to every key. INT64_OFFSETS: offsets do not fit into 32 bits.
    """
    offs_t = token
    if INT64_OFFSETS:
        offs_t, head = token.to(tl.int64), head.to(tl.int64)
    # In a padding row all numbers are 0: p = 1 and dS = 0 meet zeros.
    q = gather_rows(Q, offs_t * stride_qt, head * stride_qh, mask_m, HEAD_DIM, HEAD_DIM_BAND)
    do = gather_rows(
        DO, offs_t * stride_dot, head * stride_doh, mask_m, V_HEAD_DIM, V_HEAD_DIM_BAND
    )
    offs_row = offs_t * NUM_HEADS + head
    lse2, delta = _load_lse2_delta(LSE2, DELTA, offs_row, mask_m, BLOCK_M)
    mask = None
    if QUERY_MAJOR:
        qk = dot_transposed(q, k, ACC)
        dp = dot_transposed(do, v, ACC)
        if MASKED:
            mask = key[None, :] <= token[:, None]
        p, ds = softmax_backward(qk, dp, mask, lse2[:, None], delta[:, None], scale)
        p, ds = tl.trans(p.to(do[0].dtype)), tl.trans(ds.to(k[0].dtype))
    else:
        qk = dot_transposed(k, q, ACC)
        dp = dot_transposed(v, do, ACC)
        if MASKED:
            mask = key[:, None] <= token[None, :]
        p, ds = softmax_backward(qk, dp, mask, lse2[None, :], delta[None, :], scale)
        p, ds = p.to(do[0].dtype), ds.to(k[0].dtype)
    dv = add_dot(dv, p, do)
    dk = add_dot(dk, ds, q)
    if ORDERED or HEAD_DIM_BAND < 64:  # otherwise ptxas serializes nothing
        dk = _wait_for_products(dk)
    if not ORDERED:
        NUM_BANDS: tl.constexpr = len(k)
        dq = ()
        for i in tl.static_range(NUM_BANDS):
            if QUERY_MAJOR:
                x = tl.dot(tl.trans(ds), k[i], input_precision="ieee", out_dtype=ACC)
            else:
                # Transposed, so that the head width is the dimension that may not be below 64.
                x = tl.trans(tl.dot(tl.trans(k[i]), ds, input_precision="ieee", out_dtype=ACC))
            dq = dq + (x,)
        # No mask: padding rows add 0.
        offs_dq = offs_t * (NUM_HEADS * HEAD_DIM)
        scatter_rows(DQ, offs_dq, head * HEAD_DIM, dq, None, HEAD_DIM, True)
    return dk, dv


@triton.jit
def _accumulate_tiles(
    dk, dv, k, v, key, begin, end, first_pair, num_pairs,
    Q, DO, LSE2, DELTA, TOKENS, DQ, stride_qt, stride_qh, stride_dot, stride_doh, scale,
    GROUP: tl.constexpr, NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    HEAD_DIM_BAND: tl.constexpr, V_HEAD_DIM_BAND: tl.constexpr,
    BLOCK_M: tl.constexpr, ORDERED: tl.constexpr, QUERY_MAJOR: tl.constexpr,
    INT64_OFFSETS: tl.constexpr, MASKED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Add the tiles begin .. end of the program's pairs to dk and dv."""
    pair, head, mask_m = _tile_rows(begin, num_pairs, GROUP, BLOCK_M)
    token = tl.load(TOKENS + first_pair + pair)
    for tile in tl.range(begin, end):
        # Tokens are loaded one iteration before their rows: an address that depends on a load is
        # not prefetched.
        next_pair, next_head, next_mask_m = _tile_rows(tile + 1, num_pairs, GROUP, BLOCK_M)
        next_token = tl.load(TOKENS + first_pair + next_pair)
        dk, dv = _accumulate_tile(
            dk, dv, k, v, key, token, head, mask_m,
            Q, DO, LSE2, DELTA, DQ, stride_qt, stride_qh, stride_dot, stride_doh, scale,
            NUM_HEADS, HEAD_DIM, V_HEAD_DIM, HEAD_DIM_BAND, V_HEAD_DIM_BAND,
            BLOCK_M, ORDERED, QUERY_MAJOR, INT64_OFFSETS, MASKED, ACC,
        )  # fmt: skip
        token, head, mask_m = next_token, next_head, next_mask_m
    return dk, dv


@triton.jit(
    do_not_specialize=[
        "num_seqs", "seq_len", "first_query", "num_keys",
        "num_buckets", "buckets_per_head", "num_segments", "chunk_pairs",
    ]
)  # fmt: skip
def sel_block_backward(
    Q, K, V, DO, LSE2, DELTA, TOKENS, OFFSETS, BOUNDS, CU_SEQLENS, DQ, DK, DV,
    stride_q, stride_k, stride_v, stride_do,
    scale, num_seqs, seq_len, first_query, num_keys,
    num_buckets, buckets_per_head, num_segments, chunk_pairs,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    HEAD_DIM_BAND: tl.constexpr, V_HEAD_DIM_BAND: tl.constexpr,
    SELECT_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    ORDERED: tl.constexpr, QUERY_MAJOR: tl.constexpr, INT64_OFFSETS: tl.constexpr,
    VARLEN: tl.constexpr, PARTIAL: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Write or add dk and dv of BLOCK_N keys of a block, from one segment or chunk of its tokens.

    LSE2, DELTA [B, S, Hq]; DQ [B, S, Hq, HEAD_DIM]; DK, DV [B, num_keys, G, D], or if ORDERED
    [items, key tiles, BLOCK_N, D]. ``num_keys`` is S unless PARTIAL. sel_segments writes BOUNDS.
    If ORDERED, BOUNDS and DQ are not used.

    A block is cut into key tiles of BLOCK_N keys, one program each, so that long blocks take no
    more registers than blocks of 64.
    """
    KEY_TILES: tl.constexpr = (SELECT_BLOCK + BLOCK_N - 1) // BLOCK_N
    key_tile = tl.program_id(0) % KEY_TILES
    item = tl.program_id(0) // KEY_TILES
    if ORDERED:
        bucket, begin, end = _locate_chunk(OFFSETS, item, num_buckets, chunk_pairs)
    else:
        # Kv head, then segment, then block: programs that run at the same time share q, do and dq.
        # The first blocks, which most tokens selected, come first, and the last segment, which has
        # the most blocks.
        outer = item // buckets_per_head
        bucket = outer // num_segments * buckets_per_head + item % buckets_per_head
        bound_ptr = (
            BOUNDS
            + bucket.to(tl.int64) * (num_segments + 1)
            + (num_segments - 1 - outer % num_segments)
        )
        begin, end = tl.load(bound_ptr), tl.load(bound_ptr + 1)
    seq, kv_head, start, query_start, length, first_key = locate_bucket(
        bucket, CU_SEQLENS, num_seqs, seq_len, first_query, buckets_per_head, NUM_KV_HEADS,
        SELECT_BLOCK, VARLEN, PARTIAL,
    )  # fmt: skip
    if begin < end:
        _, stride_qt, stride_qh = stride_q
        _, stride_kt, _ = stride_k
        _, stride_vt, _ = stride_v
        _, stride_dot, stride_doh = stride_do
        offs_n = key_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        key = first_key + offs_n
        mask_n = (offs_n < SELECT_BLOCK) & (key < length)
        K += row_offset(seq, start, kv_head, stride_k)
        V += row_offset(seq, start, kv_head, stride_v)
        k = gather_rows(K, key.to(tl.int64) * stride_kt, None, mask_n, HEAD_DIM, HEAD_DIM_BAND)
        v = gather_rows(V, key.to(tl.int64) * stride_vt, None, mask_n, V_HEAD_DIM, V_HEAD_DIM_BAND)
        Q += row_offset(seq, query_start, kv_head * GROUP, stride_q)
        DO += row_offset(seq, query_start, kv_head * GROUP, stride_do)
        first_row = row_of_start(seq, query_start, seq_len, VARLEN)
        first_row = first_row * (NUM_KV_HEADS * GROUP) + kv_head * GROUP
        LSE2 += first_row
        DELTA += first_row
        DQ += first_row * HEAD_DIM
        dk = zero_rows(BLOCK_N, HEAD_DIM, HEAD_DIM_BAND, ACC)
        dv = zero_rows(BLOCK_N, V_HEAD_DIM, V_HEAD_DIM_BAND, ACC)
        visible_from = tl.where(mask_n, key, 2147483647)
        num_pairs = end - begin
        TOKENS_PER_TILE: tl.constexpr = max(BLOCK_M // GROUP, 1)
        TILES_PER_TOKEN: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
        tiles = tl.cdiv(num_pairs, TOKENS_PER_TILE) * TILES_PER_TOKEN
        # Only the first SELECT_BLOCK pairs of a block can be of tokens inside it. If BLOCK_N does
        # not divide the block, its last key tile lacks keys, and every tile is masked.
        masked_pairs = tl.minimum(
            tl.maximum(tl.load(OFFSETS + bucket) + SELECT_BLOCK - begin, 0), num_pairs
        )
        masked_tiles = (
            tl.cdiv(masked_pairs, TOKENS_PER_TILE) * TILES_PER_TOKEN
            if SELECT_BLOCK % BLOCK_N == 0
            else tiles
        )
        if masked_tiles > 0:
            dk, dv = _accumulate_tiles(
                dk, dv, k, v, visible_from, 0, masked_tiles, begin, num_pairs,
                Q, DO, LSE2, DELTA, TOKENS, DQ, stride_qt, stride_qh, stride_dot, stride_doh, scale,
                GROUP, NUM_KV_HEADS * GROUP, HEAD_DIM, V_HEAD_DIM, HEAD_DIM_BAND, V_HEAD_DIM_BAND,
                BLOCK_M, ORDERED, QUERY_MAJOR, INT64_OFFSETS, True, ACC,
            )  # fmt: skip
        dk, dv = _accumulate_tiles(
            dk, dv, k, v, visible_from, masked_tiles, tiles, begin, num_pairs,
            Q, DO, LSE2, DELTA, TOKENS, DQ, stride_qt, stride_qh, stride_dot, stride_doh, scale,
            GROUP, NUM_KV_HEADS * GROUP, HEAD_DIM, V_HEAD_DIM, HEAD_DIM_BAND, V_HEAD_DIM_BAND,
            BLOCK_M, ORDERED, QUERY_MAJOR, INT64_OFFSETS, False, ACC,
        )  # fmt: skip
        if ORDERED:
            key_row = (item.to(tl.int64) * KEY_TILES + key_tile) * BLOCK_N + tl.arange(0, BLOCK_N)
        else:
            key_rows = num_keys if PARTIAL else seq_len
            key_row = row_of_start(seq, start, key_rows, VARLEN) + key
            key_row = key_row * NUM_KV_HEADS + kv_head
        dk = scale_rows(dk, scale)
        scatter_rows(DK, key_row * HEAD_DIM, None, dk, mask_n, HEAD_DIM, not ORDERED)
        scatter_rows(DV, key_row * V_HEAD_DIM, None, dv, mask_n, V_HEAD_DIM, not ORDERED)


@triton.jit(
    do_not_specialize=[
        "num_seqs", "seq_len", "first_query", "num_keys", "buckets_per_head", "chunk_pairs",
    ]
)  # fmt: skip
def sel_add_chunks(
    CHUNKS, OFFSETS, CU_SEQLENS, OUT,
    num_seqs, seq_len, first_query, num_keys, buckets_per_head, chunk_pairs,
    NUM_KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, BAND: tl.constexpr,
    SELECT_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
    VARLEN: tl.constexpr, PARTIAL: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Add the chunks of each block in order: OUT [B, num_keys, G, WIDTH], rounded once.

    CHUNKS [items, key tiles, BLOCK_N, WIDTH] is dk or dv of sel_block_backward. A program owns one
    key tile of a block. Bound by memory.
    """
    KEY_TILES: tl.constexpr = (SELECT_BLOCK + BLOCK_N - 1) // BLOCK_N
    key_tile = tl.program_id(0) % KEY_TILES
    bucket = tl.program_id(0) // KEY_TILES
    seq, kv_head, start, _, length, first_key = locate_bucket(
        bucket, CU_SEQLENS, num_seqs, seq_len, first_query, buckets_per_head, NUM_KV_HEADS,
        SELECT_BLOCK, VARLEN, PARTIAL,
    )  # fmt: skip
    offs_n = key_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = (offs_n < SELECT_BLOCK) & (first_key + offs_n < length)
    first_pair = tl.load(OFFSETS + bucket)
    num_chunks = tl.cdiv(tl.load(OFFSETS + bucket + 1) - first_pair, chunk_pairs)
    item = (first_pair // chunk_pairs + bucket).to(tl.int64)
    total = zero_rows(BLOCK_N, WIDTH, BAND, ACC)
    for chunk in tl.range(0, num_chunks):
        row = ((item + chunk) * KEY_TILES + key_tile) * BLOCK_N + tl.arange(0, BLOCK_N)
        partial = gather_rows(CHUNKS, row * WIDTH, None, mask_n, WIDTH, BAND)
        total = add_rows(total, partial)
    seq_row = row_of_start(seq, start, num_keys if PARTIAL else seq_len, VARLEN)
    offs_out = ((seq_row + first_key + offs_n) * NUM_KV_HEADS + kv_head) * WIDTH
    scatter_rows(OUT, offs_out, None, total, mask_n, WIDTH, False)


@triton.jit
def _store_rounded(OUT, index, x, numel, BLOCK_SIZE: tl.constexpr, ADDS: tl.constexpr):
    """Store x [BLOCK_SIZE] at OUT + index * BLOCK_SIZE, up to the ``numel`` elements of OUT.

    With ADDS, add them to what OUT holds.
    """
    offs = index * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    # A masked access whose end is not known to be even would go element by element.
    if index * BLOCK_SIZE + BLOCK_SIZE <= numel:
        if ADDS:
            x += tl.load(OUT + offs)
        tl.store(OUT + offs, x.to(OUT.dtype.element_ty))
    else:
        if ADDS:
            x += tl.load(OUT + offs, mask=offs < numel)
        tl.store(OUT + offs, x.to(OUT.dtype.element_ty), mask=offs < numel)


@triton.jit(do_not_specialize=["numel_q", "numel_k", "numel_v"])
def sel_round(
    SUMS, DQ, DK, DV,
    numel_q: tl.int64, numel_k: tl.int64, numel_v: tl.int64, scale,
    BLOCK_SIZE: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """Round the fp32 sums once: DQ = scale times its sums, DK and DV = theirs.

    With ADDS, DQ holds another gradient of q, to which its sums are added in fp32.

    SUMS holds the three one after the other, each padded to a multiple of BLOCK_SIZE. A program
    owns BLOCK_SIZE elements of one of them: 4 bytes read and one element written per element, 16
    bytes at a time. Bound by memory.
    """
    pid = tl.program_id(0).to(tl.int64)
    first_k = tl.cdiv(numel_q, BLOCK_SIZE)
    first_v = first_k + tl.cdiv(numel_k, BLOCK_SIZE)
    x = tl.load(SUMS + pid * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE))
    if pid < first_k:
        _store_rounded(DQ, pid, x * scale, numel_q, BLOCK_SIZE, ADDS)
    elif pid < first_v:
        _store_rounded(DK, pid - first_k, x, numel_k, BLOCK_SIZE, False)
    else:
        _store_rounded(DV, pid - first_v, x, numel_v, BLOCK_SIZE, False)

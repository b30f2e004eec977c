"""Gradients of the selected branch, block by block: dk and dv of a block, and what it adds to dq.

A program takes KEYS keys of one block (K, V [KEYS, D] stay on chip) and some of the tokens that
chose it. Their rows (token, head) are gathered in tiles of ROWS: all heads of a token at once.

    S^T = k q^T, dP^T = v do^T
    [KEYS, ROWS], or turned: [ROWS, KEYS] (TURN: P and dS pass shared memory)
    dv += P^T do, dk += dS^T q            [KEYS, D] in registers over all tiles
    dq += dS k                            [ROWS, D] added to fp32 memory, where there is no order

A tile reads 2 ROWS D elements and 2 ROWS fp32 numbers, adds ROWS D fp32 numbers and does 10 ROWS
KEYS D operations: 80 operations a byte at KEYS = 64 in bf16. Programs run segment after segment of
tokens, whose q, do and dq fit into L2. Registers leave 2 programs of 4 warps a multiprocessor.
Counted on an H200 before offsets had 32 bits: no pipe and no memory above 60 %, latency binds;
ordered, without that sharing, L2 at 88 % does. Hence few instructions a tile: 32-bit offsets unless
WIDE, one load for the rows' lse and delta.

How the tokens of a block are shared out:
    unordered   a program per (block, segment of tokens), of which sel_segments finds the bounds;
                dq, dk, dv are added
                to fp32 memory, in no fixed order, and sel_round rounds them.
    ORDERED     a program per ``chunk`` tokens of a block at most; sel_add_chunks adds their dk, dv
                in order. No dq.

A tile has ROWS // HEADS whole tokens (or a piece of one): heads are the loop's constants, tokens
are read a tile ahead, and causally masked are only a block's first SIZE pairs, which may lie in the
block itself: most programs have none, and skip that walk. Rows that are not there, ROWS % HEADS and
those behind the last pair, are rows of zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_backend_triton.host.sequences import interpreted
from nsa_backend_triton.shared.rows import (
    LOG2E,
    add_dot,
    dot_columns,
    owner,
    place,
    scale_rows,
    transpose,
    zero_rows,
)

INTERPRETED = tl.constexpr(interpreted())  # fixed when triton is imported


@triton.jit
def sel_bucket(
    bucket,
    CU,
    n_seqs,
    seq_len,
    per_head,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    VARLEN: tl.constexpr,
):
    """(sequence, kv head, its first row in the packed axis, its length, the block's first key) of a
    bucket.
    """
    outer = bucket // per_head
    index = bucket % per_head
    if not VARLEN:
        index += outer // GROUPS * per_head
    seq, start, length, key = place(index, CU, n_seqs, seq_len, SIZE, VARLEN)
    return seq, outer % GROUPS, start, length, key


@triton.jit(do_not_specialize=["segment", "segments"])
def sel_segments(TOKENS, OFFSETS, BOUNDS, segment, segments, MOST: tl.constexpr):
    """BOUNDS [n_buckets, segments + 1]: where the tokens of each segment begin in a bucket's
    ascending TOKENS.

    A program per bucket, all its segments at once: log2(pairs) loads that wait for each other.
    Latency binds.
    """
    bucket = tl.program_id(0)
    at = tl.arange(0, MOST)
    low = tl.load(OFFSETS + bucket) + tl.zeros([MOST], tl.int32)
    high = tl.load(OFFSETS + bucket + 1) + tl.zeros([MOST], tl.int32)
    low = tl.where(at >= segments, high, low)
    while tl.max(high - low, 0) > 0:
        middle = (low + high) // 2
        open_ = low < high
        before = open_ & (tl.load(TOKENS + middle, mask=open_, other=0) < at * segment)
        low, high = (
            tl.where(before, middle + 1, low),
            tl.where(before, high, tl.where(open_, middle, high)),
        )
    tl.store(BOUNDS + bucket.to(tl.int64) * (segments + 1) + at, low, mask=at <= segments)


@triton.jit
def sel_chunk(OFFSETS, item, n_buckets, chunk):
    """(bucket, first pair, end) of a chunk: bucket b owns the items from OFFSETS[b] // chunk + b
    on, never too few.

    A bucket's pairs are cut into as many even parts as ``chunk`` demands; an item past them is
    empty.
    """
    bucket = owner(OFFSETS, n_buckets, item, chunk)
    first = tl.load(OFFSETS + bucket)
    end = tl.load(OFFSETS + bucket + 1)
    part = tl.cdiv(end - first, tl.maximum(tl.cdiv(end - first, chunk), 1))
    begin = first + (item - (first // chunk + bucket)) * part
    return bucket, tl.minimum(begin, end), tl.minimum(begin + part, end)


@triton.jit
def sel_load(X, at, head, ok, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Rows [N, DIM] of X in bands, 0 where not ``ok`` [N].

    They begin at offsets ``at`` + ``head`` [N], of which ``head`` (None: 0) is a loop's constant.
    """
    x = ()
    for first in tl.static_range(0, DIM, WIDTH):
        col = first + tl.arange(0, WIDTH)
        mask = ok[:, None] if first + WIDTH <= DIM else ok[:, None] & (col < DIM)[None, :]
        # Constants are added to each other first: in a loop an offset is one multiplication and
        # addition.
        inner = col[None, :] if head is None else head[:, None] + col[None, :]
        x = x + (tl.load(X + (at[:, None] + inner), mask=mask, other=0.0),)
    return x


@triton.jit
def sel_put(X, at, head, x, ok, DIM: tl.constexpr, WIDTH: tl.constexpr, ADD: tl.constexpr):
    """Inverse of sel_load: store, or add without an order. ``ok`` None: every row is there."""
    for i in tl.static_range((DIM + WIDTH - 1) // WIDTH):
        col = i * WIDTH + tl.arange(0, WIDTH)
        mask = None if (i + 1) * WIDTH <= DIM else (col < DIM)[None, :]
        if ok is not None:
            mask = ok[:, None] if mask is None else ok[:, None] & mask
        inner = col[None, :] if head is None else head[:, None] + col[None, :]
        where = X + (at[:, None] + inner)
        if ADD:
            tl.atomic_add(where, x[i], mask=mask, sem="relaxed")
        else:
            tl.store(where, x[i].to(X.dtype.element_ty), mask=mask)


@triton.jit
def sel_scores_backward(s, dp, seen, lse, delta, scale):
    """P and dS / scale of raw scores, 0 where not ``seen`` (None: all are); lse is that of
    delta.rows.
    """
    s = s * (scale * LOG2E) - lse
    if seen is not None:
        s = tl.where(seen, s, float("-inf"))
    p = tl.exp2(s)
    return p, p * (dp - delta)


@triton.jit
def sel_wait_for_products(x, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Return the fp32 sums x unchanged, and make the program wait until the products added to them
    are complete.

    On sm_90 a product is asynchronous (wgmma), and Triton lets the last one of a loop stay in
    flight into the next iteration. In this kernel ptxas cannot follow that: it serializes every
    product of the loop (warning C7515). Each band therefore passes through an inline assembly
    statement without instructions, which reads the sums, so Triton waits for the products before
    it. The interpreter has no inline assembly and nothing to wait for.
    """
    complete = ()
    for i in tl.static_range((DIM + WIDTH - 1) // WIDTH):
        band = x[i]
        if not INTERPRETED:
            band = tl.inline_asm_elementwise(
                "", "=f,0", [band], dtype=tl.float32, is_pure=True, pack=1
            )
        complete = complete + (band,)
    return complete


@triton.jit
def sel_tile_rows(tile, pairs, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """(pair, head, whether it is there), each [ROWS], of a tile of whole tokens; pair and head are
    always legal.
    """
    row = tl.arange(0, ROWS)
    if HEADS > ROWS:
        PIECES: tl.constexpr = (HEADS + ROWS - 1) // ROWS
        pair, head = row * 0 + tile // PIECES, tile % PIECES * ROWS + row
        ok = head < HEADS
        head = tl.minimum(head, HEADS - 1)
    else:
        pair, head = tile * (ROWS // HEADS) + row // HEADS, row % HEADS
        ok = (pair < pairs) & (row < ROWS // HEADS * HEADS)
    return tl.minimum(pair, pairs - 1), head, ok


@triton.jit
def sel_row_numbers(LSE, DELTA, at, ok, ROWS: tl.constexpr):
    """lse and delta [ROWS] of the rows at offsets ``at`` [ROWS]: 0 where not ``ok``.

    As one load of [4, ROWS], half of it masked: a load of no fewer numbers than threads is not
    repeated by each of the threads that want a number, in whose layout the scores' rows are.
    """
    kind = tl.arange(0, 4)[:, None]
    base = tl.where(kind == 0, LSE, DELTA)
    both = tl.load(base + at[None, :], mask=(kind < 2) & ok[None, :], other=0.0)
    even, odd = tl.split(tl.reshape(tl.trans(both), [ROWS, 2, 2]))
    lse, _ = tl.split(even)
    delta, _ = tl.split(odd)
    return lse, delta


@triton.jit
def sel_rows_backward(
    dk, dv, k, v, key, token, head, ok,
    Q, DO, LSE, DELTA, DQ, q_t, q_h, d_t, d_h, scale,
    HEADS: tl.constexpr, ALL_HEADS: tl.constexpr, DIM_K: tl.constexpr, DIM_V: tl.constexpr,
    WIDTH_K: tl.constexpr,
    WIDTH_V: tl.constexpr, ROWS: tl.constexpr, ORDERED: tl.constexpr, TURN: tl.constexpr,
    WIDE: tl.constexpr,
    MASKED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One tile: rows (token, head) [ROWS], ``ok`` those there. Returns dk, dv with the tile added.

    ``key`` [KEYS] are the keys' tokens, beyond any for a key that is not there. LSE, DELTA, DQ are
    [tokens, Hq, ..]. Not MASKED: every key is seen by every row. WIDE: offsets do not fit into 32
    bits.
    """
    wide = token
    if WIDE:
        wide, head = token.to(tl.int64), head.to(tl.int64)
    # In a row that is not there all numbers are 0: p = 1 and dS = 0 meet zeros.
    q = sel_load(Q, wide * q_t, head * q_h, ok, DIM_K, WIDTH_K)
    do = sel_load(DO, wide * d_t, head * d_h, ok, DIM_V, WIDTH_V)
    at = wide * ALL_HEADS + head
    lse, delta = sel_row_numbers(LSE, DELTA, at, ok, ROWS)
    seen = None
    if TURN:
        s = dot_columns(q, transpose(k, DIM_K, WIDTH_K), DIM_K, WIDTH_K, ACC)
        dp = dot_columns(do, transpose(v, DIM_V, WIDTH_V), DIM_V, WIDTH_V, ACC)
        if MASKED:
            seen = key[None, :] <= token[:, None]
        p, ds = sel_scores_backward(s, dp, seen, lse[:, None], delta[:, None], scale)
        p, ds = tl.trans(p.to(do[0].dtype)), tl.trans(ds.to(k[0].dtype))
    else:
        s = dot_columns(k, transpose(q, DIM_K, WIDTH_K), DIM_K, WIDTH_K, ACC)
        dp = dot_columns(v, transpose(do, DIM_V, WIDTH_V), DIM_V, WIDTH_V, ACC)
        if MASKED:
            seen = key[:, None] <= token[None, :]
        p, ds = sel_scores_backward(s, dp, seen, lse[None, :], delta[None, :], scale)
        p, ds = p.to(do[0].dtype), ds.to(k[0].dtype)
    dv = add_dot(dv, p, do, DIM_V, WIDTH_V, ACC)
    dk = add_dot(dk, ds, q, DIM_K, WIDTH_K, ACC)
    if ORDERED:
        dk = sel_wait_for_products(dk, DIM_K, WIDTH_K)
    else:
        dq = ()
        for i in tl.static_range((DIM_K + WIDTH_K - 1) // WIDTH_K):
            if TURN:
                x = tl.dot(tl.trans(ds), k[i], input_precision="ieee", out_dtype=ACC)
            else:
                # Turned, so that D is the side that may not be short of 64.
                x = tl.trans(tl.dot(tl.trans(k[i]), ds, input_precision="ieee", out_dtype=ACC))
            dq = dq + (x,)
        # No mask: what a row adds that is not there is 0.
        sel_put(DQ, wide * (ALL_HEADS * DIM_K), head * DIM_K, dq, None, DIM_K, WIDTH_K, True)
    return dk, dv


@triton.jit
def sel_walk_backward(
    dk, dv, k, v, key, low, high, first, pairs,
    Q, DO, LSE, DELTA, TOKENS, DQ, q_t, q_h, d_t, d_h, scale,
    HEADS: tl.constexpr, ALL_HEADS: tl.constexpr, DIM_K: tl.constexpr, DIM_V: tl.constexpr,
    WIDTH_K: tl.constexpr,
    WIDTH_V: tl.constexpr, ROWS: tl.constexpr, ORDERED: tl.constexpr, TURN: tl.constexpr,
    WIDE: tl.constexpr,
    MASKED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dk, dv with the tiles [low, high) of whole tokens."""
    pair, head, ok = sel_tile_rows(low, pairs, HEADS, ROWS)
    token = tl.load(TOKENS + first + pair)
    for tile in tl.range(low, high):
        # Tokens are read a turn before their rows: an address that waits for a load is not fetched
        # ahead.
        next_pair, next_head, next_ok = sel_tile_rows(tile + 1, pairs, HEADS, ROWS)
        next_token = tl.load(TOKENS + first + next_pair)
        dk, dv = sel_rows_backward(
            dk, dv, k, v, key, token, head, ok, Q, DO, LSE, DELTA, DQ, q_t, q_h, d_t, d_h, scale,
            HEADS, ALL_HEADS, DIM_K, DIM_V, WIDTH_K, WIDTH_V, ROWS, ORDERED, TURN, WIDE, MASKED,
            ACC,
        )  # fmt: skip
        token, head, ok = next_token, next_head, next_ok
    return dk, dv


@triton.jit(
    do_not_specialize=[
        "n_seqs",
        "seq_len",
        "n_buckets",
        "per_head",
        "segments",
        "chunk",
    ]
)
def sel_block_backward(
    Q, K, V, DO, LSE, DELTA, TOKENS, OFFSETS, BOUNDS, CU, DQ, DK, DV,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, d_b, d_t, d_h,
    scale, n_seqs, seq_len, n_buckets, per_head, segments, chunk,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM_K: tl.constexpr, DIM_V: tl.constexpr,
    WIDTH_K: tl.constexpr,
    WIDTH_V: tl.constexpr, SIZE: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr,
    ORDERED: tl.constexpr,
    TURN: tl.constexpr, WIDE: tl.constexpr, VARLEN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """LSE, DELTA [B, S, Hq]; DQ [B, S, Hq, DIM_K]; DK, DV [B, S, G, D], or if ORDERED [items,
    parts, KEYS, D].

    BOUNDS of sel_segments; not read, nor DQ, if ORDERED.

    A block is cut into parts of KEYS keys, one program each: SIZE up to 128 costs no more registers
    than 64.
    """
    PARTS: tl.constexpr = (SIZE + KEYS - 1) // KEYS
    part = tl.program_id(0) % PARTS
    item = tl.program_id(0) // PARTS
    if ORDERED:
        bucket, begin, end = sel_chunk(OFFSETS, item, n_buckets, chunk)
    else:
        # Kv head, then segment, then block: programs that run at one time share q, do and dq. Early
        # blocks, which most tokens chose, come first, and the last segment, which has the most
        # blocks.
        turn = item // per_head
        bucket = turn // segments * per_head + item % per_head
        at_bound = BOUNDS + bucket.to(tl.int64) * (segments + 1) + (segments - 1 - turn % segments)
        begin, end = tl.load(at_bound), tl.load(at_bound + 1)
    seq, group, start, length, block = sel_bucket(
        bucket, CU, n_seqs, seq_len, per_head, GROUPS, SIZE, VARLEN
    )
    if begin < end:
        inside = part * KEYS + tl.arange(0, KEYS)
        key = block + inside
        real = (inside < SIZE) & (key < length)
        base = seq.to(tl.int64)
        token_0 = start.to(tl.int64) if VARLEN else base * seq_len
        K += base * k_b + start.to(tl.int64) * k_t + group.to(tl.int64) * k_h
        V += base * v_b + start.to(tl.int64) * v_t + group.to(tl.int64) * v_h
        k = sel_load(K, key.to(tl.int64) * k_t, None, real, DIM_K, WIDTH_K)
        v = sel_load(V, key.to(tl.int64) * v_t, None, real, DIM_V, WIDTH_V)
        Q += base * q_b + start.to(tl.int64) * q_t + group.to(tl.int64) * HEADS * q_h
        DO += base * d_b + start.to(tl.int64) * d_t + group.to(tl.int64) * HEADS * d_h
        rows_0 = token_0 * (GROUPS * HEADS) + group * HEADS
        LSE += rows_0
        DELTA += rows_0
        DQ += rows_0 * DIM_K
        dk = zero_rows(KEYS, DIM_K, WIDTH_K, ACC)
        dv = zero_rows(KEYS, DIM_V, WIDTH_V, ACC)
        seen_from = tl.where(real, key, 2147483647)
        pairs = end - begin
        each: tl.constexpr = max(ROWS // HEADS, 1)
        pieces: tl.constexpr = (HEADS + ROWS - 1) // ROWS
        tiles = tl.cdiv(pairs, each) * pieces
        # Only a block's first SIZE pairs can be of tokens inside it; a part of a block may have
        # keys missing.
        near = tl.minimum(tl.maximum(tl.load(OFFSETS + bucket) + SIZE - begin, 0), pairs)
        cut = tl.cdiv(near, each) * pieces if SIZE % KEYS == 0 else tiles
        if cut > 0:
            dk, dv = sel_walk_backward(
                dk, dv, k, v, seen_from, 0, cut, begin, pairs,
                Q, DO, LSE, DELTA, TOKENS, DQ, q_t, q_h, d_t, d_h, scale,
                HEADS, GROUPS * HEADS, DIM_K, DIM_V, WIDTH_K, WIDTH_V, ROWS, ORDERED, TURN, WIDE,
                True, ACC,
            )  # fmt: skip
        dk, dv = sel_walk_backward(
            dk, dv, k, v, seen_from, cut, tiles, begin, pairs,
            Q, DO, LSE, DELTA, TOKENS, DQ, q_t, q_h, d_t, d_h, scale,
            HEADS, GROUPS * HEADS, DIM_K, DIM_V, WIDTH_K, WIDTH_V, ROWS, ORDERED, TURN, WIDE,
            False, ACC,
        )  # fmt: skip
        if ORDERED:
            at = (item.to(tl.int64) * PARTS + part) * KEYS + tl.arange(0, KEYS)
        else:
            at = (token_0 + key) * GROUPS + group
        dk = scale_rows(dk, scale, DIM_K, WIDTH_K)
        sel_put(DK, at * DIM_K, None, dk, real, DIM_K, WIDTH_K, not ORDERED)
        sel_put(DV, at * DIM_V, None, dv, real, DIM_V, WIDTH_V, not ORDERED)


@triton.jit
def sel_add(x, y, D: tl.constexpr, BLOCK: tl.constexpr):
    """Rows x + y [R, D]."""
    both = ()
    for i in tl.static_range((D + BLOCK - 1) // BLOCK):
        both = both + (x[i] + y[i],)
    return both


@triton.jit(do_not_specialize=["n_seqs", "seq_len", "per_head", "chunk"])
def sel_add_chunks(
    PARTIAL, OFFSETS, CU, OUT, n_seqs, seq_len, per_head, chunk,
    GROUPS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    VARLEN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """OUT [B, S, G, DIM], rounded once: chunks of PARTIAL [items, parts, KEYS, DIM] added in order.
    Bound by memory.
    """
    PARTS: tl.constexpr = (SIZE + KEYS - 1) // KEYS
    part = tl.program_id(0) % PARTS
    bucket = tl.program_id(0) // PARTS
    seq, group, start, length, block = sel_bucket(
        bucket, CU, n_seqs, seq_len, per_head, GROUPS, SIZE, VARLEN
    )
    inside = part * KEYS + tl.arange(0, KEYS)
    real = (inside < SIZE) & (block + inside < length)
    first = tl.load(OFFSETS + bucket)
    chunks = tl.cdiv(tl.load(OFFSETS + bucket + 1) - first, chunk)
    item = (first // chunk + bucket).to(tl.int64)
    total = zero_rows(KEYS, DIM, WIDTH, ACC)
    for nth in tl.range(0, chunks):
        at = ((item + nth) * PARTS + part) * KEYS + tl.arange(0, KEYS)
        total = sel_add(total, sel_load(PARTIAL, at * DIM, None, real, DIM, WIDTH), DIM, WIDTH)
    token_0 = start.to(tl.int64) if VARLEN else seq.to(tl.int64) * seq_len
    at = ((token_0 + block + inside) * GROUPS + group) * DIM
    sel_put(OUT, at, None, total, real, DIM, WIDTH, False)


@triton.jit
def sel_put_rounded(OUT, program, x, n, SIZE: tl.constexpr):
    """x [SIZE] at OUT + program * SIZE, as far as OUT has its n numbers."""
    at = program * SIZE + tl.arange(0, SIZE)
    x = x.to(OUT.dtype.element_ty)
    if (
        program * SIZE + SIZE <= n
    ):  # a mask whose end is not known to be even would make it a store a number
        tl.store(OUT + at, x)
    else:
        tl.store(OUT + at, x, mask=at < n)


@triton.jit(do_not_specialize=["n_q", "n_k", "n_v"])
def sel_round(
    SUMS, DQ, DK, DV, n_q: tl.int64, n_k: tl.int64, n_v: tl.int64, scale, SIZE: tl.constexpr
):
    """DQ [n_q] = scale times its sums, DK [n_k], DV [n_v] = theirs, rounded once. SIZE of one of
    them a program.

    Each has its sums padded to whole SIZE.

    4 bytes read and an itemsize written a number, 16 bytes at a time: bound by memory.
    """
    program = tl.program_id(0).to(tl.int64)
    of_k = tl.cdiv(n_q, SIZE)
    of_v = of_k + tl.cdiv(n_k, SIZE)
    x = tl.load(SUMS + program * SIZE + tl.arange(0, SIZE))
    if program < of_k:
        sel_put_rounded(DQ, program, x * scale, n_q, SIZE)
    elif program < of_v:
        sel_put_rounded(DK, program - of_k, x, n_k, SIZE)
    else:
        sel_put_rounded(DV, program - of_v, x, n_v, SIZE)

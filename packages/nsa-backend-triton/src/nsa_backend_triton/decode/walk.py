"""Device code that all decode kernels share: keys in a cache, a walk over tiles of keys, splits.

A branch numbers its keys: compressed tokens (CMP), the tokens of the selected blocks (SEL), the
tokens of the window (WIN). Key i is in row i % page_size of page TABLE[i // page_size]. The table
of WIN wraps around, TABLE[i // page_size % columns]; RING: it has one column. A row of q, k or v is
one band of HEAD_DIM_BAND columns, the power of two that holds HEAD_DIM.

The host does not read starts, sequences and tables. Wrong values give wrong results, but no kernel
leaves its tensors: a run that begins before token 0 is padding, and other indices are clamped.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_backend_triton.decode.codes import as_pairs, decode, load_scales
from nsa_backend_triton.shared.rows import finite_shift, load_at, num_compressed

CMP, SEL, WIN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def clamp_index(index, count):
    """Return ``index``, or the nearest of 0 .. count - 1."""
    return tl.minimum(tl.maximum(index, 0), count - 1)


@triton.jit
def table_row(TABLE, SEQUENCES, run, stride_table, num_sequences, RAGGED: tl.constexpr):
    """Return the row of a block table of a run; RAGGED: that of sequence SEQUENCES[run]."""
    sequence = run
    if RAGGED:
        sequence = clamp_index(tl.load(SEQUENCES + run), num_sequences)
    return TABLE + tl.cast(sequence, tl.int64) * stride_table


@triton.jit
def token_range(STARTS, LENGTHS, seq, first_token, count, max_len):
    """Return the positions (begin, end) of ``count`` tokens of a step, from ``first_token`` on.

    All of them are padding if end <= begin.
    """
    start = tl.load(STARTS + seq)
    begin = start + first_token
    end = tl.minimum(begin + count, tl.minimum(tl.load(LENGTHS + seq), max_len))
    return begin, tl.where(start < 0, begin, end)


@triton.jit
def key_range(
    begin, end, split, num_splits,
    BRANCH: tl.constexpr, TILE_KEYS: tl.constexpr,
    COMPRESS_BLOCK: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Return the keys that the tokens begin .. end see, and the tiles of one split.

    Returns (first key, one past the last key, first tile, one past the last tile). A tile holds
    TILE_KEYS keys.
    """
    low = 0
    high = tl.where(begin < end, num_compressed(end, COMPRESS_BLOCK, STRIDE), 0)
    if BRANCH == WIN:
        low = tl.maximum(begin - WINDOW + 1, 0)
        high = tl.where(begin < end, end, 0)
    tiles = tl.cdiv(tl.maximum(high - low, 0), TILE_KEYS)
    tiles_per_split = tl.cdiv(tiles, num_splits)
    first_tile = tl.minimum(split * tiles_per_split, tiles)
    return low, high, first_tile, tl.minimum(first_tile + tiles_per_split, tiles)


@triton.jit
def _locate_keys(
    tile, low, high, TABLE, BLOCKS, page_size, columns, num_pages, current_block,
    BLOCK_N: tl.constexpr, BRANCH: tl.constexpr, RING: tl.constexpr,
    NUM_SELECTED: tl.constexpr, NUM_SELECTED_PAD: tl.constexpr, SELECT_BLOCK: tl.constexpr,
    DISTINCT: tl.constexpr, CMP_PER_BLOCK: tl.constexpr, CMP_PER_BLOCK_PAD: tl.constexpr,
):  # fmt: skip
    """Return (key, page) of the keys of a tile, [BLOCK_N] each; a missing key is >= high.

    A tile of CMP holds whole blocks of CMP_PER_BLOCK keys, each padded to CMP_PER_BLOCK_PAD.
    """
    offs_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if BRANCH == SEL:
        slot = offs_n // SELECT_BLOCK
        block = tl.load(BLOCKS + slot, mask=slot < NUM_SELECTED, other=-1, cache_modifier=".cg")
        valid = (block >= 0) & (block <= current_block)
        if not DISTINCT:
            other_slot = tl.arange(0, NUM_SELECTED_PAD)
            other_block = tl.load(BLOCKS + other_slot, mask=other_slot < NUM_SELECTED, other=-1)
            repeated = (other_block[None, :] == block[:, None]) & (
                other_slot[None, :] < slot[:, None]
            )
            valid = valid & (tl.max(repeated.to(tl.int32), 1) == 0)
            block = tl.where(valid, block, current_block)  # so that the product fits 32 bits
        key = tl.where(valid, block.to(tl.int32) * SELECT_BLOCK + offs_n % SELECT_BLOCK, high)
    elif CMP_PER_BLOCK < CMP_PER_BLOCK_PAD:
        key = tl.where(
            offs_n % CMP_PER_BLOCK_PAD < CMP_PER_BLOCK,
            offs_n // CMP_PER_BLOCK_PAD * CMP_PER_BLOCK + offs_n % CMP_PER_BLOCK_PAD,
            high,
        )
    else:
        key = low + offs_n
    if RING:
        page = tl.zeros([BLOCK_N], tl.int32) + tl.load(TABLE)
    elif BRANCH == WIN:
        page = tl.load(TABLE + key // page_size % columns, mask=key < high, other=0)
    else:
        page = tl.load(TABLE + key // page_size, mask=key < high, other=0)
    return key, clamp_index(page, num_pages)


@triton.jit
def _load_rows(
    X, page, page_row, valid, stride_page, stride_row, WIDTH: tl.constexpr, BAND: tl.constexpr
):
    """Load rows [BLOCK_N, BAND] of a store.

    Rows of invalid keys are 0: memory that no sequence owns may hold NaN.
    """
    offs = page.to(tl.int64) * stride_page + page_row.to(tl.int64) * stride_row
    return load_at(X, offs, valid, WIDTH, BAND)[0]


@triton.jit
def _store_block_sums(
    p, reference, SUMS, MAXIMA, offs_sums, offs_maxima, tile, valid,
    CMP_PER_BLOCK: tl.constexpr, CMP_PER_BLOCK_PAD: tl.constexpr, CMP_STRIDES: tl.constexpr,
):  # fmt: skip
    """Store a tile's sums of p [BLOCK_M, BLOCK_N] over selection blocks (Eq. 9), of ``valid`` rows.

    A block gets a pair of sums: the share of its compressed tokens in its own score, and their
    share in the next block's score. Compressed token c of a block, c < CMP_PER_BLOCK = l'/d, covers
    CMP_STRIDES = l/d strides: min(CMP_STRIDES, CMP_PER_BLOCK - c) of them are in its own block, the
    others in the next one. p is relative to ``reference`` [BLOCK_M], which goes to MAXIMA.
    """
    BLOCK_M: tl.constexpr = p.shape[0]
    NUM_BLOCKS: tl.constexpr = p.shape[1] // CMP_PER_BLOCK_PAD
    c = tl.arange(0, CMP_PER_BLOCK_PAD)[None, None, :]
    own = tl.minimum(CMP_PER_BLOCK - c, CMP_STRIDES)
    carry = tl.where(c < CMP_PER_BLOCK, c - CMP_PER_BLOCK + CMP_STRIDES, 0)
    p = tl.reshape(p, [BLOCK_M, NUM_BLOCKS, CMP_PER_BLOCK_PAD])
    # A factor of 0 must not touch p: a NaN or inf belongs only to blocks that its token overlaps.
    own_sum = tl.sum(tl.where(own > 0, p * own.to(p.dtype), 0.0), 2)
    carry_sum = tl.sum(tl.where(carry > 0, p * carry.to(p.dtype), 0.0), 2)
    offs = offs_sums[:, None] + (tl.arange(0, NUM_BLOCKS * 2) + tile * (NUM_BLOCKS * 2))[None, :]
    tl.store(
        SUMS + offs,
        tl.reshape(tl.join(own_sum, carry_sum), [BLOCK_M, NUM_BLOCKS * 2]),
        mask=valid[:, None],
    )
    tl.store(MAXIMA + offs_maxima + tile, reference, mask=valid)


@triton.jit
def walk(
    q, m_i, l_i, acc, K, V, SCALES, SUMS, MAXIMA, TABLE, BLOCKS, stride_k, stride_v, stride_scales,
    kv_head, low, high, first_tile, end_tile, left, right, current_block,
    offs_sums, offs_maxima, page_size, columns, num_pages, qk_scale,
    BRANCH: tl.constexpr, RING: tl.constexpr, PAGE_SCALES: tl.constexpr, BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    HEAD_DIM_BAND: tl.constexpr, V_HEAD_DIM_BAND: tl.constexpr, PAGE_SIZE: tl.constexpr,
    NUM_SELECTED: tl.constexpr, NUM_SELECTED_PAD: tl.constexpr, SELECT_BLOCK: tl.constexpr,
    DISTINCT: tl.constexpr, CMP_PER_BLOCK: tl.constexpr, CMP_PER_BLOCK_PAD: tl.constexpr,
    CMP_STRIDES: tl.constexpr, ATTEND: tl.constexpr, STORE_SUMS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Online softmax of q [BLOCK_M, HEAD_DIM] over the tiles first_tile .. end_tile; base 2.

    Returns m_i, l_i [BLOCK_M] and acc [BLOCK_M, V_HEAD_DIM]. Row r sees the keys left[r] ..
    right[r]. The strides of the stores K and V are (page, row, head). PAGE_SIZE is page_size if
    that is a power of two, otherwise 0.

    If K and V have another dtype than q, they hold codes, which are read in pairs of even and odd
    columns: shared memory transposes 16 bits, not 8. A code is a number in q's dtype, so that
    products are exact, and scales multiply scores and probabilities in fp32. PAGE_SCALES: each page
    has scales of its own; otherwise all pages have those of page 0.

    ATTEND: compute l_i and acc; without it only m_i.
    STORE_SUMS: for rows with right[r] > 0, store the sums of the probabilities over selection
    blocks at SUMS + offs_sums[r]. They are relative to m_i rounded up to an integer, which goes to
    MAXIMA + offs_maxima[r]. Each p is exp2(s - floor(s)) times a power of two. So equal logits have
    equal sums, whatever m_i was when they were computed. For this p the walk cannot use
    online_softmax_update, but its operations and their order are the same.
    """
    stride_kp, stride_kr, stride_kh = stride_k
    stride_vp, stride_vr, stride_vh = stride_v
    QUANTIZED: tl.constexpr = K.dtype.element_ty != q.dtype
    kv_head = tl.cast(kv_head, tl.int64)  # the strides of a head-major pool are large
    K += kv_head * stride_kh
    V += kv_head * stride_vh
    CODES: tl.constexpr = 2 if QUANTIZED else 1  # numbers in an element of K and V
    if QUANTIZED:
        IS_INT: tl.constexpr = K.dtype.element_ty == tl.int8
        K, stride_kp, stride_kr = as_pairs(K), stride_kp // 2, stride_kr // 2
        V, stride_vp, stride_vr = as_pairs(V), stride_vp // 2, stride_vr // 2
        q, q_odd = tl.split(tl.reshape(q, [q.shape[0], HEAD_DIM_BAND // 2, 2]))
        acc, acc_odd = tl.split(tl.reshape(acc, [acc.shape[0], V_HEAD_DIM_BAND // 2, 2]))
    rows_per_page = PAGE_SIZE if PAGE_SIZE > 0 else page_size
    # A tile's pages are loaded one iteration ahead of its keys: an address that depends on a load
    # of the same iteration could not be prefetched.
    key, page = _locate_keys(
        first_tile, low, high, TABLE, BLOCKS, rows_per_page, columns, num_pages,
        current_block, BLOCK_N, BRANCH, RING, NUM_SELECTED, NUM_SELECTED_PAD, SELECT_BLOCK,
        DISTINCT, CMP_PER_BLOCK, CMP_PER_BLOCK_PAD,
    )  # fmt: skip
    if QUANTIZED:
        if PAGE_SCALES:
            # Probabilities take the scales of values relative to the largest one so far, or they
            # could leave the range of fp16, and acc that of fp32.
            k_scale, v_scale = load_scales(SCALES, page, stride_scales, kv_head, key < high)
            unit = tl.full([], 1.1754943508222875e-38, ACC)  # the least normal number
        else:
            qk_scale *= tl.load(SCALES + kv_head * 2).to(ACC)
            unit = tl.load(SCALES + kv_head * 2 + 1).to(ACC)
    for tile in tl.range(first_tile, end_tile):
        next_key, next_page = _locate_keys(
            tl.minimum(tile + 1, end_tile - 1), low, high, TABLE, BLOCKS,
            rows_per_page, columns, num_pages, current_block,
            BLOCK_N, BRANCH, RING, NUM_SELECTED, NUM_SELECTED_PAD, SELECT_BLOCK, DISTINCT,
            CMP_PER_BLOCK, CMP_PER_BLOCK_PAD,
        )  # fmt: skip
        valid = key < high
        page_row = key % rows_per_page
        k = _load_rows(
            K, page, page_row, valid, stride_kp, stride_kr, HEAD_DIM // CODES,
            HEAD_DIM_BAND // CODES,
        )  # fmt: skip
        if QUANTIZED:
            k, k_odd = decode(k, q.dtype, IS_INT)
        s = tl.dot(q, tl.trans(k), input_precision="ieee", out_dtype=ACC)
        if QUANTIZED:
            s = tl.dot(q_odd, tl.trans(k_odd), s, input_precision="ieee", out_dtype=ACC)
            if PAGE_SCALES:
                next_k_scale, next_v_scale = load_scales(
                    SCALES, next_page, stride_scales, kv_head, next_key < high
                )
        s *= qk_scale
        if QUANTIZED and PAGE_SCALES:
            s *= k_scale[None, :]
        s = tl.where(key[None, :] < right[:, None], s, float("-inf"))
        if BRANCH == WIN:
            s = tl.where(key[None, :] >= left[:, None], s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1))
        shift = finite_shift(m_new)
        if STORE_SUMS:
            reference, floor = tl.ceil(shift), tl.floor(s)
            p = tl.exp2(s - floor) * tl.exp2(floor - reference[:, None])
            p = tl.where(s == float("-inf"), 0.0, p)
            _store_block_sums(
                p, reference, SUMS, MAXIMA, offs_sums, offs_maxima, tile, right > 0,
                CMP_PER_BLOCK, CMP_PER_BLOCK_PAD, CMP_STRIDES,
            )  # fmt: skip
            # The product with v takes p relative to m_i itself: a row's largest p is then 1, so
            # rounding p to v's dtype does not bias o.
            p *= tl.exp2(reference - shift)[:, None]
        else:
            p = tl.exp2(s - shift[:, None])
        if ATTEND:
            alpha = tl.exp2(m_i - shift)
            l_i = l_i * alpha + tl.sum(p, 1)
            v = _load_rows(
                V, page, page_row, valid, stride_vp, stride_vr, V_HEAD_DIM // CODES,
                V_HEAD_DIM_BAND // CODES,
            )  # fmt: skip
            if QUANTIZED:
                v, v_odd = decode(v, q.dtype, IS_INT)
                if PAGE_SCALES:
                    largest = tl.maximum(unit, tl.max(v_scale).to(ACC))
                    alpha *= unit / largest
                    unit = largest
                    p *= (v_scale.to(ACC) / unit)[None, :]
                acc_odd = tl.dot(
                    p.to(v.dtype), v_odd, acc_odd * alpha[:, None], input_precision="ieee",
                    out_dtype=ACC,
                )  # fmt: skip
            acc = tl.dot(
                p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee", out_dtype=ACC
            )
        m_i = m_new
        key = next_key
        page = next_page
        if QUANTIZED and PAGE_SCALES:
            k_scale, v_scale = next_k_scale, next_v_scale
    if QUANTIZED:
        acc = tl.reshape(tl.join(acc, acc_odd), [acc.shape[0], V_HEAD_DIM_BAND]) * unit
    return m_i, l_i, acc


@triton.jit
def reduce_splits(
    m_i, l_i, acc, SPLIT_ML, SPLIT_ACC, COUNTERS, program, split, num_splits,
    SPLIT_STEP: tl.constexpr, BLOCK_M: tl.constexpr, V_HEAD_DIM_BAND: tl.constexpr,
):  # fmt: skip
    """Merge the splits of a unit in the last of its programs that arrives here.

    Returns (whether this program is the last, m_i, l_i, acc), merged if it is. The splits of a unit
    are SPLIT_STEP programs apart. The counter of its first program counts the arrivals; it is 0
    before the launch.

    Memory order: each thread's stores precede the barrier, and the barrier precedes thread 0's
    atomic, which releases all that it has observed at GPU scope. The last program's atomic acquires
    what every earlier one released, because they form one chain of read-modify-writes. Its result
    reaches the other threads through a barrier of its own. The loads that follow read addresses
    that this program has not read before, and bypass L1 (.cg).

    Splits are added in their own order whichever program is last, so every run gives the same bits.
    """
    arrived = num_splits - 1
    if num_splits > 1:
        first_program = tl.cast(program - split * SPLIT_STEP, tl.int64)
        offs_m, offs_d = tl.arange(0, BLOCK_M), tl.arange(0, V_HEAD_DIM_BAND)
        offs_acc = offs_m[:, None] * V_HEAD_DIM_BAND + offs_d[None, :]
        own = first_program + split * SPLIT_STEP
        tl.store(SPLIT_ML + own * (2 * BLOCK_M) + offs_m, m_i)
        tl.store(SPLIT_ML + own * (2 * BLOCK_M) + BLOCK_M + offs_m, l_i)
        tl.store(SPLIT_ACC + own * (BLOCK_M * V_HEAD_DIM_BAND) + offs_acc, acc)
        tl.debug_barrier()
        arrived = tl.atomic_add(COUNTERS + first_program, 1, sem="acq_rel", scope="gpu")
        if arrived == num_splits - 1:
            m_i = tl.full(m_i.shape, float("-inf"), m_i.dtype)
            l_i = tl.zeros(l_i.shape, l_i.dtype)
            acc = tl.zeros(acc.shape, acc.dtype)
            for other in tl.range(num_splits, loop_unroll_factor=4):
                at = first_program + other * SPLIT_STEP
                m_j = tl.load(SPLIT_ML + at * (2 * BLOCK_M) + offs_m, cache_modifier=".cg")
                l_j = tl.load(
                    SPLIT_ML + at * (2 * BLOCK_M) + BLOCK_M + offs_m, cache_modifier=".cg"
                )
                acc_j = tl.load(
                    SPLIT_ACC + at * (BLOCK_M * V_HEAD_DIM_BAND) + offs_acc, cache_modifier=".cg"
                )
                m_new = tl.maximum(m_i, m_j)
                shift = finite_shift(m_new)
                alpha, beta = tl.exp2(m_i - shift), tl.exp2(m_j - shift)
                l_i = l_i * alpha + l_j * beta
                acc = acc * alpha[:, None] + acc_j * beta[:, None]
                m_i = m_new
    return arrived == num_splits - 1, m_i, l_i, acc


@triton.jit
def signal(FLAG):
    """Set FLAG, so that a program in :func:`wait` sees what this program has written.

    Each thread's stores precede the barrier; the barrier precedes thread 0's exchange, which
    releases all of them.
    """
    tl.debug_barrier()
    tl.atomic_xchg(FLAG, 1, sem="release", scope="gpu")


@triton.jit
def wait(FLAG):
    """Wait until another program sets FLAG with :func:`signal`.

    That program must have started before this one. Read what it wrote through L2 (.cg).
    """
    flag = tl.atomic_add(FLAG, 0, sem="acquire", scope="gpu")
    while flag == 0:
        flag = tl.atomic_add(FLAG, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()

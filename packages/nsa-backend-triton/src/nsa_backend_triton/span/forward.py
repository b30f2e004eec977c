"""Forward of attention over a span of keys: the compressed branch and the sliding window.

    s = scale q k^T,  p = exp(s - lse) where t sees j,  o = p v,  lse = log sum exp s

This is one branch of Eq. 5: over the compressed keys of Eq. 7 (cmp), or over the last w tokens
(win). A program owns BLOCK_M = BLOCK_T x BLOCK_H query rows: neighbouring tokens times heads of one
group. It keeps q in shared memory, and m_i, l_i [BLOCK_M] and the output [BLOCK_M, Dv] in
registers, and walks the keys in tiles of BLOCK_N. A tile takes (Dk + Dv) * BLOCK_N * itemsize bytes
through L2 and 2 * BLOCK_M * BLOCK_N * (Dk + Dv) operations, which is BLOCK_M operations a byte in
bf16. At BLOCK_M = 128 the matrix units are the limit (128 operations a byte against about 100 that
the H200's L2 needs), then exp2. Only tiles at the ends of the span are masked. A window of w makes
a program read BLOCK_M / BLOCK_H + w - 1 keys, of which a token sees w; hence BLOCK_H > 1 there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_backend_triton.host import configs
from nsa_backend_triton.host.constexprs import accumulator, band, value_band
from nsa_backend_triton.host.descriptors import descriptors_fit, key_descriptor
from nsa_backend_triton.host.device import architecture
from nsa_backend_triton.host.launch_cache import Launch, aligned, cached_by_metadata
from nsa_backend_triton.host.sequences import Sequences
from nsa_backend_triton.host.strides import batch_apart, new_lse_strides, new_strides, strides
from nsa_backend_triton.shared.rows import (
    LOG2E,
    add_dot,
    divide_rows,
    dot_columns,
    fetch_rows,
    finish_softmax,
    load_at,
    load_rows,
    num_compressed,
    online_softmax_update,
    place_queries,
    row_offset,
    scale_rows,
    store_at,
    transpose,
    with_batch,
    zero_rows,
)
from nsa_backend_triton.span.geometry import key_span, locate_keys, mask_scores

TINY = 1e-30  # replaces a scale of 0, which would turn the -inf of a masked key into NaN


@triton.jit
def _walk(
    q, m_i, l_i, acc, K, V, K_DESC, V_DESC, batch, kv_head,
    low, skip_from, skip_to, num_tiles, seq_keys, first_key, end_key,
    qk_scale, stride_k, stride_v,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    HEAD_DIM_BAND: tl.constexpr, V_HEAD_DIM_BAND: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, ACC: tl.constexpr, USE_TMA: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Online softmax of q [M, Dk] over ``num_tiles`` tiles of keys; returns m_i, l_i, acc.

    Tile i starts at key low + i * BLOCK_N; tiles skip_from .. skip_to are left out. Row r sees the
    keys first_key[r] .. end_key[r].
    """
    stride_kt, _ = stride_k
    stride_vt, _ = stride_v
    offs_n = tl.arange(0, BLOCK_N)
    for i in tl.range(0, num_tiles):
        start_n = low + i * BLOCK_N
        if MASKED:
            start_n += tl.where(i >= skip_from, skip_to - skip_from, 0) * BLOCK_N
        if USE_TMA:
            k = fetch_rows(K_DESC, batch, start_n, kv_head, BLOCK_N, HEAD_DIM, HEAD_DIM_BAND)
        else:
            k = load_rows(
                K + tl.cast(start_n, tl.int64) * stride_kt,
                offs_n,
                seq_keys - start_n,
                stride_kt,
                HEAD_DIM,
                HEAD_DIM_BAND,
                MASKED,
            )
        s = dot_columns(q, transpose(k, HEAD_DIM, HEAD_DIM_BAND), HEAD_DIM, HEAD_DIM_BAND, ACC)
        if MASKED:
            s = mask_scores(s, offs_n, first_key - start_n, end_key - start_n, WINDOW > 0, True)
        row_max = tl.max(s, 1) * qk_scale
        m_i, l_i, p, alpha = online_softmax_update(
            m_i, l_i, s * qk_scale, row_max, None, MASKED, q[0].dtype
        )
        if USE_TMA:
            v = fetch_rows(V_DESC, batch, start_n, kv_head, BLOCK_N, V_HEAD_DIM, V_HEAD_DIM_BAND)
        else:
            v = load_rows(
                V + tl.cast(start_n, tl.int64) * stride_vt,
                offs_n,
                seq_keys - start_n,
                stride_vt,
                V_HEAD_DIM,
                V_HEAD_DIM_BAND,
                MASKED,
            )
        acc = scale_rows(acc, alpha[:, None], V_HEAD_DIM, V_HEAD_DIM_BAND)
        acc = add_dot(acc, p.to(v[0].dtype), v, V_HEAD_DIM, V_HEAD_DIM_BAND, ACC)
    return m_i, l_i, acc


@triton.jit(
    do_not_specialize=[
        "num_seqs",
        "seq_len",
        "num_keys",
        "first_query",
        "stride_lse_b",
        "stride_lse_h",
    ]
)
def span_forward(
    Q, K, V, K_DESC, V_DESC, O, LSE, CU_SEQLENS, CU_KEYS,
    stride_qb: tl.int64, stride_q, stride_kb: tl.int64, stride_k,
    stride_vb: tl.int64, stride_v, stride_ob: tl.int64, stride_o,
    stride_lse_b: tl.int64, stride_lse_h: tl.int64,
    qk_scale, num_seqs, seq_len, num_keys, first_query,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    HEAD_DIM_BAND: tl.constexpr, V_HEAD_DIM_BAND: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    COMPRESS_BLOCK: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    VARLEN: tl.constexpr, PARTIAL: tl.constexpr, NEGATIVE_SCALE: tl.constexpr,
    ACC: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    """o and lse of BLOCK_T tokens x BLOCK_H heads.

    Heads vary fastest over programs; the tiles with the most keys start first. ``qk_scale`` is
    |scale| log2(e); NEGATIVE_SCALE: the scale is negative.
    """
    num_head_tiles: tl.constexpr = NUM_HEADS // BLOCK_H
    tile = tl.num_programs(0) // num_head_tiles - 1 - tl.program_id(0) // num_head_tiles
    head = tl.program_id(0) % num_head_tiles * BLOCK_H
    seq, start, query_start, length, row = place_queries(
        tile, CU_SEQLENS, num_seqs, seq_len, first_query, BLOCK_T, VARLEN, PARTIAL
    )
    if row >= length:
        return
    key_start, seq_keys = locate_keys(
        seq, start, length, CU_KEYS, num_keys, COMPRESS_BLOCK, STRIDE, VARLEN
    )
    batch = 0 if VARLEN else seq
    offs_m = tl.arange(0, BLOCK_T * BLOCK_H)
    offs_t, offs_h = offs_m // BLOCK_H, offs_m % BLOCK_H
    token = row + offs_t
    mask_m = token < length
    Q += row_offset(batch, query_start + row, head, with_batch(stride_qb, stride_q))
    stride_qt, stride_qh = stride_q
    q = load_at(Q, offs_t * stride_qt + offs_h * stride_qh, mask_m, HEAD_DIM, HEAD_DIM_BAND)
    if NEGATIVE_SCALE:
        # Negation is exact. Then the largest product of a row is its largest score.
        q = scale_rows(q, -1.0, HEAD_DIM, HEAD_DIM_BAND)

    kv_head = head // GROUP
    K += row_offset(batch, key_start, kv_head, with_batch(stride_kb, stride_k))
    V += row_offset(batch, key_start, kv_head, with_batch(stride_vb, stride_v))
    last = tl.minimum(row + BLOCK_T, length) - 1
    low, full_low, full_high, high = key_span(
        row, last, seq_keys, COMPRESS_BLOCK, STRIDE, WINDOW, BLOCK_N
    )
    m_i = tl.full([BLOCK_T * BLOCK_H], float("-inf"), ACC)
    l_i = tl.zeros([BLOCK_T * BLOCK_H], ACC)
    acc = zero_rows(BLOCK_T * BLOCK_H, V_HEAD_DIM, V_HEAD_DIM_BAND, ACC)
    first_key = token - WINDOW + 1
    end_key = tl.minimum(num_compressed(token + 1, COMPRESS_BLOCK, STRIDE), seq_keys)
    skip_from, skip_to = (full_low - low) // BLOCK_N, (full_high - low) // BLOCK_N
    num_masked = tl.cdiv(high - low, BLOCK_N) - (skip_to - skip_from)
    m_i, l_i, acc = _walk(
        q, m_i, l_i, acc, K, V, K_DESC, V_DESC, batch, kv_head,
        full_low, 0, 0, skip_to - skip_from, seq_keys, first_key, end_key,
        qk_scale, stride_k, stride_v,
        HEAD_DIM, V_HEAD_DIM, HEAD_DIM_BAND, V_HEAD_DIM_BAND, BLOCK_N, WINDOW, ACC, USE_TMA, False,
    )  # fmt: skip
    m_i, l_i, acc = _walk(
        q, m_i, l_i, acc, K, V, K_DESC, V_DESC, batch, kv_head,
        low, skip_from, skip_to, num_masked, seq_keys, first_key, end_key,
        qk_scale, stride_k, stride_v,
        HEAD_DIM, V_HEAD_DIM, HEAD_DIM_BAND, V_HEAD_DIM_BAND, BLOCK_N, WINDOW, ACC, USE_TMA, True,
    )  # fmt: skip
    divisor, lse = finish_softmax(m_i, l_i)
    O += row_offset(batch, query_start + row, head, with_batch(stride_ob, stride_o))
    stride_ot, stride_oh = stride_o
    o = divide_rows(acc, divisor, V_HEAD_DIM, V_HEAD_DIM_BAND)
    store_at(O, offs_t * stride_ot + offs_h * stride_oh, o, mask_m, V_HEAD_DIM, V_HEAD_DIM_BAND)
    tl.store(
        LSE + batch * stride_lse_b + (query_start + row) + offs_t + (head + offs_h) * stride_lse_h,
        lse,
        mask=mask_m,
    )


def heads_together(group: int, max_heads: int) -> int:
    """Return the largest power of two <= ``max_heads`` that divides the heads of a group."""
    return min(group & -group, max_heads)


def launch_options(settings: configs.Settings) -> dict[str, int]:
    """Return num_warps, num_stages and maxnreg of ``settings``, without those absent or 0."""
    names = ("num_warps", "num_stages", "maxnreg")
    return {name: settings[name] for name in names if settings.get(name)}


@cached_by_metadata
def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seqs: Sequences,
    span: tuple[int, int, int],
    scale: float,
    tensors_aligned: bool,
    settings: configs.Settings | None,
) -> tuple[Launch, int, tuple[int, ...], tuple[int, ...]]:
    """Return the launch, the rows of a descriptor's tile (0: pointers), the shapes of o and lse."""
    *lead, heads, head_dim = q.shape
    groups, v_head_dim = v.shape[-2:]
    settings = settings or configs.pick(
        "span_forward",
        architecture(q.device),
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        itemsize=q.itemsize,
        window=span[2],
        pointers=int(not (tensors_aligned and descriptors_fit(seqs.packed, k, v))),
    )
    use_tma, block_n = bool(settings.get("USE_TMA")), settings["BLOCK_N"]
    block_h = heads_together(heads // groups, settings["BLOCK_H"])
    block_t = settings["BLOCK_M"] // block_h
    bands = band(head_dim), band(v_head_dim)
    v_band = value_band(*bands, architecture(q.device), use_tma=use_tma)
    o, lse = (*lead, heads, v_head_dim), (*lead[:-1], heads, lead[-1])
    launch = Launch(
        span_forward, (seqs.tiles(block_t) * (heads // block_h),),
        *(n for x in (q, k, v) for n in batch_apart(strides(x, seqs.packed))),
        *batch_apart(new_strides(o, seqs.packed)),
        *new_lse_strides(lse, seqs.packed),
        max(abs(scale) * LOG2E.value, TINY), seqs.n, seqs.seq_len, k.shape[-3],
        seqs.first_query,
        NUM_HEADS=heads, GROUP=heads // groups, HEAD_DIM=head_dim, V_HEAD_DIM=v_head_dim,
        HEAD_DIM_BAND=band(head_dim), V_HEAD_DIM_BAND=v_band,
        BLOCK_T=block_t, BLOCK_H=block_h, BLOCK_N=block_n,
        COMPRESS_BLOCK=span[0], STRIDE=span[1], WINDOW=span[2], VARLEN=seqs.packed,
        PARTIAL=seqs.partial, NEGATIVE_SCALE=scale < 0, ACC=accumulator(q.dtype), USE_TMA=use_tma,
        **launch_options(settings),
    )  # fmt: skip
    return launch, block_n if use_tma else 0, o, lse


def forward(
    q: Tensor,  # [B, S, Hq, Dk], packed [T, Hq, Dk]
    k: Tensor,  # [B, L, G, Dk], packed [L, G, Dk]
    v: Tensor,  # [B, L, G, Dv]
    seqs: Sequences,
    span: tuple[int, int, int],  # COMPRESS_BLOCK, STRIDE, WINDOW
    scale: float,
    settings: configs.Settings | None = None,
) -> tuple[Tensor, Tensor]:
    """Return o [B, S, Hq, Dv] and lse [B, Hq, S] (packed [T, Hq, Dv] and [Hq, T]).

    ``settings`` replace the tuned ones.
    """
    launch, rows, o_shape, lse_shape = _launch(q, k, v, seqs, span, scale, aligned(k, v), settings)
    num_keys = seqs.num_keys(*span[:2])
    descriptors = (
        (key_descriptor(k, rows, num_keys), key_descriptor(v, rows, num_keys))
        if rows
        else (None, None)
    )
    o = q.new_empty(o_shape)
    lse = q.new_empty(lse_shape, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    launch(q, k, v, *descriptors, o, lse, seqs.cu, seqs.cu_cmp)
    return o, lse

"""Forward of attention over a span of keys: the compressed branch and the sliding window.

    s = scale q k^T,  p = exp(s - lse) where t sees j,  o = p v,  lse = log sum exp s

This is one branch of Eq. 5: over the compressed keys of Eq. 7 (cmp), or over the last w tokens
(win). A program owns BLOCK_M = BLOCK_T x BLOCK_H query rows: neighbouring tokens times heads of one
group. It keeps q in shared memory, and m_i, l_i [BLOCK_M] and the output [BLOCK_M, Dv] in
registers, and walks the keys in tiles of BLOCK_N. A tile takes (Dk + Dv) * BLOCK_N * itemsize bytes
through L2 and 2 * BLOCK_M * BLOCK_N * (Dk + Dv) operations, which is BLOCK_M operations a byte in
bf16; the H200's L2 needs about 100. At BLOCK_M = 128 no unit limits cmp: matrix units reach 55% of
their peak, L2 39%, exp2 30%. Only tiles at the ends of the span are masked. A window of w makes a
program read BLOCK_M / BLOCK_H + w - 1 keys, of which a token sees w; hence BLOCK_H > 1 there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_backend_triton.host import configs
from nsa_backend_triton.host.constexprs import accumulator, band, value_band, widths
from nsa_backend_triton.host.descriptors import descriptors_fit, key_descriptors
from nsa_backend_triton.host.device import architecture
from nsa_backend_triton.host.launch_cache import Launch, aligned, cached_by_metadata
from nsa_backend_triton.host.sequences import Sequences
from nsa_backend_triton.host.strides import batch_apart, new_lse_strides, new_strides, strides
from nsa_backend_triton.shared.rows import (
    LOG2E,
    add_dot,
    divide_rows,
    dot_transposed,
    finish_softmax,
    load_at,
    online_softmax_update,
    place_queries,
    read_rows,
    row_offset,
    scale_rows,
    store_at,
    with_batch,
    zero_rows,
)
from nsa_backend_triton.span.geometry import key_tiles, locate_keys, mask_scores

TINY = 1e-30  # replaces a scale of 0, which would turn the -inf of a masked key into NaN


@triton.jit
def _walk(
    q, m_i, l_i, acc, K, V, K_DESC, V_DESC, batch, kv_head,
    tiles, seq_keys, first_key, end_key, qk_scale, stride_k, stride_v,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    HEAD_DIM_BAND: tl.constexpr, V_HEAD_DIM_BAND: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, ACC: tl.constexpr, USE_TMA: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Online softmax of q [M, Dk] over the full or MASKED ``tiles``; returns m_i, l_i, acc.

    ``tiles``, and the keys first_key[r] .. end_key[r] of row r, are those of geometry.key_tiles.
    """
    stride_kt, _ = stride_k
    stride_vt, _ = stride_v
    offs_n = tl.arange(0, BLOCK_N)
    low, full_low, skip_from, skip_to, num_masked = tiles
    first, num_tiles = (low, num_masked) if MASKED else (full_low, skip_to - skip_from)
    for i in tl.range(0, num_tiles):
        start_n = first + i * BLOCK_N
        if MASKED:
            start_n += tl.where(i >= skip_from, skip_to - skip_from, 0) * BLOCK_N
        k = read_rows(
            K, K_DESC, batch, kv_head, start_n, offs_n, seq_keys, stride_kt,
            HEAD_DIM, HEAD_DIM_BAND, MASKED, USE_TMA,
        )  # fmt: skip
        s = dot_transposed(q, k, ACC)
        if MASKED:
            s = mask_scores(s, offs_n, first_key - start_n, end_key - start_n, WINDOW > 0, True)
        row_max = tl.max(s, 1) * qk_scale
        m_i, l_i, p, alpha = online_softmax_update(
            m_i, l_i, s * qk_scale, row_max, None, MASKED, q[0].dtype
        )
        v = read_rows(
            V, V_DESC, batch, kv_head, start_n, offs_n, seq_keys, stride_vt,
            V_HEAD_DIM, V_HEAD_DIM_BAND, MASKED, USE_TMA,
        )  # fmt: skip
        acc = scale_rows(acc, alpha[:, None])
        acc = add_dot(acc, p, v)
    return m_i, l_i, acc


@triton.jit(
    do_not_specialize=[
        "num_seqs", "seq_len", "num_keys", "first_query", "stride_lse_b", "stride_lse_h",
    ]
)  # fmt: skip
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
        q = scale_rows(q, -1.0)

    kv_head = head // GROUP
    K += row_offset(batch, key_start, kv_head, with_batch(stride_kb, stride_k))
    V += row_offset(batch, key_start, kv_head, with_batch(stride_vb, stride_v))
    tiles, first_key, end_key = key_tiles(
        row, token, length, seq_keys, COMPRESS_BLOCK, STRIDE, WINDOW, BLOCK_T, BLOCK_N
    )
    m_i = tl.full([BLOCK_T * BLOCK_H], float("-inf"), ACC)
    l_i = tl.zeros([BLOCK_T * BLOCK_H], ACC)
    acc = zero_rows(BLOCK_T * BLOCK_H, V_HEAD_DIM, V_HEAD_DIM_BAND, ACC)
    for masked in tl.static_range(2):  # the full tiles first
        m_i, l_i, acc = _walk(
            q, m_i, l_i, acc, K, V, K_DESC, V_DESC, batch, kv_head,
            tiles, seq_keys, first_key, end_key, qk_scale, stride_k, stride_v,
            HEAD_DIM, V_HEAD_DIM, HEAD_DIM_BAND, V_HEAD_DIM_BAND, BLOCK_N, WINDOW, ACC, USE_TMA,
            masked,
        )  # fmt: skip
    divisor, lse = finish_softmax(m_i, l_i)
    O += row_offset(batch, query_start + row, head, with_batch(stride_ob, stride_o))
    stride_ot, stride_oh = stride_o
    o = divide_rows(acc, divisor)
    store_at(O, offs_t * stride_ot + offs_h * stride_oh, o, mask_m, V_HEAD_DIM, V_HEAD_DIM_BAND)
    tl.store(
        LSE + batch * stride_lse_b + (query_start + row) + offs_t + (head + offs_h) * stride_lse_h,
        lse,
        mask=mask_m,
    )


def heads_together(group: int, max_heads: int) -> int:
    """Return the largest power of two <= ``max_heads`` that divides the heads of a group."""
    return min(group & -group, max_heads)


def pick(kernel: str, q: Tensor, v: Tensor, window: int, described: bool) -> configs.Settings:
    """Return the tuned settings of ``kernel``; ``described``: the call can use descriptors."""
    heads, head_dim = q.shape[-2:]
    return configs.pick(
        kernel,
        architecture(q.device),
        head_dim=head_dim,
        v_head_dim=v.shape[-1],
        itemsize=q.itemsize,
        window=window,
        heads=heads,
        pointers=int(not described),
    )


def constants(
    q: Tensor, k: Tensor, v: Tensor, seqs: Sequences, span: tuple[int, int, int]
) -> dict[str, object]:
    """Return the constexpr arguments that the span kernels share."""
    return {
        **widths(q, v),
        "GROUP": q.shape[-2] // k.shape[-2],
        "COMPRESS_BLOCK": span[0],
        "STRIDE": span[1],
        "WINDOW": span[2],
        "VARLEN": seqs.packed,
        "PARTIAL": seqs.partial,
        "ACC": accumulator(q.dtype),
    }


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
    described = tensors_aligned and descriptors_fit(seqs.packed, k, v)
    settings = settings or pick("span_forward", q, v, span[2], described)
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
        NUM_HEADS=heads, **(constants(q, k, v, seqs, span) | {"V_HEAD_DIM_BAND": v_band}),
        BLOCK_T=block_t, BLOCK_H=block_h, BLOCK_N=block_n,
        NEGATIVE_SCALE=scale < 0, USE_TMA=use_tma, **configs.launch_options(settings),
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
    described = key_descriptors(k, v, rows, seqs.num_keys(*span[:2]))
    o = q.new_empty(o_shape)
    lse = q.new_empty(lse_shape, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    launch(q, k, v, *described, o, lse, seqs.cu, seqs.cu_cmp)
    return o, lse

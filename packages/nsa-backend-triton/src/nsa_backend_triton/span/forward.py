"""Forward attention over a span of keys: the compressed branch and the sliding window.

    s = scale q k^T,  p = exp(s - lse) where t sees j,  o = p v,  lse = log sum exp s
    (Eq. 5 with Eq. 7, or w)

A program owns TOKENS x HEADS = M query rows (neighbouring tokens, heads of one group), q in shared
memory, m, l [M] and the output [M, Dv] in registers, and walks the keys in tiles of BLOCK_N: (Dk +
Dv) * BLOCK_N * itemsize bytes through L2 and 2 * M * BLOCK_N * (Dk + Dv) operations a tile, so M
operations a byte in bf16. At M = 128 the matrix units bind (128 operations a byte against about 100
that the H200's L2 needs), then exp2. Only tiles at the ends of the range are masked; with a window
of w, M / HEADS + w - 1 keys are touched for w that count, hence HEADS > 1 there.
"""

from __future__ import annotations

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
    new_lse_strides,
    new_strides,
    strides,
)
from nsa_backend_triton.shared.rows import (
    LOG2E,
    add_dot,
    divide_rows,
    dot_columns,
    finish,
    load_at,
    num_compressed,
    place,
    scale_rows,
    store_at,
    transpose,
    zero_rows,
)
from nsa_backend_triton.span.geometry import fetch_rows, hide, key_place, key_span, load_rows

TINY = 1e-30  # in place of a scale of 0, which would make a hidden key's -inf a NaN


@triton.jit
def _walk(
    q, m, l, acc, K, V, K_TMA, V_TMA, batch, kv_head, low, skip_from, skip_to, tiles, keys, left,
    right, factor,
    k_row, v_row,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, ACC: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Online softmax of q [M, Dk] over ``tiles`` tiles of keys; returns m, l, acc.

    Tile i starts at key low + i * BLOCK_N; tiles skip_from .. skip_to are left out. Row r sees
    left[r] .. right[r].
    """
    column = tl.arange(0, BLOCK_N)
    for i in tl.range(0, tiles):
        j = low + i * BLOCK_N
        if MASKED:
            j += tl.where(i >= skip_from, skip_to - skip_from, 0) * BLOCK_N
        if TMA:
            k = fetch_rows(K_TMA, batch, j, kv_head, BLOCK_N, DK, BLOCK_DK)
        else:
            k = load_rows(
                K + tl.cast(j, tl.int64) * k_row, column, keys - j, k_row, DK, BLOCK_DK, MASKED
            )
        s = dot_columns(q, transpose(k, DK, BLOCK_DK), DK, BLOCK_DK, ACC)
        if MASKED:
            s = hide(s, column, left - j, right - j, WINDOW > 0, True)
        m_new = tl.maximum(m, tl.max(s, 1) * factor)
        shift = m_new
        if MASKED:
            shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen nothing yet
        p = tl.exp2(s * factor - shift[:, None])
        alpha = tl.exp2(m - shift)
        l = l * alpha + tl.sum(p, 1)
        if TMA:
            v = fetch_rows(V_TMA, batch, j, kv_head, BLOCK_N, DV, BLOCK_DV)
        else:
            v = load_rows(
                V + tl.cast(j, tl.int64) * v_row, column, keys - j, v_row, DV, BLOCK_DV, MASKED
            )
        acc = scale_rows(acc, alpha[:, None], DV, BLOCK_DV)
        acc = add_dot(acc, p.to(v[0].dtype), v, DV, BLOCK_DV, ACC)
        m = m_new
    return m, l, acc


@triton.jit(do_not_specialize=["n_seqs", "seq_len", "key_rows", "lse_seq", "lse_head"])
def span_forward(
    Q, K, V, K_TMA, V_TMA, O, LSE, CU, CU_KEYS,
    q_seq: tl.int64, q_row, q_head, k_seq: tl.int64, k_row, k_head, v_seq: tl.int64, v_row, v_head,
    o_seq: tl.int64, o_row, o_head, lse_seq: tl.int64, lse_head: tl.int64,
    factor, n_seqs, seq_len, key_rows,
    N_HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SIZE: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr, VARLEN: tl.constexpr,
    NEGATIVE: tl.constexpr,
    ACC: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """See the module. One program: TOKENS tokens x HEADS heads; heads vary fastest, the longest
    tiles start first.

    ``factor`` is |scale| log2(e), NEGATIVE the scale's sign.
    """
    slices: tl.constexpr = N_HEADS // HEADS
    index = tl.num_programs(0) // slices - 1 - tl.program_id(0) // slices
    head = tl.program_id(0) % slices * HEADS
    seq, start, length, row = place(index, CU, n_seqs, seq_len, TOKENS, VARLEN)
    if row >= length:
        return
    key_start, keys = key_place(seq, start, length, CU_KEYS, key_rows, SIZE, STRIDE, VARLEN)
    batch = 0 if VARLEN else seq
    at = tl.arange(0, TOKENS * HEADS)
    local, h = at // HEADS, at % HEADS
    token = row + local
    inside = token < length
    Q += batch * q_seq + tl.cast(start + row, tl.int64) * q_row + head * q_head
    q = load_at(Q, local * q_row + h * q_head, inside, DK, BLOCK_DK)
    if NEGATIVE:
        # exact; then a row's largest product is its largest score
        q = scale_rows(q, -1.0, DK, BLOCK_DK)

    kv_head = head // GROUP
    K += batch * k_seq + tl.cast(key_start, tl.int64) * k_row + kv_head * k_head
    V += batch * v_seq + tl.cast(key_start, tl.int64) * v_row + kv_head * v_head
    last = tl.minimum(row + TOKENS, length) - 1
    low, all_low, all_high, high = key_span(row, last, keys, SIZE, STRIDE, WINDOW, BLOCK_N)
    m = tl.full([TOKENS * HEADS], float("-inf"), ACC)
    l = tl.zeros([TOKENS * HEADS], ACC)
    acc = zero_rows(TOKENS * HEADS, DV, BLOCK_DV, ACC)
    left = token - WINDOW + 1
    right = tl.minimum(num_compressed(token + 1, SIZE, STRIDE), keys)
    skip_from, skip_to = (all_low - low) // BLOCK_N, (all_high - low) // BLOCK_N
    masked = tl.cdiv(high - low, BLOCK_N) - (skip_to - skip_from)
    m, l, acc = _walk(
        q, m, l, acc, K, V, K_TMA, V_TMA, batch, kv_head, all_low, 0, 0, skip_to - skip_from, keys,
        left, right, factor,
        k_row, v_row, DK, DV, BLOCK_DK, BLOCK_DV, BLOCK_N, WINDOW, ACC, TMA, False,
    )  # fmt: skip
    m, l, acc = _walk(
        q, m, l, acc, K, V, K_TMA, V_TMA, batch, kv_head, low, skip_from, skip_to, masked, keys,
        left, right, factor,
        k_row, v_row, DK, DV, BLOCK_DK, BLOCK_DV, BLOCK_N, WINDOW, ACC, TMA, True,
    )  # fmt: skip
    l, lse = finish(m, l)
    O += batch * o_seq + tl.cast(start + row, tl.int64) * o_row + head * o_head
    o = divide_rows(acc, l, DV, BLOCK_DV)
    store_at(O, local * o_row + h * o_head, o, inside, DV, BLOCK_DV)
    tl.store(
        LSE + batch * lse_seq + (start + row) + local + (head + h) * lse_head, lse, mask=inside
    )


def heads_together(group: int, most: int) -> int:
    """The largest power of two, at most ``most``, that divides the heads of a group."""
    return min(group & -group, most)


def launch_options(settings: configs.Settings) -> dict[str, int]:
    """num_warps, num_stages, and maxnreg where it is given and not 0."""
    names = ("num_warps", "num_stages", "maxnreg")
    return {name: settings[name] for name in names if settings.get(name)}


@remembered
def _launch(
    q: Tensor, k: Tensor, v: Tensor, seqs: Sequences, span: tuple[int, int, int], scale: float,
    tensors_aligned: bool,
    settings: configs.Settings | None,
) -> tuple[Launch, int, tuple[int, ...], tuple[int, ...]]:  # fmt: skip
    """The launch, the rows of a descriptor's tile (0: no descriptors), the shapes of o and lse."""
    *lead, heads, dk = q.shape
    groups, dv = v.shape[-2:]
    settings = settings or configs.pick(
        "span_forward",
        architecture(q.device),
        head_dim=dk,
        v_head_dim=dv,
        itemsize=q.itemsize,
        window=span[2],
        pointers=int(not (tensors_aligned and descriptors_fit(seqs.packed, k, v))),
    )
    tma, block_n = bool(settings.get("TMA")), settings["BLOCK_N"]
    together = heads_together(heads // groups, settings["HEADS"])
    tokens = settings["BLOCK_M"] // together
    o, lse = (*lead, heads, dv), (*lead[:-1], heads, lead[-1])
    made = Launch(
        span_forward, (seqs.tiles(tokens) * (heads // together),),
        *(n for x in (q, k, v) for n in strides(x, seqs.packed)), *new_strides(o, seqs.packed),
        *new_lse_strides(lse, seqs.packed),
        max(abs(scale) * LOG2E.value, TINY), seqs.n, seqs.seq_len, k.shape[-3],
        N_HEADS=heads, GROUP=heads // groups, DK=dk, DV=dv,
        BLOCK_DK=band(dk), BLOCK_DV=band(dv),
        TOKENS=tokens, HEADS=together, BLOCK_N=block_n,
        SIZE=span[0], STRIDE=span[1], WINDOW=span[2], VARLEN=seqs.packed, NEGATIVE=scale < 0,
        ACC=accumulator(q.dtype), TMA=tma, **launch_options(settings),
    )  # fmt: skip
    return made, block_n if tma else 0, o, lse


def forward(
    q: Tensor,  # [B, S, Hq, Dk], packed [T, Hq, Dk]
    k: Tensor,  # [B, L, G, Dk], packed [L, G, Dk]
    v: Tensor,  # [B, L, G, Dv]
    seqs: Sequences,
    span: tuple[int, int, int],  # SIZE, STRIDE, WINDOW
    scale: float,
    settings: configs.Settings | None = None,
) -> tuple[Tensor, Tensor]:
    """o [B, S, Hq, Dv] and lse [B, Hq, S] (packed [T, Hq, Dv] and [Hq, T]); ``settings`` replace
    the tuned ones.
    """
    launch, rows, o_shape, lse_shape = _launch(q, k, v, seqs, span, scale, aligned(k, v), settings)
    descriptors = (key_descriptor(k, rows), key_descriptor(v, rows)) if rows else (None, None)
    o = q.new_empty(o_shape)
    lse = q.new_empty(lse_shape, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    launch(q, k, v, *descriptors, o, lse, seqs.cu, seqs.cu_cmp)
    return o, lse

"""Rotate a step's queries and keys and write its keys and values into the cache, in one launch.

    (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) at the token's position

Each product and sum is rounded to fp32. A program owns BLOCK_H heads of one token's q, or one
token's k and v of one branch. It reads and writes the step's rows once; the limit is latency, a few
microseconds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_backend_triton.decode.codes import encode, scales_of, store_scale
from nsa_backend_triton.decode.launch import cdiv, power
from nsa_backend_triton.host import configs
from nsa_backend_triton.host.device import architecture
from nsa_backend_triton.host.launch_cache import Launch, cached_by_metadata
from nsa_core.contract import DecodeCall
from nsa_core.dtypes import as_bytes


@triton.jit
def _copy_heads(
    X, OUT, SCALES, COS, SIN, stride_xh, stride_outh, page, stride_scales, num_heads, position,
    valid, IS_V: tl.constexpr,
    BLOCK_H: tl.constexpr, WIDTH: tl.constexpr, BAND: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """Copy the heads of one row of X to one row of OUT if ``valid``; ROTATE: rotated.

    If OUT has codes, they are those of the elements in X's dtype.
    """
    DTYPE: tl.constexpr = OUT.dtype.element_ty
    head = tl.arange(0, BLOCK_H).to(tl.int64)  # the strides of a head-major pool are large
    scale = store_scale(
        SCALES, page, stride_scales, head, valid & (head < num_heads), IS_V, DTYPE
    )[:, None]  # fmt: skip
    if ROTATE:
        HALF: tl.constexpr = WIDTH // 2
        offs_d = tl.arange(0, BAND // 2)
        mask = valid & (head < num_heads)[:, None] & (offs_d < HALF)[None, :]
        offs_x, offs_out = (
            head[:, None] * stride_xh + offs_d[None, :],
            head[:, None] * stride_outh + offs_d[None, :],
        )
        angle = tl.cast(position, tl.int64) * HALF + offs_d
        cos = tl.load(COS + angle, mask=(offs_d < HALF) & valid, other=0.0)[None, :]
        sin = tl.load(SIN + angle, mask=(offs_d < HALF) & valid, other=0.0)[None, :]
        x1 = tl.load(X + offs_x, mask=mask, other=0.0).to(cos.dtype)
        x2 = tl.load(X + offs_x + HALF, mask=mask, other=0.0).to(cos.dtype)
        y1 = (x1 * cos - x2 * sin).to(X.dtype.element_ty)
        y2 = (x2 * cos + x1 * sin).to(X.dtype.element_ty)
        tl.store(OUT + offs_out, encode(y1, scale, DTYPE), mask=mask)
        tl.store(OUT + offs_out + HALF, encode(y2, scale, DTYPE), mask=mask)
    else:
        offs_d = tl.arange(0, BAND)
        mask = valid & (head < num_heads)[:, None] & (offs_d < WIDTH)[None, :]
        x = tl.load(X + head[:, None] * stride_xh + offs_d[None, :], mask=mask, other=0.0)
        offs_out = head[:, None] * stride_outh + offs_d[None, :]
        tl.store(OUT + offs_out, encode(x, scale, DTYPE), mask=mask)


@triton.jit
def _append_token(
    K, V, K_STORE, V_STORE, SCALES, COS, SIN, stride_k, stride_v,
    stride_k_store, stride_v_store, stride_scales, run, t, page, page_row, position, valid,
    NUM_KV_HEADS: tl.constexpr, NUM_KV_HEADS_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    HEAD_DIM_BAND: tl.constexpr, V_HEAD_DIM_BAND: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """Write k and v of one token to one row of stores [P, page_size, G, D]."""
    page, page_row = tl.cast(page, tl.int64), tl.cast(page_row, tl.int64)
    stride_kb, stride_kt, stride_kh = stride_k
    stride_ksp, stride_ksr, stride_ksh = stride_k_store
    _copy_heads(
        K + run * tl.cast(stride_kb, tl.int64) + t * stride_kt,
        K_STORE + page * stride_ksp + page_row * stride_ksr, SCALES,
        COS, SIN, stride_kh, stride_ksh, page, stride_scales, NUM_KV_HEADS, position, valid, False,
        NUM_KV_HEADS_PAD, HEAD_DIM, HEAD_DIM_BAND, ROTATE,
    )  # fmt: skip
    stride_vb, stride_vt, stride_vh = stride_v
    stride_vsp, stride_vsr, stride_vsh = stride_v_store
    _copy_heads(
        V + run * tl.cast(stride_vb, tl.int64) + t * stride_vt,
        V_STORE + page * stride_vsp + page_row * stride_vsr, SCALES,
        COS, SIN, stride_vh, stride_vsh, page, stride_scales, NUM_KV_HEADS, position, valid, True,
        NUM_KV_HEADS_PAD, V_HEAD_DIM, V_HEAD_DIM_BAND, False,
    )  # fmt: skip


@triton.jit
def _page_of(TABLE, sequence, stride_table, columns, page_number, num_pages, valid):
    """Return page ``page_number`` of a sequence, and whether it is valid; the table wraps around.

    A token whose page is outside the pool is not written, because each page has another owner.
    """
    row = TABLE + tl.cast(sequence, tl.int64) * stride_table
    page = tl.load(row + page_number % columns, mask=valid, other=0)
    return page, valid & (page >= 0) & (page < num_pages)


@triton.jit(
    do_not_specialize=[
        "num_tokens", "raw_page_size", "sel_page_size", "win_page_size",
        "raw_columns", "sel_columns", "win_columns", "num_raw_pages", "num_sel_pages",
        "num_win_pages", "num_sequences", "num_positions",
        "stride_raw_table", "stride_sel_table", "stride_win_table",
        "stride_sel_scales", "stride_win_scales",
    ],
    do_not_specialize_on_alignment=[
        "STARTS", "LENGTHS", "SEQUENCES", "RAW_TABLE", "SEL_TABLE", "WIN_TABLE", "SEL_SCALES",
        "WIN_SCALES",
    ],
)  # fmt: skip
def decode_append(
    Q, K_RAW, V_RAW, K_SEL, V_SEL, K_WIN, V_WIN,
    K_RAW_STORE, V_RAW_STORE, K_SEL_STORE, V_SEL_STORE, K_WIN_STORE, V_WIN_STORE, Q_OUT, COS, SIN,
    STARTS, LENGTHS, SEQUENCES, RAW_TABLE, SEL_TABLE, WIN_TABLE, SEL_SCALES, WIN_SCALES,
    stride_q, stride_k_raw, stride_v_raw, stride_k_sel, stride_v_sel, stride_k_win, stride_v_win,
    stride_k_raw_store, stride_v_raw_store, stride_k_sel_store, stride_v_sel_store,
    stride_k_win_store, stride_v_win_store,
    stride_raw_table, stride_sel_table, stride_win_table, stride_sel_scales, stride_win_scales,
    num_tokens, raw_page_size, sel_page_size, win_page_size, raw_columns, sel_columns, win_columns,
    num_raw_pages, num_sel_pages, num_win_pages, num_sequences, num_positions,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_H: tl.constexpr,
    NUM_KV_HEADS_PAD: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    HEAD_DIM_BAND: tl.constexpr, V_HEAD_DIM_BAND: tl.constexpr, ROPE: tl.constexpr,
    ROTATE_RAW: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Append one step; the programs of a token handle raw, sel, win and then q.

    "raw" are cmp's pages of the latest uncompressed rows. ROPE: rotate q, BLOCK_H heads per
    program, and k of sel and win; ROTATE_RAW: rotate k of raw, too.
    """
    PROGRAMS_PER_TOKEN: tl.constexpr = 3 + ((NUM_HEADS + BLOCK_H - 1) // BLOCK_H if ROPE else 0)
    task, row = tl.program_id(0) % PROGRAMS_PER_TOKEN, tl.program_id(0) // PROGRAMS_PER_TOKEN
    seq, t = row // num_tokens, row % num_tokens
    length = tl.load(LENGTHS + seq)
    position = tl.load(STARTS + seq) + t
    valid = (position >= 0) & (position < length) & (position < sel_columns * sel_page_size)
    sequence = seq
    if RAGGED:
        sequence = tl.load(SEQUENCES + seq)
    valid = valid & (sequence >= 0) & (sequence < num_sequences)
    angle = tl.minimum(position, num_positions - 1)
    if task == 0:
        # If a step has more tokens than the pages hold, the last ones stay.
        valid = valid & (position >= length - raw_columns * raw_page_size)
        page, valid = _page_of(
            RAW_TABLE, sequence, stride_raw_table, raw_columns, position // raw_page_size,
            num_raw_pages, valid,
        )  # fmt: skip
        _append_token(
            K_RAW, V_RAW, K_RAW_STORE, V_RAW_STORE, SEL_SCALES, COS, SIN, stride_k_raw,
            stride_v_raw, stride_k_raw_store, stride_v_raw_store, 0,
            seq, t, page, position % raw_page_size, angle, valid,
            NUM_KV_HEADS, NUM_KV_HEADS_PAD, HEAD_DIM, V_HEAD_DIM, HEAD_DIM_BAND, V_HEAD_DIM_BAND,
            ROPE and ROTATE_RAW,
        )  # fmt: skip
    elif task == 1:
        page, valid = _page_of(
            SEL_TABLE, sequence, stride_sel_table, sel_columns, position // sel_page_size,
            num_sel_pages, valid,
        )  # fmt: skip
        _append_token(
            K_SEL, V_SEL, K_SEL_STORE, V_SEL_STORE, SEL_SCALES, COS, SIN, stride_k_sel,
            stride_v_sel, stride_k_sel_store, stride_v_sel_store, stride_sel_scales,
            seq, t, page, position % sel_page_size, angle, valid,
            NUM_KV_HEADS, NUM_KV_HEADS_PAD, HEAD_DIM, V_HEAD_DIM, HEAD_DIM_BAND, V_HEAD_DIM_BAND,
            ROPE,
        )  # fmt: skip
    elif task == 2:
        valid = valid & (position >= length - win_columns * win_page_size)
        page, valid = _page_of(
            WIN_TABLE, sequence, stride_win_table, win_columns, position // win_page_size,
            num_win_pages, valid,
        )  # fmt: skip
        _append_token(
            K_WIN, V_WIN, K_WIN_STORE, V_WIN_STORE, WIN_SCALES, COS, SIN, stride_k_win,
            stride_v_win, stride_k_win_store, stride_v_win_store, stride_win_scales,
            seq, t, page, position % win_page_size, angle, valid,
            NUM_KV_HEADS, NUM_KV_HEADS_PAD, HEAD_DIM, V_HEAD_DIM, HEAD_DIM_BAND, V_HEAD_DIM_BAND,
            ROPE,
        )  # fmt: skip
    else:
        head = (task - 3) * BLOCK_H
        stride_qb, stride_qt, stride_qh = stride_q
        _copy_heads(
            Q + seq * tl.cast(stride_qb, tl.int64) + t * stride_qt + head * stride_qh,
            Q_OUT + (tl.cast(row, tl.int64) * NUM_HEADS + head) * HEAD_DIM, SEL_SCALES,
            COS, SIN, stride_qh, HEAD_DIM, 0, 0, NUM_HEADS - head, angle, position >= 0, False,
            BLOCK_H, HEAD_DIM, HEAD_DIM_BAND, True,
        )  # fmt: skip


def append(
    q: Tensor,  # [B, m, Hq, Dk]
    k: tuple[Tensor, Tensor, Tensor],  # cmp, sel, win rows, each [B, m, G, Dk]
    v: tuple[Tensor, Tensor, Tensor],  # each [B, m, G, Dv]
    raw: tuple[Tensor, Tensor],  # [P, page, G, D]
    sel: tuple[Tensor, Tensor],  # [P, page, G, D]
    win: tuple[Tensor, Tensor],  # [P, page, G, D]
    *,
    rope: tuple[Tensor, Tensor] | None,  # fp32 cos, sin [positions, Dk / 2]
    rotate_raw: bool,
    call: DecodeCall,
) -> Tensor:
    """Write k and v into their pages and return q, rotated if ``rope`` is given."""
    stores = (*raw, *(as_bytes(x) for x in (*sel, *win)))
    new_rows = [x if x.stride(-1) == 1 else x.contiguous() for pair in zip(k, v) for x in pair]
    q = q if q.stride(-1) == 1 else q.contiguous()
    out = q if rope is None else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    cos, sin = rope or (q, q)
    if rope is not None and not (cos.is_contiguous() and sin.is_contiguous()):
        cos, sin = cos.contiguous(), sin.contiguous()
    _, sel_table, win_table, raw_table = call.tables
    tables = (raw_table, sel_table, win_table, *scales_of(call)[1:])
    sequences = call.sequences
    options = (rope is not None, rotate_raw, sequences is not None)
    launch = _launch(q, options, cos, *new_rows, *stores, *tables)
    sequences = call.starts if sequences is None else sequences  # a placeholder
    launch(
        q, *new_rows, *stores, out, cos, sin, call.starts, call.lengths, sequences, *tables
    )  # fmt: skip
    return out


@cached_by_metadata
def _launch(q: Tensor, options: tuple[bool, bool, bool], cos: Tensor, *others: Tensor) -> Launch:
    """Prepare the launch.

    Args:
        q: As in :func:`append`.
        options: Whether there is ``rope``, ``rotate_raw``, and whether the runs have sequences.
        cos: As in :func:`append`.
        *others: k and v of raw, sel and win: the new rows, then the stores; then three tables, and
            the scales of sel and win.
    """
    rope, rotate_raw, ragged = options
    new_rows, stores, tables = others[:6], others[6:12], others[12:15]
    batch, num_tokens, heads, head_dim = q.shape
    kv_heads, v_head_dim = new_rows[0].shape[2], new_rows[1].shape[3]
    settings = configs.pick(
        "decode_append", architecture(q.device), head_dim=head_dim, v_head_dim=v_head_dim
    )
    block_h = min(settings["BLOCK_H"], power(heads))
    programs_per_token = 3 + (cdiv(heads, block_h) if rope else 0)
    return Launch(
        decode_append, (batch * num_tokens * programs_per_token,),
        *(x.stride()[:3] for x in (q, *new_rows, *stores)),
        *(x.stride(0) for x in others[12:]), num_tokens, *(x.shape[1] for x in stores[::2]),
        *(x.shape[1] for x in tables), *(len(x) for x in stores[::2]), len(tables[1]), cos.shape[0],
        NUM_HEADS=heads, NUM_KV_HEADS=kv_heads, BLOCK_H=block_h, NUM_KV_HEADS_PAD=power(kv_heads),
        HEAD_DIM=head_dim, V_HEAD_DIM=v_head_dim,
        HEAD_DIM_BAND=max(2, power(head_dim)), V_HEAD_DIM_BAND=power(v_head_dim),
        ROPE=rope, ROTATE_RAW=rotate_raw, RAGGED=ragged,
        num_warps=settings["num_warps"], enable_fp_fusion=False,
    )  # fmt: skip

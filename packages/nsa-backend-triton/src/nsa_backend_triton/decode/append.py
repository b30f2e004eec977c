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

from nsa_backend_triton.decode.launch import cdiv, power
from nsa_backend_triton.host import configs
from nsa_backend_triton.host.device import architecture
from nsa_backend_triton.host.launch_cache import Launch, cached_by_metadata
from nsa_core.contract import DecodeCall


@triton.jit
def _copy_heads(
    X, OUT, COS, SIN, stride_xh, stride_outh, num_heads, position, valid,
    BLOCK_H: tl.constexpr, WIDTH: tl.constexpr, BAND: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """Copy the heads of one row of X to one row of OUT if ``valid``; ROTATE: rotated."""
    head = tl.arange(0, BLOCK_H)
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
        dtype = OUT.dtype.element_ty
        tl.store(OUT + offs_out, (x1 * cos - x2 * sin).to(dtype), mask=mask)
        tl.store(OUT + offs_out + HALF, (x2 * cos + x1 * sin).to(dtype), mask=mask)
    else:
        offs_d = tl.arange(0, BAND)
        mask = valid & (head < num_heads)[:, None] & (offs_d < WIDTH)[None, :]
        x = tl.load(X + head[:, None] * stride_xh + offs_d[None, :], mask=mask, other=0.0)
        tl.store(OUT + head[:, None] * stride_outh + offs_d[None, :], x, mask=mask)


@triton.jit
def _append_token(
    K, V, K_STORE, V_STORE, COS, SIN, stride_k, stride_v,
    seq, t, page, page_row, page_size, position, valid,
    NUM_KV_HEADS: tl.constexpr, NUM_KV_HEADS_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    HEAD_DIM_BAND: tl.constexpr, V_HEAD_DIM_BAND: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """Write k and v of one token to one row of contiguous stores [P, page_size, G, D]."""
    first_head = (tl.cast(page, tl.int64) * page_size + page_row) * NUM_KV_HEADS
    stride_kb, stride_kt, stride_kh = stride_k
    _copy_heads(
        K + seq * tl.cast(stride_kb, tl.int64) + t * stride_kt, K_STORE + first_head * HEAD_DIM,
        COS, SIN, stride_kh, HEAD_DIM, NUM_KV_HEADS, position, valid,
        NUM_KV_HEADS_PAD, HEAD_DIM, HEAD_DIM_BAND, ROTATE,
    )  # fmt: skip
    stride_vb, stride_vt, stride_vh = stride_v
    _copy_heads(
        V + seq * tl.cast(stride_vb, tl.int64) + t * stride_vt, V_STORE + first_head * V_HEAD_DIM,
        COS, SIN, stride_vh, V_HEAD_DIM, NUM_KV_HEADS, position, valid,
        NUM_KV_HEADS_PAD, V_HEAD_DIM, V_HEAD_DIM_BAND, False,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "num_tokens",
        "raw_ring_size",
        "page_size",
        "win_ring_size",
        "num_pages",
        "num_positions",
        "stride_table",
    ],
    do_not_specialize_on_alignment=["STARTS", "LENGTHS", "BLOCK_TABLE"],
)
def decode_append(
    Q, K_RAW, V_RAW, K_SEL, V_SEL, K_WIN, V_WIN,
    K_RAW_STORE, V_RAW_STORE, K_SEL_STORE, V_SEL_STORE, K_WIN_STORE, V_WIN_STORE, Q_OUT, COS, SIN,
    STARTS, LENGTHS, BLOCK_TABLE,
    stride_q, stride_k_raw, stride_v_raw, stride_k_sel, stride_v_sel, stride_k_win, stride_v_win,
    stride_table, num_tokens, raw_ring_size, page_size, win_ring_size, num_pages, num_positions,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_H: tl.constexpr,
    NUM_KV_HEADS_PAD: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    HEAD_DIM_BAND: tl.constexpr, V_HEAD_DIM_BAND: tl.constexpr, ROPE: tl.constexpr,
    ROTATE_RAW: tl.constexpr,
):  # fmt: skip
    """Append one step; the programs of a token handle raw, sel, win and then q.

    "raw" is cmp's ring of the latest uncompressed rows. ROPE: rotate q, BLOCK_H heads per program,
    and k of sel and win; ROTATE_RAW: rotate k of raw, too.
    """
    PROGRAMS_PER_TOKEN: tl.constexpr = 3 + ((NUM_HEADS + BLOCK_H - 1) // BLOCK_H if ROPE else 0)
    task, row = tl.program_id(0) % PROGRAMS_PER_TOKEN, tl.program_id(0) // PROGRAMS_PER_TOKEN
    seq, t = row // num_tokens, row % num_tokens
    length = tl.load(LENGTHS + seq)
    position = tl.load(STARTS + seq) + t
    valid = (position < length) & (position < num_pages * page_size)
    angle = tl.minimum(position, num_positions - 1)
    if task == 0:
        # If a step has more tokens than the ring holds, the last ones stay.
        _append_token(
            K_RAW, V_RAW, K_RAW_STORE, V_RAW_STORE, COS, SIN, stride_k_raw, stride_v_raw,
            seq, t, seq, position % raw_ring_size, raw_ring_size, angle,
            valid & (position >= length - raw_ring_size),
            NUM_KV_HEADS, NUM_KV_HEADS_PAD, HEAD_DIM, V_HEAD_DIM, HEAD_DIM_BAND, V_HEAD_DIM_BAND,
            ROPE and ROTATE_RAW,
        )  # fmt: skip
    elif task == 1:
        page = tl.load(
            BLOCK_TABLE + seq * stride_table + position // page_size, mask=valid, other=0
        )
        _append_token(
            K_SEL, V_SEL, K_SEL_STORE, V_SEL_STORE, COS, SIN, stride_k_sel, stride_v_sel,
            seq, t, page, position % page_size, page_size, angle, valid,
            NUM_KV_HEADS, NUM_KV_HEADS_PAD, HEAD_DIM, V_HEAD_DIM, HEAD_DIM_BAND, V_HEAD_DIM_BAND,
            ROPE,
        )  # fmt: skip
    elif task == 2:
        _append_token(
            K_WIN, V_WIN, K_WIN_STORE, V_WIN_STORE, COS, SIN, stride_k_win, stride_v_win,
            seq, t, seq, position % win_ring_size, win_ring_size, angle,
            valid & (position >= length - win_ring_size),
            NUM_KV_HEADS, NUM_KV_HEADS_PAD, HEAD_DIM, V_HEAD_DIM, HEAD_DIM_BAND, V_HEAD_DIM_BAND,
            ROPE,
        )  # fmt: skip
    else:
        head = (task - 3) * BLOCK_H
        stride_qb, stride_qt, stride_qh = stride_q
        _copy_heads(
            Q + seq * tl.cast(stride_qb, tl.int64) + t * stride_qt + head * stride_qh,
            Q_OUT + (tl.cast(row, tl.int64) * NUM_HEADS + head) * HEAD_DIM,
            COS, SIN, stride_qh, HEAD_DIM, NUM_HEADS - head, angle, position >= 0,
            BLOCK_H, HEAD_DIM, HEAD_DIM_BAND, True,
        )  # fmt: skip


def append(
    q: Tensor,  # [B, m, Hq, Dk]
    k: tuple[Tensor, Tensor, Tensor],  # cmp, sel, win rows, each [B, m, G, Dk]
    v: tuple[Tensor, Tensor, Tensor],  # each [B, m, G, Dv]
    raw: tuple[Tensor, Tensor],  # [B, R, G, D], a ring
    sel: tuple[Tensor, Tensor],  # [P, page, G, D]
    win: tuple[Tensor, Tensor],  # [B, R, G, D], a ring
    *,
    rope: tuple[Tensor, Tensor] | None,  # fp32 cos, sin [positions, Dk / 2]
    rotate_raw: bool,
    call: DecodeCall,
) -> Tensor:
    """Write k and v into their contiguous stores and return q, rotated if ``rope`` is given.

    Raises:
        ValueError: A store or a table of ``rope`` is not contiguous.
    """
    stores = (*raw, *sel, *win)
    for x in (*stores, *(rope or ())):  # a generator takes twice the time, at every step
        if not x.is_contiguous():
            raise ValueError(
                "append writes to contiguous stores and reads contiguous rope tables, got another"
                " layout; allocate the stores with NSAttention.new_cache"
            )
    k_raw, v_raw, k_sel, v_sel, k_win, v_win = new_rows = [
        x if x.stride(-1) == 1 else x.contiguous() for pair in zip(k, v) for x in pair
    ]
    q = q if q.stride(-1) == 1 else q.contiguous()
    out = q if rope is None else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    cos, sin = rope or (q, q)
    page_sizes = raw[0].shape[1], sel[0].shape[1], win[0].shape[1]
    launch = _launch(
        q,
        k_raw,
        v_raw,
        k_sel,
        v_sel,
        k_win,
        v_win,
        cos,
        call.block_table,
        page_sizes,
        rope is not None,
        rotate_raw,
    )
    launch(q, *new_rows, *stores, out, cos, sin, call.starts, call.lengths, call.block_table)
    return out


@cached_by_metadata
def _launch(
    q: Tensor,
    k_raw: Tensor,
    v_raw: Tensor,
    k_sel: Tensor,
    v_sel: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    cos: Tensor,
    block_table: Tensor,
    page_sizes: tuple[int, int, int],
    rope: bool,
    rotate_raw: bool,
) -> Launch:
    """Prepare the launch; ``page_sizes``: rows of cmp's ring, of a page and of win's ring."""
    batch, num_tokens, heads, head_dim = q.shape
    kv_heads, v_head_dim = k_raw.shape[2], v_raw.shape[3]
    settings = configs.pick(
        "decode_append", architecture(q.device), head_dim=head_dim, v_head_dim=v_head_dim
    )
    block_h = min(settings["BLOCK_H"], power(heads))
    programs_per_token = 3 + (cdiv(heads, block_h) if rope else 0)
    return Launch(
        decode_append, (batch * num_tokens * programs_per_token,),
        *(x.stride()[:3] for x in (q, k_raw, v_raw, k_sel, v_sel, k_win, v_win)),
        block_table.stride(0), num_tokens, *page_sizes, block_table.shape[1], cos.shape[0],
        NUM_HEADS=heads, NUM_KV_HEADS=kv_heads, BLOCK_H=block_h, NUM_KV_HEADS_PAD=power(kv_heads),
        HEAD_DIM=head_dim, V_HEAD_DIM=v_head_dim,
        HEAD_DIM_BAND=max(2, power(head_dim)), V_HEAD_DIM_BAND=power(v_head_dim),
        ROPE=rope, ROTATE_RAW=rotate_raw,
        num_warps=settings["num_warps"], enable_fp_fusion=False,
    )  # fmt: skip

"""What comes before a step: queries and keys rotated, keys and values put into the cache; one
launch.

    (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) at the token's position, each product and sum
    rounded to fp32

A program owns HEADS heads of a token's q, or its k and v for one store. Bytes: what the step's rows
hold, read and written once; a few microseconds of latency bind.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_backend_triton.decode.launch import cdiv, power
from nsa_backend_triton.host import configs
from nsa_backend_triton.host.launch_cache import Launch, remembered
from nsa_backend_triton.host.sequences import architecture
from nsa_core.contract import DecodeCall


@triton.jit
def _put(
    X, OUT, COS, SIN, heads, position, there, x_head, out_head,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """Heads of a row of X to a row of OUT, rotated where ROTATE; nothing where not ``there``."""
    head = tl.arange(0, HEADS)
    if ROTATE:
        HALF: tl.constexpr = WIDTH // 2
        column = tl.arange(0, BLOCK // 2)
        mask = there & (head < heads)[:, None] & (column < HALF)[None, :]
        at, to = (
            head[:, None] * x_head + column[None, :],
            head[:, None] * out_head + column[None, :],
        )
        angle = tl.cast(position, tl.int64) * HALF + column
        cos = tl.load(COS + angle, mask=(column < HALF) & there, other=0.0)[None, :]
        sin = tl.load(SIN + angle, mask=(column < HALF) & there, other=0.0)[None, :]
        x1 = tl.load(X + at, mask=mask, other=0.0).to(cos.dtype)
        x2 = tl.load(X + at + HALF, mask=mask, other=0.0).to(cos.dtype)
        kind = OUT.dtype.element_ty
        tl.store(OUT + to, (x1 * cos - x2 * sin).to(kind), mask=mask)
        tl.store(OUT + to + HALF, (x2 * cos + x1 * sin).to(kind), mask=mask)
    else:
        column = tl.arange(0, BLOCK)
        mask = there & (head < heads)[:, None] & (column < WIDTH)[None, :]
        x = tl.load(X + head[:, None] * x_head + column[None, :], mask=mask, other=0.0)
        tl.store(OUT + head[:, None] * out_head + column[None, :], x, mask=mask)


@triton.jit
def _keep(
    K, V, OUT_K, OUT_V, COS, SIN, seq, row, page, at, position, there, k_seq, k_row, k_head, v_seq,
    v_row, v_head,
    rows_of_page,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """k and v of a token to row ``at`` of page ``page`` of contiguous stores [P, rows_of_page, G,
    D].
    """
    to = (tl.cast(page, tl.int64) * rows_of_page + at) * GROUPS
    _put(
        K + seq * k_seq + row * k_row,
        OUT_K + to * DK,
        COS,
        SIN,
        GROUPS,
        position,
        there,
        k_head,
        DK,
        HEADS,
        DK,
        BLOCK_DK,
        ROTATE,
    )
    _put(
        V + seq * v_seq + row * v_row,
        OUT_V + to * DV,
        COS,
        SIN,
        GROUPS,
        position,
        there,
        v_head,
        DV,
        HEADS,
        DV,
        BLOCK_DV,
        False,
    )


@triton.jit(
    do_not_specialize=[
        "rows",
        "raw_ring",
        "page_rows",
        "win_ring",
        "pages",
        "positions",
        "table_row",
    ],
    do_not_specialize_on_alignment=["STARTS", "LENGTHS", "TABLE"],
)
def decode_append(
    Q, K_RAW, V_RAW, K_SEL, V_SEL, K_WIN, V_WIN, RAW_K, RAW_V, SEL_K, SEL_V, WIN_K, WIN_V, OUT,
    COS, SIN, STARTS,
    LENGTHS, TABLE,
    q_seq: tl.int64, q_row, q_head, kr_seq: tl.int64, kr_row, kr_head, vr_seq: tl.int64, vr_row,
    vr_head,
    ks_seq: tl.int64, ks_row, ks_head, vs_seq: tl.int64, vs_row, vs_head, kw_seq: tl.int64, kw_row,
    kw_head,
    vw_seq: tl.int64, vw_row, vw_head, rows, raw_ring, page_rows, win_ring, pages, positions,
    table_row,
    N_HEADS: tl.constexpr, GROUPS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, ROPE: tl.constexpr,
    ROTATE_RAW: tl.constexpr,
):  # fmt: skip
    """See the module. Parts of a token: raw, sel, win, then q HEADS heads at a time, where it is
    rotated.
    """
    PARTS: tl.constexpr = 3 + ((N_HEADS + HEADS - 1) // HEADS if ROPE else 0)
    part, token = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS
    seq, row = token // rows, token % rows
    length = tl.load(LENGTHS + seq)
    position = tl.load(STARTS + seq) + row
    there = (position < length) & (position < pages * page_rows)
    angle = tl.minimum(position, positions - 1)
    if part == 0:
        # Of more tokens than a ring holds, the last ones stay.
        _keep(
            K_RAW,
            V_RAW,
            RAW_K,
            RAW_V,
            COS,
            SIN,
            seq,
            row,
            seq,
            position % raw_ring,
            angle,
            there & (position >= length - raw_ring),
            kr_seq,
            kr_row,
            kr_head,
            vr_seq,
            vr_row,
            vr_head,
            raw_ring,
            GROUPS,
            KV_HEADS,
            DK,
            DV,
            BLOCK_DK,
            BLOCK_DV,
            ROPE and ROTATE_RAW,
        )
    elif part == 1:
        page = tl.load(TABLE + seq * table_row + position // page_rows, mask=there, other=0)
        _keep(
            K_SEL,
            V_SEL,
            SEL_K,
            SEL_V,
            COS,
            SIN,
            seq,
            row,
            page,
            position % page_rows,
            angle,
            there,
            ks_seq,
            ks_row,
            ks_head,
            vs_seq,
            vs_row,
            vs_head,
            page_rows,
            GROUPS,
            KV_HEADS,
            DK,
            DV,
            BLOCK_DK,
            BLOCK_DV,
            ROPE,
        )
    elif part == 2:
        _keep(
            K_WIN,
            V_WIN,
            WIN_K,
            WIN_V,
            COS,
            SIN,
            seq,
            row,
            seq,
            position % win_ring,
            angle,
            there & (position >= length - win_ring),
            kw_seq,
            kw_row,
            kw_head,
            vw_seq,
            vw_row,
            vw_head,
            win_ring,
            GROUPS,
            KV_HEADS,
            DK,
            DV,
            BLOCK_DK,
            BLOCK_DV,
            ROPE,
        )
    else:
        head = (part - 3) * HEADS
        _put(
            Q + seq * q_seq + row * q_row + head * q_head,
            OUT + (tl.cast(token, tl.int64) * N_HEADS + head) * DK,
            COS,
            SIN,
            N_HEADS - head,
            angle,
            position >= 0,
            q_head,
            DK,
            HEADS,
            DK,
            BLOCK_DK,
            True,
        )


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
    """q, rotated where ``rope`` is given; k and v are in their stores, contiguous all.

    Raises:
        ValueError: a store or a table is not contiguous.
    """
    stores = (*raw, *sel, *win)
    if not all(x.is_contiguous() for x in (*stores, *(rope or ()))):
        raise ValueError("append needs contiguous stores and tables")
    k_raw, v_raw, k_sel, v_sel, k_win, v_win = given = [
        x if x.stride(-1) == 1 else x.contiguous() for pair in zip(k, v) for x in pair
    ]
    q = q if q.stride(-1) == 1 else q.contiguous()
    out = q if rope is None else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    cos, sin = rope or (q, q)
    rings = raw[0].shape[1], sel[0].shape[1], win[0].shape[1]
    made = _launch(
        q,
        k_raw,
        v_raw,
        k_sel,
        v_sel,
        k_win,
        v_win,
        cos,
        call.block_table,
        rings,
        rope is not None,
        rotate_raw,
    )
    made(q, *given, *stores, out, cos, sin, call.starts, call.lengths, call.block_table)
    return out


@remembered
def _launch(
    q: Tensor, k_raw: Tensor, v_raw: Tensor, k_sel: Tensor, v_sel: Tensor, k_win: Tensor,
    v_win: Tensor, cos: Tensor,
    table: Tensor, rows_of: tuple[int, int, int], rope: bool, rotate_raw: bool,
) -> Launch:  # fmt: skip
    """``rows_of``: of the ring of cmp, a page and the ring of win."""
    batch, rows, heads, dk = q.shape
    groups, dv = k_raw.shape[2], v_raw.shape[3]
    chosen = configs.pick("decode_append", architecture(q.device), head_dim=dk, v_head_dim=dv)
    together = min(chosen["HEADS"], power(heads))
    parts = 3 + (cdiv(heads, together) if rope else 0)
    return Launch(
        decode_append, (batch * rows * parts,),
        *(n for x in (q, k_raw, v_raw, k_sel, v_sel, k_win, v_win) for n in x.stride()[:3]), rows,
        *rows_of,
        table.shape[1], cos.shape[0], table.stride(0),
        N_HEADS=heads, GROUPS=groups, HEADS=together, KV_HEADS=power(groups), DK=dk, DV=dv,
        BLOCK_DK=max(2, power(dk)), BLOCK_DV=power(dv), ROPE=rope,
        ROTATE_RAW=rotate_raw, num_warps=chosen["num_warps"], enable_fp_fusion=False,
    )  # fmt: skip

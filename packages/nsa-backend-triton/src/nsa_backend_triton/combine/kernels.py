"""Gates: o = g_cmp * o_cmp + g_sel * o_sel + g_win * o_win, each direction in one pass over memory.

    forward   reads 3 outputs and the gates, writes o: 4 Dv elements and 3 gates a row
    backward  dgates[c] = sum over d of do * o_c, do_c = g_c * do: reads do and 3 outputs once,
              writes 3 gradients
              and 3 gate gradients: 7 Dv elements and 6 gates a row

A row is one query head of one token. Sums are fp32 (fp64 for fp64), rounded once. No two programs
share an element, so the same input gives the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nsa_backend_triton.host import configs
from nsa_backend_triton.host.launch_cache import Launch, remembered
from nsa_backend_triton.host.sequences import accumulator, architecture, strides
from nsa_core.contract import SlotCall


@triton.jit
def _places(pid, n_rows, seq_len, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """(row, sequence, token, head) of the program's rows, int64 [ROWS], and whether they exist."""
    row = tl.cast(pid, tl.int64) * ROWS + tl.arange(0, ROWS)
    token = row // HEADS
    return row, token // seq_len, token % seq_len, row % HEADS, row < n_rows


@triton.jit
def _load(X, seq, token, head, stride_b, stride_t, stride_h, col, mask):
    """x [ROWS, COLS] by strides, 0 outside ``mask``."""
    at = seq * stride_b + token * stride_t + head * stride_h
    return tl.load(X + at[:, None] + col[None, :], mask=mask, other=0.0)


@triton.jit(do_not_specialize=["n_rows", "seq_len"])
def combine_forward(
    GATES, O_CMP, O_SEL, O_WIN, OUT,
    g_b, g_t, g_h, c_b, c_t, c_h, s_b, s_t, s_h, w_b, w_t, w_h,
    n_rows, seq_len,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """o [rows, Dv]. A program: ROWS rows, all Dv columns (COLS, the next power of two, masked), in
    registers.

    Bytes a row: 4 * Dv elements and 3 gates; operations: 5 a column. Binding: HBM bandwidth.
    """
    row, seq, token, head, here = _places(tl.program_id(0), n_rows, seq_len, HEADS, ROWS)
    col = tl.arange(0, COLS)
    mask = here[:, None] & (col < WIDTH)[None, :]
    gate = GATES + seq * g_b + token * g_t + head * g_h
    total = tl.load(gate, mask=here, other=0.0).to(ACC)[:, None] * _load(
        O_CMP, seq, token, head, c_b, c_t, c_h, col, mask
    ).to(ACC)
    total += tl.load(gate + 1, mask=here, other=0.0).to(ACC)[:, None] * _load(
        O_SEL, seq, token, head, s_b, s_t, s_h, col, mask
    ).to(ACC)
    total += tl.load(gate + 2, mask=here, other=0.0).to(ACC)[:, None] * _load(
        O_WIN, seq, token, head, w_b, w_t, w_h, col, mask
    ).to(ACC)
    tl.store(OUT + row[:, None] * WIDTH + col[None, :], total.to(OUT.dtype.element_ty), mask=mask)


@triton.jit
def _branch(
    d_o,
    gate,
    D_GATE,
    O,
    D_O,
    seq,
    token,
    head,
    stride_b,
    stride_t,
    stride_h,
    row,
    col,
    here,
    mask,
    WIDTH: tl.constexpr,
    ACC: tl.constexpr,
):
    """One branch of backward: stores do_c = g_c * do and dgates[c] = sum of do * o_c."""
    o = _load(O, seq, token, head, stride_b, stride_t, stride_h, col, mask).to(ACC)
    tl.store(D_GATE + row * 3, tl.sum(d_o * o, 1), mask=here)
    weight = tl.load(gate, mask=here, other=0.0).to(ACC)
    tl.store(
        D_O + row[:, None] * WIDTH + col[None, :],
        (d_o * weight[:, None]).to(D_O.dtype.element_ty),
        mask=mask,
    )


@triton.jit(do_not_specialize=["n_rows", "seq_len"])
def combine_backward(
    DO, GATES, O_CMP, O_SEL, O_WIN, D_GATES, D_CMP, D_SEL, D_WIN,
    o_b, o_t, o_h, g_b, g_t, g_h, c_b, c_t, c_h, s_b, s_t, s_h, w_b, w_t, w_h,
    n_rows, seq_len,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """do_cmp, do_sel, do_win [rows, Dv] and dgates [rows, 3]. Tiles as in combine_forward; do stays
    in registers.

    Bytes a row: 7 * Dv elements and 6 gates; operations: 9 a column. Binding: HBM bandwidth.
    """
    row, seq, token, head, here = _places(tl.program_id(0), n_rows, seq_len, HEADS, ROWS)
    col = tl.arange(0, COLS)
    mask = here[:, None] & (col < WIDTH)[None, :]
    d_o = _load(DO, seq, token, head, o_b, o_t, o_h, col, mask).to(ACC)
    gate = GATES + seq * g_b + token * g_t + head * g_h
    _branch(
        d_o,
        gate,
        D_GATES,
        O_CMP,
        D_CMP,
        seq,
        token,
        head,
        c_b,
        c_t,
        c_h,
        row,
        col,
        here,
        mask,
        WIDTH,
        ACC,
    )
    _branch(
        d_o,
        gate + 1,
        D_GATES + 1,
        O_SEL,
        D_SEL,
        seq,
        token,
        head,
        s_b,
        s_t,
        s_h,
        row,
        col,
        here,
        mask,
        WIDTH,
        ACC,
    )
    _branch(
        d_o,
        gate + 2,
        D_GATES + 2,
        O_WIN,
        D_WIN,
        seq,
        token,
        head,
        w_b,
        w_t,
        w_h,
        row,
        col,
        here,
        mask,
        WIDTH,
        ACC,
    )


def forward(
    gates: Tensor,  # [..., Hq, 3] fp32 (fp64)
    o_cmp: Tensor,  # [..., Hq, Dv]
    o_sel: Tensor,
    o_win: Tensor,
    *,
    call: SlotCall,
) -> Tensor:
    """The gated sum [..., Hq, Dv]."""
    out = o_cmp.new_empty(o_cmp.shape)
    launch = _prepare(o_win, call.cu_seqlens is not None, False, gates, o_cmp, o_sel, o_win)
    launch(gates, o_cmp, o_sel, o_win, out)
    return out


def backward(
    do: Tensor,  # [..., Hq, Dv]
    gates: Tensor,
    o_cmp: Tensor,
    o_sel: Tensor,
    o_win: Tensor,
    *,
    call: SlotCall,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dgates [..., Hq, 3] in the gates' dtype; do_cmp, do_sel, do_win, each rounded once."""
    shape = do.shape
    outputs = (
        gates.new_empty(gates.shape),
        do.new_empty(shape),
        do.new_empty(shape),
        do.new_empty(shape),
    )
    launch = _prepare(o_win, call.cu_seqlens is not None, True, do, gates, o_cmp, o_sel, o_win)
    launch(do, gates, o_cmp, o_sel, o_win, *outputs)
    return outputs


@remembered
def _prepare(o: Tensor, packed: bool, backwards: bool, *inputs: Tensor) -> Launch:
    """Over every (token, head) row of contiguous outputs as ``o``; ``inputs`` [..., Hq, *] lie as
    they like.
    """
    name, kernel = (
        ("combine_backward", combine_backward)
        if backwards
        else ("combine_forward", combine_forward)
    )
    *lead, heads, width = o.shape
    rows = heads
    for size in lead:
        rows *= size
    settings = dict(
        configs.pick(name, architecture(o.device), v_head_dim=width, itemsize=o.element_size())
    )
    return Launch(
        kernel, (triton.cdiv(rows, settings["ROWS"]),),
        *(stride for x in inputs for stride in strides(x, packed, far=True)), rows, lead[-1],
        HEADS=heads, WIDTH=width, COLS=triton.next_power_of_2(width), ACC=accumulator(o.dtype),
        **settings,
    )  # fmt: skip

"""combine: the gated sum of the branches (Eq. 5), each direction in one pass over memory.

    forward   o = g_cmp o_cmp + g_sel o_sel + g_win o_win
              a row reads 3 outputs and 3 gates and writes o: 4 Dv elements and 3 gates
    backward  dg_c = sum over columns of do o_c,  do_c = g_c do  for each branch c
              a row reads do and the 3 outputs once and writes 3 output gradients and 3 gate
              gradients: 7 Dv elements and 6 gates
    statistics  dg_c as above, and lse_c / ln 2 - log2 g_c, for the backward of the whole core
              (core/backward.py): a row reads do and the 3 outputs and writes numbers alone

A row is one query head of one token. A program owns BLOCK_M rows with all their Dv columns and
keeps them in registers. Memory bandwidth limits all kernels. Sums are fp32 (fp64 for fp64) and
rounded once. No two programs write to one element, so equal inputs give equal bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nsa_backend_triton.host import configs
from nsa_backend_triton.host.constexprs import accumulator
from nsa_backend_triton.host.device import architecture
from nsa_backend_triton.host.launch_cache import Launch, cached_by_metadata
from nsa_backend_triton.host.strides import strides
from nsa_backend_triton.shared.rows import load_heads, row_offset, row_positions, to_base_2
from nsa_core.contract import SlotCall


@triton.jit(do_not_specialize=["num_rows", "seq_len"])
def combine_forward(
    GATES, O_CMP, O_SEL, O_WIN, OUT,
    stride_gates, stride_cmp, stride_sel, stride_win,
    num_rows, seq_len,
    NUM_HEADS: tl.constexpr, V_HEAD_DIM: tl.constexpr, V_HEAD_DIM_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """o [num_rows, Dv], contiguous.

    A row takes 4 Dv elements and 3 gates of memory traffic and 5 operations a column.
    """
    row, seq, token, head, row_exists = row_positions(num_rows, seq_len, NUM_HEADS, BLOCK_M)
    offs_d = tl.arange(0, V_HEAD_DIM_PAD)
    mask = row_exists[:, None] & (offs_d < V_HEAD_DIM)[None, :]
    gate = GATES + row_offset(seq, token, head, stride_gates)
    g_cmp = tl.load(gate, mask=row_exists, other=0.0).to(ACC)
    total = g_cmp[:, None] * load_heads(O_CMP, seq, token, head, stride_cmp, offs_d, mask).to(ACC)
    g_sel = tl.load(gate + 1, mask=row_exists, other=0.0).to(ACC)
    total += g_sel[:, None] * load_heads(O_SEL, seq, token, head, stride_sel, offs_d, mask).to(ACC)
    g_win = tl.load(gate + 2, mask=row_exists, other=0.0).to(ACC)
    total += g_win[:, None] * load_heads(O_WIN, seq, token, head, stride_win, offs_d, mask).to(ACC)
    out = OUT + row[:, None] * V_HEAD_DIM + offs_d[None, :]
    tl.store(out, total.to(OUT.dtype.element_ty), mask=mask)


@triton.jit
def _statistics(
    do, gate, O, LSE, DGATE, DELTA, LSE2,
    seq, token, head, stride_o, stride_lse, offs_out, offs_row, row_exists, offs_d, mask,
    ACC: tl.constexpr,
):  # fmt: skip
    """Store dg_c = sum over columns of do o_c of one branch c, and the statistics of its backward.

    These are, at ``offs_out``, dg_c as DELTA, and LSE2 = log2(exp(lse) / g_c), inf in a row without
    keys or with the gate 0.
    """
    stride_b, stride_h = stride_lse
    o = load_heads(O, seq, token, head, stride_o, offs_d, mask).to(ACC)
    delta = tl.sum(do * o, 1)
    tl.store(DGATE + offs_row * 3, delta, mask=row_exists)
    tl.store(DELTA + offs_out, delta, mask=row_exists)
    offs_lse = seq * tl.cast(stride_b, tl.int64) + head * tl.cast(stride_h, tl.int64) + token
    lse = tl.load(LSE + offs_lse, mask=row_exists)
    weight = tl.load(gate, mask=row_exists).to(ACC)
    lse2 = tl.where(lse == float("-inf"), float("inf"), to_base_2(lse) - tl.log2(weight))
    tl.store(LSE2 + offs_out, lse2, mask=row_exists)


@triton.jit(do_not_specialize=["num_tokens", "seq_len", "num_rows", "stats_size"])
def combine_statistics(
    DO, GATES, O_CMP, O_SEL, O_WIN, LSE_CMP, LSE_SEL, LSE_WIN,
    DGATES, STATS_CMP, STATS_SEL, STATS_WIN,
    stride_do, stride_gates, stride_cmp, stride_sel, stride_win,
    stride_lse_cmp, stride_lse_sel, stride_lse_win, stride_stats,
    num_tokens, seq_len, num_rows, stats_size,
    NUM_HEADS: tl.constexpr, V_HEAD_DIM: tl.constexpr, V_HEAD_DIM_PAD: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dgates [num_tokens, Hq, 3], and the statistics of each branch: delta and LSE in base 2.

    STATS_SEL is [2, num_tokens, Hq], STATS_CMP and STATS_WIN are [2, B, Hq, S padded]. A program
    owns BLOCK_T tokens x BLOCK_H heads, so that both layouts fill sectors of memory. A row takes 4
    Dv elements and 15 numbers of memory traffic and 6 operations a column; do stays in registers.
    """
    HEAD_TILES: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    offs_m = tl.arange(0, BLOCK_T * BLOCK_H)
    row_token = tl.cast(tl.program_id(0) // HEAD_TILES, tl.int64) * BLOCK_T + offs_m % BLOCK_T
    head = tl.program_id(0) % HEAD_TILES * BLOCK_H + offs_m // BLOCK_T
    row_exists = (row_token < num_tokens) & (head < NUM_HEADS)
    seq, token = row_token // seq_len, row_token % seq_len
    offs_d = tl.arange(0, V_HEAD_DIM_PAD)
    mask = row_exists[:, None] & (offs_d < V_HEAD_DIM)[None, :]
    do = load_heads(DO, seq, token, head, stride_do, offs_d, mask).to(ACC)
    gate = GATES + row_offset(seq, token, head, stride_gates)
    row = row_token * NUM_HEADS + head
    stride_b, stride_h = stride_stats
    offs_stats = seq * tl.cast(stride_b, tl.int64) + head * tl.cast(stride_h, tl.int64) + token
    size = tl.cast(stats_size, tl.int64)
    _statistics(
        do, gate, O_CMP, LSE_CMP, DGATES, STATS_CMP, STATS_CMP + size,
        seq, token, head, stride_cmp, stride_lse_cmp, offs_stats, row, row_exists, offs_d, mask,
        ACC,
    )  # fmt: skip
    _statistics(
        do, gate + 1, O_SEL, LSE_SEL, DGATES + 1, STATS_SEL,
        STATS_SEL + tl.cast(num_rows, tl.int64),
        seq, token, head, stride_sel, stride_lse_sel, row, row, row_exists, offs_d, mask,
        ACC,
    )  # fmt: skip
    _statistics(
        do, gate + 2, O_WIN, LSE_WIN, DGATES + 2, STATS_WIN, STATS_WIN + size,
        seq, token, head, stride_win, stride_lse_win, offs_stats, row, row_exists, offs_d, mask,
        ACC,
    )  # fmt: skip


@triton.jit
def _branch_gradients(
    do, gate, O, DGATE, DO_BRANCH,
    seq, token, head, stride_o, row, row_exists, offs_d, mask,
    V_HEAD_DIM: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Store do_c = g_c do and dg_c = sum over columns of do o_c of one branch c."""
    o = load_heads(O, seq, token, head, stride_o, offs_d, mask).to(ACC)
    tl.store(DGATE + row * 3, tl.sum(do * o, 1), mask=row_exists)
    weight = tl.load(gate, mask=row_exists, other=0.0).to(ACC)
    tl.store(
        DO_BRANCH + row[:, None] * V_HEAD_DIM + offs_d[None, :],
        (do * weight[:, None]).to(DO_BRANCH.dtype.element_ty),
        mask=mask,
    )


@triton.jit(do_not_specialize=["num_rows", "seq_len"])
def combine_backward(
    DO, GATES, O_CMP, O_SEL, O_WIN, DGATES, DO_CMP, DO_SEL, DO_WIN,
    stride_do, stride_gates, stride_cmp, stride_sel, stride_win,
    num_rows, seq_len,
    NUM_HEADS: tl.constexpr, V_HEAD_DIM: tl.constexpr, V_HEAD_DIM_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """do_cmp, do_sel, do_win [num_rows, Dv] and dgates [num_rows, 3], contiguous.

    A row takes 7 Dv elements and 6 gates of memory traffic and 9 operations a column; do stays in
    registers.
    """
    row, seq, token, head, row_exists = row_positions(num_rows, seq_len, NUM_HEADS, BLOCK_M)
    # Columns and mask come before the addresses: formed per branch, as load_at of shared/rows.py
    # does, they change the order of the address arithmetic, which was 2 to 4 % slower on an H200.
    offs_d = tl.arange(0, V_HEAD_DIM_PAD)
    mask = row_exists[:, None] & (offs_d < V_HEAD_DIM)[None, :]
    do = load_heads(DO, seq, token, head, stride_do, offs_d, mask).to(ACC)
    gate = GATES + row_offset(seq, token, head, stride_gates)
    _branch_gradients(
        do, gate, O_CMP, DGATES, DO_CMP,
        seq, token, head, stride_cmp, row, row_exists, offs_d, mask,
        V_HEAD_DIM, ACC,
    )  # fmt: skip
    _branch_gradients(
        do, gate + 1, O_SEL, DGATES + 1, DO_SEL,
        seq, token, head, stride_sel, row, row_exists, offs_d, mask,
        V_HEAD_DIM, ACC,
    )  # fmt: skip
    _branch_gradients(
        do, gate + 2, O_WIN, DGATES + 2, DO_WIN,
        seq, token, head, stride_win, row, row_exists, offs_d, mask,
        V_HEAD_DIM, ACC,
    )  # fmt: skip


def forward(
    gates: Tensor,  # [..., Hq, 3] fp32 (fp64)
    o_cmp: Tensor,  # [..., Hq, Dv]
    o_sel: Tensor,
    o_win: Tensor,
    *,
    call: SlotCall,
) -> Tensor:
    """Return the gated sum [..., Hq, Dv] (Eq. 5)."""
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
    """Return dgates [..., Hq, 3] in the gates' dtype, and do_cmp, do_sel, do_win, rounded once."""
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


@cached_by_metadata
def _prepare(o: Tensor, packed: bool, is_backward: bool, *inputs: Tensor) -> Launch:
    """Prepare the launch over all (token, head) rows; ``inputs`` [..., Hq, *] may have any strides.

    The outputs are contiguous and have the shape of ``o``.
    """
    name, kernel = (
        ("combine_backward", combine_backward)
        if is_backward
        else ("combine_forward", combine_forward)
    )
    *lead, heads, width = o.shape
    num_rows = heads
    for size in lead:
        num_rows *= size
    settings = dict(
        configs.pick(name, architecture(o.device), v_head_dim=width, itemsize=o.element_size())
    )
    return Launch(
        kernel, (triton.cdiv(num_rows, settings["BLOCK_M"]),),
        *(strides(x, packed, int64_products=True) for x in inputs),
        num_rows, lead[-1],
        NUM_HEADS=heads, V_HEAD_DIM=width, V_HEAD_DIM_PAD=triton.next_power_of_2(width),
        ACC=accumulator(o.dtype), **settings,
    )  # fmt: skip

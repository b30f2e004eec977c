"""The partial outputs of a token's pairs, added to what its tile computed: o = sum of exp(lse_i -
lse) o_i.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["seq_len", "first_row", "count", "sl_b", "sl_h"])
def sel_merge_kernel(
    PARTS, PART_LSE, LEFT, O, LSE, seq_len, first_row, count, groups, sl_b: tl.int64,
    sl_h: tl.int64,
    DV: tl.constexpr, DVP: tl.constexpr, H: tl.constexpr, VARLEN: tl.constexpr, ACC: tl.constexpr,
    N: tl.constexpr,
    T: tl.constexpr, M: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Add the partial outputs of T tokens of one kv head to o, weighted by exp(lse - the largest).

    Registers: acc [M, DVP]. Reads o, and of N places a token only those that LEFT marks; writes o
    and lse. Two passes over lse, which are a DV-th of the bytes. Bound by memory.
    """
    program = tl.program_id(0)
    group = program % groups
    rows = tl.arange(0, M)
    local = program // groups * T + rows // H
    inside = (rows < T * H) & (local < count)
    head = rows % H
    token = local.to(tl.int64) * groups + group  # within the run
    row = local.to(tl.int64) + first_row
    at_left = LEFT + (token + first_row * tl.cast(groups, tl.int64)) * N
    at_part = token * N * H + head
    if VARLEN:
        at_lse = LSE + (group * H + head) * sl_h + row
    else:
        at_lse = LSE + row // seq_len * sl_b + (group * H + head) * sl_h + row % seq_len
    columns = tl.arange(0, DVP)
    at_o = O + ((row * groups + group) * H + head)[:, None] * DV + columns[None, :]
    valid = inside[:, None] & (columns < DV)[None, :]
    base = tl.load(at_lse, mask=inside, other=float("-inf"))
    m = base
    any_marked = inside & (rows < 0)
    for i in tl.range(N, loop_unroll_factor=UNROLL):
        marked = inside & (tl.load(at_left + i, mask=inside, other=0) != 0)
        m = tl.maximum(m, tl.load(PART_LSE + at_part + i * H, mask=marked, other=float("-inf")))
        any_marked |= marked
    if tl.max(any_marked.to(tl.int32), 0) == 0:
        return
    m_safe = tl.where(m == float("-inf"), 0.0, m)
    l = tl.exp(base - m_safe)
    acc = tl.load(at_o, mask=valid, other=0.0).to(ACC) * l[:, None]
    for i in tl.range(N, loop_unroll_factor=UNROLL):
        marked = inside & (tl.load(at_left + i, mask=inside, other=0) != 0)
        lse = tl.load(PART_LSE + at_part + i * H, mask=marked, other=float("-inf"))
        weight = tl.exp(lse - m_safe)
        at = PARTS + (at_part + i * H)[:, None] * DV + columns[None, :]
        mask = marked[:, None] & (columns < DV)[None, :]
        acc += (
            tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first").to(ACC)
            * weight[:, None]
        )
        l += weight
    l_safe = tl.where(l == 0.0, 1.0, l)
    tl.store(at_o, (acc / l_safe[:, None]).to(O.dtype.element_ty), mask=valid)
    tl.store(at_lse, tl.where(l == 0.0, float("-inf"), m + tl.log(l_safe)), mask=inside)

"""Sum of the parts of dk and dv that several programs computed."""

from __future__ import annotations

import triton
import triton.language as tl

UNROLL: tl.constexpr = tl.constexpr(8)  # parts that are loaded before the first is added


@triton.jit
def _sum_elements(
    PARTS, OUT, CU_KEYS, num_seqs, index, num_elements, row_elements, num_parts,
    BLOCK_SIZE: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """OUT = sum of PARTS [num_parts, num_elements] in order, for block ``index`` of elements."""
    offs = index * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offs < num_elements
    if VARLEN:
        mask &= offs < tl.cast(tl.load(CU_KEYS + num_seqs), tl.int64) * row_elements
    total = tl.load(PARTS + offs, mask=mask, other=0.0)
    for part in tl.range(1, num_parts, loop_unroll_factor=UNROLL):
        total += tl.load(PARTS + part * num_elements + offs, mask=mask, other=0.0)
    tl.store(OUT + offs, total.to(OUT.dtype.element_ty), mask=offs < num_elements)


@triton.jit(
    do_not_specialize=["num_seqs", "elements_k", "elements_v", "row_k", "row_v", "num_parts"]
)
def sum_parts(
    DK_PARTS, DV_PARTS, DK, DV, CU_KEYS, num_seqs,
    elements_k: tl.int64, elements_v: tl.int64, row_k, row_v, num_parts,
    BLOCK_SIZE: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """DK and DV = the sums of their parts in order, rounded once.

    With VARLEN, rows from CU_KEYS[num_seqs] on belong to no document and get 0; a row has ``row_k``
    or ``row_v`` elements. An element takes num_parts * 4 bytes read and one itemsize written:
    memory bandwidth is the limit, or the latency of the loads if there are few elements.
    """
    index = tl.cast(tl.program_id(0), tl.int64)
    programs_k = tl.cdiv(elements_k, BLOCK_SIZE)
    if index < programs_k:
        _sum_elements(
            DK_PARTS, DK, CU_KEYS, num_seqs, index, elements_k, row_k, num_parts,
            BLOCK_SIZE, VARLEN,
        )  # fmt: skip
    else:
        _sum_elements(
            DV_PARTS, DV, CU_KEYS, num_seqs, index - programs_k, elements_v, row_v, num_parts,
            BLOCK_SIZE, VARLEN,
        )  # fmt: skip

"""The rank of the backend for a request: where FlashAttention-2 is faster than Triton's kernels.

Measured with sm_80 code on an H200 (benchmarks/rehearse.py): twelve shapes of 8 to 64 heads and 64
to 256 columns, 1024 to 65536 tokens, bf16, l=32, d=16, w=512. The times are in
benchmarks/results/h200_as_sm80/branch_ranks.json. Forward and backward of cmp take about 2 ms on
fa2 at up to 4096 tokens and 0.5 to 1.2 ms on triton; only long sequences make up for that.
"""

from __future__ import annotations

from nsa_core.contract import Rank, Request

PRIORITY = 20
SEL_PRIORITY = -10  # slow: one varlen document per token and group
FASTER = 40  # above the triton backend
WIDE = 192  # between the widths of 128 and 256, which have limits of their own
# Products q . k, in units of query heads x tokens x keys x columns, from which FlashAttention-2 is
# faster: (slot, training, wide) -> number. cmp of 64/4/128: 16384 tokens in training, ratio 1.03;
# 65536 tokens, 1.33 and 1.25 in inference. win of 28/4/128: 4096 tokens, 1.15 and 1.02.
LEAST_PRODUCTS = {
    ("cmp", True, False): 1.5e11,
    ("cmp", False, False): 3.0e11,
    ("cmp", True, True): 2.0e10,
    ("cmp", False, True): 2.0e10,
    ("win", True, False): 7.5e9,
    ("win", False, False): 1.5e10,
    ("win", True, True): 4.0e9,
    ("win", False, True): 4.0e9,
}
WIN_COLUMNS = 128  # fewest columns with a gain in win


def rank(request: Request) -> int | Rank:
    """Return a rank above Triton's where this backend was measured to be faster."""
    if request.slot == "sel":
        return SEL_PRIORITY
    if _is_faster(request):
        return Rank(FASTER, "measured faster than triton on sm_80")
    return PRIORITY


def _is_faster(request: Request) -> bool:
    """Return whether the request is among those measured: dense batches on sm_80."""
    unmeasured = request.varlen or request.partial or request.deterministic
    if request.capability != (8, 0) or request.phase == "decode" or unmeasured:
        return False
    if request.seq_len is None:
        return False
    tokens, columns, geometry = request.seq_len, request.head_dim, request.geometry
    if request.slot == "win" and columns < WIN_COLUMNS:
        return False
    keys = (
        geometry.num_compressed(tokens)
        if request.slot == "cmp"
        else min(tokens, geometry.window_size)
    )
    products = (request.batch or 1) * request.n_heads * columns * tokens * keys
    return products >= LEAST_PRODUCTS[request.slot, request.needs_grad, columns >= WIDE]

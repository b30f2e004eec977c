"""The rank of the backend for a request: where FlashAttention is faster than the other backends.

FlashAttention-2 was measured with sm_80 code on an H200 (benchmarks/rehearse.py): twelve shapes of
8 to 64 heads and 64 to 256 columns, 1024 to 65536 tokens, bf16, l=32, d=16, w=512. The times are in
benchmarks/results/h200_as_sm80/branch_ranks.json. Forward and backward of cmp take 1.7 ms or more
on fa2 at up to 4096 tokens and 0.6 to 1.1 ms on triton; only long sequences make up for that.

On sm_90, flash4_rank.json states from which size on the core is faster with cmp on FlashAttention-4
than with every other backend. A size is tokens x columns of a head: a call gains time per row and
key, and loses some per row. benchmarks/kernels/flash4_ranks.py measures and writes it.
"""

from __future__ import annotations

import functools
import importlib.resources
import json

from nsa_backend_fa2 import flash4
from nsa_core.contract import Rank, Request

PRIORITY = 20
SEL_PRIORITY = -10  # slow: one varlen document per token and group
FASTER = 40  # above the triton backend
FLASH4_FASTER = 45  # also above cuDNN in the sdpa backend
WIDE = 192  # between the widths of 128 and 256, which have limits of their own
COLUMNS = 128  # fewest columns with a gain
# Products q . k, in units of query heads x tokens x keys x columns, from which FlashAttention-2 is
# faster: (slot, training, wide) -> number. cmp of 64/4/128 in training: 16384 tokens, ratio 0.83;
# 65536 tokens, 1.11. cmp of 8/1/256: 0.92 and 1.58. Elsewhere triton is faster in most shapes. From
# 16384 tokens on, the largest ratio left to triton is 1.11 (win of 28/4/128 in training); at 1024
# and 4096 tokens, where a call takes about 1 ms, it is 1.30 (win of 16/1/128 in training).
LEAST_PRODUCTS = {
    ("cmp", True, False): 6.0e11,
    ("cmp", True, True): 2.0e11,
    ("cmp", False, True): 2.0e11,
    ("win", True, True): 1.0e10,
    ("win", False, True): 1.0e10,
}


def rank(request: Request) -> int | Rank:
    """Return a rank above Triton's where this backend was measured to be faster."""
    if request.slot == "sel":
        return SEL_PRIORITY
    if _is_faster(request):
        return Rank(FASTER, "measured faster than triton on sm_80")
    if _is_faster_on_flash4(request):
        return Rank(FLASH4_FASTER, "measured faster on FlashAttention-4 than elsewhere on sm_90")
    return PRIORITY


def _is_faster(request: Request) -> bool:
    """Return whether the request is among those measured: dense batches on sm_80."""
    unmeasured = request.varlen or request.partial or request.deterministic
    if request.capability != (8, 0) or request.phase == "decode" or unmeasured:
        return False
    least = LEAST_PRODUCTS.get((request.slot, request.needs_grad, request.head_dim >= WIDE))
    return request.head_dim >= COLUMNS and least is not None and products(request) >= least


def products(request: Request) -> int:
    """Return the size of a request: its products q . k, in units of LEAST_PRODUCTS."""
    tokens, geometry = request.seq_len or 0, request.geometry
    keys = (
        geometry.num_compressed(tokens)
        if request.slot == "cmp"
        else min(tokens, geometry.window_size)
    )
    return (request.batch or 1) * request.n_heads * request.head_dim * tokens * keys


def _is_faster_on_flash4(request: Request) -> bool:
    """Return whether the request is among those measured: one dense sequence on sm_90."""
    unmeasured = request.varlen or request.partial or (request.batch or 1) > 1
    if request.capability != (9, 0) or unmeasured:
        return False
    least = least_flash4_size()["training" if request.needs_grad else "forward"]
    size = (request.seq_len or 0) * request.head_dim
    return least is not None and size >= least and flash4.serves(request)


@functools.lru_cache(maxsize=1)
def least_flash4_size() -> dict[str, float | None]:
    """Return phase -> the size from which FlashAttention-4 is faster; None if it never is."""
    text = (importlib.resources.files("nsa_backend_fa2") / "flash4_rank.json").read_text()
    least: dict[str, float | None] = json.loads(text)
    return least

"""Where the compressed tokens of packed documents begin: one kernel in place of ten PyTorch
operators.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nsa_backend_triton.host.launch_cache import Launch, remembered
from nsa_backend_triton.shared.rows import num_compressed
from nsa_core.layout import BlockGeometry


@triton.jit(do_not_specialize=["n_seqs"])
def span_starts(CU, STARTS, n_seqs, SIZE: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    """STARTS [n_seqs + 1]: sums of num_compressed of the documents' lengths. One program, BLOCK
    documents at a time.

    8 bytes read and 4 written a document; bound by latency.
    """
    total = 0
    tl.store(STARTS, total)
    first = 0
    while first < n_seqs:
        at = first + tl.arange(0, BLOCK)
        inside = at < n_seqs
        end = tl.load(CU + at + 1, mask=inside, other=0)
        count = num_compressed(end - tl.load(CU + at, mask=inside, other=0), SIZE, STRIDE)
        tl.store(STARTS + at + 1, total + tl.cumsum(count, 0), mask=inside)
        total += tl.sum(count, 0)
        first += BLOCK


@remembered
def _prepare(cu: Tensor, size: int, stride: int) -> Launch:
    return Launch(
        span_starts, (1,), cu.numel() - 1, SIZE=size, STRIDE=stride, BLOCK=1024, num_warps=4
    )


def compressed_starts(cu_seqlens: Tensor, geometry: BlockGeometry) -> Tensor:
    """As :func:`nsa_core.packing.compressed_cu_seqlens`: int32 [documents + 1]."""
    starts = cu_seqlens.new_empty(cu_seqlens.shape)
    _prepare(cu_seqlens, geometry.compress_block_size, geometry.compress_stride)(cu_seqlens, starts)
    return starts

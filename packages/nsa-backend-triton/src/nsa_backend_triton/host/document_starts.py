"""Starts of the compressed tokens of packed documents, in one kernel.

PyTorch would take ten operators.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nsa_backend_triton.host.launch_cache import Launch, cached_by_metadata
from nsa_backend_triton.shared.rows import num_compressed
from nsa_core.layout import BlockGeometry


@triton.jit(do_not_specialize=["num_seqs", "num_tokens"])
def span_starts(
    CU_SEQLENS, STARTS, num_seqs, num_tokens,
    COMPRESS_BLOCK: tl.constexpr, STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """STARTS [num_seqs + 1]: running sum of num_compressed over the documents' lengths.

    Only the first ``num_tokens`` tokens count.

    One program reads BLOCK_SIZE documents at a time: 8 bytes read and 4 written per document.
    Latency is the limit.
    """
    total = 0
    tl.store(STARTS, total)
    first = 0
    while first < num_seqs:
        offs = first + tl.arange(0, BLOCK_SIZE)
        mask = offs < num_seqs
        end = tl.minimum(tl.load(CU_SEQLENS + offs + 1, mask=mask, other=0), num_tokens)
        count = num_compressed(
            end - tl.load(CU_SEQLENS + offs, mask=mask, other=0), COMPRESS_BLOCK, STRIDE
        )
        tl.store(STARTS + offs + 1, total + tl.cumsum(count, 0), mask=mask)
        total += tl.sum(count, 0)
        first += BLOCK_SIZE


@cached_by_metadata
def _prepare(cu: Tensor, num_tokens: int, compress_block: int, stride: int) -> Launch:
    return Launch(
        span_starts, (1,), cu.numel() - 1, num_tokens,
        COMPRESS_BLOCK=compress_block, STRIDE=stride, BLOCK_SIZE=1024, num_warps=4,
    )  # fmt: skip


def compressed_starts(cu_seqlens: Tensor, geometry: BlockGeometry, num_tokens: int) -> Tensor:
    """Return int32 [documents + 1], as :func:`nsa_core.packing.compressed_cu_seqlens`.

    Compressed tokens that end after the first ``num_tokens`` tokens do not count, since no query
    sees them. They come last, so that all others have the row that they have in the whole call.
    """
    starts = cu_seqlens.new_empty(cu_seqlens.shape)
    launch = _prepare(
        cu_seqlens, num_tokens, geometry.compress_block_size, geometry.compress_stride
    )
    launch(cu_seqlens, starts)
    return starts

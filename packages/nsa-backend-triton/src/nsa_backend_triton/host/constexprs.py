"""Constexpr arguments that kernels share: the bands of a row, and the dtype of sums."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from nsa_backend_triton.host.device import architecture
from nsa_backend_triton.host.sequences import Sequences


def accumulator(dtype: torch.dtype) -> tl.dtype:
    """Return the dtype of scores and sums: fp32, or fp64 for fp64 (in the interpreter)."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def band(width: int) -> int:
    """Return the columns of a band of rows ``width`` wide (see shared/rows.py), a power of two.

    One band holds all columns, or three bands do.
    """
    padded = max(16, 1 << (width - 1).bit_length())
    return padded // 4 if padded >= 64 and 4 * width <= 3 * padded else padded


def value_band(k_band: int, v_band: int, architecture: int, *, use_tma: bool) -> int:
    """Return the band of V for kernels that multiply tiles of K, then of V, in a loop.

    It is ``v_band``; on sm_90 at least ``k_band``, up to 64 columns (the 128 bytes of the widest
    swizzle). Without TMA, tiles of K and V that cannot be copied asynchronously share their place
    in shared memory, and if V's are narrower, the ptxas of CUDA 12.8, which Triton 3.6 brings,
    computes the addresses of V's products from a register that holds something else. The ptxas of
    CUDA 12.9 translates the same PTX correctly. tests/triton/tools/sass.py finds such products.
    """
    least = min(k_band, 64) if architecture == 90 and not use_tma else 0
    return max(v_band, least)


def widths(k: Tensor, v: Tensor) -> dict[str, int]:
    """Return the widths of rows of ``k`` and ``v`` and of their bands, as kernels take them."""
    head_dim, v_head_dim = k.shape[-1], v.shape[-1]
    return {
        "HEAD_DIM": head_dim,
        "V_HEAD_DIM": v_head_dim,
        "HEAD_DIM_BAND": band(head_dim),
        "V_HEAD_DIM_BAND": band(v_head_dim),
    }


def common_constants(
    q: Tensor, v: Tensor, group: int, seqs: Sequences, *, use_tma: bool, max_band: int = 256
) -> dict[str, object]:
    """Return the constexpr arguments that the attention kernels of the forward share.

    No band of K has more than ``max_band`` columns, nor one of V unless :func:`value_band` says so.
    """
    bands = min(band(q.shape[-1]), max_band), min(band(v.shape[-1]), max_band)
    return {
        **widths(q, v),
        "HEAD_DIM_BAND": bands[0],
        "V_HEAD_DIM_BAND": value_band(*bands, architecture(q.device), use_tma=use_tma),
        "GROUP": group,
        "VARLEN": seqs.packed,
        "PARTIAL": seqs.partial,
        "ACC": accumulator(q.dtype),
    }

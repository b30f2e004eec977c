"""Boundaries of packed documents as the kernels may be given them."""

from __future__ import annotations

from torch import Tensor


def documents(
    cu_seqlens: Tensor,  # int32 [documents + 1]
    total: int,
) -> Tensor:
    """The boundaries, made to lie in [0, total] and not to decrease: the kernels trust them with
    addresses.

    nsa_core reads boundaries only where that needs no synchronisation, so wrong ones can come this
    far on CUDA.
    """
    return cu_seqlens.clamp(0, total).cummax(0).values

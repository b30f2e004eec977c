"""Constexpr arguments and compiler options that the attention kernels of the forward share."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from nsa_backend_triton.host.sequences import (
    Sequences,
    accumulator,
    architecture,
    band,
    value_band,
)

Settings = Mapping[str, Mapping[str, int]]  # of each kernel


def compiler_options(settings: Mapping[str, int]) -> dict[str, int]:
    """Return the compiler's options among ``settings``."""
    names = ("num_warps", "num_stages", "maxnreg")
    return {name: settings[name] for name in names if name in settings}


def common_constants(
    q: Tensor, v: Tensor, group: int, seqs: Sequences, *, use_tma: bool
) -> dict[str, object]:
    """Return the constexpr arguments that the attention kernels of the forward share."""
    head_dim, v_head_dim = q.shape[-1], v.shape[-1]
    k_band, v_band = band(head_dim), band(v_head_dim)
    return {
        "HEAD_DIM": head_dim,
        "V_HEAD_DIM": v_head_dim,
        "HEAD_DIM_BAND": k_band,
        "V_HEAD_DIM_BAND": value_band(k_band, v_band, architecture(q.device), use_tma=use_tma),
        "GROUP": group,
        "VARLEN": seqs.packed,
        "PARTIAL": seqs.partial,
        "ACC": accumulator(q.dtype),
    }

"""Dtypes: their names, and the dtype of statistics beside them."""

from __future__ import annotations

import torch


def dtype_name(dtype: object) -> str:
    """ "float32" for torch.float32, and for "float32"."""
    return str(dtype).removeprefix("torch.")


def stats_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of LSE and gates beside tensors of ``dtype``: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32

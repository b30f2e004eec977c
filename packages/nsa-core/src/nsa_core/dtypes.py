"""Names of dtypes, and the dtype of softmax statistics and gates."""

from __future__ import annotations

import torch

FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # NSA computes in these

QUANTIZED = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}  # dtypes of pages, and largest codes


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """Return x, but float8_e4m3fn as uint8, which all operators and GPUs take."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def dtype_name(dtype: object) -> str:
    """Return the name of a dtype without "torch.": "float32" for torch.float32 or "float32"."""
    return str(dtype).removeprefix("torch.")


def stats_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of LSE and gates for tensors of ``dtype``: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32

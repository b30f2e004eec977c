"""Find out that a kernel has made the GPU unusable in this process.

After an illegal access of a kernel, every later CUDA call in the process fails with the same error.
A check that then fails says nothing about its own kernels.
"""

from __future__ import annotations

import torch

from nsa_core.util.text import describe_error


def gpu_error() -> str:
    """Wait for the GPU; return the error after which it is unusable in this process, or ""."""
    if not torch.cuda.is_initialized():
        return ""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return describe_error(error)
    return ""

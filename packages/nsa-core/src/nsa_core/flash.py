"""Operands in the form that FlashAttention-2's kernels require, for backends that call them.

The kernels load 16 bytes at once, take a positive scale, and launch one sequence per index of an
axis of the CUDA grid.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

ALIGNMENT = 16  # bytes per load
MAX_BATCH = 65_535  # sequences per call: the limit of an axis of the CUDA grid


def with_positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """Return q and a positive scale with the same scores.

    The kernels scale the scores after masking them with -inf, so that a negative or zero scale
    would break the mask.
    """
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (q * 0, 1.0)


def with_sign_of_scale(dq: Tensor, scale: float) -> Tensor:
    """Return the gradient of q from that of the q of :func:`with_positive_scale`."""
    if scale > 0:
        return dq
    return -dq if scale < 0 else dq * 0


def padded(x: Tensor, width: int) -> Tensor:
    """Return ``x`` with its last axis padded with zeros to ``width``; uncopied if it is as wide.

    ``pad`` alone does not ensure unit stride: it keeps the memory format that the strides suggest,
    and heads of one element suggest channels_last. See :func:`aligned`.
    """
    return x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1]))


def aligned(x: Tensor) -> Tensor:
    """Return ``x``, or a copy if a row does not begin on 16 bytes or its elements are not adjacent.

    The kernels check neither. An unaligned load makes the GPU unusable in this process.
    """
    size = x.element_size()
    # A tensor of a dry run has no address, but it has an offset.
    begin = x.storage_offset() * size if x.device.type == "meta" else x.data_ptr()
    strides = [stride for length, stride in zip(x.shape[:-1], x.stride()) if length > 1]
    unaligned = any(offset % ALIGNMENT for offset in (begin, *(s * size for s in strides)))
    if x.stride(-1) == 1 and not unaligned:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def may_split_keys(x: Tensor, heads: int, rows: int) -> bool:
    """Return whether a kernel may divide the keys of a row over several programs.

    It does so below 1.6 programs per multiprocessor, each of 64 rows; the limit here is a safe 2.
    The log-sum-exp of a row then leaves out a part whose sum is NaN.

    Args:
        x: A tensor on the device of the call. A call on another device than CUDA is a dry run.
        heads: Query heads of all sequences.
        rows: Queries of a sequence.
    """
    if not x.is_cuda:
        return True
    programs = heads * -(-rows // 64)
    return programs < 2 * torch.cuda.get_device_properties(x.device).multi_processor_count

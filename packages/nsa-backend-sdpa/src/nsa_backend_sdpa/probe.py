"""What the backend takes, from metadata alone."""

from __future__ import annotations

from collections.abc import Sequence

from nsa_core.contract import LONG_SEQUENCE, Reason, Request

# Tokens of fp64 on CUDA: a few seconds where fp64 runs at 1/64 of fp32 (consumer GPUs); fp64 is for
# reference.
FP64_CUDA_MAX_SEQ_LEN = 16384
# Where cmp runs on cuDNN it is ahead of FlashAttention-2 by the fold, and behind kernels made for
# it (benchmarks/results/h200/cmp_routes.json) but for wide heads over long sequences.
CUDNN_RANK, CUDNN_LONG_RANK = 25, 40
CUDNN_WIDE = 128  # head width


def probe(request: Request) -> Sequence[Reason]:
    """All reasons against ``request``; none: every slot, dtype, width, head count and packing
    runs.
    """
    reasons = []
    if request.device not in ("cpu", "cuda", "meta"):
        reasons.append(
            Reason(
                "device_not_supported",
                f"runs on cpu and cuda, got {request.device}",
                "move the tensors",
            )
        )
    longest = request.seq_len or 0
    if request.device == "cuda" and request.dtype == "float64" and longest > FP64_CUDA_MAX_SEQ_LEN:
        reasons.append(
            Reason(
                "fp64_too_long",
                f"takes fp64 on cuda up to {FP64_CUDA_MAX_SEQ_LEN} tokens, got {longest}",
                "use float32, or the CPU",
            )
        )
    return reasons


def rank(request: Request) -> int:
    """Priority: 0, but higher where cmp runs on cuDNN; the highest for wide heads in a request of
    many tokens.
    """
    # Packed documents are called one by one, and no step of decode runs on cuDNN.
    if request.slot != "cmp" or request.varlen or request.phase == "decode":
        return 0
    import torch

    from nsa_backend_sdpa import cudnn

    widths, tokens = (request.head_dim, request.v_head_dim), request.seq_len
    here = cudnn.takes(
        getattr(torch, request.dtype),
        request.device,
        request.capability,
        widths,
        cudnn.LEAST_TOKENS if tokens is None else tokens,
        request.batch or 1,
        1.0,
        request.deterministic,
    )
    if not here:
        return 0
    return (
        CUDNN_LONG_RANK
        if (tokens or 0) >= LONG_SEQUENCE and request.head_dim >= CUDNN_WIDE
        else CUDNN_RANK
    )

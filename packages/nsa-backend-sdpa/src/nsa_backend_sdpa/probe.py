"""The probe and the rank of the backend ``sdpa``: which requests it accepts, from metadata only."""

from __future__ import annotations

from collections.abc import Sequence

from nsa_core.contract import Reason, Request

# Longest sequence in fp64 on CUDA, where fp64 serves as a reference only. On consumer GPUs, which
# run fp64 at 1/64 of the fp32 rate, this length takes a few seconds.
FP64_CUDA_MAX_SEQ_LEN = 16384
# Ranks of cmp on cuDNN. It is faster than FlashAttention-2, because it does not copy the fold, and
# slower than FlashAttention-4 and than kernels written for cmp, except for heads of at least
# CUDNN_WIDE elements over long sequences (benchmarks/results: h100/cmp_routes.json and
# h200/cmp_routes.json). In bf16 training it would keep a backend that serves all slots from
# computing their backward as one, which takes less than half the memory.
CUDNN_RANK, CUDNN_LONG_RANK = 25, 40
CUDNN_WIDE, CUDNN_LONG = 128, 49152  # columns of a head, tokens


def probe(request: Request) -> Sequence[Reason]:
    """Return all reasons against ``request``.

    The backend accepts every slot, dtype, head width, head count and packing, and queries that
    begin inside a sequence.
    """
    reasons = []
    if request.device not in ("cpu", "cuda", "meta"):
        reasons.append(
            Reason(
                "device_not_supported",
                f"runs on cpu and cuda, got {request.device}",
                "move the tensors to cpu or cuda",
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
    """Return the rank for `auto`: 0, or more if cmp runs on cuDNN.

    The rank is highest for wide heads over long sequences, but not for training in bf16.
    """
    # Packed documents take one call each. Decode steps and queries that begin inside a sequence do
    # not run on cuDNN.
    if request.slot != "cmp" or request.varlen or request.partial or request.phase == "decode":
        return 0
    import torch

    from nsa_backend_sdpa import cudnn

    widths, tokens = (request.head_dim, request.v_head_dim), request.seq_len
    on_cudnn = cudnn.supports(
        getattr(torch, request.dtype),
        request.device,
        request.capability,
        widths,
        cudnn.MIN_TOKENS if tokens is None else tokens,
        request.batch or 1,
        1.0,
        request.deterministic,
    )
    if not on_cudnn:
        return 0
    wide_and_long = request.head_dim >= CUDNN_WIDE and (tokens or 0) >= CUDNN_LONG
    one_backward = request.needs_grad and request.dtype == "bfloat16"
    return CUDNN_LONG_RANK if wide_and_long and not one_backward else CUDNN_RANK

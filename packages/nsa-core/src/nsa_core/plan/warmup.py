"""Warm-up: run every slot of a plan once on zeros, so that its kernels are compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from nsa_core.config import NSAConfig
from nsa_core.contract import BlockTables, DecodeCall, PageScales, Request, SlotSpec
from nsa_core.dryrun import slot_inputs
from nsa_core.dtypes import stats_dtype
from nsa_core.torch_ops.core_backward import CoreBackward
from nsa_core.torch_ops.decode_kernel import DecodeKernel
from nsa_core.torch_ops.kernel import Kernel
from nsa_core.torch_ops.schema import DIFFERENTIABLE, INPUTS


def warm(
    kernels: Mapping[str, Any],
    fused: Mapping[str, Any],
    requests: Mapping[str, Request],
    specs: Mapping[str, SlotSpec],
    config: NSAConfig,
    device: torch.device,
) -> None:
    """Run every slot of a plan once.

    A plan for prefill runs the forward of each slot, and if the request needs gradients, the
    backwards and the fused backward. A plan for decode runs its decode forms and its fused forms.

    Args:
        kernels: slot -> the plan's kernel.
        fused: Name of a fused form -> its kernel.
        requests: slot -> the plan's request.
        specs: slot -> the specification of the backend's slot.
        config: The plan's configuration.
        device: Device to run on.
    """
    if requests["cmp"].phase == "decode":
        for own_scales in (False, True) if requests["cmp"].kv_dtype else (False,):
            _warm_decode(kernels, fused, requests["cmp"], config, device, own_scales)
    else:
        for slot, kernel in kernels.items():
            for tokens in _warmup_tokens(specs[slot]):
                _warm_slot(kernel, requests[slot], tokens, device)
            causal = getattr(kernel, "causal", None)
            if causal is not None:  # its inputs are those of win
                for tokens in _warmup_tokens(specs["win"]):
                    _warm_slot(causal, requests["win"], tokens, device)
        if "backward" in fused:
            longest = max(specs.values(), key=lambda spec: spec.warmup_tokens)
            for tokens in _warmup_tokens(longest):
                _warm_backward(kernels, fused["backward"], requests, tokens, device)


def _warmup_tokens(spec: SlotSpec) -> tuple[int, ...]:
    """Return the tokens of the calls that reach every kernel of a slot; 0: as few as possible.

    A slot that needs more than the default may run other kernels in short sequences.
    """
    more = spec.warmup_tokens > SlotSpec.warmup_tokens
    return (spec.warmup_tokens, 0) if more else (spec.warmup_tokens,)


def _warm_slot(kernel: Kernel, request: Request, tokens: int, device: torch.device) -> None:
    """Run the kernel of the slot of ``request`` on at least ``tokens`` tokens.

    It runs forward, and backward if the request needs gradients.
    """
    # Long enough for two documents of at least one compressed token each.
    length = max(tokens, 2 * request.geometry.compress_block_size)
    tensors = _zeros(request, length, device)
    differentiated = [
        t for n, t in tensors.items() if request.needs_grad and n in DIFFERENTIABLE[request.slot]
    ]
    for tensor in differentiated:
        tensor.requires_grad_()
    bounds = [0, length // 2, length]
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device) if request.varlen else None
    with torch.set_grad_enabled(bool(differentiated)):
        result = kernel(*tensors.values(), cu_seqlens=cu_seqlens, max_seqlen=length)
    if differentiated:
        o = result if isinstance(result, torch.Tensor) else result[0]
        torch.autograd.grad(o, differentiated, torch.zeros_like(o))


def _warm_backward(
    kernels: Mapping[str, Kernel],
    fused: CoreBackward,
    requests: Mapping[str, Request],
    tokens: int,
    device: torch.device,
) -> None:
    """Run the fused backward on at least ``tokens`` tokens of zeros."""
    request = requests["cmp"]
    length = max(tokens, 2 * request.geometry.compress_block_size)
    cmp, select, sel, win, combine = (_zeros(r, length, device) for r in requests.values())
    inputs = (cmp["q"], cmp["k_cmp"], cmp["v_cmp"], sel["k"], sel["v"], win["k"], win["v"])
    o, lse = combine["o_cmp"], select["lse"]
    cu_seqlens = None
    if request.varlen:
        bounds = [0, length // 2, length]
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device)
    tensors = [o, *inputs, combine["gates"], sel["blocks"], lse, lse, lse, o, o, o]
    fused.gradients(True, tensors, (cu_seqlens, *kernels["cmp"].tail(length)))


def _zeros(request: Request, length: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the inputs of the slot by name: one sequence, or documents, of ``length`` tokens."""
    request = dataclasses.replace(request, batch=1, seq_len=length, partial=False)
    _, tensors, _ = slot_inputs(request, device)
    return {name: x.zero_() for name, x in zip(INPUTS[request.slot], tensors)}


def _warm_decode(
    kernels: Mapping[str, Any],
    fused: Mapping[str, DecodeKernel],
    request: Request,
    config: NSAConfig,
    device: torch.device,
    own_scales: bool,
) -> None:
    """Run each decode form, the forward of combine, and each fused form for one decode step.

    The step has one query for each of two sequences. Each sequence has one token more than the
    window or than the selected blocks, whichever is longer, in pages of the request's size. Each
    quantized page has ``own_scales``, or all have the same ones through stride 0: kernels may
    differ.
    """
    geometry = request.geometry
    dtype: torch.dtype = getattr(torch, request.dtype)
    block, w = geometry.select_block_size, geometry.window_size
    length = max(w + 1, geometry.num_selected_blocks * block + 1)
    size = request.page_size or -(-length // block) * block
    pages = -(-length // size)

    def zeros(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def kv_store(
        rows: int, count: int = 2 * pages, kind: str | None = request.kv_dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        lead, of = (count, rows, request.n_kv_heads), getattr(torch, kind or request.dtype)
        return zeros(*lead, request.head_dim, dtype=of), zeros(*lead, request.v_head_dim, dtype=of)

    block_table = torch.arange(2 * pages, dtype=torch.int32, device=device).view(2, pages)
    lengths = zeros(2, dtype=torch.int32) + length
    ring_table = torch.arange(2, dtype=torch.int32, device=device)[:, None]
    tables = BlockTables(block_table, block_table, ring_table, ring_table)
    ones = torch.ones((1, request.n_kv_heads, 2), device=device).expand(2 * pages, -1, -1)
    ones = ones.contiguous() if own_scales else ones
    scales = PageScales(ones, ones, ones[:2]) if request.kv_dtype else None
    span = lengths - 1, lengths
    call = DecodeCall(geometry, config.softmax_scale, *span, tables, length, scales=scales)
    q, gates = (
        zeros(2, 1, request.n_heads, request.head_dim),
        zeros(2, 1, request.n_heads, 3, dtype=stats_dtype(dtype)),
    )
    k_cmp, v_cmp = kv_store(size // geometry.compress_stride)
    sel, win, raw = kv_store(size), kv_store(w, 2), kv_store(geometry.compress_block_size, 2, None)
    o_cmp, lse = kernels["cmp"](q, k_cmp, v_cmp, call=call)
    blocks = kernels["select"](q, k_cmp, lse, call=call)
    o_sel, _ = kernels["sel"](q, *sel, blocks, call=call)
    o_win, _ = kernels["win"](q, *win, call=call)
    kernels["combine"](gates, o_cmp, o_sel, o_win)
    if "step" in fused:
        fused["step"](q, gates, k_cmp, v_cmp, *sel, *win, call=call)
    if "append" in fused:
        k, v = (
            (zeros(2, 1, request.n_kv_heads, width),) * 3
            for width in (request.head_dim, request.v_head_dim)
        )
        cos = sin = zeros(length, request.head_dim // 2, dtype=stats_dtype(dtype))
        for rope in (None, (cos, sin)) if request.head_dim % 2 == 0 else (None,):
            fused["append"](q, k, v, raw, sel, win, rope=rope, rotate_raw=False, call=call)
    if "gates" in fused:
        x = q.flatten(2)  # the request does not state the model dimension; any width compiles
        fused["gates"](
            x,
            x.new_zeros(3 * request.n_heads, x.shape[-1]),
            x.new_zeros(3 * request.n_heads),
            call=call,
        )
    if "compress" in fused and config.compress in ("mlp", "linear"):
        rope = None
        if config.rope and not config.rope_before_compress:
            rope = (zeros(length, request.head_dim // 2, dtype=stats_dtype(dtype)),) * 2
        phis = (_phi_weights(x, config) for x in raw)
        fused["compress"](*raw, k_cmp, v_cmp, *phis, rope=rope, call=call)


def _phi_weights(x: torch.Tensor, config: NSAConfig) -> tuple[torch.Tensor, ...]:
    """Return zeros as the parameters of phi for x [.., D], in the order of the fused compress."""
    size, width = config.compress_block_size, x.shape[-1]
    hidden = 2 * width if config.compress == "mlp" else width
    shapes: list[tuple[int, ...]] = [(size, width), (hidden, size * width), (hidden,)]
    if config.compress == "mlp":
        shapes += [(width, hidden), (width,)]
    return tuple(x.new_zeros(shape) for shape in shapes)

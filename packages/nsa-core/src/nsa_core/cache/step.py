"""A step of a layer over a cache: project the new tokens, and decode over the cache's pages.

Steps run without gradient and never synchronise: lengths stay on the device, and rows without a
token are masked. Work is skipped only if the host can prove that there is none: no block completes,
or no page is missing.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from nsa_core.cache.prompt import MIN_ROWS, attend_chunks, chunk_pages, prefill, write_back_newest
from nsa_core.cache.state import CacheState, NewTokens, check_plan
from nsa_core.cache.undo import run_or_undo
from nsa_core.contract import DecodeCall
from nsa_core.decode.chunks import MAX_CHUNK_ROWS
from nsa_core.decode.layer_step import append, attend, compress, per_branch
from nsa_core.errors import InvalidInput, Unsupported
from nsa_core.layer.gating import compute_gates, plain_linear_gate
from nsa_core.layer.plain_linear import base_weight, stated_dtype
from nsa_core.limits import as_integers, shown
from nsa_core.plan.finite_checks import checked_plan
from nsa_core.torch_ops.autograd import refuse_tangents
from nsa_core.torch_ops.torch_state import dtype_of_products, is_capturing, is_transformed
from nsa_core.torch_ops.vmap_rule import is_mapped

if TYPE_CHECKING:
    from nsa_core.layer.projection import NSAProjections
    from nsa_core.plan.plan import Plan

MAX_FUSED_GATE_TOKENS = 32  # up to this many tokens the gates are launch-bound
New = Sequence[int] | torch.Tensor | None  # the argument ``new`` of NSAttention.forward


_outside_the_compiler = torch.compiler.disable(
    reason="a step changes its cache, and the host decides on pages; capture it in a CUDA graph"
)


@_outside_the_compiler
def call_with_cache(
    layer: NSAProjections, cache: object, args: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    """Call a layer and its hooks; if one of them raises, undo the changes of its cache."""
    if not isinstance(cache, CacheState):
        return torch.nn.Module.__call__(layer, *args, **options)  # step() refuses the cache
    return run_or_undo(cache, torch.nn.Module.__call__, layer, *args, **options)


@_outside_the_compiler
def step(
    layer: NSAProjections,
    x: torch.Tensor,  # [B, m, dim]
    cache: CacheState | None,
    new: New = None,
    plan: Plan | None = None,
    packed: bool = False,
) -> torch.Tensor:
    """Append the tokens of x and return the layer's output for them; see NSAttention.forward."""
    if cache is not None and not isinstance(cache, CacheState):
        raise InvalidInput(
            f"cache must be a result of new_cache() of this layer, got {type(cache).__name__}"
        )
    if cache is None:
        raise InvalidInput("new needs cache=, which is None")
    if packed:
        raise InvalidInput("cu_seqlens is not supported with a cache: pass x [B, m, dim] and new=")
    return run_or_undo(cache, _step, layer, x, cache, new, plan)


def _step(
    layer: NSAProjections, x: torch.Tensor, cache: CacheState, new: New, plan: Plan | None
) -> torch.Tensor:
    """Run :func:`step`. The caller undoes the changes of the cache after an error."""
    in_graph = is_capturing(cache.device)
    if is_transformed():
        tensors = [x, *layer.parameters(), *([new] if isinstance(new, torch.Tensor) else [])]
        refuse_tangents("a call with a cache", tensors)
        if any(map(is_mapped, tensors)):
            raise Unsupported(
                "a call with a cache is not supported under torch.func.vmap: pass all sequences as"
                " one batch x [B, m, dim]"
            )
    _check_fit(layer, x, cache, in_graph)
    tokens = new_tokens(cache, x.shape[1], new, in_graph)
    if cache.undo is not None and cache.undo.lengths is not None:
        cache.save_rings()  # an earlier step would be undone with this one
    with torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext():
        # If the host knows the lengths, the padding after the longest sequence is not computed.
        rows = tokens.rows if tokens.counts is None else max(tokens.counts)
        if rows == 0:
            return x.new_zeros(x.shape, dtype=cache.dtype)
        if tokens.counts is None:
            cache.captured = True
            return _decode(layer, x, cache, tokens, plan)
        cache.admit(tokens.counts)
        if rows == tokens.rows:
            return _run(layer, x, cache, tokens, plan)
        y = _run(layer, x[:, :rows], cache, tokens.part(0, rows), plan)
        return F.pad(y, (0, 0, 0, tokens.rows - rows))


def _check_fit(layer: NSAProjections, x: torch.Tensor, cache: CacheState, in_graph: bool) -> None:
    """Check that x, the cache and the layer fit each other."""
    problems, dtype = [], dtype_of_products(x)
    if cache.attn is not layer:
        problems.append("the cache is another layer's: use new_cache() of this layer")
    if x.shape[0] != cache.batch:
        problems.append(f"x has {x.shape[0]} sequences, but the cache has {cache.batch}")
    if (x.device, dtype) != (cache.device, cache.dtype):
        problems.append(
            f"the layer computes {dtype} on {x.device}, but the cache is {cache.dtype} on"
            f" {cache.device}: create it with new_cache(dtype={dtype}, device={str(x.device)!r})"
        )
    if torch.is_grad_enabled() and x.requires_grad:
        problems.append(
            "x requires grad, but no gradient flows through a cache: call the layer under"
            " torch.no_grad()"
        )
    if in_graph and x.shape[1] > cache.max_step:
        problems.append(
            f"a captured step takes at most max_step = {cache.max_step} rows, got {x.shape[1]};"
            " create the cache with a larger max_step"
        )
    if problems:
        raise InvalidInput("; ".join(problems))


def new_tokens(cache: CacheState, rows: int, new: New, in_graph: bool) -> NewTokens:
    """Interpret the argument ``new`` of a step of ``rows`` rows.

    Raises:
        InvalidInput: ``new`` is not one integer from 0 to ``rows`` per sequence; or a CUDA graph is
            being captured and ``new`` is not on the device.
    """
    if new is None:
        return NewTokens(rows, None if in_graph else [rows] * cache.batch, None, True)
    on_device = (
        isinstance(new, torch.Tensor) and new.device == cache.device and cache.device.type != "cpu"
    )
    if isinstance(new, torch.Tensor) and (on_device or in_graph):
        return _from_device(cache, rows, new, in_graph)
    if in_graph:
        raise InvalidInput(
            "new must be a tensor on the device while a CUDA graph is captured: a list would become"
            " a constant of the graph"
        )
    counts = as_integers(new)
    if counts is None or len(counts) != cache.batch:
        raise InvalidInput(
            f"new must be {cache.batch} integers, one per sequence, got {shown(new)}"
        )
    if not all(0 <= n <= rows for n in counts):
        raise InvalidInput(f"new must be from 0 to the {rows} rows of x, got {shown(counts)}")
    if min(counts) == rows:
        return NewTokens(rows, counts, None, True)
    on_host = torch.tensor(counts, dtype=torch.int32, device="cpu")
    return NewTokens(rows, counts, on_host.to(cache.device, non_blocking=True), True)


def _from_device(cache: CacheState, rows: int, new: torch.Tensor, in_graph: bool) -> NewTokens:
    """Use ``new`` without reading it: on the host every row counts as a token, an upper bound."""
    fits = new.shape == (cache.batch,) and new.dtype in (torch.int32, torch.int64)
    if not fits or new.device != cache.device:
        received = f"{list(new.shape)} {new.dtype} on {new.device}"
        raise InvalidInput(f"new must be int32 [{cache.batch}] on {cache.device}, got {received}")
    counts = None if in_graph else [rows] * cache.batch
    return NewTokens(rows, counts, new.clamp(0, rows).to(torch.int32), False)


def _run(
    layer: NSAProjections, x: torch.Tensor, cache: CacheState, tokens: NewTokens, plan: Plan | None
) -> torch.Tensor:
    """Run a step that fits the cache: a prefill of empty sequences, or one or more decode steps."""
    assert tokens.counts is not None
    if tokens.rows > 1 and not any(n and c for n, c in zip(cache.bounds, tokens.counts)):
        return prefill(layer, x, cache, tokens, plan)
    limit = max(cache.max_step, MAX_CHUNK_ROWS)
    if tokens.rows <= limit:
        return _decode(layer, x, cache, tokens, plan)
    cache.save_rings()
    outputs = [
        _decode(layer, x[:, i : i + limit], cache, tokens.part(i, limit), plan)
        for i in range(0, tokens.rows, limit)
    ]
    return torch.cat(outputs, 1)


def rehearse(cache: CacheState, rows: int) -> None:
    """Run a step of ``rows`` rows on full sequences, which writes nothing.

    See NSACache.reserve_workspace.
    """
    if isinstance(rows, bool) or not isinstance(rows, int) or not 1 <= rows <= cache.max_step:
        raise InvalidInput(
            "reserve_workspace: rows must be an integer from 1 to max_step ="
            f" {cache.max_step}, got {rows!r}; a longer step is never captured, and allocates more"
            " memory while it runs"
        )
    dtype = stated_dtype(base_weight(cache.attn.qkv)) or cache.dtype
    x = torch.zeros((cache.batch, rows, cache.config.dim), dtype=dtype, device=cache.device)
    undo = cache.begin()
    try:
        undo.save(cache.lengths, cache.overflowed)
        cache.lengths.copy_(cache.table.device_room)
        with torch.no_grad():
            _decode(cache.attn, x, cache, NewTokens(rows, None, None, True), None)
        cache.roll_back()
    finally:
        cache.roll_back()  # after an error


def _decode(
    layer: NSAProjections, x: torch.Tensor, cache: CacheState, tokens: NewTokens, plan: Plan | None
) -> torch.Tensor:
    """Append at most MAX_CHUNK_ROWS rows to the cache, and attend to all of its tokens."""
    explicit, plan = plan, _decode_plan(layer, cache, plan, tokens.counts is None)
    bounds, is_chunk = cache.bounds, tokens.rows > cache.max_step
    call, rope = cache.advance(tokens), cache.kv.rope
    pages = chunk_pages(cache, tokens.rows) if is_chunk else cache.kv.pages
    absent = None
    if tokens.on_device is not None:
        absent = cache.starts[:, None] + cache.kv.count[: tokens.rows] >= cache.lengths[:, None]
        absent = absent[..., None]
        x = x.masked_fill(absent, 0)
    q, k, v = layer.heads(x)
    gates = _gates(layer, plan, x, call)
    padded = tokens.on_device is not None or tokens.counts is None
    q = append(plan, pages, q, per_branch(k), per_branch(v), rope, call, padded)
    known = tokens.counts is not None and cache.exact
    completed = _completed_blocks(cache, bounds) if known else []
    if not known or any(completed):
        partly = not known or min(completed) * cache.config.compress_stride < tokens.rows
        compress(plan, pages, (layer.phi_k, layer.phi_v), rope, call, tokens.rows, partly)
    long = is_chunk and explicit is None and tokens.counts is not None and cache.exact
    partial = _chunk_plan(layer, cache, plan, tokens.rows) if long else None
    if partial is None:
        o = attend(plan, pages, q, gates, call)
    else:
        o = attend_chunks(partial, cache, pages, q, gates, bounds)
    if is_chunk:
        cache.save_rings()
        write_back_newest(cache, pages, tokens.rows)
    y: torch.Tensor = layer.out(o.flatten(-2))
    return y if absent is None else y.masked_fill(absent, 0)  # out may have a bias


def _chunk_plan(layer: NSAProjections, cache: CacheState, plan: Plan, rows: int) -> Plan | None:
    """Return the plan of prefill kernels for a chunk of ``rows`` rows, or None."""
    if rows < MIN_ROWS.get(cache.device.type, MIN_ROWS["cuda"]):
        return None
    return layer.chunk_plan(plan, cache.device, cache.dtype)


def _decode_plan(
    layer: NSAProjections, cache: CacheState, plan: Plan | None, in_graph: bool
) -> Plan:
    """Return the decode plan for this step.

    A layer with ``check`` reads the output of every branch on the host, so its plan has no fused
    forms; a captured graph is not checked.
    """
    if plan is None:
        plan = cache.plan
    else:
        check_plan(cache, plan)
    if layer.check and not in_graph:
        return dataclasses.replace(checked_plan(plan, layer.layer), fused={})
    return plan


def _completed_blocks(cache: CacheState, before: Sequence[int]) -> list[int]:
    """Return how many blocks each sequence has completed since the lengths ``before``."""
    size, stride = cache.config.compress_block_size, cache.config.compress_stride
    overlap = size - stride
    # max(n - overlap, 0) // stride is num_compressed(n), which takes a call per sequence.
    return [
        max(n - overlap, 0) // stride - max(old - overlap, 0) // stride
        for n, old in zip(cache.bounds, before)
    ]


def _gates(layer: NSAProjections, plan: Plan, x: torch.Tensor, call: DecodeCall) -> torch.Tensor:
    """Compute the gates [B, m, Hq, 3].

    Up to MAX_FUSED_GATE_TOKENS tokens the plan's fused form is used, because the gates are
    launch-bound.
    """
    use_fused = "gates" in plan.fused and x.shape[0] * x.shape[1] <= MAX_FUSED_GATE_TOKENS
    linear = plain_linear_gate(layer.gate) if use_fused else None
    if linear is None:
        return compute_gates(layer.gate, x)
    gates: torch.Tensor = plan.fused["gates"](x, linear.weight, linear.bias, call=call)
    return gates

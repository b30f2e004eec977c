"""The whole core as one operator, for training under torch.compile.

``nsa_core::core`` runs the five slots, and ``nsa_core::core_backward`` computes all gradients. The
backward is one operator if the plan has a fused backward, or if the branches run again. Otherwise
the graph has the backward of each slot, because a compiler frees a tensor after the last operator
that reads it.

Both operators take the plan as strings and numbers (:class:`CoreConstants`): a graph keeps no
Python object, and two layers with equal plans share one compiled graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from nsa_core.torch_ops import autograd
from nsa_core.torch_ops.core_kernels import (
    Branches,
    CoreConstants,
    CoreInputs,
    CoreKernels,
    by_name,
    gradients,
    gradients_by_slots,
    kernels_of_constants,
    run_all,
)
from nsa_core.torch_ops.tensor_checks import check_nonnegative

_INPUTS = ", ".join(f"Tensor {name}" for name in CoreInputs._fields)
_CONSTANTS = (
    "Tensor? cu_seqlens, SymInt max_seqlen, str kernels, float scale, int[] geometry,"
    " bool deterministic"
)
_FORWARD = (
    f"core({_INPUTS}, Tensor? blocks, {_CONSTANTS}, bool recompute, bool nonnegative_gates,"
    f" bool causal)"
    f" -> (Tensor o, {', '.join(f'Tensor {name}' for name in Branches._fields)})"
)
_RESULTS = ", ".join(f"Tensor? {name}" for name in Branches._fields if name != "blocks")
_BACKWARD = (
    f"core_backward(Tensor do, {_INPUTS}, Tensor? blocks, {_RESULTS}, {_CONSTANTS},"
    f" bool nonnegative_gates, bool[] needs)"
    f" -> ({', '.join(['Tensor'] * len(CoreInputs._fields))})"
)
_SAVED = (*CoreInputs._fields, *Branches._fields)  # by the forward, for the backward operator
_NUM_INPUTS = len(CoreInputs._fields)
_NUM_OPTIONS = 3  # the last arguments of the forward
_NUM_ARGUMENTS = _NUM_INPUTS + 7 + _NUM_OPTIONS  # of the forward


def core(
    constants: CoreConstants,
    inputs: CoreInputs,
    blocks: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    max_seqlen: int,
    recompute: bool,
    nonnegative_gates: bool,
    causal: bool,
) -> tuple[torch.Tensor, Branches]:
    """Run the five slots as one operator.

    Args:
        constants: The plan.
        inputs: The tensors of the call.
        blocks: Blocks that replace the selection; None runs `select`.
        cu_seqlens: int32 [documents + 1], for packed calls.
        max_seqlen: Length of the longest document, or an upper bound.
        recompute: Whether to run the branches again in the backward.
        nonnegative_gates: Whether no gate is negative.
        causal: Whether the causal kernel of sel replaces select and sel.

    Returns:
        o, and the results of the branches with the blocks that were used; None if ``causal``.

    Raises:
        InvalidInput, NSAError: As :func:`nsa_core.torch_ops.core_node.run_core`.
    """
    names, scale, geometry, deterministic = constants
    o, *results = torch.ops.nsa_core.core.default(
        *inputs,
        blocks,
        cu_seqlens,
        max_seqlen,
        names,
        scale,
        list(geometry),
        deterministic,
        recompute,
        nonnegative_gates,
        causal,
    )
    branches = Branches(*results)
    selected = blocks is None and not causal
    return o, branches if selected else branches._replace(blocks=blocks)


def _kernels(constants: Sequence[Any]) -> CoreKernels:
    """Return the kernels of the arguments ``kernels`` to ``deterministic`` of an operator."""
    names, scale, geometry, deterministic = constants
    return kernels_of_constants(CoreConstants(names, scale, tuple(geometry), deterministic))


def _split(
    args: Sequence[Any],
) -> tuple[CoreKernels, CoreInputs, torch.Tensor | None, dict[str, Any]]:
    """Return the kernels, the inputs, the given blocks and the packing of a call of the forward."""
    inputs = args[:_NUM_INPUTS]
    blocks, cu_seqlens, max_seqlen, *constants = args[_NUM_INPUTS:-_NUM_OPTIONS]
    packing = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
    return _kernels(constants), CoreInputs(*inputs), blocks, packing


def _forward(*args: Any) -> tuple[torch.Tensor, ...]:
    """Run the slots. The blocks among the results are empty unless they were selected."""
    kernels, inputs, blocks, packing = _split(args)
    _, nonnegative_gates, causal = args[-_NUM_OPTIONS:]
    if nonnegative_gates:
        check_nonnegative(inputs.gates)
    slots = kernels.slots(*inputs, blocks, packing["cu_seqlens"])
    return _results(blocks, *run_all(slots, inputs, blocks, packing, causal))


def _forward_fake(*args: Any) -> tuple[torch.Tensor, ...]:
    """Return the results that the slots infer, which check their inputs."""
    kernels, inputs, blocks, packing = _split(args)
    return _results(blocks, *run_all(kernels.observed, inputs, blocks, packing, args[-1]))


def _results(
    given: torch.Tensor | None, o: torch.Tensor, branches: Branches
) -> tuple[torch.Tensor, ...]:
    """Return the results of the forward; blocks that were not selected are an empty tensor.

    No result may be an argument, so given blocks cannot be one.
    """
    blocks = branches.blocks
    if blocks is None or given is not None:
        blocks = o.new_empty(0, dtype=torch.int32)
    of_branches: tuple[Any, ...] = branches._replace(blocks=blocks)
    return o, *of_branches


def _setup_context(ctx: Any, args: tuple[Any, ...], results: Sequence[torch.Tensor]) -> None:
    """Save what the backward reads: with ``recompute`` the inputs and the blocks alone."""
    branches = Branches(*results[1:])
    recompute, ctx.nonnegative_gates, causal = args[-_NUM_OPTIONS:]
    ctx.mark_non_differentiable(*branches)
    ctx.set_materialize_grads(False)  # as in a slot's operator
    blocks, cu_seqlens, ctx.max_seqlen, *ctx.constants = args[_NUM_INPUTS:-_NUM_OPTIONS]
    if causal or blocks is not None:
        branches = branches._replace(blocks=blocks)
    kept = branches[:1] if recompute else branches
    ctx.save_for_backward(*args[:_NUM_INPUTS], cu_seqlens, *kept)


def _autograd(ctx: Any, do: torch.Tensor | None, *_: Any) -> tuple[Any, ...]:
    """Return the gradient of each argument of the forward, None if it has none."""
    none = (None,) * (_NUM_ARGUMENTS - _NUM_INPUTS)
    if do is None:
        return (*(None for _ in CoreInputs._fields), *none)
    needs = ctx.needs_input_grad[1 : 1 + _NUM_INPUTS]  # after the key set of the dispatcher
    saved = by_name(ctx.saved_tensors)
    kernels = _kernels(ctx.constants)
    fused = kernels.fused is not None and ctx.nonnegative_gates and all(needs)
    fused = fused and saved["blocks"] is not None
    with autograd.backward_context():
        if not fused and "o_win" in saved:
            grads = gradients_by_slots(kernels, ctx.max_seqlen, [do], saved, needs)
            return (*grads, *none)
        tensors = [saved.get(name) for name in _SAVED]
        options = (*ctx.constants, ctx.nonnegative_gates, list(needs))
        results = torch.ops.nsa_core.core_backward.default(
            do, *tensors, saved["cu_seqlens"], ctx.max_seqlen, *options
        )
    grads = tuple(grad if needed else None for grad, needed in zip(results, needs))
    return (*grads, *none)


def _by_slots(*args: Any) -> tuple[torch.Tensor, ...] | None:
    """Run the slots as operators of their own if a policy may keep or recompute each of them."""
    kernels, inputs, blocks, packing = _split(args)
    if not _has_policy(kernels.backwards["cmp"][1].op):
        return None
    return _results(blocks, *run_all(kernels.observed, inputs, blocks, packing, args[-1]))


def _has_policy(op: Any) -> bool:
    """Return whether selective activation checkpointing runs this call, or repeats it.

    A call that is compiled inside torch.utils.checkpoint without a policy has one of PyTorch, which
    recomputes every operator. The repetition knows the operators of the first run, but no policy.

    Args:
        op: The operator of cmp, which the first run has called if it had a policy.
    """
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, _CachingTorchDispatchMode):
            return bool(mode.policy_fn.__module__ != "torch._higher_order_ops.wrap")
        if isinstance(mode, _CachedTorchDispatchMode):
            return op in mode.storage
    return False


def _backward(*args: Any) -> tuple[torch.Tensor, ...]:
    """Compute the gradients; the result is empty for an input that needs none."""
    do, *tensors, cu_seqlens, max_seqlen = args[:18]
    *constants, nonnegative_gates, needs = args[18:]
    saved = {n: t for n, t in zip(_SAVED, tensors) if t is not None or n == "blocks"}
    saved |= {"cu_seqlens": cu_seqlens}
    kernels = _kernels(constants)
    with torch.no_grad():
        grads = gradients(kernels, max_seqlen, nonnegative_gates, [do], saved, needs)
    none = do.new_empty(0)
    return tuple(
        none.clone() if grad is None or not needed else grad for grad, needed in zip(grads, needs)
    )


def _backward_fake(*args: Any) -> tuple[torch.Tensor, ...]:
    """Return empty tensors with the shapes and dtypes of the gradients."""
    inputs, needs = args[1 : 1 + _NUM_INPUTS], args[-1]
    return tuple(x.new_empty(x.shape if needed else 0) for x, needed in zip(inputs, needs))


_lib = torch.library.Library("nsa_core", "FRAGMENT")


def _define(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define an operator with its implementation and its shape inference; return its overload."""
    name = schema[: schema.index("(")]
    _lib.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _lib.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"nsa_core::{name}", fake, lib=_lib)
    return getattr(torch.ops.nsa_core, name).default


_op = _define(_FORWARD, _forward, _forward_fake)
_backward_op = _define(_BACKWARD, _backward, _backward_fake)
autograd.register(_lib, "core", _op, _forward, _setup_context, _autograd, _by_slots)
autograd.register_backward(_lib, "core_backward", _backward_op, _backward, "the core")

"""The whole core as one operator, for training under torch.compile.

``nsa_core::core`` runs the five slots, and ``nsa_core::core_backward`` computes all gradients. The
backward is one operator if the plan has a fused backward, or if the branches run again. Otherwise
the graph has the backward of each slot, because a compiler frees a tensor after the last operator
that reads it.

Both operators take the plan as strings and numbers (:class:`CoreConstants`): a graph keeps no
Python object, and two layers with equal plans share one compiled graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from nsa_core.torch_ops import autograd
from nsa_core.torch_ops.core_kernels import (
    SAVED,
    Branches,
    CoreConstants,
    CoreInputs,
    CoreKernels,
    by_name,
    gradients,
    gradients_by_slots,
    kernels_of_constants,
    run_all,
    to_save,
)
from nsa_core.torch_ops.schema import define, results_schema, tensors_schema
from nsa_core.torch_ops.tensor_checks import check_nonnegative

_NUM_INPUTS = len(CoreInputs._fields)
_CONSTANTS = "SymInt max_seqlen, str kernels, float scale, int[] geometry, bool deterministic"
_FORWARD = (
    f"core({tensors_schema(CoreInputs._fields)}, Tensor? cu_seqlens, Tensor? blocks, {_CONSTANTS},"
    " bool recompute, bool nonnegative_gates, bool causal)"
    f" -> {results_schema(1 + len(Branches._fields))}"
)
_OPTIONAL = ", ".join(f"Tensor? {name}" for name in SAVED[_NUM_INPUTS:])
_BACKWARD = (
    f"core_backward(Tensor do, {tensors_schema(CoreInputs._fields)}, {_OPTIONAL}, {_CONSTANTS},"
    f" bool nonnegative_gates, bool[] needs) -> {results_schema(_NUM_INPUTS)}"
)


class _Forward(NamedTuple):
    """The arguments of ``nsa_core::core`` after CoreInputs; :func:`core` describes them."""

    cu_seqlens: torch.Tensor | None
    blocks: torch.Tensor | None
    max_seqlen: int
    kernels: str
    scale: float
    geometry: Sequence[int]
    deterministic: bool
    recompute: bool
    nonnegative_gates: bool
    causal: bool

    def core_kernels(self) -> CoreKernels:
        return _kernels(self.kernels, self.scale, self.geometry, self.deterministic)

    def packing(self) -> dict[str, Any]:
        return {"cu_seqlens": self.cu_seqlens, "max_seqlen": self.max_seqlen}


class _Backward(NamedTuple):
    """The arguments of ``nsa_core::core_backward`` after do and the saved tensors.

    Attributes:
        max_seqlen, kernels, scale, geometry, deterministic, nonnegative_gates: As in the forward.
        needs: Whether each input needs a gradient.
    """

    max_seqlen: int
    kernels: str
    scale: float
    geometry: Sequence[int]
    deterministic: bool
    nonnegative_gates: bool
    needs: Sequence[bool]


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

    ``constants`` are those of the plan; other arguments and errors are as in
    :func:`nsa_core.torch_ops.core_node.run_core`. ``causal``: the causal kernel of sel replaces
    select and sel.

    Returns:
        o, and the results of the branches with the blocks that were used; None if ``causal``.
    """
    options = (recompute, nonnegative_gates, causal)
    names, scale, geometry, deterministic = constants
    plan = (names, scale, list(geometry), deterministic)
    arguments = (*inputs, cu_seqlens, blocks, max_seqlen, *plan, *options)
    o, *results = torch.ops.nsa_core.core.default(*arguments)
    branches = Branches(*results)
    selected = blocks is None and not causal
    return o, branches if selected else branches._replace(blocks=blocks)


def _kernels(names: str, scale: float, geometry: Sequence[int], deterministic: bool) -> CoreKernels:
    """Return the kernels of a call."""
    return kernels_of_constants(CoreConstants(names, scale, tuple(geometry), deterministic))


def _forward(*args: Any) -> tuple[torch.Tensor, ...]:
    """Run the slots. The blocks among the results are empty unless they were selected."""
    inputs, call = CoreInputs(*args[:_NUM_INPUTS]), _Forward(*args[_NUM_INPUTS:])
    if call.nonnegative_gates:
        check_nonnegative(inputs.gates)
    slots = call.core_kernels().slots(*inputs, call.blocks, call.cu_seqlens)
    return _run(slots, inputs, call)


def _forward_fake(*args: Any) -> tuple[torch.Tensor, ...]:
    """Return the results that the slots infer, which check their inputs."""
    inputs, call = CoreInputs(*args[:_NUM_INPUTS]), _Forward(*args[_NUM_INPUTS:])
    return _run(call.core_kernels().observed, inputs, call)


def _run(slots: Any, inputs: CoreInputs, call: _Forward) -> tuple[torch.Tensor, ...]:
    """Return the results of the forward; blocks that were not selected are an empty tensor.

    No result may be an argument, so given blocks cannot be one.
    """
    o, branches = run_all(slots, inputs, call.blocks, call.packing(), call.causal)
    blocks = branches.blocks
    if blocks is None or call.blocks is not None:
        blocks = o.new_empty(0, dtype=torch.int32)
    of_branches: tuple[Any, ...] = branches._replace(blocks=blocks)
    return o, *of_branches


def _setup_context(ctx: Any, args: tuple[Any, ...], results: Sequence[torch.Tensor]) -> None:
    """Save what the backward reads: with ``recompute`` the inputs and the blocks alone."""
    inputs, call = CoreInputs(*args[:_NUM_INPUTS]), _Forward(*args[_NUM_INPUTS:])
    branches = Branches(*results[1:])
    ctx.mark_non_differentiable(*branches)
    ctx.set_materialize_grads(False)  # as in a slot's operator
    if call.causal or call.blocks is not None:
        branches = branches._replace(blocks=call.blocks)
    ctx.save_for_backward(*to_save(inputs, call.cu_seqlens, branches, call.recompute))
    ctx.call = call._replace(cu_seqlens=None, blocks=None)  # tensors are among the saved ones


def _autograd(ctx: Any, do: torch.Tensor | None, *_: Any) -> tuple[Any, ...]:
    """Return the gradient of each argument of the forward, None if it has none."""
    none = (None,) * len(_Forward._fields)
    if do is None:
        return (*(None for _ in CoreInputs._fields), *none)
    call: _Forward = ctx.call
    needs = ctx.needs_input_grad[1 : 1 + _NUM_INPUTS]  # after the key set of the dispatcher
    saved = by_name(ctx.saved_tensors)
    kernels = call.core_kernels()
    fused = kernels.fused is not None and call.nonnegative_gates and all(needs)
    fused = fused and saved["blocks"] is not None
    with autograd.backward_context():
        if not fused and "o_win" in saved:
            grads = gradients_by_slots(kernels, call.max_seqlen, [do], saved, needs)
            return (*grads, *none)
        tensors = [saved.get(name) for name in SAVED]
        constants = call.kernels, call.scale, call.geometry, call.deterministic
        options = _Backward(call.max_seqlen, *constants, call.nonnegative_gates, list(needs))
        results = torch.ops.nsa_core.core_backward.default(do, *tensors, *options)
    grads = tuple(grad if needed else None for grad, needed in zip(results, needs))
    return (*grads, *none)


def _by_slots(*args: Any) -> tuple[torch.Tensor, ...] | None:
    """Run the slots as operators of their own if a policy may keep or recompute each of them."""
    inputs, call = CoreInputs(*args[:_NUM_INPUTS]), _Forward(*args[_NUM_INPUTS:])
    kernels = call.core_kernels()
    if not _has_policy(kernels.backwards["cmp"][1].op):
        return None
    return _run(kernels.observed, inputs, call)


def _has_policy(op: Any) -> bool:
    """Return whether selective activation checkpointing runs this call, or repeats it.

    A call that is compiled inside torch.utils.checkpoint without a policy has one of PyTorch, which
    recomputes every operator. Before torch 2.13, the repetition has the policy. From then on, it
    has a storage that names all operators of the first run.

    Args:
        op: The operator of cmp, which the first run has called if it had a policy.
    """
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, (_CachingTorchDispatchMode, _CachedTorchDispatchMode)):
            policy = getattr(mode, "policy_fn", None)
            if policy is None:
                return op in mode.storage
            return bool(policy.__module__ != "torch._higher_order_ops.wrap")
    return False


def _backward(*args: Any) -> tuple[torch.Tensor, ...]:
    """Compute the gradients; the result is empty for an input that needs none."""
    do, tensors, call = args[0], args[1 : 1 + len(SAVED)], _Backward(*args[1 + len(SAVED) :])
    saved = by_name(tensors)
    if saved["o_win"] is None:  # the branches run again
        saved = {name: saved[name] for name in SAVED[: SAVED.index("blocks") + 1]}
    kernels = _kernels(call.kernels, call.scale, call.geometry, call.deterministic)
    with torch.no_grad():
        grads = gradients(kernels, call.max_seqlen, call.nonnegative_gates, [do], saved, call.needs)
    none = do.new_empty(0)
    return tuple(
        none.clone() if grad is None or not needed else grad
        for grad, needed in zip(grads, call.needs)
    )


def _backward_fake(*args: Any) -> tuple[torch.Tensor, ...]:
    """Return empty tensors with the shapes and dtypes of the gradients."""
    inputs, needs = args[1 : 1 + _NUM_INPUTS], args[-1]
    return tuple(x.new_empty(x.shape if needed else 0) for x, needed in zip(inputs, needs))


_lib = torch.library.Library("nsa_core", "FRAGMENT")


_op = define(_lib, _FORWARD, _forward, _forward_fake)
_backward_op = define(_lib, _BACKWARD, _backward, _backward_fake)
autograd.register(_lib, "core", _op, _forward, _setup_context, _autograd, _by_slots)
autograd.register_backward(_lib, "core_backward", _backward_op, _backward, "the core")

"""One autograd node for the whole core: three branches, selection and the gated sum (Eq. 5).

The slots are operators with a gradient each (:mod:`nsa_core.torch_ops.slot_op`). In eager mode, one
node replaces their five: it records the core once, and calls the backward of each slot itself.
Results and gradients have the same bits; the host does less.

An eager training call records this node whoever observes it. A profiler or dispatch mode sees the
operators of the slots inside the node. So torch.utils.checkpoint may run the forward and its
repetition under different observers. torch.compile sees one operator with its own gradient
(:mod:`nsa_core.torch_ops.core_op`) instead of the node; compiled calls without gradient, exporters,
tracers and torch.func see the operators of the slots.

With ``recompute`` the node keeps only the inputs and the selected blocks, and runs the three
branches again in the backward.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.utils.checkpoint
from torch._C import _any_requires_grad, _AutoDispatchBelowAutograd
from torch.utils.checkpoint import CheckpointPolicy

from nsa_core.torch_ops import autograd, core_op
from nsa_core.torch_ops.core_kernels import (
    Branches,
    CoreInputs,
    CoreKernels,
    by_name,
    gradients,
    kernels_of_plan,
    run_all,
    selects_all,
    to_save,
)
from nsa_core.torch_ops.slot_op import slot_of
from nsa_core.torch_ops.torch_state import is_eager, is_exporting

if TYPE_CHECKING:
    from nsa_core.plan.plan import Plan

Result = TypeVar("Result")


class CoreResults(NamedTuple):
    """The results of the core; only o has a gradient.

    Attributes:
        o: the gated sum [B, S, Hq, Dv].
        lse: log-sum-exp of cmp, sel and win, each [B, Hq, S].
        blocks: the selected blocks [B, S, G, n], or those that the caller passed. None if sel was
            causal attention, because every token selects all its blocks.
    """

    o: torch.Tensor
    lse: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    blocks: torch.Tensor | None


def run_core(
    plan: Plan,
    inputs: CoreInputs,
    blocks: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    max_seqlen: int | None,
    recompute: bool = False,
    nonnegative_gates: bool = False,
) -> CoreResults:
    """Run the five slots of ``plan``, or its causal kernel of sel in place of select and sel.

    Args:
        plan: A plan of phase "prefill".
        inputs: The checked tensors of the call.
        blocks: int32 or int64 blocks that replace the selection; None: the plan selects. If the
            sequences are so short that every token selects all its blocks, `select` does not run.
        cu_seqlens: int32 [documents + 1], for packed calls.
        max_seqlen: Length of the longest document, or an upper bound; None: the number of tokens.
        recompute: Whether to run the branches again in the backward and not keep their outputs.
            Exported and traced calls and transforms of torch.func ignore it.
        nonnegative_gates: Whether no gate is negative. The backward is then the fused one of the
            plan, if it has one.

    Raises:
        InvalidInput, NSAError: As a call of :class:`nsa_core.torch_ops.kernel.Kernel`.
    """
    if max_seqlen is None:
        max_seqlen = inputs.q.shape[0 if cu_seqlens is not None else 1]
    causal = selects_all(plan, blocks, max_seqlen)
    kernels = kernels_of_plan(plan) if _may_be_one_node(inputs) else None
    if kernels is not None:
        if not isinstance(max_seqlen, torch.SymInt):
            max_seqlen = int(max_seqlen)  # of a numpy integer
        options = (recompute, nonnegative_gates, causal)
        arguments = (kernels, max_seqlen, options, blocks, cu_seqlens, *inputs)
        o, *lse_and_blocks = _CoreNode.apply(*arguments)  # type: ignore[no-untyped-call]
        lse_cmp, lse_sel, lse_win, *selected = lse_and_blocks
        used = selected[0] if selected else blocks
        return CoreResults(o, (lse_cmp, lse_sel, lse_win), used)
    if plan.core is not None and _may_be_one_operator(inputs):
        options = (recompute, nonnegative_gates, causal)
        o, branches = core_op.core(plan.core, inputs, blocks, cu_seqlens, max_seqlen, *options)
        return _results(o, branches)
    packing = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}

    def run(*tensors: torch.Tensor) -> CoreResults:
        """Run the slots on the tensors of CoreInputs, each with its own gradient."""
        return _results(*run_all(plan, CoreInputs(*tensors), blocks, packing, causal))

    if not (recompute and torch.is_grad_enabled()) or _ignores_recompute():
        return run(*inputs)
    return run_again_in_backward(run, *inputs)


def _results(o: torch.Tensor, branches: Branches) -> CoreResults:
    lse = branches.lse_cmp, branches.lse_sel, branches.lse_win
    return CoreResults(o, lse, branches.blocks)


def _may_be_one_node(inputs: CoreInputs) -> bool:
    """Return whether an eager call with gradient records one node.

    The answer must not depend on a profiler or dispatch mode: torch.utils.checkpoint compares the
    tensors that two runs save.
    """
    if not is_eager() or torch._C._get_tracing_state() is not None:
        return False
    return torch.is_grad_enabled() and _any_requires_grad(*inputs)


def _may_be_one_operator(inputs: CoreInputs) -> bool:
    """Return whether a call with gradient is one operator: torch.compile without torch.func."""
    if not torch.compiler.is_compiling() or is_exporting():
        return False
    if torch._C._are_functorch_transforms_active() or not torch.is_grad_enabled():
        return False
    return any(x.requires_grad for x in inputs)


def _ignores_recompute() -> bool:
    """Return whether the call is exported, traced or transformed, which keeps nothing."""
    return (
        torch._C._are_functorch_transforms_active()
        or is_exporting()
        or torch._C._get_tracing_state() is not None
    )


def _policy(_: Any, op: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    """Keep the selected blocks, and compute everything else again."""
    is_select = slot_of(op) == "select"
    return CheckpointPolicy.MUST_SAVE if is_select else CheckpointPolicy.PREFER_RECOMPUTE


def run_again_in_backward(function: Callable[..., Result], *tensors: torch.Tensor) -> Result:
    """Return ``function(*tensors)``; keep of its tensors the blocks, and compute others again."""
    contexts = functools.partial(
        torch.utils.checkpoint.create_selective_checkpoint_contexts, _policy
    )
    result: Result = torch.utils.checkpoint.checkpoint(
        function, *tensors, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
    )
    return result


class _HeldGradient:
    """The gradient of o on its way into the backward of a node.

    PyTorch keeps the arguments of a backward until it returns. A hook that runs before the backward
    takes the gradient out of them, so that it can be freed after the backward of `combine`. Threads
    hold one each, because several may run the backward of one graph.

    Args:
        node: The node, whose backward calls :meth:`release`.
    """

    def __init__(self, node: Any) -> None:
        self._of_thread: dict[int, torch.Tensor | None] = {}
        self._hooks = node.register_prehook(self._hold).hooks_dict_ref

    def _hold(self, grads: Sequence[torch.Tensor | None]) -> tuple[None, ...] | None:
        """Hold the first gradient and pass none on; with hooks of others, pass all on."""
        if len(self._hooks()) > 1:
            return None
        self._of_thread[threading.get_ident()] = grads[0]
        return (None,) * len(grads)

    def release(self) -> torch.Tensor | None:
        """Return the gradient that this thread holds, and hold it no more."""
        return self._of_thread.pop(threading.get_ident(), None)


class _CoreNode(torch.autograd.Function):
    """The core as one node.

    It maps (kernels, max_seqlen, (recompute, nonnegative_gates, causal), blocks, cu_seqlens,
    *CoreInputs) to o, the branches' log-sum-exps, and the blocks if it selected them.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        kernels: CoreKernels,
        max_seqlen: int,
        options: tuple[bool, bool, bool],
        blocks: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Run the slots, and save what their backwards read."""
        inputs = CoreInputs(*tensors)
        recompute, ctx.nonnegative_gates, causal = options
        packing = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
        slots = kernels.slots(*inputs, blocks, cu_seqlens)
        with _AutoDispatchBelowAutograd():
            o, branches = run_all(slots, inputs, blocks, packing, causal)
        lse = branches.lse_cmp, branches.lse_sel, branches.lse_win
        found = branches.blocks
        selected = [found] if found is not None and found is not blocks else []
        ctx.mark_non_differentiable(*lse, *selected)
        # Without this, every backward would fill unused gradients of the log-sum-exps.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*to_save(inputs, cu_seqlens, branches, recompute))
        ctx.kernels, ctx.max_seqlen = kernels, max_seqlen
        ctx.held_do = _HeldGradient(ctx)
        return o, *lse, *selected

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor | None, *_: Any) -> tuple[Any, ...]:  # type: ignore[override]
        """Return the gradients of the inputs; a branch whose inputs need none does not run."""
        constants = (None,) * 5  # the arguments before the tensors
        grads = [ctx.held_do.release() if do is None else do]
        if grads[0] is None:
            return (*constants, *(None for _ in CoreInputs._fields))
        autograd.refuse_batches("the core", grads)
        saved = by_name(ctx.saved_tensors)
        ctx.maybe_clear_saved_tensors()  # unless the graph is retained
        needs = ctx.needs_input_grad[len(constants) :]
        options = (ctx.max_seqlen, ctx.nonnegative_gates)
        if not torch.is_grad_enabled():
            return (*constants, *gradients(ctx.kernels, *options, grads, saved, needs))
        # The backwards of the slots read outputs of the branches, which have no graph here.
        sources = (*grads, *(saved[name] for name in CoreInputs._fields))
        with torch.no_grad():
            results = gradients(ctx.kernels, *options, grads, saved, needs)
        return (*constants, *autograd.final_gradients("the core", results, sources))

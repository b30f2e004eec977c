"""One autograd node for the whole core: three branches, selection and the gated sum (Eq. 5).

The slots are operators with a gradient each (:mod:`nsa_core.torch_ops.slot_op`). In eager mode, one
node replaces their five: it records the core once, and calls the backward of each slot itself.
Results and gradients have the same bits; the host does less.

An eager training call records this node whoever observes it. A profiler or dispatch mode sees the
operators of the slots inside the node. So torch.utils.checkpoint may run the forward and its
repetition under different observers. Compilers, tracers and torch.func see the operators alone.

With ``recompute`` the node keeps only the inputs and the selected blocks, and runs the three
branches again in the backward.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch._C import _any_requires_grad, _AutoDispatchBelowAutograd
from torch.utils.checkpoint import CheckpointPolicy

from nsa_core.contract import BRANCHES
from nsa_core.torch_ops import autograd, core_backward
from nsa_core.torch_ops.core_backward import CoreBackward
from nsa_core.torch_ops.slot_op import Kernel, SlotOp, operator_of, slot_of
from nsa_core.torch_ops.torch_state import is_eager

if TYPE_CHECKING:
    from nsa_core.dispatch.plan import Plan


class CoreInputs(NamedTuple):
    """The tensors that gradients flow to, in the contract's shapes."""

    q: torch.Tensor
    k_cmp: torch.Tensor
    v_cmp: torch.Tensor
    k_sel: torch.Tensor
    v_sel: torch.Tensor
    k_win: torch.Tensor
    v_win: torch.Tensor
    gates: torch.Tensor


class CoreResults(NamedTuple):
    """The results of the core; only o has a gradient.

    Attributes:
        o: the gated sum [B, S, Hq, Dv].
        lse: log-sum-exp of cmp, sel and win, each [B, Hq, S].
        blocks: the selected blocks [B, S, G, n], or those that the caller passed.
    """

    o: torch.Tensor
    lse: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    blocks: torch.Tensor


class _Branches(NamedTuple):
    """The blocks, and the output and the log-sum-exp of each branch."""

    blocks: torch.Tensor
    o_cmp: torch.Tensor
    lse_cmp: torch.Tensor
    o_sel: torch.Tensor
    lse_sel: torch.Tensor
    o_win: torch.Tensor
    lse_win: torch.Tensor


def run_core(
    plan: Plan,
    inputs: CoreInputs,
    blocks: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    max_seqlen: int | None,
    recompute: bool = False,
    nonnegative_gates: bool = False,
) -> CoreResults:
    """Run the five slots of ``plan``.

    Args:
        plan: A plan of phase "prefill".
        inputs: The checked tensors of the call.
        blocks: int32 or int64 blocks that replace the selection; None runs `select`.
        cu_seqlens: int32 [documents + 1], for packed calls.
        max_seqlen: Length of the longest document, or an upper bound; None: the number of tokens.
        recompute: Whether to run the branches again in the backward and not keep their outputs.
            Exported and traced calls and transforms of torch.func ignore it.
        nonnegative_gates: Whether no gate is negative. One node then runs the fused backward of the
            plan, if it has one.

    Raises:
        InvalidInput, NSAError: As a call of :class:`nsa_core.torch_ops.slot_op.Kernel`.
    """
    if max_seqlen is None:
        max_seqlen = inputs.q.shape[0 if cu_seqlens is not None else 1]
    kernels = _kernels(plan) if _may_be_one_node(inputs) else None
    if kernels is not None:
        if not isinstance(max_seqlen, torch.SymInt):
            max_seqlen = int(max_seqlen)  # of a numpy integer
        options = (recompute, nonnegative_gates)
        arguments = (kernels, max_seqlen, options, blocks, cu_seqlens, *inputs)
        o, *lse_and_blocks = _CoreNode.apply(*arguments)  # type: ignore[no-untyped-call]
        lse_cmp, lse_sel, lse_win, *selected = lse_and_blocks
        used = selected[0] if blocks is None else blocks
        return CoreResults(o, (lse_cmp, lse_sel, lse_win), used)
    run = functools.partial(
        _run_slots, plan, blocks=blocks, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen
    )
    if not (recompute and torch.is_grad_enabled()) or _ignores_recompute():
        return run(*inputs)
    results: CoreResults = torch.utils.checkpoint.checkpoint(
        run,
        *inputs,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=_keeping_the_blocks,
    )
    return results


def _run_slots(
    plan: Plan,
    *tensors: torch.Tensor,
    blocks: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    max_seqlen: int,
) -> CoreResults:
    """Run the slots on the tensors of CoreInputs, each with its own gradient."""
    packing = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
    o, branches = _run_all(plan, CoreInputs(*tensors), blocks, packing)
    return CoreResults(o, (branches.lse_cmp, branches.lse_sel, branches.lse_win), branches.blocks)


class _Slots(NamedTuple):
    """Functions that run the slots of a plan as its kernels do."""

    cmp: Callable[..., Any]
    select: Callable[..., Any]
    sel: Callable[..., Any]
    win: Callable[..., Any]
    combine: Callable[..., Any]


class _Kernels(NamedTuple):
    """The kernels of a plan whose core may be one node.

    Attributes:
        plan: The plan.
        direct: The slots without autograd and dispatcher; None if a wrapper checks their results.
        backwards: The operators of cmp, sel, win and combine, with the constants of the layer.
        fused: The fused backward; None if the plan has none.
    """

    plan: Plan
    direct: _Slots | None
    backwards: dict[str, tuple[SlotOp, Kernel]]
    fused: CoreBackward | None

    def slots(self, *tensors: torch.Tensor | None) -> _Slots | Plan:
        """Return the slots for calls without gradient; observers see their operators."""
        if self.direct is not None and autograd.is_unobserved(*tensors):
            return self.direct
        return self.plan


@functools.lru_cache(maxsize=256)
def _kernels(plan: Plan) -> _Kernels | None:
    """Return the kernels of ``plan``; None if one is unknown or has no backward."""
    backwards = {}
    for slot in (*BRANCHES, "combine"):
        kernel = _plain(plan, slot)
        if kernel is None or not operator_of(kernel.op).has_backward:
            return None
        backwards[slot] = operator_of(kernel.op), kernel
    kernels = [getattr(plan, slot) for slot in _Slots._fields]
    direct = None
    if all(type(kernel) is Kernel for kernel in kernels):
        direct = _Slots(*[kernel.direct for kernel in kernels])
    return _Kernels(plan, direct, backwards, plan.fused.get("backward"))


def _run_branches(
    slots: _Slots | Plan, inputs: CoreInputs, blocks: torch.Tensor | None, packing: dict[str, Any]
) -> _Branches:
    """Run cmp, sel and win, and `select` if ``blocks`` is None."""
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, _ = inputs
    o_cmp, lse_cmp = slots.cmp(q, k_cmp, v_cmp, **packing)
    if blocks is None:
        blocks = slots.select(q, k_cmp, lse_cmp, **packing)
    o_sel, lse_sel = slots.sel(q, k_sel, v_sel, blocks, **packing)
    o_win, lse_win = slots.win(q, k_win, v_win, **packing)
    return _Branches(blocks, o_cmp, lse_cmp, o_sel, lse_sel, o_win, lse_win)


def _run_all(
    slots: _Slots | Plan, inputs: CoreInputs, blocks: torch.Tensor | None, packing: dict[str, Any]
) -> tuple[torch.Tensor, _Branches]:
    """Run the branches and `combine`."""
    branches = _run_branches(slots, inputs, blocks, packing)
    outputs = branches.o_cmp, branches.o_sel, branches.o_win
    return slots.combine(inputs.gates, *outputs, **packing), branches


def _may_be_one_node(inputs: CoreInputs) -> bool:
    """Return whether an eager call with gradient records one node; separate nodes otherwise.

    The answer must not depend on a profiler or dispatch mode: torch.utils.checkpoint compares the
    tensors that two runs save.
    """
    if not is_eager() or torch._C._get_tracing_state() is not None:
        return False
    return torch.is_grad_enabled() and _any_requires_grad(*inputs)


def _plain(plan: Plan, slot: str) -> Kernel | None:
    """Return the kernel of a slot, without a wrapper that checks its results; None if unknown."""
    kernel = getattr(plan, slot)
    if type(kernel) is not Kernel:
        kernel = getattr(kernel, "kernel", None)
    return kernel if type(kernel) is Kernel else None


def _ignores_recompute() -> bool:
    """Return whether the call is exported, traced or transformed, which keeps nothing."""
    return (
        torch._C._are_functorch_transforms_active()
        or torch.compiler.is_exporting()
        or torch._C._get_tracing_state() is not None
    )


def _policy(_: Any, op: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    """Keep the selected blocks, and compute everything else again."""
    is_select = slot_of(op) == "select"
    return CheckpointPolicy.MUST_SAVE if is_select else CheckpointPolicy.PREFER_RECOMPUTE


_keeping_the_blocks = functools.partial(
    torch.utils.checkpoint.create_selective_checkpoint_contexts, _policy
)


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

    It maps (kernels, max_seqlen, (recompute, nonnegative_gates), blocks, cu_seqlens, *CoreInputs)
    to o, the branches' log-sum-exps, and the blocks if it selected them.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        kernels: _Kernels,
        max_seqlen: int,
        options: tuple[bool, bool],
        blocks: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Run the slots, and save what their backwards read."""
        inputs = CoreInputs(*tensors)
        recompute, ctx.nonnegative_gates = options
        packing = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
        slots = kernels.slots(*inputs, blocks, cu_seqlens)
        with _AutoDispatchBelowAutograd():
            o, branches = _run_all(slots, inputs, blocks, packing)
        lse = branches.lse_cmp, branches.lse_sel, branches.lse_win
        selected = [branches.blocks] if blocks is None else []
        ctx.mark_non_differentiable(*lse, *selected)
        # Without this, every backward would fill unused gradients of the log-sum-exps.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, cu_seqlens, *(branches[:1] if recompute else branches))
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
        saved = dict(zip(_SAVED, ctx.saved_tensors))
        ctx.maybe_clear_saved_tensors()  # unless the graph is retained
        if "o_win" not in saved:
            packing = {"cu_seqlens": saved["cu_seqlens"], "max_seqlen": ctx.max_seqlen}
            inputs = CoreInputs(*[saved[name] for name in CoreInputs._fields])
            slots = ctx.kernels.slots(*saved.values())
            with torch.no_grad(), _AutoDispatchBelowAutograd():
                saved |= _run_branches(slots, inputs, saved["blocks"], packing)._asdict()
            del inputs
        needs = ctx.needs_input_grad[len(constants) :]
        fused = ctx.nonnegative_gates and all(needs) and _has_work(saved)
        fused = fused and ctx.kernels.fused is not None
        gradients = _fused_gradients if fused else _gradients
        with autograd.backward_context():
            return (*constants, *gradients(ctx.kernels, ctx.max_seqlen, grads, saved, needs))


_SAVED = (*CoreInputs._fields, "cu_seqlens", *_Branches._fields)
# The order in which autograd would run the nodes of the slots, and add up dq: the branch, what its
# backward reads besides do and q, and the position of its keys in CoreInputs.
_BACKWARD = (
    ("win", ("k_win", "v_win", "o_win", "lse_win"), 5),
    ("sel", ("k_sel", "v_sel", "blocks", "o_sel", "lse_sel"), 3),
    ("cmp", ("k_cmp", "v_cmp", "o_cmp", "lse_cmp"), 1),
)


def _has_work(saved: Mapping[str, torch.Tensor]) -> bool:
    """Return whether there are queries, compressed tokens and blocks, so that no slot is empty."""
    q, k_cmp, blocks = saved["q"], saved["k_cmp"], saved["blocks"]
    return bool(q.numel() and k_cmp.shape[-3] and blocks.shape[-1])


def _fused_gradients(
    kernels: _Kernels,
    max_seqlen: int,
    grads: list[torch.Tensor],
    saved: dict[str, Any],
    needs: Sequence[bool],
) -> tuple[torch.Tensor, ...]:
    """Return what :func:`_gradients` does, by the fused backward of the plan."""
    assert kernels.fused is not None
    assert all(needs)
    direct = not torch.is_grad_enabled() and autograd.is_unobserved(*grads, *saved.values())
    _, kernel = kernels.backwards["cmp"]
    tensors = [saved.pop(name) for name in (*core_backward.DIFFERENTIABLE, *core_backward.RESULTS)]
    results: tuple[torch.Tensor, ...] = kernels.fused.gradients(direct)(
        grads.pop(), *tensors, saved["cu_seqlens"], *kernel.tail(max_seqlen)
    )
    return results


def _gradients(
    kernels: _Kernels,
    max_seqlen: int,
    grads: list[torch.Tensor],
    saved: dict[str, Any],
    needs: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of the inputs, in the order of CoreInputs.

    Args:
        kernels: The kernels of the forward.
        max_seqlen: As in the forward.
        grads: The gradient of o alone; emptied, so that it lives until its last use.
        saved: The tensors of the forward by name; emptied likewise.
        needs: Whether each input needs a gradient, in the order of CoreInputs.
    """
    # Whether to call the backends' functions without the dispatcher, and to add in place.
    direct = not torch.is_grad_enabled() and autograd.is_unobserved(*grads, *saved.values())
    cu_seqlens, q = saved["cu_seqlens"], saved.pop("q")
    operator, kernel = kernels.backwards["combine"]
    dgates, *of_outputs = operator.gradients(direct)(
        grads.pop(),
        saved["gates"],
        saved["o_cmp"],
        saved["o_sel"],
        saved["o_win"],
        cu_seqlens,
        *kernel.tail(max_seqlen),
    )
    dq: torch.Tensor | None = None
    of_keys: list[torch.Tensor | None] = []
    for branch, names, k in _BACKWARD:
        operator, kernel = kernels.backwards[branch]
        tensors, do = [saved.pop(name) for name in names], of_outputs.pop()
        of_branch = None, None, None
        if needs[0] or needs[k] or needs[k + 1]:
            of_branch = operator.gradients(direct)(
                do, q, *tensors, cu_seqlens, *kernel.tail(max_seqlen)
            )
            if dq is None:
                dq = of_branch[0]
            else:
                dq = dq.add_(of_branch[0]) if direct else dq + of_branch[0]
        of_keys = [*of_branch[1:], *of_keys]
        del of_branch
    return (dq, *of_keys, dgates)

"""The core with the kernels of a plan: its branches, the gated sum, and all gradients.

Both forms of the core as one step run these functions: the autograd node of eager calls
(:mod:`nsa_core.torch_ops.core_node`) and the operator of compiled calls
(:mod:`nsa_core.torch_ops.core_op`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch._C import _AutoDispatchBelowAutograd

from nsa_core import limits
from nsa_core.contract import SLOTS
from nsa_core.layout import BlockGeometry
from nsa_core.torch_ops import autograd, core_backward
from nsa_core.torch_ops.core_backward import CoreBackward
from nsa_core.torch_ops.kernel import Kernel
from nsa_core.torch_ops.slot_op import SlotOp, operator_of
from nsa_core.torch_ops.torch_state import is_exporting

# Slots, or a Plan, whose kernels have the names of the slots.
SlotsOrPlan: TypeAlias = Any


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


class Branches(NamedTuple):
    """The blocks, and the output and the log-sum-exp of each branch.

    The blocks are None if sel was causal attention (:func:`selects_all`).
    """

    blocks: torch.Tensor | None
    o_cmp: torch.Tensor
    lse_cmp: torch.Tensor
    o_sel: torch.Tensor
    lse_sel: torch.Tensor
    o_win: torch.Tensor
    lse_win: torch.Tensor


class Slots(NamedTuple):
    """Functions that run the slots of a plan as its kernels do; the last one is Plan.causal_sel."""

    cmp: Callable[..., Any]
    select: Callable[..., Any]
    sel: Callable[..., Any]
    win: Callable[..., Any]
    combine: Callable[..., Any]
    causal_sel: Callable[..., Any] | None


class CoreConstants(NamedTuple):
    """A plan for the whole core as strings and numbers, which an operator takes as arguments.

    Attributes:
        kernels: Names of the operators of the slots, and of the fused backward if the plan has one,
            separated by spaces. The name of sel is followed by "+" and the operator of its causal
            kernel if it has one. A name stands for one operator as long as the process lives.
        scale: Softmax scale.
        geometry: The block sizes, as BlockGeometry.as_ints() gives them.
        deterministic: Whether every run must give the same bits.
    """

    kernels: str
    scale: float
    geometry: tuple[int, ...]
    deterministic: bool


class CoreKernels(NamedTuple):
    """The kernels of a plan whose core may be one step.

    Attributes:
        observed: The slots as operators, which observers see: the plan or its kernels.
        direct: The slots without autograd and dispatcher; None if a wrapper checks their results.
        backwards: The operators of cmp, sel, win and combine, with the constants of the layer, and
            "causal_sel", those of the causal kernel of sel if it has one.
        fused: The fused backward; None if the plan has none.
    """

    observed: SlotsOrPlan
    direct: Slots | None
    backwards: dict[str, tuple[SlotOp, Kernel]]
    fused: CoreBackward | None

    def slots(self, *tensors: torch.Tensor | None) -> SlotsOrPlan:
        """Return the slots for calls without gradient; observers see their operators."""
        if self.direct is not None and autograd.is_unobserved(*tensors):
            return self.direct
        return self.observed


@functools.lru_cache(maxsize=256)
def kernels_of_plan(plan: Any) -> CoreKernels | None:
    """Return the kernels of ``plan``; None if one is unknown or has no backward."""
    kernels = [_plain(getattr(plan, slot)) for slot in SLOTS]
    backwards = _backwards(kernels)
    if backwards is None:
        return None
    direct = None
    if all(type(getattr(plan, slot)) is Kernel for slot in SLOTS):
        direct = _direct_slots([kernel for kernel in kernels if kernel is not None])
    return CoreKernels(plan, direct, backwards, plan.fused.get("backward"))


def constants_of(kernels: Sequence[Any], fused: CoreBackward | None) -> CoreConstants | None:
    """Return the constants of a plan with the kernels of SLOTS in this order.

    They are None if a kernel is of another class, has no backward, or differs from the others in
    scale, geometry or determinism.
    """
    if not all(type(kernel) is Kernel for kernel in kernels) or _backwards(kernels) is None:
        return None
    tails = {(kernel.scale, kernel.geometry, kernel.deterministic) for kernel in kernels}
    if len(tails) > 1:
        return None
    names = [_name(kernel) for kernel in kernels]
    if fused is not None:
        names.append(fused.op.name())
    return CoreConstants(" ".join(names), *tails.pop())


@functools.lru_cache(maxsize=256)
def kernels_of_constants(constants: CoreConstants) -> CoreKernels:
    """Return the kernels that ``constants``, the result of :func:`constants_of`, names."""
    *names, last = constants.kernels.split(" ")
    fused = None
    if len(names) == len(SLOTS):
        fused = core_backward.operator_of(_overload(last))
    else:
        names.append(last)
    kernels = []
    for slot, name in zip(SLOTS, names, strict=True):
        name, _, causal_name = name.partition("+")
        operator = operator_of(_overload(name))
        kernel = Kernel(operator.backend, slot, operator.op, *constants[1:])
        if causal_name:
            causal = causal_kernel(kernel, operator_of(_overload(causal_name)))
            kernel = dataclasses.replace(kernel, causal=causal)
        kernels.append(kernel)
    backwards = _backwards(kernels)
    assert backwards is not None  # constants_of gives no constants without backwards
    slots = Slots._make([*kernels, kernels[SLOTS.index("sel")].causal])
    return CoreKernels(slots, _direct_slots(kernels), backwards, fused)


def causal_kernel(sel: Kernel, win: SlotOp) -> Kernel:
    """Return the kernel of sel as causal attention: ``win`` with a window of n * l' tokens."""
    geometry = causal_geometry(BlockGeometry.from_ints(sel.geometry))
    return dataclasses.replace(sel, op=win.op, geometry=tuple(geometry.as_ints()))


def causal_geometry(geometry: BlockGeometry) -> BlockGeometry:
    """Return ``geometry`` with a window of the longest sequence whose tokens select every block."""
    longest = min(geometry.num_selected_blocks * geometry.select_block_size, limits.COUNT)
    return dataclasses.replace(geometry, window_size=longest)


def selects_all(plan: Any, blocks: torch.Tensor | None, max_seqlen: int) -> bool:
    """Return whether the call runs the causal kernel of sel instead of select and sel.

    Without given blocks, a token selects min(n, candidates) of its candidates, the blocks up to its
    own. In a sequence of at most n * l' tokens these are all of them, and sel is causal attention.

    A graph that runs with several lengths contains select and sel: one that is exported, traced, or
    compiled for sequences whose length is symbolic.
    """
    if blocks is not None or plan.causal_sel is None:
        return False
    if is_exporting() or torch._C._get_tracing_state() is not None:
        return False
    short = max_seqlen <= causal_geometry(plan.config.geometry).window_size
    if torch.compiler.is_compiling() or isinstance(short, torch.SymBool):
        # Imported here, because it imports sympy. A comparison would compile the graph again.
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        return bool(statically_known_true(short))
    return bool(short)


def _name(kernel: Kernel) -> str:
    """Return the name of a kernel in CoreConstants.kernels."""
    name: str = kernel.op.name()
    return name if kernel.causal is None else f"{name}+{kernel.causal.op.name()}"


def _direct_slots(kernels: Sequence[Kernel]) -> Slots:
    """Return the slots of ``kernels``, in the order of SLOTS, without autograd and dispatcher."""
    causal = kernels[SLOTS.index("sel")].causal
    direct = [kernel.direct() for kernel in kernels]
    return Slots._make([*direct, causal.direct() if causal else None])


def _overload(name: str) -> Any:
    """Return the default overload of the operator ``name``, "namespace::operator"."""
    namespace, operator = name.split("::")
    return getattr(getattr(torch.ops, namespace), operator).default


def _backwards(kernels: Sequence[Kernel | None]) -> dict[str, tuple[SlotOp, Kernel]] | None:
    """Return the operators of all slots but select; None if one is unknown or has no backward."""
    backwards = {}
    for slot, kernel in zip(SLOTS, kernels, strict=True):
        if slot == "select":
            continue
        if kernel is None or not operator_of(kernel.op).has_backward:
            return None
        backwards[slot] = operator_of(kernel.op), kernel
        if kernel.causal is not None:
            backwards["causal_sel"] = operator_of(kernel.causal.op), kernel.causal
    return backwards


def _plain(kernel: Any) -> Kernel | None:
    """Return ``kernel`` without a wrapper that checks its results; None if unknown."""
    if type(kernel) is not Kernel:
        kernel = getattr(kernel, "kernel", None)
    return kernel if type(kernel) is Kernel else None


def run_branches(
    slots: SlotsOrPlan,
    inputs: CoreInputs,
    blocks: torch.Tensor | None,
    packing: dict[str, Any],
    causal: bool,
) -> Branches:
    """Run cmp, sel and win, and `select` if ``blocks`` is None.

    ``causal``: :func:`selects_all`; the causal kernel of sel replaces select and sel.
    """
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, _ = inputs
    o_cmp, lse_cmp = slots.cmp(q, k_cmp, v_cmp, **packing)
    if causal:
        o_sel, lse_sel = slots.causal_sel(q, k_sel, v_sel, **packing)
    else:
        if blocks is None:
            blocks = slots.select(q, k_cmp, lse_cmp, **packing)
        o_sel, lse_sel = slots.sel(q, k_sel, v_sel, blocks, **packing)
    o_win, lse_win = slots.win(q, k_win, v_win, **packing)
    return Branches(blocks, o_cmp, lse_cmp, o_sel, lse_sel, o_win, lse_win)


def run_all(
    slots: SlotsOrPlan,
    inputs: CoreInputs,
    blocks: torch.Tensor | None,
    packing: dict[str, Any],
    causal: bool,
) -> tuple[torch.Tensor, Branches]:
    """Run the branches and `combine`; arguments as of :func:`run_branches`."""
    branches = run_branches(slots, inputs, blocks, packing, causal)
    outputs = branches.o_cmp, branches.o_sel, branches.o_win
    return slots.combine(inputs.gates, *outputs, **packing), branches


SAVED = (*CoreInputs._fields, "cu_seqlens", *Branches._fields)  # by a forward
# The order in which autograd would run the nodes of the slots, and add up dq: the branch, what its
# backward reads besides do and q, and the position of its keys in CoreInputs.
_BACKWARD = (
    ("win", ("k_win", "v_win", "o_win", "lse_win"), 5),
    ("sel", ("k_sel", "v_sel", "blocks", "o_sel", "lse_sel"), 3),
    ("cmp", ("k_cmp", "v_cmp", "o_cmp", "lse_cmp"), 1),
)


def to_save(
    inputs: CoreInputs, cu_seqlens: torch.Tensor | None, branches: Branches, recompute: bool
) -> tuple[torch.Tensor | None, ...]:
    """Return what a forward saves, in the order of SAVED; with ``recompute`` up to the blocks."""
    return (*inputs, cu_seqlens, *(branches[:1] if recompute else branches))


def by_name(saved: Sequence[torch.Tensor | None]) -> dict[str, Any]:
    """Return the tensors of :func:`to_save` by name; after causal attention, blocks are None."""
    return dict(zip(SAVED, saved))


def gradients(
    kernels: CoreKernels,
    max_seqlen: int,
    nonnegative_gates: bool,
    grads: list[torch.Tensor],
    saved: dict[str, Any],
    needs: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of the inputs, in the order of CoreInputs.

    The fused backward of the plan runs if it has one, no gate is negative, sel was not causal
    attention and every input needs a gradient; otherwise the backwards of the slots. A branch whose
    inputs need none does not run.

    Args:
        kernels: The kernels of the forward.
        max_seqlen: As in the forward.
        nonnegative_gates: Whether no gate is negative.
        grads: The gradient of o alone; emptied, so that it lives until its last use.
        saved: The tensors of the forward as :func:`by_name` returns them; emptied likewise. Without
            the outputs of the branches, the branches run again.
        needs: Whether each input needs a gradient, in the order of CoreInputs.
    """
    if "o_win" not in saved:
        packing = {"cu_seqlens": saved["cu_seqlens"], "max_seqlen": max_seqlen}
        inputs = CoreInputs(*[saved[name] for name in CoreInputs._fields])
        slots = kernels.slots(*saved.values())
        with torch.no_grad(), _AutoDispatchBelowAutograd():
            blocks = saved["blocks"]
            saved |= run_branches(slots, inputs, blocks, packing, blocks is None)._asdict()
        del inputs
    fused = kernels.fused
    with autograd.backward_context():
        if fused is None or not (nonnegative_gates and all(needs) and _has_work(saved)):
            return gradients_by_slots(kernels, max_seqlen, grads, saved, needs)
        direct = not torch.is_grad_enabled() and autograd.is_unobserved(*grads, *saved.values())
        _, kernel = kernels.backwards["cmp"]
        names = (*core_backward.DIFFERENTIABLE, *core_backward.STATISTICS, *core_backward.OUTPUTS)
        tensors = [grads.pop(), *(saved.pop(name) for name in names)]
        tail = (saved["cu_seqlens"], *kernel.tail(max_seqlen))
        results: tuple[torch.Tensor, ...] = fused.gradients(direct, tensors, tail)
        return results


def _has_work(saved: Mapping[str, Any]) -> bool:
    """Return whether there are queries, compressed tokens and blocks, so that no slot is empty."""
    q, k_cmp, blocks = saved["q"], saved["k_cmp"], saved["blocks"]
    return blocks is not None and bool(q.numel() and k_cmp.shape[-3] and blocks.shape[-1])


def gradients_by_slots(
    kernels: CoreKernels,
    max_seqlen: int,
    grads: list[torch.Tensor],
    saved: dict[str, Any],
    needs: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    """Return what :func:`gradients` does, by the backwards of the slots; arguments as there."""
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
    names: tuple[str, ...]
    for branch, names, k in _BACKWARD:
        if branch == "sel" and saved["blocks"] is None:
            branch, names = "causal_sel", tuple(name for name in names if name != "blocks")
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

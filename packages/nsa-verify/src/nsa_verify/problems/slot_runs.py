"""SlotRun: the inputs and outputs of one slot call."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from nsa_core.contract import SLOTS
from nsa_core.plan.plan import Plan
from nsa_core.torch_ops.kernel import Kernel
from nsa_verify.problems.cases import Case, CaseData


class Documents(Protocol):
    """The document bounds of a call; a CaseData has them."""

    @property
    def cu_seqlens(self) -> torch.Tensor | None:
        """Document bounds, int32 [documents + 1]; None if dense."""

    @property
    def max_seqlen(self) -> int:
        """Length of the longest document."""


@dataclasses.dataclass(frozen=True)
class SlotRun:
    """The inputs and outputs of one slot call.

    Attributes:
        inputs: Input tensors by their names in the contract.
        outputs: Results by name (o, lse, blocks), and gradients as "d" + the input's name.
        do: Gradient of o that entered the backward; None if only the forward ran.
    """

    inputs: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]
    do: torch.Tensor | None


OUTPUTS = {
    "cmp": ("o", "lse"),
    "select": ("blocks",),
    "sel": ("o", "lse"),
    "win": ("o", "lse"),
    "combine": ("o",),
}


@dataclasses.dataclass(frozen=True)
class CausalSel:
    """The causal kernel of a plan in the place of sel: it does not read the blocks."""

    kernel: Kernel
    slot: str = "sel"

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: torch.Tensor, **packing: Any
    ) -> Any:
        """Run the kernel."""
        return self.kernel(q, k, v, **packing)


def run_kernel(
    kernel: Any,
    inputs: Mapping[str, torch.Tensor],
    do: torch.Tensor | None,
    data: Documents,
    first_query: int | None = None,
    frozen: Sequence[str] = (),
) -> SlotRun:
    """Call ``kernel`` on ``inputs`` and, if ``do`` is given, its backward.

    Args:
        kernel: The kernel of a slot, or a callable with the attribute ``slot``.
        inputs: Its tensors.
        do: Gradient of o; None: only the forward runs.
        data: Document bounds.
        first_query: Position of row 0 of q, if q holds only some rows.
        frozen: Inputs that need no gradient.
    """
    leaves = {n: t.detach() for n, t in inputs.items()}
    without = ("blocks", "lse", *frozen)
    differentiated = [n for n in leaves if do is not None and n not in without]
    for name in differentiated:
        leaves[name].requires_grad_()
    result = kernel(
        *leaves.values(),
        cu_seqlens=data.cu_seqlens,
        max_seqlen=data.max_seqlen,
        first_query=first_query,
    )
    results = (result,) if isinstance(result, torch.Tensor) else tuple(result)
    outputs = {n: t.detach() for n, t in zip(OUTPUTS[kernel.slot], results)}
    if do is not None:
        grads = torch.autograd.grad(results[0], [leaves[n] for n in differentiated], do)
        outputs |= {f"d{n}": g for n, g in zip(differentiated, grads)}
    return SlotRun({n: t.detach() for n, t in leaves.items()}, outputs, do)


def slot_inputs(
    slot: str, data: CaseData, upstream: Mapping[str, SlotRun]
) -> dict[str, torch.Tensor]:
    """Return the inputs of ``slot``: tensors of the case and outputs of the slots before it."""
    if slot == "cmp":
        return {"q": data.q, "k_cmp": data.k_cmp, "v_cmp": data.v_cmp}
    if slot == "select":
        return {"q": data.q, "k_cmp": data.k_cmp, "lse": upstream["cmp"].outputs["lse"]}
    if slot == "sel":
        return {
            "q": data.q,
            "k": data.k_sel,
            "v": data.v_sel,
            "blocks": upstream["select"].outputs["blocks"],
        }
    if slot == "win":
        return {"q": data.q, "k": data.k_win, "v": data.v_win}
    return {"gates": data.gates} | {
        f"o_{b}": upstream[b].outputs["o"] for b in ("cmp", "sel", "win")
    }


def masked_do(case: Case, do: torch.Tensor) -> torch.Tensor:
    """Return ``do`` with zeros outside the judged rows, which must not reach the gradients."""
    if case.rows is None:
        return do
    masked = torch.zeros_like(do)
    masked[..., list(case.rows), :, :] = do[..., list(case.rows), :, :]
    return masked


def run_slots(plan: Plan, case: Case, data: CaseData, gradients: bool = True) -> dict[str, SlotRun]:
    """Run every slot once, forward and, with ``gradients``, backward, in order of the data flow."""
    runs: dict[str, SlotRun] = {}
    do = masked_do(case, data.do) if gradients else None
    for slot in SLOTS:
        inputs, of_slot = slot_inputs(slot, data, runs), None if slot == "select" else do
        runs[slot] = run_kernel(getattr(plan, slot), inputs, of_slot, data)
    return runs

"""SlotRun: one call of a slot, with the tensors that went in and came out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from nsa_core.contract import SLOTS
from nsa_core.dispatch.plan import Plan
from nsa_core.torch_ops.slot_op import Kernel
from nsa_verify.cases import Case, CaseData


@dataclasses.dataclass(frozen=True)
class SlotRun:
    """Tensors one slot received and what it returned, gradients ("dq", ...) included."""

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


def run_slot(
    plan: Plan,
    slot: str,
    inputs: Mapping[str, torch.Tensor],
    do: torch.Tensor | None,
    data: CaseData,
) -> SlotRun:
    """Call ``slot`` of ``plan`` on ``inputs`` and, with ``do``, its backward."""
    return run_kernel(getattr(plan, slot), inputs, do, data)


def run_kernel(
    kernel: Kernel, inputs: Mapping[str, torch.Tensor], do: torch.Tensor | None, data: CaseData
) -> SlotRun:
    """Call ``kernel`` on ``inputs`` and, with ``do``, its backward."""
    leaves = {n: t.detach() for n, t in inputs.items()}
    wanted = [n for n in leaves if do is not None and n not in ("blocks", "lse")]
    for name in wanted:
        leaves[name].requires_grad_()
    result = kernel(*leaves.values(), cu_seqlens=data.cu_seqlens, max_seqlen=data.max_seqlen)
    results = (result,) if isinstance(result, torch.Tensor) else tuple(result)
    outputs = {n: t.detach() for n, t in zip(OUTPUTS[kernel.slot], results)}
    if do is not None:
        grads = torch.autograd.grad(results[0], [leaves[n] for n in wanted], do)
        outputs |= {f"d{n}": g for n, g in zip(wanted, grads)}
    return SlotRun({n: t.detach() for n, t in leaves.items()}, outputs, do)


def slot_inputs(
    slot: str, data: CaseData, upstream: Mapping[str, SlotRun]
) -> dict[str, torch.Tensor]:
    """The tensors ``slot`` receives: the case's, and what the slots before it returned."""
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
    """``do`` with zeros outside the judged rows: what is not judged must not reach the
    gradients.
    """
    if case.rows is None:
        return do
    kept = torch.zeros_like(do)
    kept[..., list(case.rows), :, :] = do[..., list(case.rows), :, :]
    return kept


def run_slots(plan: Plan, case: Case, data: CaseData) -> dict[str, SlotRun]:
    """Every slot once, in the order data flows, forward and backward."""
    runs: dict[str, SlotRun] = {}
    do = masked_do(case, data.do)
    for slot in SLOTS:
        runs[slot] = run_slot(
            plan, slot, slot_inputs(slot, data, runs), None if slot == "select" else do, data
        )
    return runs

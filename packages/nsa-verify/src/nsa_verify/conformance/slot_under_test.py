"""One slot of one backend, run on its own: its inputs come from the oracle, not from another
backend.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from nsa_core.contract import SlotSpec
from nsa_core.dispatch.loading import BackendEntry
from nsa_core.dispatch.probing import Candidate, ask
from nsa_core.dtypes import stats_dtype
from nsa_core.torch_ops.decode_kernel import decode_kernel
from nsa_core.torch_ops.slot_op import DIFFERENTIABLE, Kernel, slot_op
from nsa_verify import oracle
from nsa_verify.cases import Case, CaseData
from nsa_verify.checks.decode_parity import (
    Results,
    Step,
    StepData,
    judge_step,
    packed,
    received,
    step_data,
)
from nsa_verify.conformance.grid import Point, StepPoint
from nsa_verify.judge.selection import judge_selection
from nsa_verify.judge.slot import judge_slot
from nsa_verify.slot_runs import SlotRun, run_kernel


@dataclasses.dataclass(frozen=True)
class SlotUnderTest:
    """Slot ``slot`` of a ready backend, on ``device``."""

    entry: BackendEntry
    slot: str
    device: str = "cpu"

    @property
    def spec(self) -> SlotSpec:
        """What the backend declares about the slot."""
        assert self.entry.spec is not None  # a ready backend has one
        return self.entry.spec.slots[self.slot]

    @property
    def differentiable(self) -> bool:
        """The slot has inputs that gradients flow to, and the backend a backward."""
        return bool(DIFFERENTIABLE[self.slot]) and self.spec.backward is not None

    def ask(self, point: Point, needs_grad: bool) -> Candidate:
        """The backend's answer to ``point`` on this device."""
        kind = torch.device(self.device).type
        capability = torch.cuda.get_device_capability(self.device) if kind == "cuda" else None
        return ask(self.entry, point.request(self.slot, kind, capability, needs_grad))

    def ask_step(self, point: StepPoint) -> Candidate:
        """The backend's answer to a step of decode on this device."""
        kind = torch.device(self.device).type
        capability = torch.cuda.get_device_capability(self.device) if kind == "cuda" else None
        return ask(self.entry, point.request(self.slot, kind, capability))

    def step_faults(self, point: StepPoint) -> list[str]:
        """What is wrong with the decode form on the point's step; what other slots make, the oracle
        does.
        """
        assert self.spec.decode is not None  # the suite asks for declared forms
        dtype = getattr(torch, point.dtype)
        data = step_data(point.step, dtype, self.device)
        results = _upstream(self.slot, point.step, data)
        form = decode_kernel(self.entry.name, self.slot, self.spec.decode)
        made = form(*received(self.slot, data, results), call=data.call)
        results[self.slot] = (made,) if isinstance(made, torch.Tensor) else tuple(made)
        found = judge_step(point.step, dtype, data, results, (self.slot,))
        return [f"{f.quantity}: {f.detail}" for f in found if not f.ok]

    def kernel(self, point: Point) -> Kernel:
        """The kernel a plan for ``point`` would hold."""
        op, config = slot_op(self.entry.name, self.slot, self.spec), point.case.config
        geometry = tuple(config.geometry.as_ints())
        return Kernel(
            self.entry.name, self.slot, op.op, config.softmax_scale, geometry, point.deterministic
        )

    def data(self, point: Point, seed: int = 0) -> tuple[CaseData, dict[str, torch.Tensor]]:
        """The case's tensors, and those of them that this slot receives."""
        data = point.case.data(getattr(torch, point.dtype), self.device, seed)
        return data, inputs_of(self.slot, point.case, data)

    def run(
        self,
        point: Point,
        inputs: Mapping[str, torch.Tensor],
        do: torch.Tensor | None,
        data: CaseData,
    ) -> SlotRun:
        """Forward and, with ``do``, backward."""
        return run_kernel(self.kernel(point), inputs, do, data)


def inputs_of(slot: str, case: Case, data: CaseData) -> dict[str, torch.Tensor]:
    """The tensors ``slot`` receives; what another slot would have made, the oracle makes."""
    if slot == "win":
        return {"q": data.q, "k": data.k_win, "v": data.v_win}
    if slot == "combine":
        return {
            "gates": data.gates,
            "o_cmp": data.do.flip(0),
            "o_sel": data.do.flip(-1),
            "o_win": data.do * 0.5,
        }
    if slot == "cmp":
        return {"q": data.q, "k_cmp": data.k_cmp, "v_cmp": data.v_cmp}
    geometry, scale = case.config.geometry, case.config.softmax_scale
    truth = oracle.cmp(data.q, data.k_cmp, data.v_cmp, geometry, scale, cu_seqlens=data.cu_seqlens)
    assert truth.lse is not None  # cmp has one
    lse = truth.lse.to(data.q.device, stats_dtype(data.q.dtype))
    if slot == "select":
        return {"q": data.q, "k_cmp": data.k_cmp, "lse": lse}
    blocks = oracle.select(data.q, data.k_cmp, lse, geometry, scale, cu_seqlens=data.cu_seqlens)
    return {"q": data.q, "k": data.k_sel, "v": data.v_sel, "blocks": blocks.to(data.q.device)}


def _upstream(slot: str, step: Step, data: StepData) -> Results:
    """The lse that select receives, or the blocks that sel does, by the oracle."""
    if slot not in ("select", "sel"):
        return {}
    p, where = packed(step, data), (step.case.config.geometry, step.case.config.softmax_scale)
    given = (p.whole["q"], p.whole["k_cmp"])
    truth = oracle.cmp(*given, p.whole["v_cmp"], *where, cu_seqlens=p.cu_seqlens, rows=p.rows)
    assert truth.lse is not None  # cmp has one
    lse = truth.lse.to(stats_dtype(data.q.dtype))
    if slot == "select":
        return {
            "cmp": (
                data.q,
                p.rows_of(lse.T, -torch.inf).transpose(1, 2).contiguous().to(data.q.device),
            )
        }
    blocks = oracle.select(*given, lse, *where, cu_seqlens=p.cu_seqlens, rows=p.rows)
    return {"select": (p.rows_of(blocks, -1).to(data.q.device),)}


def faults(slot: str, case: Case, run: SlotRun, data: CaseData) -> list[str]:
    """What is wrong with ``run``: one line per output that the verdict of docs/verification.md
    refuses.
    """
    if not data.q.numel():
        return [
            f"{n} is {tuple(t.shape)}, not empty"
            for n, t in run.outputs.items()
            if n[0] != "d" and t.numel()
        ]
    geometry, scale = case.config.geometry, case.config.softmax_scale
    if slot == "select":
        blocks = run.outputs["blocks"]
        chosen = judge_selection(
            **run.inputs, blocks=blocks, geometry=geometry, scale=scale, cu_seqlens=data.cu_seqlens
        )
        return (
            []
            if chosen.ok
            else [f"blocks: {chosen.why or f'regret {chosen.regret}, flips {chosen.flip_rate}'}"]
        )
    verdicts = judge_slot(
        slot, run.inputs, run.outputs, geometry, scale, cu_seqlens=data.cu_seqlens, do=run.do
    )
    return [
        f"{quantity}: {verdict.why}" for quantity, verdict in verdicts.items() if not verdict.ok
    ]

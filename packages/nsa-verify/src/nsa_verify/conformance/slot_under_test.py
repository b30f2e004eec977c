"""SlotUnderTest: one slot of one backend, run alone on inputs that the oracle computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from nsa_core.contract import SlotSpec
from nsa_core.dtypes import stats_dtype
from nsa_core.plan.loading import BackendEntry
from nsa_core.plan.probing import Candidate, probe_candidate
from nsa_core.torch_ops.decode_kernel import decode_kernel
from nsa_core.torch_ops.kernel import Kernel
from nsa_core.torch_ops.schema import DIFFERENTIABLE
from nsa_core.torch_ops.slot_op import slot_op
from nsa_verify import oracle
from nsa_verify.checks.decode_parity import judge_step
from nsa_verify.conformance.grid import Point, StepPoint
from nsa_verify.judge.selection import judge_selection
from nsa_verify.judge.slot import judge_slot
from nsa_verify.problems.cases import Case, CaseData
from nsa_verify.problems.slot_runs import SlotRun, run_kernel
from nsa_verify.problems.step_data import StepData, packed, step_data
from nsa_verify.problems.step_runs import Results, decode_inputs
from nsa_verify.problems.steps import Step


@dataclasses.dataclass(frozen=True)
class SlotUnderTest:
    """One slot of a ready backend, on one device.

    Attributes:
        entry: The backend.
        slot: Name of the slot.
        device: Torch device.
    """

    entry: BackendEntry
    slot: str
    device: str = "cpu"

    @property
    def spec(self) -> SlotSpec:
        """The backend's specification of the slot."""
        assert self.entry.spec is not None  # a ready backend has one
        return self.entry.spec.slots[self.slot]

    @property
    def differentiable(self) -> bool:
        """Whether the slot has differentiable inputs and the backend has a backward for it."""
        return bool(DIFFERENTIABLE[self.slot]) and self.spec.backward is not None

    def probe(self, point: Point, needs_grad: bool) -> Candidate:
        """Probe the backend with the request of ``point`` on this device."""
        kind = torch.device(self.device).type
        capability = torch.cuda.get_device_capability(self.device) if kind == "cuda" else None
        return probe_candidate(self.entry, point.request(self.slot, kind, capability, needs_grad))

    def probe_step(self, point: StepPoint) -> Candidate:
        """Probe the backend with the request of a decode step on this device."""
        kind = torch.device(self.device).type
        capability = torch.cuda.get_device_capability(self.device) if kind == "cuda" else None
        return probe_candidate(self.entry, point.request(self.slot, kind, capability))

    def step_faults(self, point: StepPoint) -> list[str]:
        """Run the decode form on a step and list its faults; the oracle computes its inputs."""
        assert self.spec.decode is not None  # the suite tests declared forms only
        dtype = getattr(torch, point.dtype)
        data = step_data(point.step, dtype, self.device)
        results = _upstream(self.slot, point.step, data)
        form = decode_kernel(self.entry.name, self.slot, self.spec.decode)
        result = form(*decode_inputs(self.slot, data, results), call=data.call)
        results[self.slot] = (result,) if isinstance(result, torch.Tensor) else tuple(result)
        findings = judge_step(point.step, dtype, data, results, (self.slot,))
        return [f"{f.quantity}: {f.detail}" for f in findings if not f.ok]

    def kernel(self, point: Point) -> Kernel:
        """Return the kernel that a plan for ``point`` would hold."""
        op, config = slot_op(self.entry.name, self.slot, self.spec), point.case.config
        geometry = tuple(config.geometry.as_ints())
        return Kernel(
            self.entry.name, self.slot, op.op, config.softmax_scale, geometry, point.deterministic
        )

    def data(self, point: Point, seed: int = 0) -> tuple[CaseData, dict[str, torch.Tensor]]:
        """Return the tensors of the case, and the inputs of this slot."""
        data = point.case.data(getattr(torch, point.dtype), self.device, seed)
        return data, inputs_of(self.slot, point.case, data)

    def run(
        self,
        point: Point,
        inputs: Mapping[str, torch.Tensor],
        do: torch.Tensor | None,
        data: CaseData,
    ) -> SlotRun:
        """Run the forward and, if ``do`` is given, the backward."""
        return run_kernel(self.kernel(point), inputs, do, data)


def inputs_of(slot: str, case: Case, data: CaseData) -> dict[str, torch.Tensor]:
    """Return the inputs of ``slot``; the oracle computes the outputs of earlier slots."""
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
    """Compute the lse that select receives, or the blocks that sel receives, by the oracle."""
    if slot not in ("select", "sel"):
        return {}
    p, sizes = packed(step, data), (step.case.config.geometry, step.case.config.softmax_scale)
    q_k = (p.tensors["q"], p.tensors["k_cmp"])
    truth = oracle.cmp(*q_k, p.tensors["v_cmp"], *sizes, cu_seqlens=p.cu_seqlens, rows=p.rows)
    assert truth.lse is not None  # cmp has one
    lse = truth.lse.to(stats_dtype(data.q.dtype))
    if slot == "select":
        return {
            "cmp": (
                data.q,
                p.gather(lse.T, -torch.inf).transpose(1, 2).contiguous().to(data.q.device),
            )
        }
    blocks = oracle.select(*q_k, lse, *sizes, cu_seqlens=p.cu_seqlens, rows=p.rows)
    return {"select": (p.gather(blocks, -1).to(data.q.device),)}


def faults(slot: str, case: Case, run: SlotRun, data: CaseData) -> list[str]:
    """List the faults of ``run``: one line per output that fails its verdict."""
    if not data.q.numel():
        return [
            f"{n} is {tuple(t.shape)}, not empty"
            for n, t in run.outputs.items()
            if n[0] != "d" and t.numel()
        ]
    geometry, scale = case.config.geometry, case.config.softmax_scale
    if slot == "select":
        blocks, inputs = run.outputs["blocks"], dict[str, Any](run.inputs)
        selection = judge_selection(
            **inputs, blocks=blocks, geometry=geometry, scale=scale, cu_seqlens=data.cu_seqlens
        )
        why = selection.why or f"regret {selection.regret}, flips {selection.flip_rate}"
        return [] if selection.ok else [f"blocks: {why}"]
    verdicts = judge_slot(
        slot, run.inputs, run.outputs, geometry, scale, cu_seqlens=data.cu_seqlens, do=run.do
    )
    return [
        f"{quantity}: {verdict.why}" for quantity, verdict in verdicts.items() if not verdict.ok
    ]

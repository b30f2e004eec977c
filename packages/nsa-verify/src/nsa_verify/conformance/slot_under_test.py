"""SlotUnderTest: one slot of one backend, run alone on inputs that the oracle computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from nsa_core.contract import Request, SlotSpec
from nsa_core.dtypes import stats_dtype
from nsa_core.plan.candidates import Candidate, probe_candidate
from nsa_core.plan.loading import BackendEntry
from nsa_core.torch_ops.decode_kernel import decode_kernel
from nsa_core.torch_ops.kernel import Kernel
from nsa_core.torch_ops.schema import DIFFERENTIABLE
from nsa_core.torch_ops.slot_op import slot_op
from nsa_verify import oracle
from nsa_verify.checks.decode_parity import judge_step
from nsa_verify.checks.slots import judge_run
from nsa_verify.conformance.grid import Point
from nsa_verify.problems.cases import Case, CaseData
from nsa_verify.problems.findings import Finding, Findings
from nsa_verify.problems.slot_runs import SlotRun, run_kernel, slot_inputs
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

    def request(self, point: Point, needs_grad: bool = False) -> Request:
        """Return the request of ``point`` on this device."""
        kind = torch.device(self.device).type
        capability = torch.cuda.get_device_capability(self.device) if kind == "cuda" else None
        return point.request(self.slot, kind, capability, needs_grad)

    def probe(self, point: Point, needs_grad: bool = False) -> Candidate:
        """Probe the backend with the request of ``point`` on this device."""
        return probe_candidate(self.entry, self.request(point, needs_grad))

    def step_data(self, point: Point) -> tuple[StepData, Results]:
        """Return the tensors of a step, and the oracle's results of earlier slots."""
        assert point.step is not None
        data = step_data(point.step, getattr(torch, point.dtype), self.device)
        return data, _upstream(self.slot, point.step, data)

    def step_faults(self, point: Point) -> list[str]:
        """Run the decode form on a step and list its faults."""
        assert point.step is not None
        assert self.spec.decode is not None  # the suite tests declared forms only
        dtype, (data, results) = getattr(torch, point.dtype), self.step_data(point)
        form = decode_kernel(self.entry.name, self.slot, self.spec.decode)
        result = form(*decode_inputs(self.slot, data, results), call=data.call)
        results[self.slot] = (result,) if isinstance(result, torch.Tensor) else tuple(result)
        return _failures(judge_step(point.step, dtype, data, results, (self.slot,)))

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
    outputs: dict[str, dict[str, torch.Tensor]] = {
        "cmp": {"o": data.do.flip(0)},
        "sel": {"o": data.do.flip(-1)},
        "win": {"o": data.do * 0.5},
    }
    if slot in ("select", "sel"):
        options: dict[str, Any] = {"cu_seqlens": data.cu_seqlens}
        sizes = (case.config.geometry, case.config.softmax_scale)
        lse = oracle.cmp(data.q, data.k_cmp, data.v_cmp, *sizes, **options).lse
        assert lse is not None  # cmp has one
        lse = outputs["cmp"]["lse"] = lse.to(data.q.device, stats_dtype(data.q.dtype))
        if slot == "sel":
            blocks = oracle.select(data.q, data.k_cmp, lse, *sizes, **options)
            outputs["select"] = {"blocks": blocks.to(data.q.device)}
    return slot_inputs(slot, data, {n: SlotRun({}, x, None) for n, x in outputs.items()})


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
        padded = p.gather(lse.T, -torch.inf).transpose(1, 2).contiguous()
        return {"cmp": (data.q, padded.to(data.q.device))}
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
    findings = Findings("conformance", case, data.q.dtype)
    return _failures(judge_run(findings, slot, run, data.cu_seqlens))


def _failures(findings: Iterable[Finding]) -> list[str]:
    return [f"{f.quantity}: {f.detail}" for f in findings if not f.ok]

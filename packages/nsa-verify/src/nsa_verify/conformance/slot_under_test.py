"""SlotUnderTest: one slot of one backend, run alone on inputs that the oracle computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from nsa_core.contract import DecodeCall, Request, SlotSpec
from nsa_core.dtypes import stats_dtype
from nsa_core.plan.candidates import Candidate, probe_candidate
from nsa_core.plan.loading import BackendEntry
from nsa_core.torch_ops.kernel import Kernel
from nsa_core.torch_ops.schema import DIFFERENTIABLE
from nsa_core.torch_ops.slot_op import slot_op
from nsa_verify import oracle
from nsa_verify.checks.slots import judge_run
from nsa_verify.conformance.points import Point
from nsa_verify.problems.cases import Case, CaseData
from nsa_verify.problems.findings import Findings
from nsa_verify.problems.slot_runs import SlotRun, run_kernel, slot_inputs
from nsa_verify.problems.step_data import step_data
from nsa_verify.problems.step_runs import decode_inputs


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

    def step_inputs(self, point: Point) -> tuple[tuple[torch.Tensor, ...], DecodeCall]:
        """Return the inputs of the decode form on a step, and the arguments of its call.

        An LSE is 0, and every row has the first blocks.
        """
        assert point.step is not None
        data = step_data(point.step, getattr(torch, point.dtype), self.device)
        (batch, m, heads), config = data.q.shape[:3], point.case.config
        lse = data.q.new_zeros((batch, heads, m), dtype=stats_dtype(data.q.dtype))
        blocks = torch.arange(config.num_selected_blocks, dtype=torch.int32, device=self.device)
        lists = blocks.expand(batch, m, config.n_kv_heads, -1).contiguous()
        results = {"cmp": (data.q, lse), "select": (lists,)}
        return decode_inputs(self.slot, data, results), data.call

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


def faults(slot: str, case: Case, run: SlotRun, data: CaseData) -> list[str]:
    """List the faults of ``run``: one line per output that fails its verdict."""
    findings = judge_run(Findings("conformance", case, data.q.dtype), slot, run, data.cu_seqlens)
    return [f"{f.quantity}: {f.detail}" for f in findings if not f.ok]

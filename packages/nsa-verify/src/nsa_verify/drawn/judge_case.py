"""Run a case on a combination and judge it by the oracle: outputs, LSE, gradients, a second run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from nsa_core.block.attention import block_attention_with_lse
from nsa_core.block.plans import BlockPlan
from nsa_core.contract import SLOTS
from nsa_core.errors import Unsupported
from nsa_core.plan.plan import Plan
from nsa_core.torch_ops.kernel import Kernel
from nsa_core.torch_ops.schema import DIFFERENTIABLE
from nsa_verify.drawn.block_plan import block_plan
from nsa_verify.drawn.case import SlotCase
from nsa_verify.drawn.judge_core import core_findings
from nsa_verify.drawn.poison import poison_findings
from nsa_verify.drawn.tensors import Problem, problem_of
from nsa_verify.drawn.verdicts import judge_run, same_outputs, second_run
from nsa_verify.judge.truth_cache import caching
from nsa_verify.problems.combination import Combination, spec_of
from nsa_verify.problems.findings import Finding
from nsa_verify.problems.slot_runs import SlotRun, run_kernel


def case_findings(combination: Combination, case: SlotCase) -> Iterator[Finding]:
    """Plan a case, and return its findings.

    They cover outputs, LSE and all gradients, a second run, in which the frozen inputs of the case
    need no gradient, and the NaN or Inf of the case.

    Raises:
        NSAError: No backend of the combination accepts the case.
    """
    if case.kind == "core":
        plan = combination.plan(case.config, case.torch_dtype, varlen=case.packed)
        specs = [spec_of(combination, plan, slot).slots[slot] for slot in SLOTS]
        deterministic = all(spec.deterministic for spec in specs)
        return core_findings(case, problem_of(case, combination.device), plan, deterministic)
    planned = (_block_attention if case.kind == "block_attention" else _kernel)(combination, case)
    return _findings(case, problem_of(case, combination.device), planned)


@dataclasses.dataclass(frozen=True)
class _Planned:
    """A kernel for a case.

    Attributes:
        kernel: The kernel of a slot, or block_attention called as that of sel.
        grad: Whether it has gradients.
        deterministic: Whether its bits repeat.
    """

    kernel: Kernel | _BlockAttention
    grad: bool
    deterministic: bool

    def run(self, inputs: dict[str, Any], problem: Problem, *frozen: str) -> SlotRun:
        """Run the kernel forward, and backward if it has gradients."""
        do = problem.do if self.grad else None
        return run_kernel(self.kernel, inputs, do, problem, problem.first_query, frozen)


@dataclasses.dataclass(frozen=True)
class _BlockAttention:
    """block_attention with a plan, called as the kernel of sel."""

    plan: BlockPlan
    slot: str = "sel"

    def __call__(self, *tensors: torch.Tensor, max_seqlen: int, **options: Any) -> Any:
        """Return o and lse."""
        sizes = self.plan.sizes
        if options["cu_seqlens"] is not None:
            options["max_seqlen"] = max_seqlen
        options |= {"block_size": sizes.block_size, "scale": sizes.scale, "plan": self.plan}
        return block_attention_with_lse(*tensors, **options)


def _block_attention(combination: Combination, case: SlotCase) -> _Planned:
    """Plan block_attention; its bits are not compared."""
    first, end = case.query_rows
    plan = block_plan(
        combination,
        case,
        needs_grad=True,
        varlen=case.packed,
        partial=case.partial,
        batch=case.batch,
        seq_len=end - first,
    )
    return _Planned(_BlockAttention(plan), grad=True, deterministic=False)


def _kernel(combination: Combination, case: SlotCase) -> _Planned:
    """Plan the slot, with gradients if a backend has them.

    Only the slot itself is planned as the user named it, so that no other slot refuses the case.
    """
    slot, layer = case.kind, (case.config, case.torch_dtype)
    named = {slot: combination.backends[slot]} if slot in combination.backends else {}
    alone = dataclasses.replace(combination, backends=named)

    def plan_with(grad: bool) -> Plan:
        fields: dict[str, Any] = {"varlen": case.packed, "needs_grad": grad}
        return (
            alone.plan_partial(slot, *layer, **fields)
            if case.partial
            else alone.plan(*layer, **fields)
        )

    grad = bool(DIFFERENTIABLE[slot])
    try:
        plan = plan_with(grad)
    except Unsupported:
        if not grad:
            raise
        grad = False
        plan = plan_with(grad)
    spec = spec_of(alone, plan, slot).slots[slot]
    return _Planned(getattr(plan, slot), grad, spec.deterministic)


def _findings(case: SlotCase, problem: Problem, planned: _Planned) -> Iterator[Finding]:
    run = planned.run(problem.inputs, problem)
    if not case.rows:
        # Without queries, the keys of a partial call have gradients, which are zero.
        zeros = {name: torch.zeros_like(output) for name, output in run.outputs.items()}
        yield from same_outputs(case, run.outputs, zeros, "without a query")
        return
    with caching():  # the other runs need the truths of the first
        yield from judge_run(case, run, problem)
        equal = planned.deterministic and not case.partial
        frozen, label = case.frozen if planned.grad else (), second_run(case)
        if equal or frozen:
            again = planned.run(problem.inputs, problem, *frozen)
            if equal:
                yield from same_outputs(case, again.outputs, run.outputs, label)
            else:
                for finding in judge_run(case, again, problem):
                    yield dataclasses.replace(finding, quantity=f"{finding.quantity} {label}")
        if case.poison != "none" and case.kind != "combine":  # combine has it in its inputs
            yield from poison_findings(case, run, problem, planned.run)

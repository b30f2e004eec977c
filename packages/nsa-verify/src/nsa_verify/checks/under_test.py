"""The subject of a check: a combination with a case or a decode step, and its findings.

The rules that checks of prefill and of decode share are methods here.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from nsa_core.config import NSAConfig
from nsa_core.plan.plan import Plan
from nsa_verify.problems.cases import Case, CaseData
from nsa_verify.problems.combination import Combination, spec_of
from nsa_verify.problems.findings import Finding, Findings
from nsa_verify.problems.slot_runs import SlotRun, run_kernel, run_slots
from nsa_verify.problems.step_data import StepData, step_data
from nsa_verify.problems.step_runs import decode_plan
from nsa_verify.problems.steps import Step

CaseCheck = Callable[[Combination, Case, torch.dtype], Iterator[Finding]]
StepCheck = Callable[[Combination, Step, torch.dtype], Iterator[Finding]]
Tensors = Mapping[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class UnderTest(Findings):
    """A combination that a check judges.

    Attributes:
        combination: The combination.
    """

    combination: Combination

    def is_deterministic(self, plan: Plan, slot: str) -> bool:
        """Return whether the backend of ``slot`` declares it deterministic."""
        return spec_of(self.combination, plan, slot).slots[slot].deterministic

    def not_deterministic(self, plan: Plan, slot: str, of: str | None = None) -> Finding:
        """Return the finding that bits are not compared, because ``slot`` is not deterministic.

        ``of`` is the slot of the finding, if it is another one.
        """
        detail = f"{plan.choices[slot].backend} does not declare {slot} deterministic"
        return self.finding(slot if of is None else of, "as declared", None, detail=detail)

    def equal_runs(self, slot: str, runs: Iterable[Tensors]) -> Iterator[Finding]:
        """Compare the tensors of all runs with those of the first, bit for bit."""
        first, *others = runs
        for other, name in itertools.product(others, first):
            yield self.same_bits(slot, name, other[name], first[name])

    def profiled(self, plan: Plan, slot: str, run: Callable[[], object]) -> Finding:
        """Check that a profile of ``run`` shows an event that the backend declares as evidence."""
        evidence = spec_of(self.combination, plan, slot).slots[slot].evidence
        if not evidence:
            return self.finding(slot, "profile", None, detail="no evidence declared")
        # torch.profiler would import torch._inductor, and parse each event in Python.
        device = self.combination.device.partition(":")[0]
        with torch.autograd.profiler.profile(
            use_device=None if device == "cpu" else device, use_kineto=True
        ) as profile:
            run()
        names = {event.name() for event in profile.kineto_results.events()}
        events = sorted(name for name in names if any(e in name for e in evidence))
        shown = events[0] if events else f"no event of SlotSpec.evidence: {', '.join(evidence)}"
        return self.finding(slot, "profile", bool(events), detail=f"profile shows {shown}")


@dataclasses.dataclass(frozen=True)
class CaseUnderTest(UnderTest):
    """A combination on a case."""

    @functools.cached_property
    def data(self) -> CaseData:
        """The tensors of the case."""
        return self.case.data(self.dtype, self.combination.device)

    def plan(self, config: NSAConfig | None = None, **fields: Any) -> Plan:
        """Plan the case, forward and backward.

        Args:
            config: Configuration; None takes that of the case.
            **fields: Other fields of PlanOptions.

        Raises:
            NSAError: As :meth:`Combination.plan`.
        """
        fields = {"varlen": self.case.packed, **fields}
        return self.combination.plan(config or self.case.config, self.dtype, **fields)

    def runs(self, plan: Plan) -> dict[str, SlotRun]:
        """Run every slot once, forward and backward, in the order of the data flow."""
        return run_slots(plan, self.case, self.data)

    def run(self, plan: Plan, slot: str, inputs: Tensors, do: torch.Tensor | None) -> SlotRun:
        """Run one slot on ``inputs`` and, if ``do`` is given, its backward."""
        return run_kernel(getattr(plan, slot), inputs, do, self.data)


@dataclasses.dataclass(frozen=True)
class StepUnderTest(UnderTest):
    """A combination on a decode step.

    Attributes:
        step: The step.
    """

    step: Step

    @functools.cached_property
    def data(self) -> StepData:
        """The tensors of the step."""
        return step_data(self.step, self.dtype, self.combination.device)

    def plan(self, *, deterministic: bool = False) -> Plan:
        """Plan the step.

        Raises:
            NSAError: As :meth:`Combination.plan`.
        """
        return decode_plan(self.combination, self.step, self.dtype, deterministic=deterministic)

    def missing_form(self, name: str) -> Finding:
        """Return the finding of a check that does not apply: no fused form ``name``."""
        backends = {choice.backend for choice in self.plan().choices.values()}
        several = "the slots are of several backends"
        why = several if len(backends) > 1 else f"{backends.pop()} has no fused {name}"
        return self.finding("", name, None, detail=why)


def case_check(
    name: str,
) -> Callable[[Callable[[CaseUnderTest], Iterator[Finding]]], CaseCheck]:
    """Make a check of cases: a function of (combination, case, dtype) that yields findings.

    Args:
        name: Name of the check in findings.
    """

    def declare(check: Callable[[CaseUnderTest], Iterator[Finding]]) -> CaseCheck:
        @functools.wraps(check)
        def run(combination: Combination, case: Case, dtype: torch.dtype) -> Iterator[Finding]:
            return check(CaseUnderTest(name, case, dtype, combination))

        return run

    return declare


def step_check(
    name: str,
) -> Callable[[Callable[[StepUnderTest], Iterator[Finding]]], StepCheck]:
    """Make a check of decode steps, as :func:`case_check`: of (combination, step, dtype)."""

    def declare(check: Callable[[StepUnderTest], Iterator[Finding]]) -> StepCheck:
        @functools.wraps(check)
        def run(combination: Combination, step: Step, dtype: torch.dtype) -> Iterator[Finding]:
            return check(StepUnderTest(name, step.case, dtype, combination, step))

        return run

    return declare

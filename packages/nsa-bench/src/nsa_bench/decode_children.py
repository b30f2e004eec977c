"""The timed steps of a plan with a third-party backend, which run in child processes."""

from __future__ import annotations

import dataclasses

import torch

from nsa_bench.clocks import clock_for
from nsa_bench.decode_workloads import (
    DecodeCell,
    State,
    make_state,
    step_workloads,
    within_step,
)
from nsa_bench.timing import FAILED, Outcome, Performance, Workload
from nsa_core.config import NSAConfig
from nsa_core.contract import SLOTS
from nsa_core.dtypes import dtype_name
from nsa_core.errors import NSAError
from nsa_core.plan.options import PlanOptions
from nsa_core.plan.plan import Plan, resolve
from nsa_core.plan.registry import Registry
from nsa_core.util.text import describe_error
from nsa_verify.isolation.children import call_in_child


@dataclasses.dataclass(frozen=True)
class StepsInChild:
    """The timed steps of a plan with a third-party backend; every field can be pickled.

    Attributes:
        name: Name of the plan's combination.
        registry: The backends.
        config: Configuration of the layer.
        options: Options of the plan, with the backend of each slot.
        cell: The cell.
        seed: Seed of its random tensors.
    """

    name: str
    registry: Registry
    config: NSAConfig
    options: PlanOptions
    cell: DecodeCell
    seed: int

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, dtype_name(self.options.dtype))
        return dtype

    def _plan(self) -> Plan:
        return resolve(self.config, self.options, registry=self.registry)

    def _state(self) -> State:
        device = str(self.options.device)
        return make_state(self.cell, self.config, self._dtype, device, self.seed)

    def workload(self, key: str) -> Workload:
        """Return the workload ``key`` of the plan; call it in a child process."""
        device, plan = str(self.options.device), self._plan()
        steps = step_workloads(self.name, plan, self._state, self.cell, self._dtype, device)
        return next(step for step in steps if step.key == key)

    def slot_times(self, budget_s: float, limit_s: float) -> dict[str, Outcome]:
        """Time each slot within the step in a child process; return the outcome of each slot."""
        try:
            times: dict[str, Performance] = call_in_child(
                _slot_times, self, budget_s, limit_s=limit_s, doing="in a step"
            )
        except NSAError as error:
            return dict.fromkeys(SLOTS, Outcome(reason=f"{FAILED}: {describe_error(error)}"))
        return {slot: Outcome(time) for slot, time in times.items()}


def _slot_times(steps: StepsInChild, budget_s: float) -> dict[str, Performance]:
    with torch.inference_mode():
        clock = clock_for(str(steps.options.device))
        return within_step(steps._plan(), steps._state(), clock, budget_s)

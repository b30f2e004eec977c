"""The decode benchmark: whole steps, the slots within a step, a layer's step, dense attention."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from nsa_bench import child_call, entries, isolation
from nsa_bench.cells import Cell
from nsa_bench.clocks import EagerClock, clock_for
from nsa_bench.decode_workloads import (
    State,
    dense_workloads,
    make_state,
    step_costs,
    step_workloads,
    within_step,
)
from nsa_bench.gate import decode_step, judge_step
from nsa_bench.result import EAGER, LAYER, UNFUSED
from nsa_bench.roofline import Cost, Peaks
from nsa_bench.run import Bench, Subject
from nsa_bench.settings import DecodeSettings, default_cells
from nsa_bench.timing import (
    FAILED,
    MIN_SAMPLES,
    Clock,
    Outcome,
    Performance,
    Workload,
    measure,
)
from nsa_core.config import NSAConfig
from nsa_core.contract import SLOTS
from nsa_core.errors import NSAError
from nsa_core.plan.options import PlanOptions
from nsa_core.plan.plan import Plan, resolve
from nsa_core.plan.registry import Registry
from nsa_core.util.text import describe_error
from nsa_verify.problems.combination import Combination, ready_combinations

REPEATS = 5  # minimum number of samples; the spread of this many repeats is reported


class DecodeBench(Bench):
    """One run of the decode benchmark; the arguments are those of :class:`nsa_bench.run.Bench`."""

    def __init__(
        self, settings: DecodeSettings, registry: Registry, versions: dict[str, Any]
    ) -> None:
        chosen = settings.cells or default_cells(settings.device)
        self.settings = dataclasses.replace(settings, cells=chosen)
        super().__init__(self.settings, registry, versions)
        self._judged: set[tuple[Any, ...]] = set()
        self._plans: dict[Cell, dict[str, Plan]] = {}
        self._dense: dict[Cell, list[str]] = {}  # the baselines that run here

    def cells(self) -> list[Cell]:
        """Return every cell with every dtype."""
        s = self.settings
        return [cell.of(dtype, s.blocks) for cell in s.cells for dtype in s.dtypes]

    def problems(self) -> list[Cell]:
        """Return every cell."""
        return self.cells()

    def plan_and_judge(self, problem: Cell) -> None:
        """Plan the combinations of a cell; judge each once per shape, dtype and page size."""
        s, config = self.settings, problem.config
        options = step_options(problem, s.device)
        combos = list(s.combos) or ready_combinations(
            self.registry, config, dataclasses.replace(options, batch=None, seq_len=None)
        )
        plans = self._plans.setdefault(problem, {})
        for combo in combos:
            if self._stop.received:
                return
            named = dataclasses.replace(options, backends=dict(combo.backends))
            plans[combo.name] = plan = resolve(config, named, registry=self.registry)
            where = f"{problem.shape} {problem.dtype} {problem.inputs}"
            entries.record_backends(self._combos, combo.name, plan, where)
            key = (combo.name, problem.shape, problem.page_size, problem.dtype)
            if key not in self._judged:
                self._judged.add(key)
                self._judge_steps(combo, problem, plan)

    def _judge_steps(self, combo: Combination, problem: Cell, plan: Plan) -> None:
        s = self.settings
        registry = isolation.only_of(self.registry, plan)
        combination = dataclasses.replace(combo, device=s.device, registry=registry)
        step, dtype = decode_step(problem, s.device, s.seed), getattr(torch, problem.dtype)
        judge = functools.partial(judge_step, combination, step, dtype)
        self.judge(combo.name, problem, plan, step.case.name, judge)

    def plans_of(self, cell: Cell) -> dict[str, Plan]:
        """Return the plan of each combination of a cell."""
        return self._plans.get(cell, {})

    def least_bytes(self, cell: Cell) -> int:
        """Return the bytes of the cache."""
        return _costs(cell)["dense"].bytes

    @torch.inference_mode()
    def time_cell(
        self,
        cell: Cell,
        plans: dict[str, Plan],
        peaks: Peaks,
        outcomes: dict[str, Outcome],
        reasons: dict[str, str],
    ) -> None:
        """Time steps and dense attention over one cache, on a GPU also without CUDA graphs."""
        s = self.settings
        with self._limits.until_deadline():
            x = make_state(cell, s.device, s.seed)
            dense, skipped = dense_workloads(x, cell.config)
        self._skipped |= {
            f"{name}, {cell.shape} {cell.dtype}": why for name, why in skipped.items()
        }
        self._dense[cell] = [work.key for work in dense]
        steps = [
            (work, name)
            for name, plan in plans.items()
            for work in step_workloads(name, plan, lambda: x, cell, s.device)
        ]
        baselines = [(work, "") for work in dense]
        outcomes |= self._timed(cell, [*baselines, *steps], plans, self._clock)
        if s.device.startswith("cuda"):
            eager = [
                (dataclasses.replace(work, key=work.key + EAGER), name) for work, name in steps
            ]
            outcomes |= self._timed(cell, eager, plans, EagerClock())
        for name, plan in plans.items():
            if self._stop.received or time.monotonic() > self._deadline:
                return  # a part without a time then has its step's reason, or none
            times = self._slot_times(cell, name, plan, x)
            outcomes |= {slot_key(name, slot): outcome for slot, outcome in times.items()}

    def _timed(
        self,
        cell: Cell,
        workloads: Sequence[tuple[Workload, str]],
        plans: Mapping[str, Plan],
        clock: Clock,
    ) -> dict[str, Outcome]:
        """Time workloads and their combinations together, third-party backends in children."""
        s, is_eager = self.settings, isinstance(clock, EagerClock)
        with contextlib.ExitStack() as children:
            prepared = []
            for workload, name in workloads:
                limited = dataclasses.replace(workload, limited=self._limits.first_call)
                if name and isolation.is_foreign(self.registry, plans[name]):
                    limited = self._in_child(cell, name, plans[name], limited, children)
                prepared.append(limited)
            return measure(
                prepared,
                clock,
                budget_s=s.budget_s,
                deadline=self._deadline,
                limit_s=s.cell_limit_s,
                min_samples=MIN_SAMPLES if is_eager else REPEATS,
                stop=self._stop,
            )

    def _in_child(
        self, cell: Cell, name: str, plan: Plan, workload: Workload, children: contextlib.ExitStack
    ) -> Workload:
        """Let a child process prepare a workload of a plan and take its samples."""
        device, key = self.settings.device, workload.key
        place = (cell, device, self.settings.seed)
        planner = self._planner(cell, plan)
        make = functools.partial(step_in_child, planner, *place, name, key.removesuffix(EAGER))
        limits, eager = (self._limits, self._stop, children), key.endswith(EAGER)
        return child_call.in_child(workload, make, device, *limits, eager=eager, inference=True)

    def _planner(self, cell: Cell, plan: Plan) -> Callable[[NSAConfig], Plan]:
        options = step_options(cell, self.settings.device)
        return isolation.planner(self.registry, plan, options)

    def _slot_times(self, cell: Cell, name: str, plan: Plan, x: State) -> dict[str, Outcome]:
        """Return the outcome of each slot within the step of a plan."""
        s = self.settings
        if not isolation.is_foreign(self.registry, plan):
            with self._limits.until_deadline():
                times = within_step(plan, x, self._clock, s.budget_s)
        else:
            arguments = (self._planner(cell, plan), cell, s.device, s.seed, s.budget_s)
            limit_s = self._deadline - time.monotonic()
            try:
                times = isolation.call_in_child(
                    slots_in_child, *arguments, limit_s=limit_s, doing="in a step"
                )
            except NSAError as error:
                return dict.fromkeys(SLOTS, Outcome(reason=f"{FAILED}: {describe_error(error)}"))
        return {slot: Outcome(performance) for slot, performance in times.items()}

    def subjects_of(self, cell: Cell, outcomes: Mapping[str, Outcome]) -> Iterator[Subject]:
        """Yield the steps, dense attention, and the other ways to run a step that have a time.

        Only a step that was run slot by slot has parts.
        """
        plans, costs = self.plans_of(cell), _costs(cell)

        def step(subject: str) -> Subject:
            combo = subject.removesuffix(UNFUSED)
            plan = plans.get(combo)
            parts: dict[str, tuple[str, str, Cost]] = {}
            if plan is not None and (subject.endswith(UNFUSED) or "step" not in plan.fused):
                parts = {
                    slot: (plan.choices[slot].backend, slot_key(combo, slot), costs[slot])
                    for slot in SLOTS
                }
            kind = "layer" if LAYER in subject else "combo"
            return Subject(subject, kind, subject, costs["total"], parts)

        dense = self._dense.get(cell, [])
        yield from map(step, plans)
        yield from (Subject(name, "dense", name, costs["dense"], {}) for name in dense)
        variants = [key for key in outcomes if any(key.startswith(name + ", ") for name in plans)]
        yield from (step(key) for key in variants if key not in plans and key not in dense)


def slot_key(combo: str, slot: str) -> str:
    """Return the key of a slot's time within a combination's step."""
    return f"{slot} in {combo}"


def _costs(cell: Cell) -> dict[str, Cost]:
    """Return the costs of a step; those of dense attention have the bytes of the cache."""
    element = torch.finfo(getattr(torch, cell.dtype)).bits // 8
    return step_costs(cell.config, cell.batch, cell.length, element)


def step_options(cell: Cell, device: str) -> PlanOptions:
    """Return the options of a plan for a step of a cell, for the backends that ``auto`` chooses."""
    return PlanOptions(
        device=device,
        dtype=getattr(torch, cell.dtype),
        phase="decode",
        page_size=cell.page_size,
        batch=cell.batch,
        seq_len=cell.length,
    )


def step_in_child(
    planner: Callable[[NSAConfig], Plan], cell: Cell, device: str, seed: int, name: str, key: str
) -> Workload:
    """Return a workload of a plan; call it in a child process.

    Args:
        planner: Returns the plan.
        cell: The cell.
        device: The device of the run.
        seed: Seed of the random tensors.
        name: Name of the plan's combination.
        key: Key of the workload.
    """
    plan = planner(cell.config)
    workloads = step_workloads(name, plan, lambda: make_state(cell, device, seed), cell, device)
    return next(workload for workload in workloads if workload.key == key)


@torch.inference_mode()
def slots_in_child(
    planner: Callable[[NSAConfig], Plan], cell: Cell, device: str, seed: int, budget_s: float
) -> dict[str, Performance]:
    """Time each slot within the step of a plan; call it in a child process."""
    plan, state = planner(cell.config), make_state(cell, device, seed)
    return within_step(plan, state, clock_for(device), budget_s)

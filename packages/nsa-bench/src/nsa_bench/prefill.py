"""The prefill benchmark: whole calls, their kernels alone, dense attention and other libraries.

Cells run in order of length, the shortest first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from nsa_bench import cells, entries, isolation
from nsa_bench.baselines import Baseline
from nsa_bench.cells import Cell
from nsa_bench.gate import gate_case, judge_plan, long_cases
from nsa_bench.rivals import check_rivals
from nsa_bench.roofline import Peaks
from nsa_bench.run import Bench, Subject
from nsa_bench.settings import Settings
from nsa_bench.slow_calls import SlowCalls
from nsa_bench.subjects import Subjects
from nsa_bench.timing import Outcome, measure
from nsa_core.errors import InvalidInput
from nsa_core.plan.default_plan import planned_length
from nsa_core.plan.plan import Plan, resolve
from nsa_core.plan.registry import Registry
from nsa_verify.problems.combination import ready_combinations


class PrefillBench(Bench):
    """One run of the prefill benchmark; the arguments are those of :class:`nsa_bench.run.Bench`.

    Raises:
        InvalidInput: A phase or rival is unknown, or a checkpoint cannot be used.
        BackendUnavailable: A checkpoint is given and safetensors is not installed.
    """

    def __init__(self, settings: Settings, registry: Registry, versions: dict[str, Any]) -> None:
        unknown = [phase for phase in settings.phases if phase not in cells.PHASES]
        if unknown:
            raise InvalidInput(
                f"phase must be one of {', '.join(cells.PHASES)}; got {', '.join(unknown)}"
                + "; nsa bench decode times steps of decoding" * ("decode" in unknown)
            )
        check_rivals(settings.rivals or ())
        super().__init__(settings, registry, versions, settings.max_call_s)
        self.settings = settings
        self._subjects = Subjects(settings, registry)
        self._skipped = self._subjects.skipped

    def cells(self) -> list[Cell]:
        """Return the cells, shortest first, so that a time limit drops the longest lengths."""
        s = self.settings
        return [
            Cell(shape.config(s.blocks), shape.name, dtype, inputs, phase, s.batch, length)
            for length in sorted(s.lengths)
            for shape in s.shapes
            for dtype in s.dtypes
            for inputs in s.inputs
            for phase in s.phases
        ]

    def problems(self) -> list[Cell]:
        """Return the first cell of each shape and dtype."""
        return [*{(cell.shape, cell.dtype): cell for cell in self.cells()[::-1]}.values()][::-1]

    def settings_as_json(self) -> dict[str, Any]:
        """Return the settings as the result file stores them, with the facts of checkpoints."""
        models = self._subjects.models.items()
        checkpoints = {name: checkpoint.facts for name, checkpoint in models}
        return self.settings.as_json() | {"checkpoints": checkpoints}

    @functools.cached_property
    def _slow(self) -> SlowCalls:
        return SlowCalls(self._subjects, self._limits, self._clock, self._stop)

    def may_be_slow(self, cell: Cell, peaks: Peaks) -> bool:
        """Return whether a call of ``cell`` may need a child process."""
        return self._slow.may_be_slow(cell, peaks)

    def plan_and_judge(self, problem: Cell) -> None:
        """Plan and judge the combinations of a shape and dtype."""
        s, subjects, config = self.settings, self._subjects, problem.config
        combos = list(s.combos) or ready_combinations(
            self.registry, config, subjects.options(problem.dtype)
        )
        small, judged = gate_case(config, s.device, s.seed), []
        longest = {planned_length(length, False): length for length in sorted(s.lengths)}
        for seq_len, combo in itertools.product(longest, combos):
            if self._stop.received:
                return
            options = subjects.options(problem.dtype, seq_len)
            named = dataclasses.replace(options, backends=dict(combo.backends))
            plan, gate_plan = (
                resolve(each, named, registry=self.registry) for each in (config, small.config)
            )
            subjects.add(combo.name, problem, seq_len, plan)
            where = f"{problem.shape} {problem.dtype}"
            entries.record_backends(self._combos, combo.name, plan, where, seq_len)
            backends = {slot: choice.backend for slot, choice in gate_plan.choices.items()}
            target = (config, s.device, s.seed, longest[seq_len])
            for case in (small, *long_cases(self.registry, backends, *target)):
                if (combo, backends, case.name) in judged:
                    continue
                judged.append((combo, backends, case.name))
                planner = isolation.planner(self.registry, gate_plan, options)
                dtype = getattr(torch, problem.dtype)
                judge = functools.partial(
                    judge_plan, planner, case, dtype, s.device, subjects.gradients
                )
                self.judge(combo.name, problem, gate_plan, case.name, judge)

    def plans_of(self, cell: Cell) -> dict[str, Plan]:
        """Return the plan of each combination of a cell."""
        return self._subjects.plans_of(cell)

    def least_bytes(self, cell: Cell) -> int:
        """Return the bytes of the inputs and the output."""
        forward = dataclasses.replace(cell, phase="forward")
        return self._subjects.costs(forward, cell.config)["total"].bytes

    def time_cell(
        self,
        cell: Cell,
        plans: dict[str, Plan],
        peaks: Peaks,
        outcomes: dict[str, Outcome],
        reasons: dict[str, str],
    ) -> None:
        """Time whole calls, kernels and baselines, without calls that are expected to be slow."""
        s = self.settings
        baselines = {baseline.name: baseline for baseline in self._subjects.baselines(cell)}
        subjects = {cells.TOTAL + name: name for name in plans} | {name: name for name in baselines}
        reasons |= self._slow.probe(cell, subjects, peaks)
        reasons |= {
            name: reason
            for key, name in subjects.items()
            if (reason := self._slow.estimates.too_long(cell, key, s.max_call_s))
        }
        plans = {name: plan for name, plan in plans.items() if name not in reasons}
        timed_baselines = [b for name, b in baselines.items() if name not in reasons]
        outcomes |= self._time_workloads(cell, plans, timed_baselines)
        for key, outcome in outcomes.items():
            if outcome.performance is not None:
                self._slow.estimates.add(cell, key, outcome.performance.median_ms)

    def _time_workloads(
        self, cell: Cell, plans: dict[str, Plan], baselines: list[Baseline]
    ) -> dict[str, Outcome]:
        s = self.settings
        with contextlib.ExitStack() as children:
            return measure(
                [
                    self._slow.limited(cell, workload, plans, children)
                    for workload in self._subjects.workloads(cell, plans, baselines)
                ],
                self._clock,
                budget_s=s.budget_s,
                deadline=self._deadline,
                limit_s=s.cell_limit_s,
                stop=self._stop,
            )

    def subjects_of(self, cell: Cell, outcomes: Mapping[str, Outcome]) -> Iterator[Subject]:
        """Yield the combinations with their kernels, and the baselines."""
        costs = self._subjects.costs(cell, cell.config)
        for name, plan in self.plans_of(cell).items():
            keys = {"compress": ("nsa_core", "compress")}
            for part, backend in cells.kernels_of(plan, cell.length).items():
                keys[part] = (backend, cells.part_key(part, backend))
            parts = {part: (*key, costs[part]) for part, key in keys.items()}
            yield Subject(name, "combo", cells.TOTAL + name, costs["total"], parts)
        for baseline in self._subjects.baselines(cell):
            cost = self._subjects.cost(cell, baseline.name)
            yield Subject(baseline.name, baseline.kind, baseline.name, cost, {})

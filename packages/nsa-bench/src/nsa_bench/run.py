"""One run of the prefill benchmark: gates first, then every cell, then crossovers.

Cells run in order of length, the shortest first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import time
from collections.abc import Callable
from typing import Any

import torch

from nsa_bench import cells, entries, isolation, roofline
from nsa_bench.baselines import Baseline
from nsa_bench.cells import Cell
from nsa_bench.clocks import clock_for
from nsa_bench.crossover import crossovers
from nsa_bench.environment import machine
from nsa_bench.gate import NOT_CORRECT, Gate, Gates, gate_case, run_gate
from nsa_bench.limits import GRACE_S, Limits, lacks_memory
from nsa_bench.result import Interrupted, Measurement, Part, Result
from nsa_bench.rivals import check_rivals
from nsa_bench.roofline import Cost, Peaks
from nsa_bench.settings import Settings
from nsa_bench.shapes import Shape
from nsa_bench.slow_calls import SlowCalls
from nsa_bench.subjects import Subjects, gate_of
from nsa_bench.timing import INTERRUPTED, LATE, Outcome, measure, reason_of
from nsa_core.contract import LONG_SEQUENCE
from nsa_core.errors import InvalidInput
from nsa_core.plan.default_plan import is_long
from nsa_core.plan.options import PlanOptions
from nsa_core.plan.plan import Plan
from nsa_core.plan.registry import Registry
from nsa_core.util.interruption import NEVER, Interruption
from nsa_verify.isolation.children import preload
from nsa_verify.problems.cases import Case
from nsa_verify.problems.combination import Combination


class Bench:
    """One run of the prefill benchmark.

    Args:
        settings: What to measure.
        registry: The installed backends.
        versions: Facts for the result file's ``environment``, beside those of the machine.

    Raises:
        InvalidInput: A phase or rival is unknown, or a checkpoint cannot be used.
        BackendUnavailable: A checkpoint is given and safetensors is not installed.
    """

    def __init__(self, settings: Settings, registry: Registry, versions: dict[str, Any]) -> None:
        if "decode" in settings.phases:
            phases = ", ".join(settings.phases)
            raise InvalidInput(
                "phase decode is measured by itself, apart from other phases, got"
                f" {phases}; run decode separately"
            )
        unknown = [phase for phase in settings.phases if phase not in cells.PHASES]
        if unknown:
            raise InvalidInput(
                f"phase must be one of {', '.join(cells.PHASES)}, decode; got {', '.join(unknown)}"
            )
        check_rivals(settings.rivals or ())
        self.settings, self.registry, self._versions = settings, registry, versions
        self._started = time.monotonic()
        self._deadline = self._started + settings.time_limit_s
        self._limits = Limits.of_run(self._deadline, settings.max_call_s, settings.device)
        self._gates = Gates(self._limits)
        self._measurements: list[Measurement] = []
        self._stop = NEVER
        self._combos: dict[str, dict[str, str]] = {}
        self._subjects = Subjects(settings, registry)

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

    def run(
        self, advance: Callable[[str], None] = lambda label: None, stop: Interruption = NEVER
    ) -> Result:
        """Measure every cell, or as many as finish before an interruption.

        Args:
            advance: Called with a label after each finished gate and cell.
            stop: Reports an interruption by a signal.

        Returns:
            The result; ``result.interrupted`` is set if cells are missing.

        Raises:
            Unsupported, BackendUnavailable, InvalidInput: A combination in the settings cannot run
                here.
        """
        s, peaks, left = self.settings, dict[str, Peaks](), len(self.cells())
        self._stop = stop
        environment = self._versions | machine(s.device)  # after a signal it would take too long
        with stop.stop_on_interrupt(GRACE_S):
            peaks |= {
                name: roofline.measure_peaks(s.device, getattr(torch, name)) for name in s.dtypes
            }
            self._clock = clock_for(s.device)
            self._slow = SlowCalls(self._subjects, self._limits, self._clock, stop)
            if isolation.may_be_foreign(self.registry, {}) or any(
                self._slow.may_be_slow(cell, peaks[cell.dtype]) for cell in self.cells()
            ):
                preload([__name__])  # while the gates run
            for shape, dtype in itertools.product(s.shapes, s.dtypes):
                self._plan_and_judge(shape, dtype)
                advance(f"gate {shape.name}, {dtype}")
            for cell in self.cells():
                if stop.received:
                    break
                self._measure_cell(cell, peaks[cell.dtype])
                left -= not stop.received
                advance(f"{cell.shape}, {cell.dtype}, {cell.inputs}, {cell.phase}, S={cell.length}")
        return Result(
            settings=s.as_json()
            | {
                "checkpoints": {
                    name: checkpoint.facts for name, checkpoint in self._subjects.models.items()
                }
            },
            environment=environment,
            combos=self._combos,
            skipped=self._subjects.skipped,
            peaks=peaks,
            gates=self._gates.done,
            measurements=self._measurements,
            crossovers=crossovers(self._measurements),
            seconds=round(time.monotonic() - self._started, 2),
            interrupted=Interrupted.by(stop, left, len(self.cells())),
        )

    def _plan_and_judge(self, shape: Shape, dtype_name: str) -> None:
        """Plan and judge the combinations of a shape and dtype."""
        s, dtype, config = (
            self.settings,
            getattr(torch, dtype_name),
            shape.config(self.settings.blocks),
        )
        options = PlanOptions(device=s.device, dtype=dtype, needs_grad=self._subjects.gradients)
        combos = list(s.combos) or isolation.combinations(self.registry, config, options)
        case = gate_case(config, s.device, s.seed)
        judged = []
        for long, combo in itertools.product(
            sorted({is_long(length, False) for length in s.lengths}), combos
        ):
            if self._stop.received:
                return
            plan, gate_plan = (
                self._subjects.plan(config, dtype, combo, long),
                self._subjects.plan(case.config, dtype, combo, long),
            )
            self._subjects.add(combo, shape.name, dtype_name, long, plan)
            where = f"{shape.name} {dtype_name}" + f" from {LONG_SEQUENCE} tokens on" * long
            entries.record_backends(self._combos, combo.name, plan, where)
            backends = {slot: choice.backend for slot, choice in gate_plan.choices.items()}
            if (combo, backends) not in judged:
                judged.append((combo, backends))
                gate = functools.partial(self._gate, combo, gate_plan, case, dtype, shape, long)
                self._gates.judge(combo.name, shape.name, dtype_name, gate)

    def _gate(
        self,
        combo: Combination,
        plan: Plan,
        case: Case,
        dtype: torch.dtype,
        shape: Shape,
        long: bool,
    ) -> Gate:
        """Judge a combination, in a child process if a third-party backend takes part."""
        s = self.settings
        arguments = (combo.name, plan, case, dtype, s.device, self._subjects.gradients, shape.name)
        if not isolation.is_foreign(self.registry, plan):
            return run_gate(*arguments)
        return isolation.gate_in_child(
            gate_of,
            s,
            self.registry,
            combo,
            case,
            dtype,
            shape.name,
            long,
            failed=isolation.failed_gate(combo.name, shape.name, dtype, case.name),
            device=s.device,
            deadline=self._deadline,
        )

    def _measure_cell(self, cell: Cell, peaks: Peaks) -> None:
        s = self.settings
        plans = self._subjects.plans_of(cell)
        baselines = {baseline.name: baseline for baseline in self._subjects.baselines(cell)}
        reasons = self._not_judged(cell)
        if no_memory := self._lacks_memory(cell):
            reasons |= dict.fromkeys([*plans, *baselines], no_memory)
        subjects = {cells.TOTAL + name: name for name in plans if name not in reasons}
        subjects |= {name: name for name in baselines if name not in reasons}
        reasons |= self._slow.probe(cell, subjects, peaks)
        reasons |= {
            name: reason
            for key, name in subjects.items()
            if (reason := self._slow.estimates.too_long(cell, key, s.max_call_s))
        }
        timed_plans = {name: plan for name, plan in plans.items() if name not in reasons}
        timed_baselines = [b for name, b in baselines.items() if name not in reasons]
        outcomes: dict[str, Outcome] = {}
        if time.monotonic() < self._deadline and (timed_plans or timed_baselines):
            try:
                outcomes = self._time_workloads(cell, timed_plans, timed_baselines)
            except RuntimeError as error:  # a kernel that broke the device fails all later calls
                reasons |= dict.fromkeys([*timed_plans, *baselines], reason_of(error))
        for key, outcome in outcomes.items():
            if outcome.performance is not None:
                self._slow.estimates.add(cell, key, outcome.performance.median_ms)
        self._record(cell, peaks, outcomes, reasons, [*plans], baselines)
        gc.collect()  # retained autograd graphs hold most of the memory
        if s.device.startswith("cuda"):
            with contextlib.suppress(RuntimeError):
                torch.cuda.empty_cache()

    def _lacks_memory(self, cell: Cell) -> str:
        """Return why a cell cannot run: its inputs and its output alone exceed the memory."""
        forward = self._subjects.costs(dataclasses.replace(cell, phase="forward"), cell.config)
        return lacks_memory(forward["total"].bytes, self.settings.device)

    def _not_judged(self, cell: Cell) -> dict[str, str]:
        """Return the combinations of a cell that may not be timed, and the reason of each."""
        where = (cell.shape, cell.dtype)
        late = INTERRUPTED if self._stop.received else LATE
        reasons = dict.fromkeys(self._gates.unjudged(*where), late)
        return reasons | dict.fromkeys(self._gates.failed(*where), NOT_CORRECT)

    def _time_workloads(
        self, cell: Cell, timed_plans: dict[str, Plan], timed_baselines: list[Baseline]
    ) -> dict[str, Outcome]:
        s = self.settings
        with contextlib.ExitStack() as children:
            return measure(
                [
                    self._slow.limited(cell, workload, timed_plans, children)
                    for workload in self._subjects.workloads(cell, timed_plans, timed_baselines)
                ],
                self._clock,
                budget_s=s.budget_s,
                deadline=self._deadline,
                limit_s=s.cell_limit_s,
                stop=self._stop,
            )

    def _record(
        self,
        cell: Cell,
        peaks: Peaks,
        outcomes: dict[str, Outcome],
        reasons: dict[str, str],
        plans: list[str],
        baselines: dict[str, Baseline],
    ) -> None:
        costs = self._subjects.costs(cell, cell.config)
        late = Outcome(reason=INTERRUPTED if self._stop.received else LATE)
        measurements = []
        for name in [*plans, *baselines]:
            is_combo = name in plans
            outcome = (
                Outcome(reason=reasons[name])
                if name in reasons
                else outcomes.get(cells.TOTAL * is_combo + name, late)
            )
            parts = (
                self._parts(cell, name, outcomes, costs, peaks)
                if is_combo and name not in reasons
                else {}
            )
            measurements.append(
                entries.measurement(
                    "combo" if is_combo else baselines[name].kind,
                    outcome,
                    self._subjects.cost(cell, name),
                    peaks,
                    subject=name,
                    shape=cell.shape,
                    dtype=cell.dtype,
                    inputs=cell.inputs,
                    phase=cell.phase,
                    batch=cell.batch,
                    length=cell.length,
                    parts=parts,
                )
            )
        self._measurements += entries.add_dense_ratios(measurements)

    def _parts(
        self,
        cell: Cell,
        combo: str,
        outcomes: dict[str, Outcome],
        costs: dict[str, Cost],
        peaks: Peaks,
    ) -> dict[str, Part]:
        plan = self._subjects.plans_of(cell)[combo]
        keys = {"compress": ("nsa_core", "compress")}
        for name, backend in cells.kernels_of(plan, cell.length).items():
            keys[name] = (backend, cells.part_key(name, backend))
        parts = {}
        for name, (backend, key) in keys.items():
            if key in outcomes:
                parts[name] = entries.part(backend, outcomes[key], costs[name], peaks)
        return parts

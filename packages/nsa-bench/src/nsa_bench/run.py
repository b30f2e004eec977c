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

from nsa_bench import cells, entries, isolation, remote, roofline
from nsa_bench.baselines import Baseline, dense_baselines
from nsa_bench.cells import Cell
from nsa_bench.clocks import clock_for
from nsa_bench.crossover import crossovers
from nsa_bench.environment import machine
from nsa_bench.estimates import CHILD_MS, SLOWDOWN, Estimates, probe_length
from nsa_bench.gate import NOT_CORRECT, Gate, gate_case, run_gate
from nsa_bench.inputs import Inputs, load_models, make_inputs
from nsa_bench.limits import GRACE_S, Limits
from nsa_bench.result import Interrupted, Measurement, Part, Result
from nsa_bench.rivals import check_rivals, rivals
from nsa_bench.roofline import Cost, Peaks
from nsa_bench.settings import Settings
from nsa_bench.shapes import Shape
from nsa_bench.timing import (
    FAILED,
    INTERRUPTED,
    LATE,
    Outcome,
    Prepared,
    TimeUp,
    Workload,
    measure,
)
from nsa_core.config import NSAConfig
from nsa_core.contract import LONG_SEQUENCE, SLOTS
from nsa_core.dispatch.default_plan import is_long
from nsa_core.dispatch.options import PlanOptions
from nsa_core.dispatch.plan import Plan, resolve
from nsa_core.dispatch.registry import Registry
from nsa_core.errors import InvalidInput, NSAError
from nsa_core.util.interruption import NEVER, Interruption
from nsa_core.util.text import describe_error
from nsa_verify.cases import Case
from nsa_verify.combination import Combination
from nsa_verify.isolation.children import preload


class Bench:
    """One run of the prefill benchmark.

    Args:
        settings: What to measure.
        registry: The installed backends.
        versions: Facts for the result file's ``environment``, beside those of the machine.
        is_child: Whether this process is a child in which third-party backends may run.

    Raises:
        InvalidInput: A phase or rival is unknown, or a checkpoint cannot be used.
        BackendUnavailable: A checkpoint is given and safetensors is not installed.
    """

    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        versions: dict[str, Any],
        *,
        is_child: bool = False,
    ) -> None:
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
        self._is_child = is_child
        self._gradients = any(phase != "forward" for phase in settings.phases)
        self._started = time.monotonic()
        self._deadline = self._started + settings.time_limit_s
        # (shape, dtype, whether the sequence is long) -> combination -> plan
        self._plans: dict[tuple[str, str, bool], dict[str, Plan]] = {}
        # (combination, shape, dtype) -> how the user named it
        self._combinations: dict[tuple[str, str, str], Combination] = {}
        self._gates: list[Gate] = []
        self._unjudged: set[tuple[str, str, str]] = set()  # the keys without a complete verdict
        self._measurements: list[Measurement] = []
        self._skipped: dict[str, str] = {}
        self._estimates = Estimates()
        self._limits = Limits.of_run(self._deadline, settings.max_call_s, settings.device)
        self._stop = NEVER
        self._combos: dict[str, dict[str, str]] = {}
        self._dense: dict[str, list[Baseline]] = {}
        self._models = load_models(settings.checkpoints, settings.shapes, settings.inputs)

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
            if isolation.may_be_foreign(self.registry, {}) or any(
                self._may_be_slow(cell, peaks[cell.dtype]) for cell in self.cells()
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
                "checkpoints": {name: checkpoint.facts for name, checkpoint in self._models.items()}
            },
            environment=environment,
            combos=self._combos,
            skipped=self._skipped,
            peaks=peaks,
            gates=self._gates,
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
        options = PlanOptions(device=s.device, dtype=dtype, needs_grad=self._gradients)
        combos = list(s.combos) or isolation.combinations(self.registry, config, options)
        case = gate_case(config, s.device, s.seed)
        judged = []
        for long, combo in itertools.product(
            sorted({is_long(length, False) for length in s.lengths}), combos
        ):
            if self._stop.received:
                return
            plan, gate_plan = (
                self._plan(config, dtype, combo, long),
                self._plan(case.config, dtype, combo, long),
            )
            self._plans.setdefault((shape.name, dtype_name, long), {})[combo.name] = plan
            self._combinations[combo.name, shape.name, dtype_name] = combo
            where = f"{shape.name} {dtype_name}" + f" from {LONG_SEQUENCE} tokens on" * long
            entries.record_backends(self._combos, combo.name, plan, where)
            backends = {slot: choice.backend for slot, choice in gate_plan.choices.items()}
            if (combo, backends) not in judged:
                judged.append((combo, backends))
                try:
                    with self._limits.until_deadline():
                        self._gates.append(self._gate(combo, gate_plan, case, dtype, shape, long))
                except TimeUp:
                    self._unjudged.add((combo.name, shape.name, dtype_name))

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
        arguments = (combo.name, plan, case, dtype, s.device, self._gradients, shape.name)
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

    def _plan(self, config: NSAConfig, dtype: torch.dtype, combo: Combination, long: bool) -> Plan:
        """Return the plan that a call with these backends would use."""
        options = PlanOptions(
            device=self.settings.device,
            dtype=dtype,
            backends=dict(combo.backends),
            needs_grad=self._gradients,
            seq_len=LONG_SEQUENCE if long else None,
        )
        if not self._is_child:
            isolation.check_plan(self.registry, config, options)
        return resolve(config, options, registry=self.registry)

    def _plans_of(self, cell: Cell) -> dict[str, Plan]:
        return self._plans.get((cell.shape, cell.dtype, is_long(cell.length, False)), {})

    def _baselines(self, cell: Cell) -> list[Baseline]:
        key = f"{cell.shape} {cell.dtype}"
        if key not in self._dense:
            target = (cell.config, self.settings.device, getattr(torch, cell.dtype))
            self._dense[key] = dense_baselines(*target) + rivals(self.settings.rivals, *target)
            for baseline in self._dense[key]:
                if baseline.reason:
                    self._skipped[f"{baseline.name}, {key}"] = baseline.reason
        return [baseline for baseline in self._dense[key] if not baseline.reason]

    def _measure_cell(self, cell: Cell, peaks: Peaks) -> None:
        s = self.settings
        plans = self._plans_of(cell)
        baselines = {baseline.name: baseline for baseline in self._baselines(cell)}
        reasons = self._not_judged(cell)
        subjects = {cells.TOTAL + name: name for name in plans if name not in reasons}
        subjects |= {name: name for name in baselines}
        reasons |= self._probe(cell, subjects, peaks)
        reasons |= {
            name: reason
            for key, name in subjects.items()
            if (reason := self._estimates.too_long(cell, key, s.max_call_s))
        }
        timed_plans = {name: plan for name, plan in plans.items() if name not in reasons}
        timed_baselines = [b for name, b in baselines.items() if name not in reasons]
        outcomes: dict[str, Outcome] = {}
        if time.monotonic() < self._deadline and (timed_plans or timed_baselines):
            try:
                outcomes = self._time_workloads(cell, timed_plans, timed_baselines)
            except torch.OutOfMemoryError:
                reasons |= dict.fromkeys([*timed_plans, *baselines], "out of memory")
            except RuntimeError as error:  # a kernel that broke the device fails all later calls
                reasons |= dict.fromkeys(
                    [*timed_plans, *baselines], f"{FAILED}: {describe_error(error)}"
                )
        for key, outcome in outcomes.items():
            if outcome.performance is not None:
                self._estimates.add(cell, key, outcome.performance.median_ms)
        self._record(cell, peaks, outcomes, reasons, [*plans], baselines)
        gc.collect()  # retained autograd graphs hold most of the memory
        if s.device.startswith("cuda"):
            with contextlib.suppress(RuntimeError):
                torch.cuda.empty_cache()

    def _not_judged(self, cell: Cell) -> dict[str, str]:
        """Return the combinations of a cell that may not be timed, and the reason of each."""
        where = (cell.shape, cell.dtype)
        gates = [gate for gate in self._gates if (gate.shape, gate.dtype) == where]
        unjudged = {combo for combo, *rest in self._unjudged if tuple(rest) == where}
        reasons = dict.fromkeys(unjudged, INTERRUPTED if self._stop.received else LATE)
        return reasons | {gate.combo: NOT_CORRECT for gate in gates if not gate.ok}

    def _time_workloads(
        self, cell: Cell, timed_plans: dict[str, Plan], timed_baselines: list[Baseline]
    ) -> dict[str, Outcome]:
        s = self.settings
        with contextlib.ExitStack() as children:
            return measure(
                [
                    self._limited(cell, workload, timed_plans, children)
                    for workload in self._workloads(cell, timed_plans, timed_baselines)
                ],
                self._clock,
                budget_s=s.budget_s,
                deadline=self._deadline,
                limit_s=s.cell_limit_s,
                stop=self._stop,
            )

    def _workloads(
        self, cell: Cell, plans: dict[str, Plan], baselines: list[Baseline]
    ) -> list[Workload]:
        s = self.settings
        # The kernels of "both" are timed alone only if forward and backward are not measured.
        parts = cell.phase != "both" or not {"forward", "backward"} <= {*s.phases}

        @functools.cache
        def inputs() -> Inputs:
            return make_inputs(
                cell.inputs,
                cell.config,
                batch=cell.batch,
                length=cell.length,
                dtype=getattr(torch, cell.dtype),
                device=s.device,
                seed=s.seed,
                text=s.text,
                model=self._models[cell.shape].model if self._models else None,
            )

        return cells.cell_workloads(inputs, cell.config, cell.phase, plans, baselines, parts)

    def _limited(
        self,
        cell: Cell,
        workload: Workload,
        plans: dict[str, Plan],
        children: contextlib.ExitStack,
    ) -> Workload:
        """Let the limits end the first call of a workload; run a slow one in a child process."""
        limited = dataclasses.replace(workload, limited=self._limits.first_call)
        combo = cells.combo_of(workload.key, plans)
        expected_ms = self._estimates.expected_ms(cell, workload.key)
        if expected_ms is None and combo:
            # Nothing is known of this kernel alone; it is at most as slow as its combination.
            expected_ms = self._estimates.expected_ms(cell, cells.TOTAL + combo)
        foreign = bool(combo) and isolation.is_foreign(self.registry, plans[combo])
        if self._is_child or (not foreign and (expected_ms is None or expected_ms <= CHILD_MS)):
            return limited
        make = functools.partial(
            workload_in_child,
            self.settings,
            self.registry,
            self._combinations.get((combo, cell.shape, cell.dtype)),
            cell,
            workload.key,
        )

        def start() -> Prepared:
            try:
                call = remote.RemoteCall(make, self.settings.device, self._limits, self._stop)
                children.callback(call.end)
                return call.prepare()
            except remote.CannotStart as error:
                if foreign:
                    raise RuntimeError(str(error)) from error
                return self._clock.prepare(limited)

        return dataclasses.replace(limited, start=start)

    def _probe(self, cell: Cell, subjects: dict[str, str], peaks: Peaks) -> dict[str, str]:
        """Call each uncertain subject on fewer tokens, to estimate its time in ``cell``.

        Args:
            cell: The cell.
            subjects: Key of the workload -> subject, of each subject that may be timed.
            peaks: The machine's peak rates.

        Returns:
            The subjects that a limit ended, and the reason of each.
        """
        uncertain = [
            key
            for key, name in subjects.items()
            if self._estimates.expected_ms(cell, key) is None
            and not self._is_foreign(cell, name)  # its own children limit it
            and self._floor_ms(cell, name, peaks) * SLOWDOWN > CHILD_MS
        ]
        short = dataclasses.replace(cell, length=probe_length(cell, self.settings.device))
        names = {subjects[key] for key in uncertain}
        plans = {name: plan for name, plan in self._plans_of(cell).items() if name in names}
        baselines = [b for b in self._baselines(cell) if b.name in names]
        reasons = {}
        for workload in self._workloads(short, plans, baselines) if uncertain else []:
            if workload.key not in uncertain or self._stop.received:
                continue
            name = subjects[workload.key]
            try:
                call, _ = self._clock.first_call(
                    dataclasses.replace(workload, limited=self._limits.first_call)
                )
                growth = self._floor_ms(cell, name, peaks) / self._floor_ms(short, name, peaks)
                expected_ms = self._clock.sample(call, 1) * growth
                self._estimates.add_probe(cell, workload.key, short.length, expected_ms)
            except TimeUp as error:
                reasons[name] = str(error)
            except (NSAError, RuntimeError):  # the cell itself reports it
                continue
        return reasons

    def _is_foreign(self, cell: Cell, subject: str) -> bool:
        """Return whether ``subject`` is a combination with a third-party backend."""
        plan = self._plans_of(cell).get(subject)
        return plan is not None and isolation.is_foreign(self.registry, plan)

    def _may_be_slow(self, cell: Cell, peaks: Peaks) -> bool:
        costs = self._costs(cell, cell.config)
        floors = [peaks.floor_ms(costs[name]) for name in ("dense", "total")]
        return max(floors) * SLOWDOWN > CHILD_MS

    def _floor_ms(self, cell: Cell, subject: str, peaks: Peaks) -> float:
        return peaks.floor_ms(self._cost(cell, subject))

    def _cost(self, cell: Cell, subject: str) -> Cost:
        """Return the cost of a combination or baseline."""
        baseline = {b.name: b for b in self._baselines(cell)}.get(subject)
        config = cell.config if baseline is None else baseline.config or cell.config
        is_dense = baseline is not None and baseline.config is None
        return self._costs(cell, config)["dense" if is_dense else "total"]

    def _costs(self, cell: Cell, config: NSAConfig) -> dict[str, Cost]:
        element = torch.finfo(getattr(torch, cell.dtype)).bits // 8
        return roofline.part_costs(config, cell.batch, cell.length, element, cell.phase)

    def _record(
        self,
        cell: Cell,
        peaks: Peaks,
        outcomes: dict[str, Outcome],
        reasons: dict[str, str],
        plans: list[str],
        baselines: dict[str, Baseline],
    ) -> None:
        costs = self._costs(cell, cell.config)
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
                    self._cost(cell, name),
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
        plan = self._plans_of(cell)[combo]
        keys = {"compress": ("nsa_core", "compress")}
        keys |= {slot: (plan.choices[slot].backend, cells.part_key(slot, plan)) for slot in SLOTS}
        parts = {}
        for name in roofline.PARTS:
            backend, key = keys[name]
            if key in outcomes:
                parts[name] = entries.part(backend, outcomes[key], costs[name], peaks)
        return parts


def workload_in_child(
    settings: Settings, registry: Registry, combo: Combination | None, cell: Cell, key: str
) -> Workload:
    """Set up one workload of a cell in a child process.

    Args:
        settings: The settings of the run.
        registry: Its backends.
        combo: The combination whose total or kernel is timed; None for a baseline.
        cell: The cell.
        key: Key of the workload.
    """
    bench = Bench(settings, registry, {}, is_child=True)
    plans = {}
    if combo is not None:
        dtype, long = getattr(torch, cell.dtype), is_long(cell.length, False)
        plans[combo.name] = bench._plan(cell.config, dtype, combo, long)
    baselines = [] if combo else [b for b in bench._baselines(cell) if b.name == key]
    return next(w for w in bench._workloads(cell, plans, baselines) if w.key == key)


def gate_of(
    settings: Settings,
    registry: Registry,
    combo: Combination,
    case: Case,
    dtype: torch.dtype,
    shape: str,
    long: bool,
) -> Gate:
    """Plan and judge a combination in a child process."""
    bench = Bench(settings, registry, {}, is_child=True)
    plan = bench._plan(case.config, dtype, combo, long)
    return run_gate(combo.name, plan, case, dtype, settings.device, bench._gradients, shape)

"""One run of the decode benchmark: gates first, then every cell.

A cell times whole steps, the slots within a step, one step of a layer, and dense baselines.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from nsa_bench import entries, isolation, remote, roofline
from nsa_bench.clocks import EagerClock, clock_for
from nsa_bench.decode_children import StepsInChild
from nsa_bench.decode_gate import decode_gate
from nsa_bench.decode_settings import DecodeSettings
from nsa_bench.decode_workloads import (
    DecodeCell,
    State,
    default_cells,
    dense_workloads,
    layer_config,
    make_state,
    step_costs,
    step_workloads,
    within_step,
)
from nsa_bench.environment import machine
from nsa_bench.gate import NOT_CORRECT, Gates
from nsa_bench.limits import GRACE_S, Limits, lacks_memory
from nsa_bench.result import EAGER, LAYER, UNFUSED, Interrupted, Measurement, Part, Result
from nsa_bench.roofline import Cost, Peaks
from nsa_bench.timing import (
    INTERRUPTED,
    LATE,
    MIN_ROUNDS,
    Clock,
    Outcome,
    Prepared,
    TimeUp,
    Workload,
    measure,
    reason_of,
)
from nsa_core.config import NSAConfig
from nsa_core.contract import SLOTS
from nsa_core.dtypes import dtype_name
from nsa_core.errors import NSAError
from nsa_core.plan.options import PlanOptions
from nsa_core.plan.plan import Plan, resolve
from nsa_core.plan.registry import Registry
from nsa_core.util.interruption import NEVER, Interruption
from nsa_verify.problems.combination import Combination

REPEATS = 5  # minimum number of rounds; the spread of this many repeats is reported
# A workload, and the steps that run it in a child process
_Timed: TypeAlias = tuple[Workload, StepsInChild | None]


class DecodeBench:
    """One run of the decode benchmark.

    Args:
        settings: What to measure.
        registry: The installed backends.
        versions: Facts for the result file's ``environment``, beside those of the machine.
    """

    def __init__(
        self, settings: DecodeSettings, registry: Registry, versions: dict[str, Any]
    ) -> None:
        self.settings = dataclasses.replace(
            settings, cells=settings.cells or default_cells(settings.device)
        )
        self.registry, self._versions = registry, versions
        self._started = time.monotonic()
        self._deadline = self._started + settings.time_limit_s
        self._judged: set[tuple[Any, ...]] = set()
        self._limits = Limits(deadline=self._deadline)
        self._gates = Gates(self._limits)
        self._measurements: list[Measurement] = []
        self._skipped: dict[str, str] = {}
        self._combos: dict[str, dict[str, str]] = {}

    def cells(self) -> list[tuple[DecodeCell, str]]:
        """Return every cell with every dtype."""
        return [(cell, dtype) for cell in self.settings.cells for dtype in self.settings.dtypes]

    def run(
        self, advance: Callable[[str], None] = lambda label: None, stop: Interruption = NEVER
    ) -> Result:
        """Measure every cell, or as many as finish before an interruption.

        Args:
            advance: Called with a label after each finished cell.
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
            plans = {
                (cell, dtype): self._plan_and_judge(cell, dtype) for cell, dtype in self.cells()
            }
            if not stop.received:
                peaks |= {
                    name: roofline.measure_peaks(s.device, getattr(torch, name))
                    for name in s.dtypes
                }
                self._clock = clock_for(s.device)
            for cell, dtype in self.cells():
                if stop.received:
                    break
                with torch.inference_mode():
                    self._measure_cell(cell, dtype, plans[cell, dtype], peaks[dtype])
                gc.collect()
                left -= not stop.received
                advance(f"{cell.shape.name}, {dtype}, B={cell.batch}, S={cell.length}")
        return Result(
            settings=s.as_json(),
            environment=environment,
            combos=self._combos,
            skipped=self._skipped,
            peaks=peaks,
            gates=self._gates.done,
            measurements=self._measurements,
            crossovers=[],
            seconds=round(time.monotonic() - self._started, 2),
            interrupted=Interrupted.by(stop, left, len(self.cells())),
        )

    def _plan_and_judge(self, cell: DecodeCell, dtype_text: str) -> dict[str, Plan]:
        """Plan each combination for a cell and judge it; return the plans by combination."""
        s, dtype = self.settings, getattr(torch, dtype_text)
        config = layer_config(cell.shape, tuple(s.blocks))
        options = PlanOptions(
            device=s.device, dtype=dtype, phase="decode", page_size=cell.page_size
        )
        combos = list(s.combos) or isolation.combinations(self.registry, config, options)
        plans = {}
        for combo in combos:
            if self._stop.received:
                break
            named = dataclasses.replace(
                options, backends=dict(combo.backends), batch=cell.batch, seq_len=cell.length
            )
            isolation.check_plan(self.registry, config, named)
            plans[combo.name] = plan = resolve(config, named, registry=self.registry)
            entries.record_backends(
                self._combos, combo.name, plan, f"{cell.shape.name} {dtype_text} {cell.inputs}"
            )
            self._judge(combo, plan, config, cell, dtype)
        return plans

    def _judge(
        self,
        combo: Combination,
        plan: Plan,
        config: NSAConfig,
        cell: DecodeCell,
        dtype: torch.dtype,
    ) -> None:
        """Judge a combination once per shape, dtype and page size."""
        key = (combo.name, cell.shape, cell.page_size, dtype)
        if key not in self._judged:
            self._judged.add(key)
            combination = dataclasses.replace(
                combo, device=self.settings.device, registry=self.registry
            )
            arguments = (combo.name, combination, config, cell, dtype, self.settings.seed)
            judge = functools.partial(decode_gate, *arguments)
            if isolation.is_foreign(self.registry, plan):
                name = f"{cell.shape.name} steps"
                judge = functools.partial(
                    isolation.gate_in_child,
                    decode_gate,
                    *arguments,
                    failed=isolation.failed_gate(combo.name, cell.shape.name, dtype, name),
                    device=self.settings.device,
                    deadline=self._deadline,
                )
            self._gates.judge(combo.name, cell.shape.name, dtype_name(dtype), judge)

    def _measure_cell(
        self, cell: DecodeCell, dtype_text: str, plans: dict[str, Plan], peaks: Peaks
    ) -> None:
        s, dtype = self.settings, getattr(torch, dtype_text)
        failed_combos = self._gates.failed(cell.shape.name, dtype_text)
        untimed = failed_combos | self._gates.unjudged(cell.shape.name, dtype_text)
        timed = {name: plan for name, plan in plans.items() if name not in untimed}
        outcomes: dict[str, Outcome] = {name: Outcome(reason=NOT_CORRECT) for name in failed_combos}
        subjects: dict[str, str] = dict.fromkeys(plans, "combo")
        config, cuda = layer_config(cell.shape, tuple(s.blocks)), s.device.startswith("cuda")
        cache_bytes = self._costs(cell, dtype_text)["dense"].bytes
        if no_memory := lacks_memory(cache_bytes, s.device):
            outcomes = dict.fromkeys(timed, Outcome(reason=no_memory)) | outcomes
            self._record(cell, dtype_text, plans, subjects, outcomes, peaks)
            return
        steps = {
            name: self._in_child(name, plan, config, cell, dtype) for name, plan in timed.items()
        }
        try:
            with self._limits.until_deadline():
                x = make_state(cell, config, dtype, s.device, s.seed)
                rivals, skipped = dense_workloads(x, config)
            self._skipped |= {
                f"{name}, {cell.shape.name} {dtype_text}": why for name, why in skipped.items()
            }
            subjects |= dict.fromkeys((work.key for work in rivals), "dense")
            workloads: list[_Timed] = [(work, None) for work in rivals]
            for name, plan in timed.items():
                workloads += [
                    (work, steps[name])
                    for work in step_workloads(name, plan, lambda: x, cell, dtype, s.device)
                ]
            limits: dict[str, Any] = {"budget_s": s.budget_s, "deadline": self._deadline}
            limits |= {"limit_s": s.cell_limit_s, "stop": self._stop}
            outcomes |= self._timed(workloads, self._clock, limits)
            if cuda:
                eager = [
                    (dataclasses.replace(work, key=work.key + EAGER), child)
                    for work, child in workloads
                    if work.key not in subjects or work.key in plans
                ]
                outcomes |= self._timed(eager, EagerClock(), limits)
            self._time_slots(timed, steps, x, outcomes)
        except TimeUp:  # _record() gives the reason
            pass
        except (NSAError, RuntimeError) as error:
            failed = Outcome(reason=reason_of(error))
            outcomes |= {name: failed for name in subjects if name not in outcomes}
        self._record(cell, dtype_text, plans, subjects, outcomes, peaks)

    def _time_slots(
        self,
        plans: dict[str, Plan],
        steps: dict[str, StepsInChild | None],
        x: State,
        outcomes: dict[str, Outcome],
    ) -> None:
        """Add the time of each slot within the step of each plan to ``outcomes``."""
        for name, plan in plans.items():
            if self._stop.received or time.monotonic() > self._deadline:
                return  # a part without a time then has its step's reason, or none
            child, budget_s = steps[name], self.settings.budget_s
            if child is not None:
                times = child.slot_times(budget_s, self._deadline - time.monotonic())
            else:
                with self._limits.until_deadline():
                    measured = within_step(plan, x, self._clock, budget_s)
                times = {slot: Outcome(time) for slot, time in measured.items()}
            outcomes |= {slot_key(name, slot): outcome for slot, outcome in times.items()}

    def _timed(
        self,
        workloads: Sequence[_Timed],
        clock: Clock,
        limits: dict[str, Any],
    ) -> dict[str, Outcome]:
        """Time workloads together, those of third-party backends in children."""
        with contextlib.ExitStack() as children:
            prepared = []
            for workload, steps in workloads:
                limited = dataclasses.replace(workload, limited=self._limits.first_call)
                if steps is not None:
                    is_eager = isinstance(clock, EagerClock)
                    limited = self._started_in_child(limited, steps, children, eager=is_eager)
                prepared.append(limited)
            rounds = MIN_ROUNDS if isinstance(clock, EagerClock) else REPEATS
            return measure(prepared, clock, min_rounds=rounds, **limits)

    def _in_child(
        self, name: str, plan: Plan, config: NSAConfig, cell: DecodeCell, dtype: torch.dtype
    ) -> StepsInChild | None:
        """Return the steps of a plan that run in a child: those of third-party backends."""
        if not isolation.is_foreign(self.registry, plan):
            return None
        options = PlanOptions(
            device=self.settings.device,
            dtype=dtype,
            phase="decode",
            page_size=cell.page_size,
            batch=cell.batch,
            seq_len=cell.length,
            backends={slot: choice.backend for slot, choice in plan.choices.items()},
        )
        return StepsInChild(name, self.registry, config, options, cell, self.settings.seed)

    def _started_in_child(
        self,
        workload: Workload,
        steps: StepsInChild,
        children: contextlib.ExitStack,
        *,
        eager: bool,
    ) -> Workload:
        """Let a child process prepare ``workload`` and take its samples."""
        make = functools.partial(steps.workload, workload.key.removesuffix(EAGER))

        def start() -> Prepared:
            try:
                return remote.prepare_in_child(
                    make,
                    self.settings.device,
                    self._limits,
                    self._stop,
                    children,
                    eager=eager,
                    inference=True,
                )
            except remote.CannotStart as error:
                raise RuntimeError(str(error)) from error

        return dataclasses.replace(workload, start=start)

    def _costs(self, cell: DecodeCell, dtype: str) -> dict[str, Cost]:
        """Return the costs of a step; those of dense attention have the bytes of the cache."""
        config = layer_config(cell.shape, tuple(self.settings.blocks))
        element = torch.finfo(getattr(torch, dtype)).bits // 8
        return step_costs(config, cell.batch, cell.length, element)

    def _record(
        self,
        cell: DecodeCell,
        dtype: str,
        plans: dict[str, Plan],
        subjects: dict[str, str],
        outcomes: dict[str, Outcome],
        peaks: Peaks,
    ) -> None:
        kinds = dict(subjects)
        for key in outcomes:
            if key not in kinds and any(key.startswith(name + ", ") for name in plans):
                kinds[key] = "layer" if LAYER in key else "combo"
        costs = self._costs(cell, dtype)
        measurements = []
        for subject, kind in kinds.items():
            plan = plans.get(subject.removesuffix(UNFUSED))
            has_parts = plan is not None and (subject.endswith(UNFUSED) or "step" not in plan.fused)
            parts = (
                _parts(subject.removesuffix(UNFUSED), plan, outcomes, costs, peaks)
                if plan is not None and has_parts
                else {}
            )
            outcome = outcomes.get(
                subject, Outcome(reason=INTERRUPTED if self._stop.received else LATE)
            )
            measurements.append(
                entries.measurement(
                    kind,
                    outcome,
                    costs["dense" if kind == "dense" else "total"],
                    peaks,
                    subject=subject,
                    shape=cell.shape.name,
                    dtype=dtype,
                    inputs=cell.inputs,
                    phase="decode",
                    batch=cell.batch,
                    length=cell.length,
                    parts=parts,
                )
            )
        self._measurements += entries.add_dense_ratios(measurements)


def slot_key(combo: str, slot: str) -> str:
    """Return the key of a slot's time within a combination's step."""
    return f"{slot} in {combo}"


def _parts(
    combo: str, plan: Plan, outcomes: dict[str, Outcome], costs: dict[str, Cost], peaks: Peaks
) -> dict[str, Part]:
    parts = {}
    for slot in SLOTS:
        outcome = outcomes.get(slot_key(combo, slot))
        if outcome is not None:
            parts[slot] = entries.part(plan.choices[slot].backend, outcome, costs[slot], peaks)
    return parts

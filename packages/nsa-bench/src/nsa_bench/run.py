"""One run of the prefill benchmark: gates first, then every cell, then crossovers.

Cells run in order of length, the shortest first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from nsa_bench import cells, entries, roofline
from nsa_bench.baselines import Baseline, dense_baselines
from nsa_bench.cells import Cell
from nsa_bench.clocks import clock_for
from nsa_bench.crossover import crossovers
from nsa_bench.environment import machine
from nsa_bench.gate import NOT_CORRECT, Gate, gate_case, run_gate
from nsa_bench.inputs import load_models, make_inputs
from nsa_bench.result import Interrupted, Measurement, Part, Result
from nsa_bench.rivals import check_rivals, rivals
from nsa_bench.roofline import Cost, Peaks
from nsa_bench.shapes import PAPER_BLOCKS, Shape
from nsa_bench.timing import FAILED, INTERRUPTED, LATE, METHODS, NOT_MEASURED, Outcome, measure
from nsa_core.config import NSAConfig
from nsa_core.contract import LONG_SEQUENCE, SLOTS
from nsa_core.dispatch.default_plan import is_long
from nsa_core.dispatch.options import PlanOptions
from nsa_core.dispatch.plan import Plan, resolve
from nsa_core.dispatch.registry import Registry
from nsa_core.errors import InvalidInput
from nsa_core.util.interruption import NEVER, Interruption
from nsa_core.util.text import describe_error
from nsa_verify.combination import Combination, ready_combinations


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a prefill benchmark.

    Attributes:
        shapes: The heads to measure.
        lengths: Tokens per sequence.
        phases: Any of "forward", "backward" and "both".
        dtypes: Names of torch dtypes.
        inputs: "random", "real" or both.
        combos: Combinations to time; empty for all that are ready.
        rivals: Other libraries to time; None for all known ones on a GPU and none elsewhere.
        blocks: l, d, l', n, w.
        batch: Number of sequences.
        device: "cpu", "cuda" or "cuda:N".
        seed: Seed of the random tensors.
        text: Text of real inputs.
        text_name: Name of the text in the result file.
        checkpoints: Models for real inputs, one per shape; empty for an untrained layer.
        budget_s: Seconds of samples per workload.
        max_call_s: Skip calls that are expected to take longer than this many seconds.
        cell_limit_s: Seconds after which a cell prepares no further workload.
        time_limit_s: Seconds after which the run prepares no further workload.
    """

    shapes: Sequence[Shape]
    lengths: Sequence[int]
    phases: Sequence[str] = ("forward", "backward")
    dtypes: Sequence[str] = ("float32",)
    inputs: Sequence[str] = ("random",)
    combos: Sequence[Combination] = ()
    rivals: Sequence[str] | None = None
    blocks: Sequence[int] = PAPER_BLOCKS
    batch: int = 1
    device: str = "cpu"
    seed: int = 0
    text: bytes = b""
    text_name: str = ""
    checkpoints: Sequence[Path] = ()
    budget_s: float = 0.3
    max_call_s: float = 5.0
    cell_limit_s: float = 60.0
    time_limit_s: float = 420.0

    def as_json(self) -> dict[str, Any]:
        """Return the settings as a result file stores them, with the text's length for the text."""
        values = dataclasses.asdict(self)
        values["shapes"] = [shape.name for shape in self.shapes]
        values["combos"] = [combo.name for combo in self.combos]
        values.pop("checkpoints")
        values |= {
            "text_bytes": len(values.pop("text")),
            "threads": torch.get_num_threads(),
            "methods": METHODS,
        }
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
        }


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
        self._gradients = any(phase != "forward" for phase in settings.phases)
        self._started = time.monotonic()
        self._deadline = self._started + settings.time_limit_s
        # (shape, dtype, whether the sequence is long) -> combination -> plan
        self._plans: dict[tuple[str, str, bool], dict[str, Plan]] = {}
        self._gates: list[Gate] = []
        self._measurements: list[Measurement] = []
        self._skipped: dict[str, str] = {}
        self._known_ms: dict[tuple[Any, ...], list[tuple[int, float]]] = {}
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
        with stop.stop_on_interrupt():
            for shape, dtype in itertools.product(s.shapes, s.dtypes):
                self._plan_and_judge(shape, dtype)
                advance(f"gate {shape.name}, {dtype}")
            if not stop.received:
                peaks |= {
                    name: roofline.measure_peaks(s.device, getattr(torch, name))
                    for name in s.dtypes
                }
                self._clock = clock_for(s.device)
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
            environment=self._versions | machine(s.device),
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
        combos = list(s.combos) or ready_combinations(self.registry, config, options)
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
            where = f"{shape.name} {dtype_name}" + f" from {LONG_SEQUENCE} tokens on" * long
            entries.record_backends(self._combos, combo.name, plan, where)
            backends = {slot: choice.backend for slot, choice in gate_plan.choices.items()}
            if (combo, backends) not in judged:
                judged.append((combo, backends))
                gate = run_gate(
                    combo.name, gate_plan, case, dtype, s.device, self._gradients, shape.name
                )
                self._gates.append(gate)

    def _plan(self, config: NSAConfig, dtype: torch.dtype, combo: Combination, long: bool) -> Plan:
        """Return the plan that a call with these backends would use."""
        options = PlanOptions(
            device=self.settings.device,
            dtype=dtype,
            backends=dict(combo.backends),
            needs_grad=self._gradients,
            seq_len=LONG_SEQUENCE if long else None,
        )
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
        gates = [
            gate for gate in self._gates if (gate.shape, gate.dtype) == (cell.shape, cell.dtype)
        ]
        correct = {gate.combo for gate in gates} - {gate.combo for gate in gates if not gate.ok}
        plans = self._plans_of(cell)
        baselines = {baseline.name: baseline for baseline in self._baselines(cell)}
        reasons: dict[str, str] = {name: NOT_CORRECT for name in plans if name not in correct}
        reasons |= {
            name: reason
            for name in [*plans, *baselines]
            if name not in reasons and (reason := self._too_long(cell, name))
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
        self._record(cell, peaks, outcomes, reasons, [*plans], baselines)
        gc.collect()  # retained autograd graphs hold most of the memory
        if s.device.startswith("cuda"):
            with contextlib.suppress(RuntimeError):
                torch.cuda.empty_cache()

    def _time_workloads(
        self, cell: Cell, timed_plans: dict[str, Plan], timed_baselines: list[Baseline]
    ) -> dict[str, Outcome]:
        s = self.settings
        x = make_inputs(
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
        # The kernels of "both" are timed alone only if forward and backward are not measured.
        parts = cell.phase != "both" or not {"forward", "backward"} <= {*s.phases}
        workloads = cells.cell_workloads(
            x, cell.config, cell.phase, timed_plans, timed_baselines, parts
        )
        return measure(
            workloads,
            self._clock,
            budget_s=s.budget_s,
            deadline=self._deadline,
            limit_s=s.cell_limit_s,
            stop=self._stop,
        )

    def _too_long(self, cell: Cell, subject: str) -> str:
        """Return why a call is not tried: its expected time exceeds the limit; "" if it is tried.

        The time is extrapolated with its growth over the last two lengths, or with S^2 after one.
        """
        known = self._known_ms.get(_curve(cell, subject))
        if known is None:
            return ""
        (length, time_ms), power = known[-1], 2.0
        if len(known) > 1:
            earlier, earlier_ms = known[-2]
            power = min(2.0, max(1.0, math.log(time_ms / earlier_ms) / math.log(length / earlier)))
        expected, limit = (
            time_ms * (cell.length / length) ** power / 1e3,
            self.settings.max_call_s,
        )
        if expected <= limit:
            return ""
        return (
            f"{NOT_MEASURED}: a call would take about {expected:.2g} s, over --max-call {limit:g}"
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
        element = torch.finfo(getattr(torch, cell.dtype)).bits // 8
        size = (cell.batch, cell.length, element, cell.phase)
        costs = roofline.part_costs(cell.config, *size)
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
            kind, own_config = (
                ("combo", None) if is_combo else (baselines[name].kind, baselines[name].config)
            )
            cost = (
                roofline.part_costs(own_config, *size)["total"]
                if own_config
                else costs["total" if is_combo else "dense"]
            )
            time_ms = outcome.performance.median_ms if outcome.performance else None
            if time_ms is not None:
                self._known_ms.setdefault(_curve(cell, name), []).append((cell.length, time_ms))
            measurements.append(
                entries.measurement(
                    kind,
                    outcome,
                    cost,
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


def _curve(cell: Cell, subject: str) -> tuple[str, ...]:
    return (subject, cell.shape, cell.dtype, cell.inputs, cell.phase)

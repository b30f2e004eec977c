"""The loop of a benchmark run: gates first, then every cell, then crossovers.

Prefill and decode say what their cells, plans and workloads are.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from nsa_bench import entries, isolation, roofline
from nsa_bench.cells import Cell
from nsa_bench.clocks import clock_for
from nsa_bench.crossover import crossovers
from nsa_bench.environment import machine
from nsa_bench.gate import NOT_CORRECT, Judge, failures_of, gate_of
from nsa_bench.limits import GRACE_S, Limits, lacks_memory
from nsa_bench.result import Gate, Interrupted, Measurement, Result
from nsa_bench.roofline import Cost, Peaks
from nsa_bench.settings import RunSettings
from nsa_bench.timing import INTERRUPTED, LATE, Outcome, TimeUp, reason_of
from nsa_core.errors import NSAError
from nsa_core.plan.plan import Plan
from nsa_core.plan.registry import Registry
from nsa_core.util.child import preload
from nsa_core.util.interruption import NEVER, Interruption


@dataclasses.dataclass(frozen=True)
class Subject:
    """An entry of a cell in the result file.

    Attributes:
        name: The name of the combination or baseline.
        kind: combo, dense, layer or rival.
        key: The key of its outcome.
        cost: The operations and bytes of a call.
        parts: Name of a part -> its backend, the key of its outcome, and its cost.
    """

    name: str
    kind: str
    key: str
    cost: Cost
    parts: Mapping[str, tuple[str, str, Cost]]


class Bench(abc.ABC):
    """One run of a benchmark.

    Args:
        settings: What to measure.
        registry: The installed backends.
        versions: Facts for the result file's ``environment``, beside those of the machine.
        max_call_s: Longest duration of a call, in seconds.
    """

    def __init__(
        self,
        settings: RunSettings,
        registry: Registry,
        versions: dict[str, Any],
        max_call_s: float = float("inf"),
    ) -> None:
        self.registry, self._run_settings, self._versions = registry, settings, versions
        self._started = time.monotonic()
        self._deadline = self._started + settings.time_limit_s
        self._limits = Limits.of_run(self._deadline, max_call_s, settings.device)
        self._gates: list[Gate] = []
        self._measurements: list[Measurement] = []
        self._stop = NEVER
        self._combos: dict[str, dict[str, str]] = {}
        self._skipped: dict[str, str] = {}

    @abc.abstractmethod
    def cells(self) -> list[Cell]:
        """Return the cells in the order in which they are timed."""

    @abc.abstractmethod
    def problems(self) -> list[Cell]:
        """Return a cell of each problem that is planned and judged, in this order."""

    @abc.abstractmethod
    def plan_and_judge(self, problem: Cell) -> None:
        """Plan and judge the combinations of a problem."""

    @abc.abstractmethod
    def plans_of(self, cell: Cell) -> dict[str, Plan]:
        """Return the plan of each combination of a cell."""

    @abc.abstractmethod
    def least_bytes(self, cell: Cell) -> int:
        """Return the bytes of a cell's tensors, without which no call can run."""

    @abc.abstractmethod
    def time_cell(
        self,
        cell: Cell,
        plans: dict[str, Plan],
        peaks: Peaks,
        outcomes: dict[str, Outcome],
        reasons: dict[str, str],
    ) -> None:
        """Time the subjects of a cell.

        Args:
            cell: The cell.
            plans: Its correct combinations.
            peaks: The machine's peak rates.
            outcomes: The outcomes by key; this adds to them.
            reasons: Name of a subject -> why it has no time; this adds to them.
        """

    @abc.abstractmethod
    def subjects_of(self, cell: Cell, outcomes: Mapping[str, Outcome]) -> Iterator[Subject]:
        """Yield the subjects of a cell for the result file."""

    def may_be_slow(self, cell: Cell, peaks: Peaks) -> bool:
        """Return whether a call of ``cell`` may need a child process."""
        return False

    def settings_as_json(self) -> dict[str, Any]:
        """Return the settings as the result file stores them."""
        return self._run_settings.as_json()

    def steps(self) -> int:
        """Return how often :meth:`run` calls ``advance``."""
        return len(self.problems()) + len(self.cells())

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
        s, peaks, cells = self._run_settings, dict[str, Peaks](), self.cells()
        left = len(cells)
        self._stop = stop
        environment = self._versions | machine(s.device)  # after a signal it would take too long
        with stop.stop_on_interrupt(GRACE_S):
            peaks |= {
                name: roofline.measure_peaks(s.device, getattr(torch, name)) for name in s.dtypes
            }
            if s.device.startswith("cuda"):
                torch.cuda.empty_cache()  # the children of plugins share the GPU
            self._clock = clock_for(s.device)
            if isolation.has_plugins(self.registry) or any(
                self.may_be_slow(cell, peaks[cell.dtype]) for cell in cells
            ):
                preload(type(self).__module__)  # while the gates run
            for problem in self.problems():
                if stop.received:
                    break
                self.plan_and_judge(problem)
                advance(f"gate {problem.shape}, {problem.dtype}")
            for cell in cells:
                if stop.received:
                    break
                self._measure_cell(cell, peaks[cell.dtype])
                if stop.received:
                    break
                left -= 1
                advance(
                    f"{cell.shape}, {cell.dtype}, {cell.inputs}, {cell.phase}, B={cell.batch},"
                    f" S={cell.length}"
                )
        return Result(
            settings=self.settings_as_json(),
            environment=environment,
            combos=self._combos,
            skipped=self._skipped,
            peaks=peaks,
            gates=self._gates,
            measurements=self._measurements,
            crossovers=crossovers([m for m in self._measurements if m.phase != "decode"]),
            seconds=round(time.monotonic() - self._started, 2),
            interrupted=Interrupted(stop.name, left, len(cells)) if left else None,
        )

    def judge(self, combo: str, problem: Cell, plan: Plan, case: str, judge: Judge) -> None:
        """Judge a combination, in a child process if a third-party backend takes part.

        A gate that the time limit ends is left out, because no cell is timed after it.

        Args:
            combo: The combination.
            problem: Its problem.
            plan: Its plan.
            case: Name of the case on which it is judged.
            judge: Returns one line per tensor that fails; pickle can send it.
        """
        run = functools.partial(failures_of, judge)
        if isolation.is_foreign(self.registry, plan):
            limits = (self._run_settings.device, self._deadline)
            run = functools.partial(isolation.failures_in_child, judge, *limits)
        with contextlib.suppress(TimeUp), self._limits.until_deadline():
            self._gates.append(gate_of(combo, problem.shape, problem.dtype, case, run))

    def _measure_cell(self, cell: Cell, peaks: Peaks) -> None:
        device, outcomes = self._run_settings.device, dict[str, Outcome]()
        where = (cell.shape, cell.dtype)
        wrong = [g.combo for g in self._gates if not g.ok and (g.shape, g.dtype) == where]
        reasons = dict.fromkeys(wrong, NOT_CORRECT)
        if no_memory := lacks_memory(self.least_bytes(cell), device):
            reasons = {s.name: no_memory for s in self.subjects_of(cell, outcomes)} | reasons
        elif time.monotonic() < self._deadline:
            plans = {n: plan for n, plan in self.plans_of(cell).items() if n not in reasons}
            try:
                self.time_cell(cell, plans, peaks, outcomes, reasons)
            except TimeUp:  # _record() gives the reason
                pass
            except (NSAError, RuntimeError) as error:
                # A kernel that broke the device fails all later calls.
                subjects = self.subjects_of(cell, outcomes)
                missing = [s.name for s in subjects if s.key not in outcomes]
                reasons = dict.fromkeys(missing, reason_of(error)) | reasons
        self._record(cell, peaks, outcomes, reasons)
        gc.collect()  # retained autograd graphs hold most of the memory
        if device.startswith("cuda"):
            with contextlib.suppress(RuntimeError):
                torch.cuda.empty_cache()

    def _record(
        self, cell: Cell, peaks: Peaks, outcomes: dict[str, Outcome], reasons: dict[str, str]
    ) -> None:
        late = Outcome(reason=INTERRUPTED if self._stop.received else LATE)
        measurements = []
        for subject in self.subjects_of(cell, outcomes):
            reason = reasons.get(subject.name, "")
            parts = {
                name: entries.part(backend, outcomes[key], cost, peaks)
                for name, (backend, key, cost) in subject.parts.items()
                if key in outcomes and not reason
            }
            measurements.append(
                entries.measurement(
                    subject.kind,
                    Outcome(reason=reason) if reason else outcomes.get(subject.key, late),
                    subject.cost,
                    peaks,
                    subject=subject.name,
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

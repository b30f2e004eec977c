"""Calls of a prefill run that may be slow: their expected time, and child processes for them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools

from nsa_bench import cells, child_call
from nsa_bench.cells import Cell
from nsa_bench.clocks import CpuClock, CudaClock, first_call
from nsa_bench.estimates import CHILD_MS, SLOWDOWN, Estimates, probe_length
from nsa_bench.limits import Limits
from nsa_bench.roofline import Peaks
from nsa_bench.subjects import Subjects
from nsa_bench.timing import TimeUp, Workload
from nsa_core.plan.plan import Plan
from nsa_core.util.interruption import Interruption


class SlowCalls:
    """Expects the time of calls, and runs slow ones in child processes, which can be ended.

    Args:
        subjects: The combinations and baselines of the run.
        limits: The limits of its calls.
        clock: The clock of its device.
        stop: Reports an interruption by a signal.

    Attributes:
        estimates: The expected times.
    """

    def __init__(
        self,
        subjects: Subjects,
        limits: Limits,
        clock: CpuClock | CudaClock,
        stop: Interruption,
    ) -> None:
        self._subjects, self._limits, self._clock, self._stop = subjects, limits, clock, stop
        self._device = subjects.settings.device
        self.estimates = Estimates()

    def may_be_slow(self, cell: Cell, peaks: Peaks) -> bool:
        """Return whether a call of ``cell`` may need a child process."""
        costs = self._subjects.costs(cell, cell.config)
        floors = [peaks.floor_ms(costs[name]) for name in ("dense", "total")]
        return max(floors) * SLOWDOWN > CHILD_MS

    def probe(self, cell: Cell, subjects: dict[str, str], peaks: Peaks) -> dict[str, str]:
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
            if self.estimates.expected_ms(cell, key) is None
            and not self._subjects.is_foreign(cell, name)  # its own children limit it
            and self._subjects.floor_ms(cell, name, peaks) * SLOWDOWN > CHILD_MS
        ]
        short = dataclasses.replace(cell, length=probe_length(cell, self._device))
        names = {subjects[key] for key in uncertain}
        plans = {
            name: plan for name, plan in self._subjects.plans_of(cell).items() if name in names
        }
        baselines = [b for b in self._subjects.baselines(cell) if b.name in names]
        reasons = {}
        for workload in self._subjects.workloads(short, plans, baselines) if uncertain else []:
            if workload.key not in uncertain or self._stop.received:
                continue
            name = subjects[workload.key]
            try:
                limited = dataclasses.replace(workload, limited=self._limits.first_call)
                call, _ = first_call(self._clock, limited)
                floor_ms, short_floor_ms = (
                    self._subjects.floor_ms(each, name, peaks) for each in (cell, short)
                )
                expected_ms = self._clock.sample(call, 1) * (floor_ms / short_floor_ms)
                self.estimates.add_probe(cell, workload.key, short.length, expected_ms)
            except TimeUp as error:
                reasons[name] = str(error)
            except Exception:  # noqa: BLE001  the cell itself reports it
                continue
        return reasons

    def limited(
        self,
        cell: Cell,
        workload: Workload,
        plans: dict[str, Plan],
        children: contextlib.ExitStack,
    ) -> Workload:
        """Let the limits end the first call of a workload; run a slow one in a child process."""
        limited = dataclasses.replace(workload, limited=self._limits.first_call)
        combo = cells.combo_of(workload.key, plans, cell.length)
        expected_ms = self.estimates.expected_ms(cell, workload.key)
        if expected_ms is None and combo:
            # Nothing is known of this kernel alone; it is at most as slow as its combination.
            expected_ms = self.estimates.expected_ms(cell, cells.TOTAL + combo)
        foreign = bool(combo) and self._subjects.is_foreign(cell, combo)
        if not foreign and (expected_ms is None or expected_ms <= CHILD_MS):
            return limited
        make = self._subjects.in_child(cell, combo, workload.key)
        otherwise = None if foreign else functools.partial(self._clock.prepare, limited)
        limits = (self._limits, self._stop, children)
        return child_call.in_child(limited, make, self._device, *limits, otherwise=otherwise)

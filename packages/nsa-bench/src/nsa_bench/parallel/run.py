"""One run: judge the divisions, then time every length, then search the longest and project.

Every rank runs this code in its main process and gets the same answers, so that all ranks take the
same decisions. Rank 0 keeps the result file.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

from nsa_bench.gate import NOT_CORRECT, Gate
from nsa_bench.parallel.call import Division, Times
from nsa_bench.parallel.longest import Search
from nsa_bench.parallel.projection import METHOD, CollectiveTimes
from nsa_bench.parallel.result import (
    MEASURED,
    PROJECTED,
    Largest,
    ParallelResult,
    Row,
    Traffic,
)
from nsa_bench.parallel.settings import ParallelSettings
from nsa_bench.parallel.worker import OUT_OF_MEMORY, Facts, Judge, Measure, Project, Try
from nsa_bench.parallel.workers import Workers, reason_of
from nsa_bench.result import Interrupted
from nsa_bench.shapes import Shape
from nsa_bench.timing import FAILED, NOT_MEASURED, summarise
from nsa_core.parallel import pad_to
from nsa_core.util.interruption import NEVER, Interruption

Advance = Callable[[str], None]
ONE = Division()


class ParallelBench:
    """One run of the benchmark of context parallelism.

    The main processes must be connected over gloo, as
    :func:`nsa_bench.parallel.workers.control_group` does.

    Args:
        settings: What to measure; equal on all ranks.
        versions: Facts for the result file's ``environment``, beside those of the machine.
        keep: Called with the result so far after each step, to write it.
    """

    def __init__(
        self,
        settings: ParallelSettings,
        versions: dict[str, Any],
        keep: Callable[[ParallelResult], None] = lambda result: None,
    ) -> None:
        self.settings, self._keep = settings, keep
        self._environment = versions | {"projection": METHOD}
        self._started = time.monotonic()
        self._gates: list[Gate] = []
        self._rows: list[Row] = []
        self._largest: list[Largest] = []
        self._skipped: dict[str, str] = {}
        self._traffic: list[Traffic] = []
        # (division, shape, dtype) without a verdict -> reason
        self._unjudged: dict[tuple[str, str, str], str] = {}
        self._left = self.steps()
        self._stop = NEVER

    def steps(self) -> int:
        """Return the number of steps, of which one is a judged division or a timed cell."""
        s = self.settings
        problems = len(s.shapes) * len(s.dtypes)
        divided = sum(len(self._divisions(shape)) for shape in s.shapes)
        measured = len(s.lengths) * (problems + divided * len(s.dtypes))
        projected = len(s.lengths) * len(s.projected) * problems
        judged = divided * len({*s.judged, *s.dtypes})
        return judged + measured + projected + 2 * s.largest * problems

    def run(
        self, advance: Advance = lambda label: None, stop: Interruption = NEVER
    ) -> ParallelResult:
        """Measure everything, or as much as fits the time limit.

        Args:
            advance: Called with a label after each step.
            stop: Reports an interruption by a signal.

        Returns:
            The result, equal on all ranks.
        """
        self._stop = stop
        self._workers = Workers(self.settings, stop, self._started + self.settings.time_limit_s)
        try:
            for label in self._labels():
                self._left -= 1
                self._keep(self.result())
                advance(label)
        finally:
            self._workers.end()
        return self.result()

    def result(self) -> ParallelResult:
        """Return the result so far."""
        return ParallelResult(
            settings=self.settings.as_json(),
            environment=self._environment,
            gates=self._gates,
            rows=self._rows,
            largest=self._largest,
            skipped=self._skipped,
            seconds=round(time.monotonic() - self._started, 2),
            interrupted=Interrupted.by(self._stop, self._left, self.steps())
            if self._stop.received
            else None,
        )

    def _labels(self) -> Iterator[str]:
        """Run all steps; yield a label after each."""
        s = self.settings
        problems = list(itertools.product(s.shapes, s.dtypes))
        facts = [a.value for a in self._workers.run(Facts()) if a.value is not None]
        if facts:
            self._environment |= facts[0] | {"devices": [each["device"] for each in facts]}
        for shape in s.shapes:
            yield from self._judge(shape)
        for length in sorted(s.lengths):
            for shape, dtype in problems:
                for division in (ONE, *self._divisions(shape)):
                    self._measure(shape, dtype, division, length)
                    yield f"{shape.name}, {dtype}, {division.name}, S={length}"
        self._workers.end()  # those of a projection have no process group
        for length, ranks in itertools.product(sorted(s.lengths), s.projected):
            for shape, dtype in problems:
                self._project(shape, dtype, ranks, length)
                yield f"projection: {shape.name}, {dtype}, {ranks} GPUs, S={length}"
        self._workers.end()
        for shape, dtype in problems if s.largest else ():
            for division in (ONE, *self._divisions(shape)[:1]):
                self._search(shape, dtype, division)
                yield f"longest sequence: {shape.name}, {dtype}, {division.name}"

    def _divisions(self, shape: Shape) -> list[Division]:
        """Return the divisions that are possible for a shape."""
        s, divisions = self.settings, []
        for mode, layout in itertools.product(s.modes, s.layouts):
            if mode == "heads" and shape.n_kv_heads % s.ranks:
                reason = f"{s.ranks} ranks do not divide {shape.n_kv_heads} key/value heads"
                self._skipped[f"heads, {shape.name}"] = reason
            else:
                divisions.append(Division(s.ranks, mode, layout))
        return divisions

    def _judge(self, shape: Shape) -> Iterator[str]:
        """Judge every division of a shape in every dtype."""
        dtypes = dict.fromkeys((*self.settings.judged, *self.settings.dtypes))
        for division, dtype in itertools.product(self._divisions(shape), dtypes):
            answers = self._workers.run(Judge(shape, dtype, division))
            reason = reason_of(answers)
            if reason.startswith(NOT_MEASURED):
                self._unjudged[division.name, shape.name, dtype] = reason
            elif reason:
                failed = Gate(division.name, shape.name, dtype, False, "", 0.0, [reason])
                self._gates.append(failed)
            else:
                self._gates.append(answers[0].value)
            yield f"check of {division.name}, {shape.name}, {dtype}"

    def _refusal(self, shape: Shape, dtype: str, division: Division, length: int) -> str:
        """Return why a cell is not measured; empty if it is."""
        key = (division.name, shape.name, dtype)
        if key in self._unjudged:
            return self._unjudged[key]
        if any((g.combo, g.shape, g.dtype) == key and not g.ok for g in self._gates):
            return NOT_CORRECT
        if length != pad_to(length, division.ranks, division.layout or "contiguous"):
            return f"{NOT_MEASURED}: {length} tokens do not divide over the GPUs"
        shorter = [
            row
            for row in self._rows
            if row.problem == (shape.name, dtype)
            and row.division == (division.ranks, division.mode, division.layout)
            and row.length < length
            and OUT_OF_MEMORY in row.reason
        ]
        return f"{OUT_OF_MEMORY} at {shorter[0].length} tokens already" if shorter else ""

    def _measure(self, shape: Shape, dtype: str, division: Division, length: int) -> None:
        """Add the row of one cell."""
        reason = self._refusal(shape, dtype, division, length)
        times: list[Times] = []
        if not reason:
            task = Measure(shape, dtype, division, length)
            answers = self._workers.run(task, only=0 if division.ranks == 1 else None)
            reason = reason_of(answers)
            times = [a.value for a in answers if a.value is not None]
        if reason:
            self._rows.append(self._row(shape, dtype, division, length, MEASURED, [], reason))
            return
        self._traffic += times[0].traffic
        communication = sum(traffic.ms or 0.0 for traffic in times[0].traffic)
        self._rows.append(
            self._row(
                shape,
                dtype,
                division,
                length,
                MEASURED,
                times,
                "",
                communication,
                times[0].samples_ms,
            )
        )

    def _row(
        self,
        shape: Shape,
        dtype: str,
        division: Division,
        length: int,
        kind: str,
        times: list[Times],
        reason: str,
        communication_ms: float | None = None,
        samples_ms: list[float] | None = None,
    ) -> Row:
        """Return a row; ``times`` has an entry for each rank."""
        performance = summarise(samples_ms, "barrier", 1) if samples_ms else None
        one = next(
            (
                row.performance.median_ms
                for row in self._rows
                if row.problem == (shape.name, dtype)
                and (row.ranks, row.length) == (1, length)
                and row.performance
            ),
            None,
        )
        speed_up = one / performance.median_ms if one and performance else None
        return Row(
            kind=kind,
            shape=shape.name,
            dtype=dtype,
            length=length,
            ranks=division.ranks,
            mode=division.mode,
            layout=division.layout,
            performance=performance,
            reason=reason,
            speed_up=speed_up if division.ranks > 1 else None,
            compute_ms=[_rounded(t.compute_ms) for t in times],
            waiting_ms=[_rounded(t.waiting_ms) for t in times],
            communication_ms=communication_ms if division.ranks > 1 else None,
            received_bytes=[sum(c.received_bytes for c in t.traffic) for t in times],
            peak_bytes=[t.peak_bytes for t in times if t.peak_bytes is not None],
            traffic=times[0].traffic if times else [],
        )

    def _project(self, shape: Shape, dtype: str, ranks: int, length: int) -> None:
        """Add the projected time on ``ranks`` GPUs; each GPU runs one rank at a time."""
        division = Division(ranks, "sequence", self.settings.layouts[0])
        reason = self._projection_refusal(length, division)
        times: list[Times] = []
        for first in range(0, ranks, self.settings.ranks):
            if reason:
                break
            chosen = [
                Project(shape, dtype, division, length, rank) if rank < ranks else None
                for rank in range(first, first + self.settings.ranks)
            ]
            answers = self._workers.run_each(chosen)
            reason = reason_of(answers)
            times += [a.value for a in answers if a.value is not None]
        communication = None
        if not reason:
            collectives = CollectiveTimes(self._traffic, self.settings.ranks)
            communication = collectives.milliseconds(times[0].traffic, ranks)
            if communication is None:
                reason = f"{NOT_MEASURED}: no collectives of mode sequence were measured"
        if reason or communication is None:
            self._rows.append(self._row(shape, dtype, division, length, PROJECTED, [], reason))
            return
        slowest = max(t.compute_ms for t in times)
        projected = [slowest + communication]
        self._rows.append(
            self._row(
                shape, dtype, division, length, PROJECTED, times, "", communication, projected
            )
        )

    def _projection_refusal(self, length: int, division: Division) -> str:
        if self.settings.ranks == 1:
            return f"{NOT_MEASURED}: collectives need two GPUs"
        if length != pad_to(length, division.ranks, division.layout):
            return f"{NOT_MEASURED}: {length} tokens do not divide over the GPUs"
        return ""

    def _search(self, shape: Shape, dtype: str, division: Division) -> None:
        """Add the longest sequence that a division trains."""
        rows = [
            row
            for row in self._rows
            if row.kind == MEASURED
            and row.problem == (shape.name, dtype)
            and row.division == (division.ranks, division.mode, division.layout)
        ]
        fits = [row.length for row in rows if row.performance]
        failed = [row.length for row in rows if OUT_OF_MEMORY in row.reason]
        search = Search(max(fits, default=0), min(failed, default=None), min(self.settings.lengths))
        reason = OUT_OF_MEMORY if failed else ""
        while (length := search.next_length()) is not None:
            task = Try(shape, dtype, division, length)
            answers = self._workers.run(task, only=0 if division.ranks == 1 else None)
            outcome = reason_of(answers)
            if outcome and OUT_OF_MEMORY not in outcome and FAILED not in outcome:
                reason = outcome
                break
            reason = outcome or reason
            search.add(length, not outcome)
        self._largest.append(
            Largest(
                shape.name,
                dtype,
                division.ranks,
                division.mode,
                division.layout,
                search.fits or None,
                search.failed,
                reason,
            )
        )


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")

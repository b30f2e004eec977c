"""Timing: works of one cell run round by round, interleaved, so that what drifts (clocks,
neighbours) hits all alike.

How a sample is taken: nsa_bench.clocks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from nsa_core.errors import NSAError
from nsa_core.util.interruption import NEVER, Interruption
from nsa_core.util.text import describe_error

MIN_ROUNDS, MAX_ROUNDS = 3, 20
NOT_MEASURED, FAILED = "not measured", "failed"  # how reasons begin
LATE = f"{NOT_MEASURED}: the time limit was reached"
INTERRUPTED = f"{NOT_MEASURED}: the run was interrupted"
CELL_LATE = NOT_MEASURED + ": the cell's time limit of {:g} s was reached"
METHODS = {
    "events": "CUDA events, cold L2",
    "graph": "CUDA graph replay, CUDA events, cold L2",
    "benchmark": "torch.utils.benchmark, caches as left by the previous work",
    "eager": "wall clock of successive calls with one synchronisation behind them, warm L2",
    "within": "perf_counter between the slots of one step",
    "within graph": (
        "CUDA graphs of the step up to a slot and up to the one before, their difference, cold L2"
    ),
    "within events": "as within graph, of steps that are not captured",
    "perf_counter": "perf_counter, caches as left by the previous work",
}


@dataclasses.dataclass(frozen=True)
class Performance:
    """Times of one work, ms per call. Result files of before they were there lack the fields with a
    default.
    """

    median_ms: float
    q1_ms: float
    q3_ms: float
    method: str  # a key of METHODS
    calls_per_sample: int
    samples_ms: list[float]
    # that the host takes to launch a call, where the method was chosen by it
    host_ms: float | None = None
    # why a call whose time the host may hold up was not captured all the same
    not_captured: str = ""
    # where ``method`` is graph: the same call without it, by events
    eager: Performance | None = None

    @property
    def eager_ms(self) -> float:
        """Median of the call as Python makes it, the host's launches included."""
        return self.median_ms if self.eager is None else self.eager.median_ms


@dataclasses.dataclass
class Workload:
    """Something to time. ``make`` sets it up (a forward whose backward is timed, say) and returns
    the call.
    """

    key: str
    make: Callable[[], Callable[[], Any]]
    measure_memory: bool = False


@dataclasses.dataclass
class Outcome:
    """What became of a work: its times and peak memory, or the reason why there are none."""

    performance: Performance | None = None
    peak_bytes: int | None = None
    reason: str = ""


@dataclasses.dataclass
class Prepared:
    """A work that is set up, warmed up and ready to be sampled."""

    call: Callable[[], Any]
    method: str
    calls: int
    estimate_ms: float
    peak_bytes: int  # most bytes that one call holds beyond what was held before it
    samples: list[float] = dataclasses.field(default_factory=list)
    host_ms: float | None = None
    not_captured: str = ""
    eager: list[float] = dataclasses.field(default_factory=list)

    def performance(self) -> Performance:
        """What the samples come to."""
        found = summarise(self.samples, self.method, self.calls)
        host_ms = None if self.host_ms is None else float(f"{self.host_ms:.4g}")
        eager = summarise(self.eager, "events", 1) if self.eager else None
        return dataclasses.replace(
            found, host_ms=host_ms, not_captured=self.not_captured, eager=eager
        )


class Clock(Protocol):
    """Prepares works and takes their samples."""

    def prepare(self, work: Workload) -> Prepared:
        """Set up and warm up."""

    def sample(self, call: Callable[[], Any], calls: int) -> float:
        """Milliseconds per call over ``calls`` calls."""


def measure(
    works: Sequence[Workload],
    clock: Clock,
    *,
    budget_s: float,
    deadline: float = float("inf"),
    limit_s: float = float("inf"),
    least: int = MIN_ROUNDS,
    stop: Interruption = NEVER,
) -> dict[str, Outcome]:
    """Time all works, interleaved: ``least`` to 20 rounds each, about ``budget_s`` seconds each
    where that allows more.

    Past ``deadline`` (time.monotonic), or ``limit_s`` seconds after the start, no further work is
    prepared, and what is prepared is timed once; once ``stop`` has come, nothing more is timed at
    all. A work that is left out, runs out of memory or whose kernel refuses has a reason instead of
    times.
    """
    limits = {LATE: deadline, CELL_LATE.format(limit_s): time.monotonic() + limit_s}

    def late() -> str:
        return (
            INTERRUPTED
            if stop.came
            else next((reason for reason, end in limits.items() if time.monotonic() > end), "")
        )

    outcomes: dict[str, Outcome] = {}
    ready: dict[str, Prepared] = {}
    for work in works:
        if reason := late():
            outcomes[work.key] = Outcome(reason=reason)
            continue
        outcomes[work.key] = outcome = Outcome()
        with _reasons(outcome, stop):
            ready[work.key] = clock.prepare(work)
            outcome.peak_bytes = ready[work.key].peak_bytes if work.measure_memory else None
    for _ in range(MAX_ROUNDS):
        for key, prepared in ready.items():
            rounds = min(
                MAX_ROUNDS,
                max(least, int(budget_s * 1e3 / (prepared.estimate_ms * prepared.calls))),
            )
            if (
                len(prepared.samples) >= rounds
                or outcomes[key].reason
                or (late() and (prepared.samples or stop.came))
            ):
                continue
            with _reasons(outcomes[key], stop):
                prepared.samples.append(clock.sample(prepared.call, prepared.calls))
    for key, prepared in ready.items():
        if not outcomes[key].reason and not prepared.samples:
            outcomes[key].reason = INTERRUPTED
        if not outcomes[key].reason:
            outcomes[key].performance = prepared.performance()
    return outcomes


@contextlib.contextmanager
def _reasons(outcome: Outcome, stop: Interruption) -> Iterator[None]:
    """Turn what a kernel raises into the outcome's reason."""
    try:
        yield
    except torch.OutOfMemoryError:
        outcome.reason = "out of memory"
        gc.collect()
    except (NSAError, RuntimeError) as error:
        # A signal to a group of processes ends the compilers that run for a kernel, too: no fault
        # of the kernel's.
        outcome.reason = INTERRUPTED if stop.came else f"{FAILED}: {describe_error(error)}"


def summarise(samples: Sequence[float], method: str, calls: int) -> Performance:
    """Median and quartiles of samples in ms."""
    ordered = torch.tensor(sorted(samples), dtype=torch.float64)
    q1, median, q3 = (float(ordered.quantile(at)) for at in (0.25, 0.5, 0.75))
    kept = [float(f"{sample:.5g}") for sample in samples]
    q1, median, q3 = (float(f"{x:.6g}") for x in (q1, median, q3))
    return Performance(median, q1, q3, method, calls, kept)


def spread_of_repeats(performance: Performance, repeats: int = 5) -> float | None:
    """Standard deviation over mean of the medians of ``repeats`` runs of successive samples; None
    for too few.
    """
    samples = torch.tensor(performance.samples_ms, dtype=torch.float64)
    if len(samples) < repeats:
        return None
    medians = torch.stack([part.quantile(0.5) for part in samples.tensor_split(repeats)])
    return float(medians.std() / medians.mean())

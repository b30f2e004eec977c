"""Timing: the workloads of a cell are sampled in turns.

Drift of the machine (clocks, other jobs) then affects all workloads alike. nsa_bench.clocks takes
the samples.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from nsa_core.util.interruption import NEVER, Interruption, is_ctrl_c
from nsa_core.util.text import describe_error

MIN_SAMPLES, MAX_SAMPLES = 3, 20
NOT_MEASURED, FAILED = "not measured", "failed"  # prefixes of reasons
LATE = f"{NOT_MEASURED}: the time limit was reached"
INTERRUPTED = f"{NOT_MEASURED}: the run was interrupted"
NO_MEMORY = "out of memory"
CELL_LATE = NOT_MEASURED + ": the cell's time limit of {:g} s was reached"
METHODS = {
    "events": "CUDA events, cold L2",
    "graph": "CUDA graph replay, CUDA events, cold L2",
    "benchmark": "torch.utils.benchmark, caches as left by the previous workload",
    "eager": "wall clock of successive calls with one synchronisation at the end, warm L2",
    "within": "perf_counter between the slots of one step",
    "within graph": (
        "difference of two CUDA graphs, of the step up to a slot and up to the slot before, cold L2"
    ),
    "within events": "as within graph, but for steps that cannot be captured",
    "perf_counter": "perf_counter, caches as left by the previous workload",
    "barrier": "wall clock of the slowest GPU, from a barrier to its synchronisation",
}


class TimeUp(BaseException):
    """A call was ended at a limit; the message is the reason in the result file.

    It is no Exception, so that no kernel can catch it as its own failure.
    """


@dataclasses.dataclass(frozen=True)
class Performance:
    """Times of one workload, in ms per call. Older result files lack the fields with defaults."""

    median_ms: float
    q1_ms: float
    q3_ms: float
    method: str  # a key of METHODS
    samples_ms: list[float]
    # Host time of the launches, if it decided the method.
    host_ms: float | None = None
    # Why a launch-bound call was not captured as a CUDA graph.
    not_captured: str = ""
    # For method "graph": the same call timed eagerly, with events.
    eager: Performance | None = None

    @property
    def eager_ms(self) -> float:
        """Return the median of the call launched from Python, including host launches."""
        return self.median_ms if self.eager is None else self.eager.median_ms


@dataclasses.dataclass
class Workload:
    """Something to time.

    Attributes:
        key: Its name in the outcomes.
        make: Sets it up, for example by a forward whose backward is timed, and returns the call.
        measure_memory: Whether its peak memory is measured.
        limited: Returns a context that ends the setup, or the first call, at its limit.
        start: Prepares the workload elsewhere, such as in a child process; None: the clock does.
        has_state: Whether a call changes what the next one does. Then no untimed calls precede its
            samples.
    """

    key: str
    make: Callable[[], Callable[[], Any]]
    measure_memory: bool = False
    limited: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    start: Callable[[], Prepared] | None = None
    has_state: bool = False


@dataclasses.dataclass
class Outcome:
    """The result of timing a workload: times and peak memory, or why they are missing."""

    performance: Performance | None = None
    peak_bytes: int | None = None
    reason: str = ""


@dataclasses.dataclass
class Prepared:
    """A workload that is set up, warmed up and ready to be sampled."""

    call: Callable[[], Any]
    method: str
    calls: int
    estimate_ms: float
    peak_bytes: int  # peak memory of one call beyond the memory held before it
    samples: list[float] = dataclasses.field(default_factory=list)
    host_ms: float | None = None
    not_captured: str = ""
    eager: list[float] = dataclasses.field(default_factory=list)
    # Takes a sample elsewhere, with the keyword of take_sample; None: the clock takes it.
    take: Callable[..., float] | None = None

    def performance(self) -> Performance:
        """Summarise the samples."""
        performance = summarise(self.samples, self.method)
        host_ms = None if self.host_ms is None else float(f"{self.host_ms:.4g}")
        eager = summarise(self.eager, "events") if self.eager else None
        return dataclasses.replace(
            performance, host_ms=host_ms, not_captured=self.not_captured, eager=eager
        )


class Clock(Protocol):
    """Prepares workloads and takes their samples.

    Attributes:
        turns: The number of turns over which the samples of a workload are spread.
        lead_ms: Milliseconds of untimed calls of a workload before its first sample of a turn. A
            workload with state, and a call of at least four times as long, have none.
    """

    turns: int
    lead_ms: float

    def prepare(self, workload: Workload) -> Prepared:
        """Set up and warm up a workload."""

    def sample(self, call: Callable[[], Any], calls: int) -> float:
        """Return the milliseconds per call over ``calls`` calls."""


def measure(
    workloads: Sequence[Workload],
    clock: Clock,
    *,
    budget_s: float,
    deadline: float = float("inf"),
    limit_s: float = float("inf"),
    min_samples: int = MIN_SAMPLES,
    stop: Interruption = NEVER,
) -> dict[str, Outcome]:
    """Time all workloads, in turns.

    Args:
        workloads: The workloads, the most important first.
        clock: Takes the samples.
        budget_s: Seconds of samples per workload; it sets their number between ``min_samples``
            and 20.
        deadline: Value of time.monotonic() after which no further workload is prepared and each
            prepared workload gets one sample.
        limit_s: The same limit, in seconds after the start of this call.
        min_samples: Minimum number of samples.
        stop: Reports an interruption; after it nothing more is timed.

    Returns:
        The outcome of each workload by key. A workload that is left out, runs out of memory or
        fails has a reason instead of times.
    """
    limits = {LATE: deadline, CELL_LATE.format(limit_s): time.monotonic() + limit_s}

    def late() -> str:
        return (
            INTERRUPTED
            if stop.received
            else next((reason for reason, end in limits.items() if time.monotonic() > end), "")
        )

    outcomes: dict[str, Outcome] = {}
    ready: dict[str, Prepared] = {}
    have_state = {workload.key for workload in workloads if workload.has_state}
    ended: set[str] = set()
    for workload in workloads:
        if reason := late():
            outcomes[workload.key] = Outcome(reason=reason)
            continue
        outcomes[workload.key] = outcome = Outcome()
        with _reasons(outcome, stop):
            ready[workload.key] = workload.start() if workload.start else clock.prepare(workload)
            outcome.peak_bytes = ready[workload.key].peak_bytes if workload.measure_memory else None
    for turn in range(1, clock.turns + 1):
        for key, prepared in ready.items():
            samples = int(budget_s * 1e3 / (prepared.estimate_ms * prepared.calls))
            samples = min(MAX_SAMPLES, max(min_samples, samples))
            begins_turn = key not in have_state
            while not (
                len(prepared.samples) >= math.ceil(samples * turn / clock.turns)
                or outcomes[key].reason
                or key in ended
                or (late() and (prepared.samples or stop.received))
            ):
                with _reasons(outcomes[key], stop):
                    take = prepared.take or functools.partial(take_sample, clock, prepared)
                    prepared.samples.append(take(begins_turn=begins_turn))
                begins_turn = False
                if prepared.samples and outcomes[key].reason.startswith(NOT_MEASURED):
                    outcomes[key].reason = ""  # a limit ended a further sample
                    ended.add(key)
    for key, prepared in ready.items():
        if not outcomes[key].reason and not prepared.samples:
            outcomes[key].reason = INTERRUPTED
        if not outcomes[key].reason:
            outcomes[key].performance = prepared.performance()
    return outcomes


def take_sample(clock: Clock, prepared: Prepared, *, begins_turn: bool) -> float:
    """Return the milliseconds per call of one sample.

    Args:
        clock: Takes the sample.
        prepared: The workload.
        begins_turn: Whether untimed calls come first, because another workload may have run before.
    """
    if begins_turn and prepared.estimate_ms < 4 * clock.lead_ms:  # a longer call is its own lead
        for _ in range(math.ceil(clock.lead_ms / max(prepared.estimate_ms, 1e-3))):
            prepared.call()
    return clock.sample(prepared.call, prepared.calls)


@contextlib.contextmanager
def _reasons(outcome: Outcome, stop: Interruption) -> Iterator[None]:
    """Turn an exception of a kernel, or the end at a limit, into the outcome's reason."""
    try:
        yield
    except TimeUp as error:
        outcome.reason = str(error)
    except BaseException as error:  # a third-party kernel may raise anything
        if is_ctrl_c(error):
            raise
        # A signal to the process group also ends compilers that run for a kernel; that is not the
        # kernel's failure.
        outcome.reason = INTERRUPTED if stop.received else reason_of(error)
        if outcome.reason == NO_MEMORY:
            gc.collect()


def reason_of(error: BaseException) -> str:
    """Return the reason of a measurement that an exception ended.

    PyTorch's allocator of the CPU raises a plain RuntimeError.
    """
    import torch

    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return NO_MEMORY
    return f"{FAILED}: {describe_error(error)}"


def summarise(samples: Sequence[float], method: str) -> Performance:
    """Return median and quartiles of samples in ms."""
    import torch

    ordered = torch.tensor(sorted(samples), dtype=torch.float64)
    q1, median, q3 = (float(ordered.quantile(quantile)) for quantile in (0.25, 0.5, 0.75))
    rounded = [float(f"{sample:.5g}") for sample in samples]
    q1, median, q3 = (float(f"{x:.6g}") for x in (q1, median, q3))
    return Performance(median, q1, q3, method, rounded)


def spread_of_repeats(performance: Performance) -> float | None:
    """Return the coefficient of variation of the medians of five runs of samples.

    The samples are split in order into five runs; None if there are fewer samples than runs.
    """
    samples = performance.samples_ms
    if len(samples) < 5:
        return None
    size, longer = divmod(len(samples), 5)  # the first runs have one sample more
    starts = [size * run + min(run, longer) for run in range(6)]
    medians = [statistics.median(samples[a:b]) for a, b in itertools.pairwise(starts)]
    return statistics.stdev(medians) / statistics.mean(medians)

"""Timers: works of one cell run round by round, interleaved, so that what drifts (clocks, neighbours) hits all alike.

CUDA: events around one call, the L2 cache flushed before each by writing a buffer larger than it (as
triton.testing.do_bench does); a call under 1 ms is captured into a CUDA graph and replayed, so that the host's launch
time does not hide the kernels. CPU: torch.utils.benchmark over as many calls as fill 5 ms, at a stated thread count;
a call that takes longer by itself is timed by perf_counter, because Timer would make it three times for one sample.
Caches are as the previous work left them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.benchmark import Timer

from nsa_core.errors import NSAError
from nsa_core.interruption import NEVER, Interruption
from nsa_core.text import describe_error

GRAPH_BELOW_MS = 1.0
SLOW_MS = 200.0  # calls above are warmed up once only, and the next call is a sample already
SAMPLE_MS = 5.0  # shortest CPU sample
HIGHEST_THRESHOLD = 32 << 20  # of glibc's mmap
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
    "perf_counter": "perf_counter, caches as left by the previous work",
}


@dataclasses.dataclass(frozen=True)
class Performance:
    """Times of one work, ms per call."""

    median_ms: float
    q1_ms: float
    q3_ms: float
    method: str  # a key of METHODS
    calls_per_sample: int
    samples_ms: list[float]


@dataclasses.dataclass
class Work:
    """Something to time. ``make`` sets it up (a forward whose backward is timed, say) and returns the call."""

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
class _Prepared:
    call: Callable[[], Any]
    method: str
    calls: int
    estimate_ms: float
    peak_bytes: int  # most bytes that one call holds beyond what was held before it
    samples: list[float] = dataclasses.field(default_factory=list)


class CpuClock:
    """Wall time on the CPU.

    glibc returns freed memory above a threshold to the system, and faults it in again at the next call, until a larger
    block has been freed once: the first cells would be up to four times slower than the same cells later on. So a
    block of about the highest threshold is freed first.
    """

    def __init__(self) -> None:
        torch.empty(HIGHEST_THRESHOLD - (1 << 16), dtype=torch.uint8)

    def sample(self, call: Callable[[], Any], calls: int) -> float:
        """Milliseconds per call over ``calls`` calls."""
        if calls > 1:
            timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
            return float(timer.timeit(calls).mean) * 1e3
        start = time.perf_counter_ns()
        call()
        return (time.perf_counter_ns() - start) / 1e6

    def prepare(self, work: Work) -> _Prepared:
        """Set up and warm up: what is allocated once and kept is not the call's."""
        call = work.make()
        first = self.sample(call, 1)
        estimate = self.sample(call, 1) if first < 200 else first
        peak = self._peak_bytes(call) if work.measure_memory else 0
        calls = max(1, round(SAMPLE_MS / max(estimate, 1e-3)))
        return _Prepared(call, "benchmark" if calls > 1 else "perf_counter", calls, estimate, peak)

    def _peak_bytes(self, call: Callable[[], Any]) -> int:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            call()
        assert profiled.profiler is not None  # it ran
        events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
        held = peak = 0
        for event in sorted(events, key=lambda e: e.start_ns()):
            held += event.nbytes()
            peak = max(peak, held)
        return peak


class CudaClock:
    """Device time on the current CUDA device."""

    def __init__(self, device: str) -> None:
        properties = torch.cuda.get_device_properties(device)
        size = max(256 << 20, 2 * int(getattr(properties, "L2_cache_size", 0)))
        self._flush = torch.empty(size // 4, dtype=torch.int32, device=device)

    def sample(self, call: Callable[[], Any], calls: int) -> float:
        """Milliseconds of one call after an L2 flush."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    def prepare(self, work: Work) -> _Prepared:
        """Set up, warm up, and capture what is short. The first call compiles: later ones tell how long it takes."""
        call = work.make()
        self.sample(call, 1)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        estimate = self.sample(call, 1)
        peak = torch.cuda.max_memory_allocated() - before
        if estimate > SLOW_MS:
            return _Prepared(call, "events", 1, estimate, peak, [estimate])
        estimate = min(estimate, self.sample(call, 1))
        if estimate < GRAPH_BELOW_MS:
            replay = self._captured(work.make)
            if replay is not None:
                return _Prepared(replay, "graph", 1, self.sample(replay, 1), peak)
        return _Prepared(call, "events", 1, estimate, peak)

    def _captured(self, make: Callable[[], Callable[[], Any]]) -> Callable[[], Any] | None:
        """The call as a graph, or None where it cannot be captured (it synchronises, say)."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(stream):
                call = make()  # a backward runs on its forward's stream: both on the one that captures
                for _ in range(2):
                    call()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                call()
            graph.replay()
            torch.cuda.synchronize()
        except (RuntimeError, NSAError):
            torch.cuda.synchronize()
            return None

        def replay() -> Any:
            graph.replay()
            return call  # kept alive as long as the graph reads its tensors

        return replay


class EagerClock:
    """Wall time on the current CUDA device: the longer of what the host takes to launch and the device to run."""

    CALLS = 20

    def sample(self, call: Callable[[], Any], calls: int) -> float:
        """Milliseconds per call over ``calls`` calls."""
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
        return (time.perf_counter_ns() - start) / 1e6 / calls

    def prepare(self, work: Work) -> _Prepared:
        """Set up and warm up."""
        call = work.make()
        self.sample(call, 3)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        estimate = self.sample(call, self.CALLS)
        return _Prepared(call, "eager", self.CALLS, estimate, torch.cuda.max_memory_allocated() - before)


def clock_for(device: str) -> CpuClock | CudaClock:
    """The timer of a device."""
    return CudaClock(device) if device.startswith("cuda") else CpuClock()


def measure(
    works: Sequence[Work],
    clock: CpuClock | CudaClock | EagerClock,
    *,
    budget_s: float,
    deadline: float = float("inf"),
    limit_s: float = float("inf"),
    least: int = MIN_ROUNDS,
    stop: Interruption = NEVER,
) -> dict[str, Outcome]:
    """Time all works, interleaved: ``least`` to 20 rounds each, about ``budget_s`` seconds each where that allows more.

    Past ``deadline`` (time.monotonic), or ``limit_s`` seconds after the start, no further work is prepared, and what is
    prepared is timed once; once ``stop`` has come, nothing more is timed at all. A work that is left out, runs out of
    memory or whose kernel refuses has a reason instead of times.
    """
    limits = {LATE: deadline, CELL_LATE.format(limit_s): time.monotonic() + limit_s}

    def late() -> str:
        return (
            INTERRUPTED if stop.came else next((reason for reason, end in limits.items() if time.monotonic() > end), "")
        )

    outcomes: dict[str, Outcome] = {}
    ready: dict[str, _Prepared] = {}
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
            rounds = min(MAX_ROUNDS, max(least, int(budget_s * 1e3 / (prepared.estimate_ms * prepared.calls))))
            if len(prepared.samples) >= rounds or outcomes[key].reason or (late() and (prepared.samples or stop.came)):
                continue
            with _reasons(outcomes[key], stop):
                prepared.samples.append(clock.sample(prepared.call, prepared.calls))
    for key, prepared in ready.items():
        if not outcomes[key].reason and not prepared.samples:
            outcomes[key].reason = INTERRUPTED
        if not outcomes[key].reason:
            outcomes[key].performance = summarise(prepared.samples, prepared.method, prepared.calls)
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
        # A signal to a group of processes ends the compilers that run for a kernel, too: no fault of the kernel's.
        outcome.reason = INTERRUPTED if stop.came else f"{FAILED}: {describe_error(error)}"


def summarise(samples: Sequence[float], method: str, calls: int) -> Performance:
    """Median and quartiles of samples in ms."""
    ordered = torch.tensor(sorted(samples), dtype=torch.float64)
    q1, median, q3 = (float(ordered.quantile(at)) for at in (0.25, 0.5, 0.75))
    kept = [float(f"{sample:.5g}") for sample in samples]
    q1, median, q3 = (float(f"{x:.6g}") for x in (q1, median, q3))
    return Performance(median, q1, q3, method, calls, kept)


def spread_of_repeats(performance: Performance, repeats: int = 5) -> float | None:
    """Standard deviation over mean of the medians of ``repeats`` runs of successive samples; None for too few."""
    samples = torch.tensor(performance.samples_ms, dtype=torch.float64)
    if len(samples) < repeats:
        return None
    medians = torch.stack([part.quantile(0.5) for part in samples.tensor_split(repeats)])
    return float(medians.std() / medians.mean())

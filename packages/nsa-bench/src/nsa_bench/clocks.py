"""Clocks: set up a call, warm it up, and take one sample of its time.

CUDA: events around one call. Before each call a buffer larger than the L2 cache is written, which
flushes it (as triton.testing.do_bench does). Launch-bound calls are captured into a CUDA graph and
replayed, so that the time is the kernels' time.

A GPU at its power limit lowers its clock. For some 100 ms, a call therefore takes up to 17 % longer
after calls that need more power, and less time after calls that need less. So each turn of a
workload begins with untimed calls of it, and its samples have the clock that its own power allows.
Calls with state (Workload.has_state) and calls of at least 4 * LEAD_MS begin without them.

CPU: torch.utils.benchmark over enough calls to fill 5 ms, at a stated thread count. A longer call
is timed with perf_counter, because Timer would run it three times per sample. Caches stay as the
previous workload left them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.benchmark import Timer

from nsa_bench.timing import MAX_SAMPLES, Clock, Prepared, Workload, take_sample
from nsa_core.util.text import describe_error

HOST_SHARE = 0.05  # largest tolerated share of host launch time in an eagerly timed call
SLOW_MS = 200.0  # a slower call is warmed up once, and its second run is already a sample
EAGER_SAMPLES = 5  # eager samples of a captured call
TURNS, LEAD_MS = 2, 100.0  # on a GPU: turns of a workload, and its untimed calls before each
SAMPLE_MS = 5.0  # shortest CPU sample
HIGHEST_THRESHOLD = 32 << 20  # highest value of glibc's dynamic mmap threshold, in bytes


# A call in named parts. It calls its argument with the name of each part that has ended.
Run = Callable[[Callable[[str], None]], Any]


def may_be_launch_bound(event_ms: float, host_ms: float) -> bool:
    """Return whether a call may be launch-bound: host time above HOST_SHARE of its event time.

    ``event_ms`` is at most the kernels' time plus ``host_ms``, the time of the launches. So the
    host adds at most host_ms / event_ms of it.
    """
    return host_ms > HOST_SHARE * event_ms


class _Stop(Exception):
    """Raised when the last requested part of a run has ended."""


def _run_until(run: Run, last: str) -> None:
    """Run the parts of ``run`` up to and including ``last``."""

    def part_ended(part: str) -> None:
        if part == last:
            raise _Stop

    with contextlib.suppress(_Stop):
        run(part_ended)


def first_call(clock: Clock, workload: Workload) -> tuple[Callable[[], Any], float]:
    """Set up a workload and call it once, both limited; return the call and its milliseconds."""
    with workload.limited():
        call = workload.make()
    with workload.limited():
        return call, clock.sample(call, 1)


class CpuClock:
    """Wall time on the CPU.

    glibc returns freed blocks above a threshold to the system, and the next call faults the pages
    in again. Freeing a larger block raises the threshold. Without that, the first cells would be up
    to four times slower than the same cells later. So the constructor frees a block of almost the
    highest threshold.
    """

    turns, lead_ms = MAX_SAMPLES, 0.0

    def __init__(self) -> None:
        torch.empty(HIGHEST_THRESHOLD - (1 << 16), dtype=torch.uint8)

    def sample(self, call: Callable[[], Any], calls: int) -> float:
        """Return the milliseconds per call over ``calls`` calls."""
        if calls > 1:
            timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
            return float(timer.timeit(calls).mean) * 1e3
        start = time.perf_counter_ns()
        call()
        return (time.perf_counter_ns() - start) / 1e6

    def slot_times(self, run: Run) -> tuple[Callable[[], dict[str, float]], str]:
        """Return (sample, method); ``sample()`` runs ``run`` and returns the ms of each part."""

        def sample() -> dict[str, float]:
            times, last = {}, time.perf_counter_ns()

            def part_ended(part: str) -> None:
                nonlocal last
                times[part] = (time.perf_counter_ns() - last) / 1e6
                last = time.perf_counter_ns()

            run(part_ended)
            return times

        sample()
        return sample, "within"

    def prepare(self, workload: Workload) -> Prepared:
        """Set up and warm up; memory that the setup allocates and keeps is not counted."""
        call, first = first_call(self, workload)
        estimate = self.sample(call, 1) if first < 200 else first
        peak = self._peak_bytes(call) if workload.measure_memory else 0
        calls = max(1, round(SAMPLE_MS / max(estimate, 1e-3)))
        return Prepared(call, "benchmark" if calls > 1 else "perf_counter", calls, estimate, peak)

    def _peak_bytes(self, call: Callable[[], Any]) -> int:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            call()
        assert profiled.profiler is not None  # the profiler has run
        events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
        held = peak = 0
        for event in sorted(events, key=lambda e: e.start_ns()):
            held += event.nbytes()
            peak = max(peak, held)
        return peak


class CudaClock:
    """Device time on the current CUDA device."""

    turns, lead_ms = TURNS, LEAD_MS

    def __init__(self, device: str) -> None:
        properties = torch.cuda.get_device_properties(device)
        size = max(256 << 20, 2 * int(getattr(properties, "L2_cache_size", 0)))
        self._flush = torch.empty(size // 4, dtype=torch.int32, device=device)

    def sample(self, call: Callable[[], Any], calls: int) -> float:
        """Return the milliseconds of one call after an L2 flush."""
        return self._timed(call)[0]

    def _timed(self, call: Callable[[], Any]) -> tuple[float, float]:
        """Return (event time, host launch time) of one call after an L2 flush, in ms."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()  # earlier calls would hide the launches of this one
        self._flush.zero_()
        start.record()
        host_start = time.perf_counter_ns()
        call()
        host_ms = (time.perf_counter_ns() - host_start) / 1e6
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)), host_ms

    def prepare(self, workload: Workload) -> Prepared:
        """Set up and warm up; capture a launch-bound call as a CUDA graph.

        The first call compiles kernels, so only later calls are timed.
        """
        call, _ = first_call(self, workload)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        event_ms, host_ms = self._timed(call)
        peak = torch.cuda.max_memory_allocated() - before
        prepared = Prepared(call, "events", 1, event_ms, peak, host_ms=host_ms)
        if event_ms > SLOW_MS:
            prepared.samples = [event_ms]
            if may_be_launch_bound(event_ms, host_ms):
                prepared.not_captured = f"a call takes over {SLOW_MS:g} ms"
            return prepared
        second = self._timed(call)
        prepared.estimate_ms, prepared.host_ms = (
            min(pair) for pair in zip((event_ms, host_ms), second)
        )
        if not may_be_launch_bound(prepared.estimate_ms, prepared.host_ms):
            return prepared
        eager = [
            take_sample(self, prepared, begins_turn=n == 0 and not workload.has_state)
            for n in range(EAGER_SAMPLES)
        ]
        replay, prepared.not_captured = self._captured(workload.make)
        if replay is None:
            return prepared
        return dataclasses.replace(
            prepared, call=replay, method="graph", estimate_ms=self.sample(replay, 1), eager=eager
        )

    def slot_times(self, run: Run) -> tuple[Callable[[], dict[str, float]], str]:
        """Return (sample, method); ``sample()`` runs ``run`` and returns the ms of each part.

        A part's time is the time of ``run`` up to the part's end minus the time up to its start.
        Each of the two is a CUDA graph where capture succeeds. Events recorded inside one graph
        would not do: an event takes 3 us, as long as some of the kernels.
        """
        parts: list[str] = []
        run(parts.append)
        prefixes = [functools.partial(_run_until, run, part) for part in parts]
        graphs = [self._captured(lambda call=call: call)[0] for call in prefixes]  # type: ignore[misc]
        all_captured = all(graphs)
        calls = graphs if all_captured else prefixes

        def sample() -> dict[str, float]:
            ends = [0.0, *(self.sample(call, 1) for call in calls if call is not None)]
            return {
                part: end - start for part, (start, end) in zip(parts, itertools.pairwise(ends))
            }

        return sample, "within graph" if all_captured else "within events"

    def _captured(
        self, make: Callable[[], Callable[[], Any]]
    ) -> tuple[Callable[[], Any] | None, str]:
        """Capture the call as a CUDA graph.

        Returns:
            (replay function, ""), or (None, reason) if it cannot be captured, for example because
            it synchronises with the device.
        """
        stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(current)
        graph, pool, capturing = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle(), False
        try:
            with torch.cuda.stream(stream):
                # A backward runs on its forward's stream, so the setup runs on the capture stream.
                call = make()
                call()
                with _synchronisation_raises():
                    call()
            torch.cuda.synchronize()
            capturing = True
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                call()
            capturing = False
            graph.replay()
            torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001  a third-party kernel may raise anything
            # After a failed capture torch.cuda.graph leaves its own stream current.
            torch.cuda.set_stream(current)
            torch.cuda.synchronize()
            if capturing:
                _release_pool(pool)
            return None, describe_error(error)

        def replay() -> Any:
            graph.replay()
            return call  # keeps the tensors alive that the graph reads

        return replay, ""


@contextlib.contextmanager
def _synchronisation_raises() -> Iterator[None]:
    """Make calls that synchronise with the device raise RuntimeError.

    A synchronisation during capture would leave the allocator in an inconsistent state.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():  # PyTorch warns that the mode is a prototype
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _release_pool(pool: Any) -> None:
    """End the allocator's recording into ``pool`` after a failed capture.

    Some PyTorch versions (2.11 for one) leave it open. The allocator then frees no cached memory,
    and the GPU fills up.
    """
    # RuntimeError: PyTorch has ended it itself. AttributeError: these functions do not exist.
    with contextlib.suppress(RuntimeError, AttributeError):
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        torch._C._cuda_releasePool(torch.cuda.current_device(), pool)


class EagerClock:
    """Wall time on the current CUDA device: the longer of host launches and kernel execution."""

    CALLS = 20
    turns, lead_ms = TURNS, LEAD_MS

    def sample(self, call: Callable[[], Any], calls: int) -> float:
        """Return the milliseconds per call over ``calls`` calls."""
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
        return (time.perf_counter_ns() - start) / 1e6 / calls

    def prepare(self, workload: Workload) -> Prepared:
        """Set up and warm up."""
        with workload.limited():
            call = workload.make()
            self.sample(call, 3)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        estimate = self.sample(call, self.CALLS)
        return Prepared(
            call, "eager", self.CALLS, estimate, torch.cuda.max_memory_allocated() - before
        )


def clock_for(device: str) -> CpuClock | CudaClock:
    """Return the clock of a device."""
    return CudaClock(device) if device.startswith("cuda") else CpuClock()

"""Clocks: how a call is set up, warmed up, and one sample of it taken.

CUDA: events around one call, the L2 cache flushed before each by writing a buffer larger than it
(as triton.testing.do_bench does); a call that the host may hold up is captured into a CUDA graph
and replayed, so that what is timed is the kernels. CPU: torch.utils.benchmark over as many calls as
fill 5 ms, at a stated thread count; a call that takes longer by itself is timed by perf_counter,
because Timer would make it three times for one sample. Caches are as the previous work left them.
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

from nsa_bench.timing import Prepared, Workload
from nsa_core.errors import NSAError
from nsa_core.util.text import describe_error

HOST_SHARE = 0.05  # of a call's time, up to which the host's part in it is let stand
SLOW_MS = 200.0  # calls above are warmed up once only, and the next call is a sample already
EAGER_SAMPLES = 5  # of a call that is captured
SAMPLE_MS = 5.0  # shortest CPU sample
HIGHEST_THRESHOLD = 32 << 20  # of glibc's mmap


# a call that tells its argument the name of each part that has ended
Run = Callable[[Callable[[str], None]], Any]


def host_may_bind(event_ms: float, host_ms: float) -> bool:
    """Whether the host may add more than HOST_SHARE to a call that takes ``event_ms`` by CUDA
    events.

    A call takes at most the kernels' own time and the ``host_ms`` in which the host launches them:
    of ``event_ms``, no more than host_ms / event_ms is the host's, whichever of the two the call
    waits for.
    """
    return host_ms > HOST_SHARE * event_ms


class _Ended(Exception):
    """The last part that is wanted has ended."""


def _until(run: Run, last: str) -> None:
    """``run`` up to the end of its part ``last``."""

    def ended(part: str) -> None:
        if part == last:
            raise _Ended

    with contextlib.suppress(_Ended):
        run(ended)


class CpuClock:
    """Wall time on the CPU.

    glibc returns freed memory above a threshold to the system, and faults it in again at the next
    call, until a larger block has been freed once: the first cells would be up to four times slower
    than the same cells later on. So a block of about the highest threshold is freed first.
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

    def slot_times(self, run: Run) -> tuple[Callable[[], dict[str, float]], str]:
        """What takes, at each call, milliseconds of each part of ``run``; and the method."""

        def taken() -> dict[str, float]:
            times, last = {}, time.perf_counter_ns()

            def ended(part: str) -> None:
                nonlocal last
                times[part] = (time.perf_counter_ns() - last) / 1e6
                last = time.perf_counter_ns()

            run(ended)
            return times

        taken()
        return taken, "within"

    def prepare(self, work: Workload) -> Prepared:
        """Set up and warm up: what is allocated once and kept is not the call's."""
        call = work.make()
        first = self.sample(call, 1)
        estimate = self.sample(call, 1) if first < 200 else first
        peak = self._peak_bytes(call) if work.measure_memory else 0
        calls = max(1, round(SAMPLE_MS / max(estimate, 1e-3)))
        return Prepared(call, "benchmark" if calls > 1 else "perf_counter", calls, estimate, peak)

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
        return self._timed(call)[0]

    def _timed(self, call: Callable[[], Any]) -> tuple[float, float]:
        """Milliseconds of one call after an L2 flush, and those after which the host has launched
        all of it.
        """
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        start.record()
        began = time.perf_counter_ns()
        call()
        host_ms = (time.perf_counter_ns() - began) / 1e6
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)), host_ms

    def prepare(self, work: Workload) -> Prepared:
        """Set up, warm up, and capture what the host may hold up.

        The first call compiles: later ones tell how long it takes.
        """
        call = work.make()
        self.sample(call, 1)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        event_ms, host_ms = self._timed(call)
        peak = torch.cuda.max_memory_allocated() - before
        prepared = Prepared(call, "events", 1, event_ms, peak, host_ms=host_ms)
        if event_ms > SLOW_MS:
            prepared.samples = [event_ms]
            if host_may_bind(event_ms, host_ms):
                prepared.not_captured = f"a call takes over {SLOW_MS:g} ms"
            return prepared
        again = self._timed(call)
        prepared.estimate_ms, prepared.host_ms = (
            min(pair) for pair in zip((event_ms, host_ms), again)
        )
        if not host_may_bind(prepared.estimate_ms, prepared.host_ms):
            return prepared
        eager = [event_ms, again[0], *(self.sample(call, 1) for _ in range(EAGER_SAMPLES - 2))]
        replay, prepared.not_captured = self._captured(work.make)
        if replay is None:
            return prepared
        return dataclasses.replace(
            prepared, call=replay, method="graph", estimate_ms=self.sample(replay, 1), eager=eager
        )

    def slot_times(self, run: Run) -> tuple[Callable[[], dict[str, float]], str]:
        """What takes, at each call, milliseconds of each part of ``run``, a graph if it can be one;
        and the method.

        A part's time is that of ``run`` up to its end less that up to its beginning, each a graph
        of its own: an event that a graph records between two kernels takes 3 us itself, some
        kernels no longer.
        """
        parts: list[str] = []
        run(parts.append)
        begun = [functools.partial(_until, run, part) for part in parts]
        graphs = [self._captured(lambda call=call: call)[0] for call in begun]  # type: ignore[misc]
        whole = all(graphs)
        calls = graphs if whole else begun

        def taken() -> dict[str, float]:
            ends = [0.0, *(self.sample(call, 1) for call in calls if call is not None)]
            return {
                part: end - start for part, (start, end) in zip(parts, itertools.pairwise(ends))
            }

        return taken, "within graph" if whole else "within events"

    def _captured(
        self, make: Callable[[], Callable[[], Any]]
    ) -> tuple[Callable[[], Any] | None, str]:
        """The call as a graph; or None, and why it cannot be captured (it waits for the device,
        say).
        """
        stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(current)
        graph, pool, captures = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle(), False
        try:
            with torch.cuda.stream(stream):
                # a backward runs on its forward's stream: both on the one that captures
                call = make()
                call()
                with _waiting_raises():
                    call()
            torch.cuda.synchronize()
            captures = True
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                call()
            captures = False
            graph.replay()
            torch.cuda.synchronize()
        except (RuntimeError, NSAError) as error:
            torch.cuda.set_stream(current)  # torch.cuda.graph leaves its own where a capture fails
            torch.cuda.synchronize()
            if captures:
                _give_back(pool)
            return None, describe_error(error)

        def replay() -> Any:
            graph.replay()
            return call  # kept alive as long as the graph reads its tensors

        return replay, ""


@contextlib.contextmanager
def _waiting_raises() -> Iterator[None]:
    """Make what waits for the device raise RuntimeError: met in a capture, it would leave the
    allocator in disorder.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():  # that the mode is a prototype
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _give_back(pool: Any) -> None:
    """End the capture into ``pool``, which has failed, for the allocator too.

    torch (2.11 is one) leaves it open there: then no cached memory is freed any more, and a GPU
    fills up.
    """
    with contextlib.suppress(
        RuntimeError, AttributeError
    ):  # a torch that has ended it itself, or hides how
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        torch._C._cuda_releasePool(torch.cuda.current_device(), pool)


class EagerClock:
    """Wall time on the current CUDA device: the longer of what the host takes to launch and the
    device to run.
    """

    CALLS = 20

    def sample(self, call: Callable[[], Any], calls: int) -> float:
        """Milliseconds per call over ``calls`` calls."""
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
        return (time.perf_counter_ns() - start) / 1e6 / calls

    def prepare(self, work: Workload) -> Prepared:
        """Set up and warm up."""
        call = work.make()
        self.sample(call, 3)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        estimate = self.sample(call, self.CALLS)
        return Prepared(
            call, "eager", self.CALLS, estimate, torch.cuda.max_memory_allocated() - before
        )


def clock_for(device: str) -> CpuClock | CudaClock:
    """The timer of a device."""
    return CudaClock(device) if device.startswith("cuda") else CpuClock()

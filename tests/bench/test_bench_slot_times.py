"""Times of the parts of a call, measured within the call."""

from __future__ import annotations

import pytest

from nsa_bench.clocks import CpuClock, CudaClock


@pytest.mark.parametrize("refusal", ["", "it waits"])
def test_part_times_on_a_gpu_are_differences_of_prefixes(monkeypatch, refusal):
    clock, now, scale, replayed = object.__new__(CudaClock), [0.0], [1.0], []

    def run(part_ended):
        for part, ms in (("first", 2.0), ("second", 3.0), ("third", 0.5)):
            now[0] += ms * scale[0]
            part_ended(part)

    def captured(make):
        call = make()
        return (None, refusal) if refusal else (lambda: (replayed.append(1), call()), "")

    def timed(call):
        start = now[0]
        call()
        return now[0] - start, 0.0

    monkeypatch.setattr(clock, "_captured", captured)
    monkeypatch.setattr(clock, "_timed", timed)
    times, method = clock.slot_times(run)
    assert times() == {"first": 2.0, "second": 3.0, "third": 0.5}
    scale[0] = 10.0  # each call measures again
    assert times() == {"first": 20.0, "second": 30.0, "third": 5.0}
    assert (len(replayed), method) == ((0, "within events") if refusal else (6, "within graph"))


def test_part_times_on_the_cpu_sum_to_the_call(monkeypatch):
    ticks = iter(range(0, 10**9, 10**6))  # each reading advances the clock by 1 ms
    monkeypatch.setattr("time.perf_counter_ns", lambda: next(ticks))
    times, method = CpuClock().slot_times(lambda ended: [ended(part) for part in "abc"])
    assert (times(), method) == ({"a": 1.0, "b": 1.0, "c": 1.0}, "within")

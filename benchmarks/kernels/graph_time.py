"""Time work on the GPU: as a CUDA graph, without the share of the host, or launched from Python."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def graph_ms(run: Callable[[], Any], repeats: int = 20, rounds: int = 7) -> float:
    """Return the milliseconds of one ``run``, the median over the replays of a graph.

    Args:
        run: Launches the work to be timed.
        repeats: Runs that the graph captures.
        rounds: Timed replays of the graph.
    """
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            run()
    graph.replay()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) / repeats


def eager_ms(run: Callable[[], Any], repeats: int) -> float:
    """Return the mean milliseconds of ``repeats`` runs launched from Python, host included."""
    for _ in range(5):
        run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats * 1e3

"""Time GPU work without the host's share, by replaying a CUDA graph."""

from __future__ import annotations

import statistics
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

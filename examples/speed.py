"""Measure the training of an example: tokens a second and the peak memory of a GPU."""

import statistics
import time

import torch
from transformers import TrainerCallback


class Speed(TrainerCallback):
    """The time of each step. A loop of its own calls ``on_step_end()`` after each step."""

    def __init__(self):
        self.ends = []

    def on_step_end(self, *_, **__):
        """Wait for the GPU and note the time."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())

    def report(self, tokens: float) -> str:
        """Return the speed of the median step; ``tokens`` are those of a step, of all processes.

        The first step compiles kernels and does not count.
        """
        seconds = statistics.median(b - a for a, b in zip(self.ends, self.ends[1:]))
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        memory = f", peak {peak / 2**30:.1f} GiB of GPU memory a process" if peak else ""
        return f"{tokens / seconds:,.0f} tokens/s in steps of {tokens:,.0f} tokens{memory}"

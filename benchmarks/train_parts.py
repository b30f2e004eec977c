"""Divide the time of a training step among groups of kernels, for benchmarks/train.py."""

from __future__ import annotations

import re
from collections import Counter

import torch
from train_cells import Row, median

from nsa_models.lm.trainer import Trainer

# The first pattern that a kernel's name contains names its group. Names beginning with triton_ are
# kernels that torch.compile wrote; ours have no prefix.
GROUPS = {
    "attention": r"^(span|select|sel|combine)_|^attention_delta|^sum_parts|fmha|flash|cudnn",
    "products": r"gemm|nvjet|cutlass|splitK|::(addmm|bmm|mm|linear)$",
    "compiled": r"^triton_",
    "optimizer": r"multi_tensor_apply|[Aa]dam",
}
OTHER = "other"
STEPS = 4  # profiled steps; a group's time is the mean over them


def group_of(kernel: str) -> str:
    """Return the group of a kernel, or of an operator on the CPU."""
    return next((name for name, text in GROUPS.items() if re.search(text, kernel)), OTHER)


def step_parts(trainer: Trainer, step_times: list[float]) -> Row:
    """Return the median time of a step, and the time of each group of kernels in one, in ms.

    The kernels of a group may run beside others, so the groups may take longer than the step.

    Args:
        trainer: A trainer after its first steps.
        step_times: Seconds of steps without a profiler.
    """
    cuda = next(trainer.model.parameters()).is_cuda
    kind = torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind]) as profile:
        for _ in range(STEPS):
            trainer.step().read()
    times: Counter[str] = Counter(dict.fromkeys([*GROUPS, OTHER], 0.0))
    for row in profile.key_averages():
        microseconds = row.self_device_time_total if cuda else row.self_cpu_time_total
        times[group_of(row.key)] += microseconds / 1e3 / STEPS
    step = {"step_ms": round(median(step_times) * 1e3, 3)}
    return step | {"kernels_ms": {name: round(ms, 3) for name, ms in times.items()}}

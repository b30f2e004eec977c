"""Tasks for the workers of a benchmark of context parallelism, and processes that run them."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from nsa_bench.parallel.run import ParallelBench
from nsa_bench.parallel.settings import ParallelSettings
from nsa_bench.parallel.workers import Workers
from nsa_bench.shapes import parse_shape
from nsa_core.util.interruption import NEVER


@dataclasses.dataclass(frozen=True)
class Fault:
    """Fail on one rank, while the other one waits in a collective.

    Attributes:
        rank: The rank that fails.
        kind: "memory", "error", "exit", "sleep" or "" for no fault.
    """

    rank: int
    kind: str

    def __call__(self, worker: Any) -> float:
        """Run the task; return the sum of the ranks' numbers plus one."""
        worker.mesh  # noqa: B018  joins the ranks
        if worker.rank == self.rank and self.kind:
            if self.kind == "memory":
                raise torch.OutOfMemoryError("planted")
            if self.kind == "error":
                raise ValueError("planted")
            if self.kind == "exit":
                os._exit(3)
            time.sleep(600)
        total = torch.tensor(float(worker.rank + 1))
        dist.all_reduce(total)
        return float(total)


@dataclasses.dataclass(frozen=True)
class Planted:
    """Run a task with a change of the sources of mode sequence, as in tests/core/parallel.

    Attributes:
        task: The task.
        module: The module that is changed; empty for no change.
        changes: Old text -> new text.
    """

    task: Any
    module: str = ""
    changes: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __call__(self, worker: Any) -> Any:
        """Run the task with the operators of a GPU; a tensor that NCCL refuses is an error."""
        from dense_collectives import dense_collectives
        from nsa_core.layer import fp32_product
        from sequence_mutants import mutated

        # In bf16, the gradient of a gate's weight is then a transposed view.
        gpu = mock.patch.object(fp32_product, "DEVICES", ("cpu",))
        with dense_collectives(), gpu, mutated(self.module, self.changes):
            return self.task(worker)


def settings(**changes: Any) -> ParallelSettings:
    """Return small settings for two ranks on the CPU."""
    values: dict[str, Any] = {
        "ranks": 2,
        "shapes": [parse_shape("4/2/16")],
        "lengths": [128],
        "dtypes": ("float32",),
        "judged": ("float32",),
        "blocks": (8, 4, 16, 4, 16),
        "device": "cpu",
        "budget_s": 0.001,
        "largest": False,
    }
    return ParallelSettings(**(values | changes))


def run_tasks(chosen: ParallelSettings, tasks: Sequence[Any], limit_s: float) -> list[Any]:
    """Run tasks on the workers of two ranks; return the answers that each rank has of each task.

    A task that is None ends the workers; new ones run the tasks after it.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_control, (folder, chosen, tasks, limit_s), nprocs=chosen.ranks)
        return [
            torch.load(pathlib.Path(folder, f"{rank}.pt"), weights_only=False)
            for rank in range(chosen.ranks)
        ]


def _control(
    rank: int, folder: str, chosen: ParallelSettings, tasks: Sequence[Any], limit_s: float
) -> None:
    dist.init_process_group(
        "gloo", rank=rank, world_size=chosen.ranks, init_method=f"file://{folder}/store"
    )
    workers = Workers(chosen, NEVER, time.monotonic() + limit_s)
    answers = []
    for task in tasks:
        if task is None:
            workers.end()
        else:
            answers.append(workers.run(task))
    workers.end()
    torch.save(answers, pathlib.Path(folder, f"{rank}.pt"))
    dist.destroy_process_group()


def run_bench(chosen: ParallelSettings) -> list[Any]:
    """Run the whole benchmark on two ranks; return the result of each rank."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_bench, (folder, chosen), nprocs=chosen.ranks)
        return [
            torch.load(pathlib.Path(folder, f"{rank}.pt"), weights_only=False)
            for rank in range(chosen.ranks)
        ]


def _bench(rank: int, folder: str, chosen: ParallelSettings) -> None:
    dist.init_process_group(
        "gloo", rank=rank, world_size=chosen.ranks, init_method=f"file://{folder}/store"
    )
    kept: list[Any] = []
    result = ParallelBench(chosen, {}, kept.append).run()
    assert len(kept) == ParallelBench(chosen, {}).steps()
    assert dataclasses.replace(kept[-1], seconds=0.0) == dataclasses.replace(result, seconds=0.0)
    torch.save(result, pathlib.Path(folder, f"{rank}.pt"))
    dist.destroy_process_group()

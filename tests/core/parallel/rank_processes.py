"""Run cases on several processes with gloo: one start of the processes serves many cases."""

from __future__ import annotations

import datetime
import importlib
import pathlib
import tempfile
import traceback
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dense_collectives import dense_collectives

MODULES = ("parallel_cases", "collective_cases", "block_cases", "agreement_cases")
Outcome = Any  # the result of a case on a rank, or the text of its exception after "raised "


def run_on_ranks(
    world: int, cases: Sequence[tuple[str, dict[str, Any]]], modules: Sequence[str] = MODULES
) -> list[list[Outcome]]:
    """Run functions of modules of cases on ``world`` processes, in order.

    Args:
        world: number of processes.
        cases: names of functions and their keyword arguments.
        modules: names of the modules; a function is taken from the first that has it.

    Returns:
        For each case, the results of all ranks.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (world, folder, cases, modules), nprocs=world)
        results = [torch.load(pathlib.Path(folder, f"{r}.pt")) for r in range(world)]
    return [[results[rank][index] for rank in range(world)] for index in range(len(cases))]


def _rank(
    rank: int,
    world: int,
    folder: str,
    cases: Sequence[tuple[str, dict[str, Any]]],
    modules: Sequence[str],
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        rank=rank,
        world_size=world,
        init_method=f"file://{folder}/store",
        timeout=datetime.timedelta(seconds=60),
    )
    loaded = [importlib.import_module(name) for name in modules]
    results: list[Outcome] = []
    for name, arguments in cases:
        try:
            module = next(module for module in loaded if hasattr(module, name))
            with dense_collectives():
                results.append(getattr(module, name)(rank, world, **arguments))
        except Exception as error:  # noqa: BLE001  (the parent process reports it)
            traceback.print_exc()
            results.append(f"raised {type(error).__name__}: {error}")
    torch.save(results, pathlib.Path(folder, f"{rank}.pt"))
    dist.destroy_process_group()

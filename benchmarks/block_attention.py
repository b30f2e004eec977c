"""Time block_attention beside dense attention, in bf16 at batch 1.

    python benchmarks/block_attention.py --json block_attention.json
    python benchmarks/rehearse.py --arch 80 -- python benchmarks/block_attention.py --json a100.json
    python benchmarks/block_attention.py --quick --device cpu  # in seconds

Each query attends to 2048 keys: 16 random blocks of 128, and the same number of keys in blocks of
other sizes. Random blocks are the slowest case, because neighbouring queries share few of them. The
workloads of a length alternate in one run. Every time is a row, and the file is written after each
length.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from random_blocks import random_causal_blocks
from torch import Tensor

from nsa_bench.baselines import dense_baselines
from nsa_bench.clocks import clock_for
from nsa_bench.environment import machine
from nsa_bench.inputs import Inputs, make_inputs
from nsa_bench.shapes import parse_shape
from nsa_bench.timing import Workload, measure
from nsa_core import NSAConfig, block_attention
from nsa_core.util.atomic_files import write_atomic

PHASES = ("both", "forward")
Forward = Callable[[Inputs], Tensor]


@dataclasses.dataclass(frozen=True)
class Problem:
    """The timed problems.

    Attributes:
        shapes: Heads and widths, such as 64/4/128.
        lengths: Tokens.
        block_sizes: Keys of a block.
        keys: Keys that a query attends to; the number of blocks is ``keys`` / block size.
        dtype: Dtype of q, k, v and the gradient of o.
        budget_s: Seconds of samples for each workload.
    """

    shapes: tuple[str, ...] = ("64/4/128",)
    lengths: tuple[int, ...] = (8192, 32768, 65536)
    block_sizes: tuple[int, ...] = (128, 64, 256)
    keys: int = 2048
    dtype: torch.dtype = torch.bfloat16
    budget_s: float = 0.3


QUICK = Problem(("4/2/16",), (128, 300), (32, 64), 256, torch.float32, 0.01)


def over_blocks(
    problem: Problem, config: NSAConfig, length: int, size: int, device: str
) -> Forward:
    """Return block_attention over random blocks of ``size`` keys."""
    geometry = dataclasses.replace(
        config, select_block_size=size, num_selected_blocks=problem.keys // size
    ).geometry
    blocks = random_causal_blocks(length, config.n_kv_heads, geometry, device)

    def forward(x: Inputs) -> Tensor:
        return block_attention(x.q, x.k, x.v, blocks, block_size=size)

    return forward


def call_of(forward: Forward, x: Inputs, phase: str) -> Callable[[], Any]:
    """Return the call to be timed."""
    if phase == "forward":
        return torch.no_grad()(functools.partial(forward, x))
    return lambda: torch.autograd.grad(forward(x), [x.q, x.k, x.v], x.do)


def rows_of(problem: Problem, shape: str, length: int, device: str) -> list[dict[str, Any]]:
    """Time all implementations at one length, in turns; return a row for each and each phase."""
    config = parse_shape(shape).config()
    x = make_inputs(
        "random",
        config,
        batch=1,
        length=length,
        dtype=problem.dtype,
        device=device,
        seed=0,
    )
    forwards: dict[tuple[str, int | None], Forward] = {
        ("block_attention", size): over_blocks(problem, config, length, size, device)
        for size in problem.block_sizes
    }
    reasons = {}
    for baseline in dense_baselines(config, device, problem.dtype):
        forwards[baseline.name, None] = baseline.forward
        reasons[baseline.name] = baseline.reason
    cells = list(itertools.product(forwards, PHASES))
    workloads = [
        Workload(
            str(cell),
            functools.partial(call_of, forwards[cell[0]], x, cell[1]),
            measure_memory=True,
        )
        for cell in cells
        if not reasons.get(cell[0][0])
    ]
    outcomes = measure(workloads, clock_for(device), budget_s=problem.budget_s)
    rows = []
    for cell in cells:
        (name, size), phase = cell
        outcome = outcomes.get(str(cell))
        times = outcome.performance if outcome else None
        row = {"shape": shape, "S": length, "implementation": name, "block_size": size}
        row |= {"phase": phase, "median_ms": times and times.median_ms}
        if times and outcome:
            row |= {"method": times.method, "samples_ms": times.samples_ms}
            row |= {"peak_bytes": outcome.peak_bytes}
        else:
            row["reason"] = outcome.reason if outcome else reasons[name]
        rows.append(row)
        shown = [str(row[key]) for key in ("shape", "S", "implementation", "block_size", "phase")]
        print("  ".join(shown), row["median_ms"] or row["reason"], flush=True)
    return rows


def main() -> None:
    """Time every length; print and save the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="tiny problems, in seconds")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    problem = QUICK if options.quick else Problem()
    document: dict[str, Any] = {
        "kind": "nsa-block-attention-bench",
        "schema_version": 1,
        "machine": machine(options.device),
        "torch": torch.__version__,
        "keys": problem.keys,
        "dtype": str(problem.dtype).removeprefix("torch."),
        "rows": [],
    }
    for shape, length in itertools.product(problem.shapes, problem.lengths):
        document["rows"] += rows_of(problem, shape, length, options.device)
        if options.json:
            write_atomic(options.json, json.dumps(document, indent=1) + "\n", force=True)


if __name__ == "__main__":
    main()

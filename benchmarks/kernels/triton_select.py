"""Check and time select of the triton backend on a GPU.

    python benchmarks/kernels/triton_select.py [--quick] [--skip-check] [--shapes 0,1,2,3]
        [--configs 0,1,2] [--parts]

Small shapes are judged by the oracle's regret rule, large ones are timed. Prints one line per
shape, data and configuration: ms, and TFLOP/s of the product over visible compressed tokens. A
configuration that fails prints its error, and the others go on. --parts times the first
configuration without its ranking and without exp2: the part whose absence saves time is the limit.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import multiprocessing
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl

from nsa_backend_triton.host import configs
from nsa_backend_triton.select import forward as select
from nsa_backend_triton.shared.rows import dot_columns, transpose
from nsa_core.contract import SlotCall
from nsa_core.layout import BlockGeometry
from nsa_verify.judge.selection import judge_selection

GEOMETRY = BlockGeometry(32, 16, 64, 16, 1, 2, 512)
FORCED = BlockGeometry(32, 16, 64, 3, 1, 2, 512)  # all blocks are forced: nothing is ranked
OTHER, ODD = BlockGeometry(16, 8, 48, 16, 0, 0, 64), BlockGeometry(32, 32, 64, 40, 2, 3, 64)
Shape = tuple[int, int, int, int]
ANCHORS: list[Shape] = [
    (64, 4, 128, 65536),
    (32, 8, 128, 32768),
    (12, 2, 64, 65536),
    (64, 4, 192, 32768),
]
CHECKS: list[tuple[int, int, int, int, torch.dtype, BlockGeometry, float]] = [
    (64, 4, 128, 4096, torch.bfloat16, GEOMETRY, 1.0),
    (32, 8, 128, 4096, torch.bfloat16, GEOMETRY, 4.0),
    (12, 2, 64, 40000, torch.bfloat16, GEOMETRY, 1.0),
    (7, 1, 96, 3000, torch.float16, OTHER, 1.0),
    (3, 3, 192, 5000, torch.bfloat16, ODD, 2.0),
    (8, 2, 64, 2000, torch.float32, GEOMETRY, 1.0),
    (64, 4, 128, 4096, torch.bfloat16, GEOMETRY, 0.0),
]
BASE = {
    "BLOCK_M": 128,
    "BLOCK_N": 64,
    "Q_BYTES": 32768,
    "RANK_ROWS": 8,
    "RANK_CHUNKS": 16,
    "RANK_LANES": 32,
    "PROGRAMS_PER_SM": 2,
}
BASE |= {"num_warps": 4, "num_stages": 3}
WIDE = {"BLOCK_N": 128, "num_warps": 8, "PROGRAMS_PER_SM": 1}
CONFIGS: list[configs.Settings] = [
    BASE,
    BASE | {"num_stages": 2},
    BASE | {"Q_BYTES": 16384},
    BASE | {"BLOCK_M": 64, "PROGRAMS_PER_SM": 3, "maxnreg": 168},
    BASE | {"BLOCK_M": 64, "PROGRAMS_PER_SM": 4, "maxnreg": 128, "num_stages": 2},
    BASE | {"RANK_ROWS": 16},
    BASE | {"RANK_CHUNKS": 8},
    BASE | {"RANK_CHUNKS": 4},
    BASE | WIDE | {"Q_BYTES": 65536},
]
FOR_WIDE_HEADS = (-1, 3)  # configurations that fit


@triton.jit
def without_exp2(
    k, q, lse, qk_scale, visible,
    HEAD_DIM: tl.constexpr, HEAD_DIM_BAND: tl.constexpr, BLOCK_H: tl.constexpr,
    NUM_HEAD_TILES: tl.constexpr, ACC: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """select._sum_heads for the logits in place of their probabilities."""
    for i in tl.static_range(NUM_HEAD_TILES):
        s = dot_columns(k, transpose(q[i], HEAD_DIM, HEAD_DIM_BAND), HEAD_DIM, HEAD_DIM_BAND, ACC)
        p = s * qk_scale - lse[i][None, :]
        partial = tl.sum(tl.reshape(p, [s.shape[0], BLOCK_H, p.shape[1] // BLOCK_H]), 1)
        total = partial if i == 0 else total + partial  # noqa: F821
    if MASKED:
        total = tl.where(visible, total, 0.0)
    return total


PARTS = {
    "whole": (GEOMETRY, select._sum_heads),
    "without ranking": (FORCED, select._sum_heads),
    "without exp2": (GEOMETRY, without_exp2),
    "without both": (FORCED, without_exp2),
}


@dataclasses.dataclass(frozen=True)
class Job:
    """One binary and the data on which it is timed."""

    shape: Shape
    peak: float = 1.0
    number: int = 0  # of the configuration; -1: the tuned one
    part: str = "whole"
    dtype: torch.dtype = torch.bfloat16
    geometry: BlockGeometry = GEOMETRY

    @property
    def settings(self) -> configs.Settings | None:
        """Settings of the configuration; None: those of the tables."""
        return None if self.number < 0 else CONFIGS[self.number]

    @property
    def name(self) -> str:
        """A name that distinguishes jobs of one shape."""
        settings = self.settings
        change = (
            "tuned"
            if settings is None
            else {k: v for k, v in settings.items() if BASE.get(k) != v} or "base"
        )
        return f"{change}" if self.part == "whole" else f"{change}, {self.part}"


@contextlib.contextmanager
def replaced(part: str) -> Iterator[BlockGeometry]:
    """Replace ``part`` of the kernel inside the block.

    A process may use one part only: compiled kernels keep the functions that they call.
    """
    geometry, sum_heads = PARTS[part]
    with mock.patch.object(select, "_sum_heads", sum_heads):
        yield geometry


def inputs(
    heads: int,
    groups: int,
    dim: int,
    length: int,
    peak: float,
    dtype: torch.dtype,
    geometry: BlockGeometry = GEOMETRY,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q [1, S, Hq, D], k_cmp [1, n_c, G, D] and their lse [1, Hq, S].

    ``peak`` is the standard deviation of the logits.
    """
    torch.manual_seed(length + heads)
    q = (torch.randn(1, length, heads, dim, device="cuda") * peak).to(dtype)
    k = torch.randn(1, geometry.num_compressed(length), groups, dim, device="cuda").to(dtype)
    lse = torch.full((1, heads, length), -torch.inf, device="cuda")
    last = (
        torch.arange(k.shape[1], device="cuda") * geometry.compress_stride
        + geometry.compress_block_size
        - 1
    )
    for head in range(heads):
        keys = k[0, :, head * groups // heads].float()
        for at in range(0, length, 8192):
            rows = torch.arange(at, min(at + 8192, length), device="cuda")
            logits = q[0, rows, head].float() @ keys.T * dim**-0.5
            lse[0, head, rows] = logits.masked_fill_(last > rows[:, None], -torch.inf).logsumexp(-1)
    return q, k, lse


def check(cases: list[tuple[int, int, int, int, torch.dtype, BlockGeometry, float]]) -> None:
    """Judge dtypes, numbers of heads and geometries by the regret rule on sampled rows."""
    for heads, groups, dim, length, dtype, geometry, peak in cases:
        name = (
            f"{heads}/{groups}/{dim} S={length} {str(dtype)[6:]} l'={geometry.select_block_size}"
            f" x{peak:g}"
        )
        try:
            q, k, lse = inputs(heads, groups, dim, length, peak, dtype, geometry)
            call = SlotCall(geometry, dim**-0.5, None, length)
            blocks = select.forward(q, k, lse, call=call)
            rows = [*torch.randperm(length)[:60].tolist(), 0, 1, 31, 32, length - 1]
            judged = judge_selection(q, k, lse, blocks, geometry, dim**-0.5, rows=sorted(set(rows)))
            again = bool(torch.equal(blocks, select.forward(q, k, lse, call=call)))
            verdict = (
                "ok" if judged.ok and again else f"WRONG {judged.why} same bits twice: {again}"
            )
            print(
                f"{name:55s} {verdict} regret {judged.regret:.2f} flips {judged.flip_rate:.3%}",
                flush=True,
            )
        except Exception as error:  # noqa: BLE001  go on with the other cases
            print(f"{name:55s} FAILED {type(error).__name__}: {str(error)[:300]}", flush=True)


def measure(shape: Shape, peak: float, jobs: list[Job]) -> None:
    """Print a line per job: median ms, TFLOP/s, and the share of sets equal to the first job's."""
    q, k, lse = inputs(*shape, peak, torch.bfloat16)
    heads, groups, dim, length = shape
    visible = sum(GEOMETRY.num_compressed(t + 1) for t in range(length))
    first = None
    for job in jobs:
        start = time.perf_counter()
        try:
            with replaced(job.part) as geometry:
                call = SlotCall(geometry, dim**-0.5, None, length)
                blocks = select.forward(q, k, lse, call=call, settings=job.settings)
                torch.cuda.synchronize()
                compiled = time.perf_counter() - start

                def again(job: Job = job, call: SlotCall = call) -> torch.Tensor:
                    return select.forward(q, k, lse, call=call, settings=job.settings)

                ms = triton.testing.do_bench(again, warmup=25, rep=120, return_mode="median")
            first = blocks if first is None else first
            same = (
                (blocks == first).all(-1).float().mean().item()
                if blocks.shape == first.shape
                else 0.0
            )
            rate = 2 * visible * heads * dim / ms / 1e9
            print(
                f"{heads}/{groups}/{dim} S={length} x{peak:g} {job.name}: {ms:.3f} ms {rate:.0f}"
                f" TFLOP/s, {same:.3%} sets as the first, first call {compiled:.1f} s",
                flush=True,
            )
        except Exception as error:  # noqa: BLE001  go on with the other configurations
            print(
                f"{heads}/{groups}/{dim} {job.name}: {type(error).__name__}: {str(error)[:200]}",
                flush=True,
            )


def compile_one(job: Job) -> None:
    """Put the binary of a job into Triton's cache; it serves every S."""
    heads, groups, dim, _ = job.shape
    with replaced(job.part) as changed:
        geometry = changed if job.part != "whole" else job.geometry
        q, k, lse = inputs(heads, groups, dim, 256, 1.0, job.dtype, geometry)
        select.forward(
            q, k, lse, call=SlotCall(geometry, dim**-0.5, None, 256), settings=job.settings
        )


def measure_part(part: str, shapes: list[Shape], turn: Any) -> None:
    """Compile one part in a process of its own, and time it once ``turn`` is free."""
    jobs = [Job(shape, part=part) for shape in shapes]
    with contextlib.suppress(Exception):  # appears again when measured
        for job in jobs:
            compile_one(job)
    with turn:
        for job in jobs:
            measure(job.shape, 1.0, [job])


def precompile(jobs: list[Job]) -> None:
    """Compile all binaries in parallel; one takes some seconds.

    Failures appear again when measured.
    """
    start, context = time.perf_counter(), multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(12, mp_context=context) as pool:
        list(concurrent.futures.as_completed([pool.submit(compile_one, job) for job in jobs]))
    print(f"{len(jobs)} binaries in {time.perf_counter() - start:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="time the tuned configuration only")
    parser.add_argument("--skip-check", action="store_true")
    parser.add_argument(
        "--parts",
        action="store_true",
        help="also time parts of the kernel, at the first two shapes",
    )
    parser.add_argument("--shapes", default="0,1,2,3", help="anchors by number")
    parser.add_argument(
        "--configs",
        default=",".join(map(str, range(len(CONFIGS)))),
        help="configurations by number",
    )
    given = parser.parse_args()
    shapes = [ANCHORS[int(i)] for i in given.shapes.split(",")]
    numbers = [-1] if given.quick else [-1, *map(int, given.configs.split(","))]
    jobs = [
        Job(shape, number=n)
        for shape in shapes
        for n in numbers
        if shape[2] <= 128 or n in FOR_WIDE_HEADS
    ]
    checks = (
        []
        if given.skip_check
        else [Job((*case[:3], 0), 1.0, -1, "whole", *case[4:6]) for case in CHECKS]
    )
    context = multiprocessing.get_context("spawn")
    turn = context.Lock()
    parts = [
        context.Process(target=measure_part, args=(part, shapes[:2], turn), daemon=True)
        for part in list(PARTS)[1:]
        if given.parts
    ]
    with turn:  # everything else is measured first
        for process in parts:
            process.start()
        precompile([*checks, *jobs])
        if checks:
            check(CHECKS)
        for shape in shapes:
            measure(shape, 1.0, [job for job in jobs if job.shape == shape])
        for shape in shapes[:2]:
            measure(shape, 4.0, [Job(shape, 4.0, -1)])
    for process in parts:
        process.join()


if __name__ == "__main__":
    main()

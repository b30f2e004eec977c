"""Tune the backward of sel: check small cases, then time tile shapes on several kinds of blocks.

    python benchmarks/kernels/triton_sel_backward.py [--shape 64/4/128] [--kind near] [--quick]
        [--no-check]

Kinds of blocks:

    random   the initial and local blocks, and 13 random earlier ones
    near     each of the 13 equals that of the previous token with probability 0.8

A pool of processes first checks bf16 and fp16 and compiles all configurations. Then the
configurations are timed, while the pool checks fp32, which takes long to compile. Times are medians
of do_bench in bf16 at batch 1; lse is the average that random q and k give. TFLOP/s count the
products of the pairs, without those that a tile computes and masks. Times of "dq dk dv" include
zeroing and rounding the fp32 sums.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import math
import multiprocessing
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nsa_backend_triton.sel import backward as sel_backward
from nsa_backend_triton.sel import pair_lists
from nsa_core.contract import SlotCall
from nsa_core.layout import BlockGeometry
from nsa_verify.judge.tensor import heads_first, judge
from nsa_verify.reference import attention

GEOMETRY = BlockGeometry()
# heads, kv heads, Dk, Dv, tokens
SHAPES = {
    "64/4/128": (64, 4, 128, 128, 65536),
    "32/8/128": (32, 8, 128, 128, 32768),
    "12/2/64": (12, 2, 64, 64, 65536),
    "64/4/192/128": (64, 4, 192, 128, 32768),
}
# Time of the best rival and our target, in ms.
TARGETS = {
    "64/4/128": (29.9, 15),
    "32/8/128": (18.2, 6),
    "12/2/64": (6.3, 3),
}
BASE = {"BLOCK_N": 64, "SEGMENT_ROWS": 32768, "CHUNK_PAIRS": 2048, "PROGRAMS_PER_SM": 8}
# QUERY_MAJOR, BLOCK_M, num_warps, num_stages of the unordered form
UNORDERED = [
    (0, 32, 4, 3),
    (0, 64, 8, 2),
    (1, 64, 8, 2),
    (0, 64, 4, 3),
    (1, 64, 4, 3),
    (0, 32, 8, 3),
    (0, 32, 4, 2),
]
# The same, of the ordered form (dk and dv only).
ORDERED = [(0, 32, 4, 3), (0, 64, 8, 2), (0, 64, 4, 3), (1, 64, 8, 2)]
# BLOCK_N, BLOCK_M, num_warps, num_stages
TILES = [
    (64, 64, 4, 2),
    (64, 64, 4, 3),
    (64, 128, 8, 2),
    (32, 64, 4, 3),
]
# For Dk above 128; a fifth number is BLOCK_N.
WIDE_UNORDERED = [
    (0, 64, 8, 2, 32),
    (0, 32, 4, 2, 32),
]
WIDE_ORDERED = [
    (0, 16, 8, 3),
    (0, 64, 8, 2, 32),
    (0, 128, 8, 2, 32),
    (0, 32, 4, 2, 32),
    (0, 16, 4, 2),
    (0, 32, 4, 2),
]
WIDE_TILES = [(32, 64, 8, 2), (32, 64, 4, 2), (64, 64, 4, 2), (32, 128, 8, 2)]
SEGMENTS = (8192, 131072)
WORKERS = 12


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """One configuration of sel_block_backward."""

    query_major: int
    block_m: int
    warps: int
    stages: int
    block_n: int = BASE["BLOCK_N"]
    ordered: bool = False  # if so, the pass over tiles computes dq

    def settings(self, segment_rows: int = BASE["SEGMENT_ROWS"]) -> dict[str, int]:
        """Return the configuration as a row of the tuned table."""
        tile = {
            "QUERY_MAJOR": self.query_major,
            "BLOCK_M": self.block_m,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }
        tile |= {"BLOCK_N": self.block_n}
        return BASE | tile | {"SEGMENT_ROWS": segment_rows}

    def __str__(self) -> str:
        grads = "dk dv ordered" if self.ordered else "dq dk dv"
        tile = f"BLOCK_N={self.block_n} BLOCK_M={self.block_m}"
        compiler = f"warps={self.warps} stages={self.stages}"
        return f"{grads:13} QUERY_MAJOR={self.query_major} {tile} {compiler}"


def block_configs(shape: str, quick: bool) -> list[BlockConfig]:
    """Return the configurations to time, the most promising first."""
    unordered, ordered = (
        (WIDE_UNORDERED, WIDE_ORDERED) if SHAPES[shape][2] > 128 else (UNORDERED, ORDERED)
    )
    if quick:
        return [BlockConfig(*tile) for tile in unordered[:3]]
    return [BlockConfig(*tile) for tile in unordered] + [
        BlockConfig(*tile, ordered=True) for tile in ordered
    ]


def tiles_of(shape: str) -> list[tuple[int, int, int, int]]:
    """Return the tile shapes of sel_tile_backward to time."""
    return WIDE_TILES if SHAPES[shape][2] > 128 else TILES


def dq_settings(tile: tuple[int, int, int, int]) -> dict[str, int]:
    """Return a tile shape as a row of the tuned table."""
    return dict(zip(("BLOCK_N", "BLOCK_M", "num_warps", "num_stages"), tile))


def past_blocks(kind: str, length: int, groups: int) -> Tensor:
    """Return int32 [1, S, G, n]: block 0, the last two blocks, and others before them."""
    n, size = GEOMETRY.num_selected_blocks, GEOMETRY.select_block_size
    current = torch.arange(length, device="cuda")[:, None, None] // size
    num_free = n - 3
    drawn = torch.rand(length, groups, num_free, device="cuda")
    if kind == "near":
        epoch = (torch.rand(length, groups, num_free, device="cuda") > 0.8).long().cumsum(0)
        drawn = drawn.gather(0, epoch.clamp(max=length - 1))
    # The blocks of a token are distinct: choice i takes blocks i + 1 modulo num_free.
    choice = torch.arange(num_free, device="cuda")
    others = 1 + choice + num_free * (drawn * ((current - 3) / num_free).clamp(min=0)).long()
    others = torch.where(others < current - 1, others, -1)
    forced = torch.cat([torch.zeros_like(current), current - 1, current], -1).expand(
        length, groups, 3
    )
    return torch.cat([forced, others], -1).int()[None]


def problem(shape: str, length: int | None = None) -> tuple[list[Tensor], SlotCall]:
    """Return do, q, k, v, o, lse, and the call; ``length`` replaces the tokens of the shape."""
    heads, groups, dk, dv, tokens = SHAPES[shape]
    length = length or tokens
    torch.manual_seed(0)
    tensors = [
        torch.randn((1, length, n, width), device="cuda", dtype=torch.bfloat16)
        for n, width in ((heads, dv), (heads, dk), (groups, dk), (groups, dv), (heads, dv))
    ]
    num_keys = GEOMETRY.num_selected_blocks * GEOMETRY.select_block_size
    lse = torch.full((1, heads, length), math.log(num_keys) + 0.5, device="cuda")
    return [*tensors, lse], SlotCall(GEOMETRY, dk**-0.5)


# heads per kv head, Dk, Dv
CASES = [
    (16, 128, 128),
    (4, 128, 128),
    (6, 64, 64),
    (1, 64, 64),
    (7, 192, 128),
    (12, 256, 256),
]


def check_one(dtype: torch.dtype, packed: bool, group: int, dk: int, dv: int) -> list[str]:
    """Return a line per mode with the verdicts of nsa_verify.judge.tensor on dq, dk, dv."""
    torch.set_num_threads(1)
    length, groups, lines = 450, 2, []
    for cu in (
        torch.tensor([0, 200, 201, 201, 450], device="cuda", dtype=torch.int32) if packed else None,
    ):
        torch.manual_seed(1)
        lead = (1, length) if cu is None else (length,)
        shapes = [(group * groups, dv), (group * groups, dk), (groups, dk), (groups, dv)]
        do, q, k, v = (torch.randn((*lead, *s), device="cuda", dtype=dtype) for s in shapes)
        blocks = past_blocks("near", length, groups)
        blocks = blocks if cu is None else blocks[0].contiguous()
        call = SlotCall(GEOMETRY, dk**-0.5, cu, length)
        golden, rounded, magnitude = (
            attention.sel(
                q,
                k,
                v,
                blocks,
                GEOMETRY,
                call.scale,
                cu_seqlens=cu,
                do=do,
                arithmetic=arithmetic,
                dtype=dtype,
            )
            for arithmetic in ("exact", "rounded", "magnitude")
        )
        assert golden.lse is not None  # attention has one
        o, lse = rounded.o.to("cuda", dtype), golden.lse.float().cuda()
        for deterministic in (False, True):
            mode = dataclasses.replace(call, deterministic=deterministic)
            name = (
                f"{str(dtype)[6:]:9} h={group} {dk}/{dv} {'dense ' if cu is None else 'packed'}"
                f" {deterministic=}"
            )
            try:
                grads, repeated = (
                    sel_backward.backward(do, q, k, v, blocks, o, lse, call=mode) for _ in range(2)
                )
            except Exception as error:  # noqa: BLE001  # it may not fit: report it and go on
                lines.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
                continue
            same = all(torch.equal(x, y) for x, y in zip(grads, repeated))
            text = []
            for x, name_of_grad in zip(grads, golden.grads):
                references = (
                    heads_first(reference.grads[name_of_grad])
                    for reference in (golden, rounded, magnitude)
                )
                verdict = judge(heads_first(x), *references, dtype, grad=True)
                wrong = f" WRONG: {verdict.why}" if verdict.why else ""
                text.append(
                    f"{name_of_grad} {verdict.row:.2f} {verdict.elem:.2f} {verdict.bias:.2f}{wrong}"
                )
            lines.append(
                f"{name}: {'; '.join(text)}; {'same bits' if same else 'OTHER BITS'}"
                f"{' WRONG' if deterministic and not same else ''}"
            )
    return lines


def compile_one(shape: str, config: BlockConfig | tuple[int, int, int, int]) -> list[str]:
    """Run one configuration once, so that triton's cache holds its binary."""
    (do, q, k, v, o, lse), call = problem(shape, 512)
    blocks = past_blocks("random", 512, k.shape[-2])
    inputs = sel_backward.prepare(do, q, k, v, o, lse, call=call)
    try:
        if isinstance(config, BlockConfig):
            lists = pair_lists.build(blocks, inputs.seqs, GEOMETRY)
            sel_backward.block_gradients(inputs, lists, config.settings(), ordered=config.ordered)
        else:
            sel_backward.tile_gradients(inputs, blocks, dq_settings(config))
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001  # it may not fit: report it and go on
        return [f"{shape} {config}: {type(error).__name__}: {str(error)[:200]}"]
    return []


def report(task: concurrent.futures.Future[list[str]]) -> None:
    """Print the lines of a finished task."""
    for line in task.result():
        print(line, flush=True)


def attempt(
    name: str, function: Callable[[], Any], note: Callable[[float], str] = lambda ms: ""
) -> float:
    """Time ``function`` and print the time; return it in ms, inf on failure."""
    from triton.testing import do_bench

    try:
        ms = float(do_bench(function, warmup=5, rep=60, return_mode="median"))
    except Exception as error:  # noqa: BLE001  # it may not fit: report it and go on
        print(f"  {name:60} {type(error).__name__}: {str(error)[:120]}", flush=True)
        return math.inf
    print(f"  {name:60} {ms:8.3f} ms {note(ms)}", flush=True)
    return ms


def measure(shape: str, kind: str, quick: bool) -> None:
    """Time all parts of the backward for one shape on one kind of blocks."""
    tensors, call = problem(shape)
    do, q, k, v, o, lse = tensors
    blocks = past_blocks(kind, q.shape[1], k.shape[-2])
    print(
        f"{shape} S={q.shape[1]} {kind}: best rival and target in ms: {TARGETS.get(shape, 'none')}",
        flush=True,
    )
    inputs = sel_backward.prepare(do, q, k, v, o, lse, call=call)
    lists = pair_lists.build(blocks, inputs.seqs, GEOMETRY)
    flops = (
        int(lists.offsets[-1])
        * inputs.group
        * GEOMETRY.select_block_size
        * (q.shape[-1] + v.shape[-1])
    )

    def rate(num_products: int) -> Callable[[float], str]:
        return lambda ms: f"{num_products * flops / ms / 1e9:6.0f} TFLOP/s"

    for deterministic in (False, True):
        mode = dataclasses.replace(call, deterministic=deterministic)
        backward = functools.partial(sel_backward.backward, do, q, k, v, blocks, o, lse, call=mode)
        attempt(f"backward with tuned settings, {deterministic=}", backward, rate(5))
    attempt("lists", lambda: pair_lists.build(blocks, inputs.seqs, GEOMETRY))
    attempt("delta and lse", lambda: sel_backward.prepare(do, q, k, v, o, lse, call=call))
    attempt(
        "zeroed fp32 dq, cast",
        lambda: torch.zeros(q.shape, dtype=torch.float32, device="cuda").to(q.dtype),
    )

    def block_pass(config: BlockConfig, segment_rows: int = BASE["SEGMENT_ROWS"]) -> float:
        run = functools.partial(
            sel_backward.block_gradients, inputs, lists, config.settings(segment_rows)
        )
        run = functools.partial(run, ordered=config.ordered)
        num_products = 4 if config.ordered else 5
        return attempt(f"{config} SEGMENT_ROWS={segment_rows}", run, rate(num_products))

    times = {config: block_pass(config) for config in block_configs(shape, quick)}
    unordered = (config for config in times if not config.ordered)
    fastest = min(unordered, key=lambda config: times[config])
    for segment_rows in SEGMENTS:
        block_pass(fastest, segment_rows)
    for tile in tiles_of(shape):
        tile_pass = functools.partial(
            sel_backward.tile_gradients, inputs, blocks, dq_settings(tile)
        )
        attempt(f"dq by tile, {dq_settings(tile)}", tile_pass, rate(3))


def main() -> None:
    """Check the small cases and time the configurations."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--kind", nargs="*", choices=("random", "near"), default=["random", "near"])
    parser.add_argument(
        "--quick", action="store_true", help="time three configurations of the unordered form only"
    )
    parser.add_argument("--no-check", action="store_true")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # in the pool's processes
    start = time.time()
    with concurrent.futures.ProcessPoolExecutor(
        WORKERS, multiprocessing.get_context("spawn")
    ) as pool:

        def submit(
            function: Callable[..., list[str]], *args: Any
        ) -> concurrent.futures.Future[list[str]]:
            task = pool.submit(function, *args)
            task.add_done_callback(report)
            return task

        configs = {
            shape: [*block_configs(shape, arguments.quick), *tiles_of(shape)]
            for shape in arguments.shape
        }
        tasks = [
            submit(compile_one, shape, config) for shape in configs for config in configs[shape]
        ]
        cases = [] if arguments.no_check else list(itertools.product((False, True), CASES))
        tasks += [submit(check_one, torch.bfloat16, packed, *case) for packed, case in cases]
        tasks += [submit(check_one, torch.float16, packed, *case) for packed, case in cases[::2]]
        concurrent.futures.wait(tasks)
        print(f"{len(tasks)} tasks in {time.time() - start:.0f} s", flush=True)
        for packed, case in cases[::2]:
            submit(check_one, torch.float32, packed, *case)
        for shape, kind in itertools.product(arguments.shape, arguments.kind):
            measure(shape, kind, arguments.quick)


if __name__ == "__main__":
    main()

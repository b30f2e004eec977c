"""Backward of sel on our kernels: judged on small cases, then timed over tile shapes and kinds of
blocks.

    python benchmarks/kernels/triton_sel_backward.py [--shape 64/4/128] [--kind near] [--quick]
        [--no-check]

A pool of processes judges bf16 and fp16 and compiles what is timed; then come the times (medians of
do_bench, bf16, batch 1, lse what random q and k give on average), while fp32, which takes long to
compile, is judged. ``random``: the forced blocks and 13 random past ones; ``near``: a token keeps
each of its neighbour's 13 with probability 0.8. TFLOP/s count products of the pairs, not what a
tile computes and masks away. "dq dk dv" holds its zeroed fp32 buffers, casts.
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
SHAPES = {  # heads, kv heads, Dk, Dv, tokens
    "64/4/128": (64, 4, 128, 128, 65536),
    "32/8/128": (32, 8, 128, 128, 32768),
    "12/2/64": (12, 2, 64, 64, 65536),
    "64/4/192/128": (64, 4, 192, 128, 32768),
}
# ms: best rival, what we want
AIM = {
    "64/4/128": (29.9, 15),
    "32/8/128": (18.2, 6),
    "12/2/64": (6.3, 3),
}
BASE = {"KEYS": 64, "SEGMENT": 32768, "CHUNK": 2048, "PROGRAMS": 8}
ADDED = [  # TURN, ROWS, num_warps, num_stages
    (0, 32, 4, 3),
    (0, 64, 8, 2),
    (1, 64, 8, 2),
    (0, 64, 4, 3),
    (1, 64, 4, 3),
    (0, 32, 8, 3),
    (0, 32, 4, 2),
]
REST = [(0, 32, 4, 3), (0, 64, 8, 2), (0, 64, 4, 3), (1, 64, 8, 2)]  # dk and dv alone
# KEYS, ROWS, num_warps, num_stages
TILES = [
    (64, 64, 4, 2),
    (64, 64, 4, 3),
    (64, 128, 8, 2),
    (32, 64, 4, 3),
]
# the same and KEYS: Dk above 128, held in 256 columns
WIDE_ADDED = [
    (0, 64, 8, 2, 32),
    (0, 32, 4, 2, 32),
]
WIDE_REST = [
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
class Kind:
    """One compiled form of the block pass."""

    turn: int
    rows: int
    warps: int
    stages: int
    keys: int = BASE["KEYS"]
    ordered: bool = False  # then dq is left to the tiles

    def settings(self, segment: int = BASE["SEGMENT"]) -> dict[str, int]:
        """As a row of the tuned table."""
        tile = {
            "TURN": self.turn,
            "ROWS": self.rows,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }
        tile |= {"KEYS": self.keys}
        return BASE | tile | {"SEGMENT": segment}

    def __str__(self) -> str:
        what = "dk dv ordered" if self.ordered else "dq dk dv"
        tile = f"KEYS={self.keys} ROWS={self.rows}"
        return f"{what:13} TURN={self.turn} {tile} warps={self.warps} stages={self.stages}"


def kinds(shape: str, quick: bool) -> list[Kind]:
    """All that are timed, the likeliest first."""
    added, rest = (WIDE_ADDED, WIDE_REST) if SHAPES[shape][2] > 128 else (ADDED, REST)
    if quick:
        return [Kind(*tile) for tile in added[:3]]
    return [Kind(*tile) for tile in added] + [Kind(*tile, ordered=True) for tile in rest]


def tiles_of(shape: str) -> list[tuple[int, int, int, int]]:
    """Those of dq's pass."""
    return WIDE_TILES if SHAPES[shape][2] > 128 else TILES


def dq_settings(tile: tuple[int, int, int, int]) -> dict[str, int]:
    """A row of the tuned table for the tile pass."""
    return dict(zip(("KEYS", "ROWS", "num_warps", "num_stages"), tile))


def past_blocks(kind: str, length: int, groups: int) -> Tensor:
    """int32 [1, S, G, n]: block 0, the last two, and others before them."""
    n, size = GEOMETRY.num_selected_blocks, GEOMETRY.select_block_size
    current = torch.arange(length, device="cuda")[:, None, None] // size
    free = n - 3
    drawn = torch.rand(length, groups, free, device="cuda")
    if kind == "near":
        epoch = (torch.rand(length, groups, free, device="cuda") > 0.8).long().cumsum(0)
        drawn = drawn.gather(0, epoch.clamp(max=length - 1))
    # Distinct inside a token: the i-th draw from the i-th of `free` strides.
    lane = torch.arange(free, device="cuda")
    others = 1 + lane + free * (drawn * ((current - 3) / free).clamp(min=0)).long()
    others = torch.where(others < current - 1, others, -1)
    forced = torch.cat([torch.zeros_like(current), current - 1, current], -1).expand(
        length, groups, 3
    )
    return torch.cat([forced, others], -1).int()[None]


def problem(shape: str, length: int | None = None) -> tuple[list[Tensor], SlotCall]:
    """do, q, k, v, o, lse, and the call."""
    heads, groups, dk, dv, full = SHAPES[shape]
    length = length or full
    torch.manual_seed(0)
    made = [
        torch.randn((1, length, n, width), device="cuda", dtype=torch.bfloat16)
        for n, width in ((heads, dv), (heads, dk), (groups, dk), (groups, dv), (heads, dv))
    ]
    seen = GEOMETRY.num_selected_blocks * GEOMETRY.select_block_size
    lse = torch.full((1, heads, length), math.log(seen) + 0.5, device="cuda")
    return [*made, lse], SlotCall(GEOMETRY, dk**-0.5)


# h, Dk, Dv
CASES = [
    (16, 128, 128),
    (4, 128, 128),
    (6, 64, 64),
    (1, 64, 64),
    (7, 192, 128),
    (12, 256, 256),
]


def judged(dtype: torch.dtype, packed: bool, heads: int, dk: int, dv: int) -> list[str]:
    """A line for each mode: the verdict on dq, dk, dv by nsa_verify.judge.tensor."""
    torch.set_num_threads(1)
    length, groups, lines = 450, 2, []
    for cu in (
        torch.tensor([0, 200, 201, 201, 450], device="cuda", dtype=torch.int32) if packed else None,
    ):
        torch.manual_seed(1)
        lead = (1, length) if cu is None else (length,)
        shapes = [(heads * groups, dv), (heads * groups, dk), (groups, dk), (groups, dv)]
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
                f"{str(dtype)[6:]:9} h={heads} {dk}/{dv} {'dense ' if cu is None else 'packed'}"
                f" {deterministic=}"
            )
            try:
                found, again = (
                    sel_backward.backward(do, q, k, v, blocks, o, lse, call=mode) for _ in range(2)
                )
            except Exception as error:  # noqa: BLE001  # a configuration may not fit; the others still count
                lines.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
                continue
            same = all(torch.equal(x, y) for x, y in zip(found, again))
            text = []
            for x, grad in zip(found, golden.grads):
                three = (heads_first(truth.grads[grad]) for truth in (golden, rounded, magnitude))
                verdict = judge(heads_first(x), *three, dtype, grad=True)
                wrong = f" WRONG: {verdict.why}" if verdict.why else ""
                text.append(
                    f"{grad} {verdict.row:.2f} {verdict.elem:.2f} {verdict.bias:.2f}{wrong}"
                )
            lines.append(
                f"{name}: {'; '.join(text)}; {'same bits' if same else 'OTHER BITS'}"
                f"{' WRONG' if deterministic and not same else ''}"
            )
    return lines


def compiled(shape: str, kind: Kind | tuple[int, int, int, int]) -> list[str]:
    """Run one configuration once, so that its binary lies in triton's cache."""
    (do, q, k, v, o, lse), call = problem(shape, 512)
    blocks = past_blocks("random", 512, k.shape[-2])
    what = sel_backward.prepare(do, q, k, v, o, lse, call=call)
    try:
        if isinstance(kind, Kind):
            lists = pair_lists.build(blocks, what.seqs, GEOMETRY)
            sel_backward.block_gradients(what, lists, kind.settings(), ordered=kind.ordered)
        else:
            sel_backward.tile_gradients(what, blocks, dq_settings(kind))
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001  # a configuration may not fit; the others still count
        return [f"{shape} {kind}: {type(error).__name__}: {str(error)[:200]}"]
    return []


def report(task: concurrent.futures.Future[list[str]]) -> None:
    """The lines of a task that is done."""
    for line in task.result():
        print(line, flush=True)


def attempt(
    name: str, function: Callable[[], Any], note: Callable[[float], str] = lambda ms: ""
) -> float:
    """Time and print; inf where it fails."""
    from triton.testing import do_bench

    try:
        ms = float(do_bench(function, warmup=5, rep=60, return_mode="median"))
    except Exception as error:  # noqa: BLE001  # a configuration may not fit; the others still count
        print(f"  {name:60} {type(error).__name__}: {str(error)[:120]}", flush=True)
        return math.inf
    print(f"  {name:60} {ms:8.3f} ms {note(ms)}", flush=True)
    return ms


def measure(shape: str, kind: str, quick: bool) -> None:
    """All pieces of one shape on one kind of blocks."""
    tensors, call = problem(shape)
    do, q, k, v, o, lse = tensors
    blocks = past_blocks(kind, q.shape[1], k.shape[-2])
    print(
        f"{shape} S={q.shape[1]} {kind}: best rival and aim in ms: {AIM.get(shape, 'none')}",
        flush=True,
    )
    what = sel_backward.prepare(do, q, k, v, o, lse, call=call)
    lists = pair_lists.build(blocks, what.seqs, GEOMETRY)
    product = (
        int(lists.offsets[-1])
        * what.heads
        * GEOMETRY.select_block_size
        * (q.shape[-1] + v.shape[-1])
    )

    def rate(count: int) -> Callable[[float], str]:
        return lambda ms: f"{count * product / ms / 1e9:6.0f} TFLOP/s"

    for deterministic in (False, True):
        mode = dataclasses.replace(call, deterministic=deterministic)
        whole = functools.partial(sel_backward.backward, do, q, k, v, blocks, o, lse, call=mode)
        attempt(f"whole, as shipped, {deterministic=}", whole, rate(5))
    attempt("lists", lambda: pair_lists.build(blocks, what.seqs, GEOMETRY))
    attempt("delta and lse", lambda: sel_backward.prepare(do, q, k, v, o, lse, call=call))
    attempt(
        "zeroed fp32 dq, cast",
        lambda: torch.zeros(q.shape, dtype=torch.float32, device="cuda").to(q.dtype),
    )

    def block_pass(form: Kind, segment: int = BASE["SEGMENT"]) -> float:
        one = functools.partial(sel_backward.block_gradients, what, lists, form.settings(segment))
        one = functools.partial(one, ordered=form.ordered)
        return attempt(f"{form} SEGMENT={segment}", one, rate(4 if form.ordered else 5))

    taken = {form: block_pass(form) for form in kinds(shape, quick)}
    for segment in SEGMENTS:
        block_pass(
            min((form for form in taken if not form.ordered), key=lambda form: taken[form]), segment
        )
    for tile in tiles_of(shape):
        tile_pass = functools.partial(sel_backward.tile_gradients, what, blocks, dq_settings(tile))
        attempt(f"dq by tile, {dq_settings(tile)}", tile_pass, rate(3))


def main() -> None:
    """The judgement and the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--kind", nargs="*", choices=("random", "near"), default=["random", "near"])
    parser.add_argument("--quick", action="store_true", help="only the single pass, in three forms")
    parser.add_argument("--no-check", action="store_true")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # in the pool's processes
    start = time.time()
    with concurrent.futures.ProcessPoolExecutor(
        WORKERS, multiprocessing.get_context("spawn")
    ) as pool:

        def begin(
            function: Callable[..., list[str]], *given: Any
        ) -> concurrent.futures.Future[list[str]]:
            task = pool.submit(function, *given)
            task.add_done_callback(report)
            return task

        forms = {
            shape: [*kinds(shape, arguments.quick), *tiles_of(shape)] for shape in arguments.shape
        }
        tasks = [begin(compiled, shape, form) for shape in forms for form in forms[shape]]
        cases = [] if arguments.no_check else list(itertools.product((False, True), CASES))
        tasks += [begin(judged, torch.bfloat16, packed, *case) for packed, case in cases]
        tasks += [begin(judged, torch.float16, packed, *case) for packed, case in cases[::2]]
        concurrent.futures.wait(tasks)
        print(f"{len(tasks)} tasks in {time.time() - start:.0f} s", flush=True)
        for packed, case in cases[::2]:
            begin(judged, torch.float32, packed, *case)
        for shape, kind in itertools.product(arguments.shape, arguments.kind):
            measure(shape, kind, arguments.quick)


if __name__ == "__main__":
    main()

"""Checks and times the backward of the selected branch, piece by piece, over tile shapes: median ms, bf16, batch 1.

    python benchmarks/triton_sel_backward.py [--shape 64/4/128] [--quick]

First a check against float32 on small shapes; then every configuration compiled in child processes; then the times.
"ms" of the block pass holds the zeroed fp32 buffers and the casts. lse is what random q and k give on average.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from nsa_backend_sdpa import sel as reference
from nsa_backend_triton import sel_backward, sel_lists
from nsa_core.contract import SlotCall
from nsa_core.layout import BlockGeometry

GEOMETRY = BlockGeometry()
SHAPES = {
    "64/4/128": (64, 4, 128, 65536),
    "32/8/128": (32, 8, 128, 32768),
    "12/2/64": (12, 2, 64, 65536),
}
AIM = {"64/4/128": (29.9, 15), "32/8/128": (18.2, 6), "12/2/64": (6.3, 3)}  # best rival, what we want
BASE = {"KEYS": 64, "SEGMENT": 32768, "CHUNK": 2048}
TILES = [  # ROWS, num_warps, num_stages
    (64, 4, 3),
    (64, 4, 1),
    (64, 8, 3),
    (128, 8, 1),
    (128, 8, 3),
]
SEGMENTS = (8192, 16384, 65536, 131072, 2**30)
TOKEN_TILES = [(2, 2), (4, 2), (4, 3)]  # num_warps, num_stages of the token pass


@dataclasses.dataclass(frozen=True)
class Kind:
    """One compiled form of the block pass."""

    rows: int
    warps: int
    stages: int
    ordered: bool = False
    add_dq: bool = True

    def settings(self, segment: int = BASE["SEGMENT"]) -> dict[str, int]:
        """As a row of the tuned table."""
        tile = {"ROWS": self.rows, "num_warps": self.warps, "num_stages": self.stages}
        return BASE | tile | {"SEGMENT": segment}

    def __str__(self) -> str:
        what = ("dq dk dv" if self.add_dq else "dk dv") + (" ordered" if self.ordered else "")
        return f"{what:14} ROWS={self.rows} warps={self.warps} stages={self.stages}"


def kinds() -> Iterator[Kind]:
    """All that are timed."""
    for rows, warps, stages in TILES:
        yield Kind(rows, warps, stages)
    for rows, warps, stages in ((64, 4, 3), (128, 8, 3)):
        yield Kind(rows, warps, stages, add_dq=False)
    yield Kind(64, 4, 3, ordered=True, add_dq=False)


def median_ms(function: Callable[[], Any]) -> float:
    """Median of do_bench, short."""
    from triton.testing import do_bench

    return float(do_bench(function, warmup=20, rep=100, return_mode="median"))


def causal_blocks(length: int, groups: int, *, alike: float, width: int = 4096) -> Tensor:
    """Forced blocks and the highest random scores, int32 [1, S, G, n]; tokens of a block share ``alike`` of a score."""
    size, n = GEOMETRY.select_block_size, GEOMETRY.num_selected_blocks
    count = math.ceil(length / size)
    block = torch.arange(count, device="cuda")
    found = []
    for first in range(0, length, width):
        current = torch.arange(first, min(first + width, length), device="cuda")[:, None, None] // size
        shared = torch.rand((count, groups, count), device="cuda")[current.flatten()]
        score = alike * shared + (1 - alike) * torch.rand(shared.shape, device="cuda")
        score[(block == 0) | (block == current - 1) | (block == current) & (score >= 0)] = 9.0
        score.masked_fill_(block > current, -1.0)
        best = score.topk(min(n, count), dim=-1)
        chosen = best.indices.masked_fill(best.values < 0, -1)
        found.append(torch.nn.functional.pad(chosen, (0, n - chosen.shape[-1]), value=-1).int())
    return torch.cat(found)[None]


def problem(shape: str, length: int | None = None) -> tuple[list[Tensor], SlotCall]:
    """do, q, k, v, o, lse, and the call."""
    heads, groups, width, full = SHAPES[shape]
    length = length or full
    torch.manual_seed(0)
    each = [
        torch.randn((1, length, n, width), device="cuda", dtype=torch.bfloat16)
        for n in (heads, heads, groups, groups, heads)
    ]
    seen = GEOMETRY.num_selected_blocks * GEOMETRY.select_block_size
    lse = torch.full((1, heads, length), math.log(seen) + 0.5, device="cuda")
    return [*each, lse], SlotCall(GEOMETRY, width**-0.5)


CHECKS = list(
    itertools.product(((64, 4, 128, 700), (32, 8, 128, 1500), (12, 2, 64, 1100)), (None, (0, 300, 301, 1100)))
)


def check(index: int) -> None:
    """Both modes against the sdpa backend in float32, relative to the gradient's norm."""
    (heads, groups, width, length), cu = CHECKS[index]
    length = cu[-1] if cu else length
    torch.manual_seed(1)
    shapes = [(heads, width), (heads, width), (groups, width), (groups, width)]
    lead = (length,) if cu else (1, length)
    do, q, k, v = (torch.randn((*lead, *s), device="cuda", dtype=torch.bfloat16) for s in shapes)
    blocks = causal_blocks(length, groups, alike=0.0)
    offsets = torch.tensor(cu, device="cuda", dtype=torch.int32) if cu else None
    call = SlotCall(GEOMETRY, width**-0.5, offsets, length)
    blocks = blocks[0].contiguous() if cu else blocks  # packed: blocks past a document's end are dropped
    o, lse = reference.forward(q.float(), k.float(), v.float(), blocks, call=call)
    truth = reference.backward(do.float(), q.float(), k.float(), v.float(), blocks, o, lse, call=call)
    for deterministic in (False, True):
        mode = dataclasses.replace(call, deterministic=deterministic)
        found, again = (sel_backward.backward(do, q, k, v, blocks, o.bfloat16(), lse, call=mode) for _ in range(2))
        wrong = [float((x.float() - y).norm() / y.norm()) for x, y in zip(found, truth)]
        same = all(torch.equal(x, y) for x, y in zip(found, again))
        verdict = "ok" if max(wrong) < 0.012 and (same or not deterministic) else "WRONG"
        numbers = " ".join(f"{x:.2e}" for x in wrong)
        print(
            f"check {heads}/{groups}/{width} packed={cu is not None} {deterministic=} {numbers} {same=} {verdict}",
            flush=True,
        )


def compile_one(shape: str, index: int) -> None:
    """Run one configuration once, so that its binary lies in triton's cache."""
    (do, q, k, v, o, lse), call = problem(shape, 512)
    blocks = causal_blocks(512, k.shape[-2], alike=0.0)
    what = sel_backward.prepare(do, q, k, v, o, lse, call=call)
    every = list(kinds())
    if index < len(every):
        kind = every[index]
        lists = sel_lists.build(blocks, what.seqs, GEOMETRY)
        sel_backward.block_gradients(what, lists, kind.settings(), ordered=kind.ordered, add_dq=kind.add_dq)
    else:
        warps, stages = TOKEN_TILES[index - len(every)]
        sel_backward.token_gradients(what, blocks, {"num_warps": warps, "num_stages": stages})
    torch.cuda.synchronize()


def prepare_all(shapes: list[str]) -> None:
    """compile_one of everything and the checks, twelve child processes at a time."""
    start = time.time()
    waiting = [["--check", str(i)] for i in range(len(CHECKS))]
    every = range(len(list(kinds())) + len(TOKEN_TILES))
    waiting += [["--shape", shape, "--compile", str(i)] for shape, i in itertools.product(shapes, every)]
    running: list[tuple[list[str], subprocess.Popen[bytes]]] = []
    while waiting or running:
        for what, child in running:
            if child.poll():
                print("FAILED:", *what, flush=True)
        running = [(what, child) for what, child in running if child.poll() is None]
        while waiting and len(running) < 12:
            what = waiting.pop(0)
            running.append((what, subprocess.Popen([sys.executable, __file__, *what])))
        time.sleep(0.1)
    print(f"checked and compiled in {time.time() - start:.0f} s", flush=True)


def attempt(name: str, function: Callable[[], Any], note: Callable[[float], str] = lambda ms: "") -> float:
    """Time and print; inf where it fails."""
    try:
        ms = median_ms(function)
    except Exception as error:  # noqa: BLE001  # a configuration that does not fit must not end the run
        print(f"  {name:60} {type(error).__name__}: {str(error)[:120]}", flush=True)
        return math.inf
    print(f"  {name:60} {ms:8.3f} ms {note(ms)}", flush=True)
    return ms


def measure(shape: str, alike: float, quick: bool) -> None:
    """All pieces of one shape on one kind of blocks."""
    tensors, call = problem(shape)
    do, q, k, v, o, lse = tensors
    blocks = causal_blocks(q.shape[1], k.shape[-2], alike=alike)
    rival, aim = AIM[shape]
    print(
        f"{shape} S={q.shape[1]} blocks {'random' if not alike else f'alike {alike}'}: rival {rival} ms, aim {aim} ms",
        flush=True,
    )
    what = sel_backward.prepare(do, q, k, v, o, lse, call=call)
    lists = sel_lists.build(blocks, what.seqs, GEOMETRY)
    pairs = int(lists.offsets[-1])
    product = 2 * pairs * what.heads * GEOMETRY.select_block_size * q.shape[-1]

    def rate(count: int) -> Callable[[float], str]:
        return lambda ms: f"{count * product / ms / 1e9:6.0f} TFLOP/s"

    attempt("lists", lambda: sel_lists.build(blocks, what.seqs, GEOMETRY))
    attempt("delta and lse", lambda: sel_backward.prepare(do, q, k, v, o, lse, call=call))
    attempt("zeroed fp32 dq, cast", lambda: torch.zeros(q.shape, dtype=torch.float32, device="cuda").to(q.dtype))

    def block_pass(kind: Kind, segment: int = BASE["SEGMENT"]) -> float:
        settings = kind.settings(segment)
        return attempt(
            f"{kind} SEGMENT={segment}",
            lambda: sel_backward.block_gradients(what, lists, settings, ordered=kind.ordered, add_dq=kind.add_dq),
            rate(5 if kind.add_dq else 4),
        )

    taken = {kind: block_pass(kind) for kind in kinds() if not quick or kind.add_dq}
    for segment in SEGMENTS:
        block_pass(min((kind for kind in taken if kind.add_dq), key=lambda kind: taken[kind]), segment)
    rest = [kind for kind in taken if not kind.add_dq and not kind.ordered]
    for segment in SEGMENTS[1::2] if rest else ():
        block_pass(min(rest, key=lambda kind: taken[kind]), segment)
    for warps, stages in TOKEN_TILES if not quick else ():
        settings = {"num_warps": warps, "num_stages": stages}
        token_pass = functools.partial(sel_backward.token_gradients, what, blocks, settings)
        attempt(f"dq by token, {settings}", token_pass, rate(3))
    for deterministic in (False, True):
        mode = dataclasses.replace(call, deterministic=deterministic)
        whole = functools.partial(sel_backward.backward, do, q, k, v, blocks, o, lse, call=mode)
        attempt(f"whole, {deterministic=}", whole, rate(5))


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--quick", action="store_true", help="only the single pass")
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--check", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    shapes = [arguments.shape] if arguments.shape else list(SHAPES)
    if arguments.compile is not None:
        compile_one(shapes[0], arguments.compile)
        return
    if arguments.check is not None:
        check(arguments.check)
        return
    prepare_all(shapes)
    for shape in shapes:
        measure(shape, 0.0, arguments.quick)
        measure(shape, 0.8, True)


if __name__ == "__main__":
    main()

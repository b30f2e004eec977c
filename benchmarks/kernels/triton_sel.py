"""Forward of sel on our kernels: checked on small cases, then timed over tile shapes and kinds of
blocks.

    python benchmarks/kernels/triton_sel.py [--case 0 1 2] [--kind random near real] [--checkpoints
    DIRECTORY] [--quick]

``random``: the forced blocks and 13 random past ones. ``near``: a token keeps each of its
neighbour's 13 with probability 0.8. ``real``: activations of the layers that real_blocks.py trained
into DIRECTORY. What is measured is compiled first, in several processes. Times are medians of
do_bench, bf16, batch 1. Parts: the unions, the tile kernel, the pair lists, the buckets and their
merge (with their lists).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import TritonError

from nsa_backend_triton.host.sequences import Sequences
from nsa_backend_triton.sel import forward as sel_forward
from nsa_backend_triton.sel import pair_lists
from nsa_backend_triton.sel import unions as sel_union
from nsa_core.contract import SlotCall
from nsa_core.layout import BlockGeometry
from nsa_verify.judge.tensor import judge, judge_lse

GEOMETRY = BlockGeometry()
SHAPES = [
    ("32/8/128 S=32k", 32, 8, 128, 32768),
    ("64/4/128 S=64k", 64, 4, 128, 65536),
    ("12/2/64 S=64k", 12, 2, 64, 65536),
]
FAILURES = (RuntimeError, TritonError)  # too much memory of either kind, what does not compile
COMPILER = {"num_warps": 4, "num_stages": 2}
Tuned = dict[str, dict[str, int]]


def tuned(
    forward: tuple[int, ...],
    bucket: tuple[int, ...] = (64, 16, 4, 2),
    merge: tuple[int, int] = (32, 4),
) -> Tuned:
    """forward: ROWS, LEAST, warps, stages[, registers, KEYS]; bucket: ROWS, TILES, warps, stages[,
    registers].

    merge: ROWS, UNROLL. Registers 0: as many as the compiler likes.
    """
    f = {"KEYS": 64, "SHORT": 0, "TMA": int(torch.cuda.get_device_capability() >= (9, 0))}
    f |= zip(("ROWS", "LEAST", "num_warps", "num_stages", "maxnreg", "KEYS"), forward)
    b = dict(zip(("ROWS", "TILES", "num_warps", "num_stages", "maxnreg"), bucket))
    for row in (f, b):
        if not row.get("maxnreg", 1):
            del row["maxnreg"]
    return {
        "sel_forward": f,
        "sel_bucket": b,
        "sel_merge": dict(zip(("ROWS", "UNROLL"), merge)) | COMPILER,
    }


def configurations(heads: int) -> Iterator[Tuned]:
    """What is tried for ``heads`` a group: all shared first, then with buckets."""
    shared = [
        (64, 1, 4, 3),
        (64, 1, 4, 2),
        (64, 1, 4, 3, 168),
        (64, 1, 4, 3, 168, 32),
        (64, 1, 4, 4, 0, 32),
        (128, 1, 8, 3),
        (128, 1, 8, 2),
    ]
    for row in shared:
        yield tuned(row)
    buckets = [
        (64, 16, 4, 2),
        (64, 16, 4, 3),
        (64, 16, 4, 2, 168),
        (64, 32, 4, 2, 168),
        (64, 8, 4, 2, 168),
    ]
    if heads >= 16:
        for bucket in buckets[:3]:
            yield tuned((64, 2, 4, 3), bucket)
        return
    best = 4 if heads <= 4 else 3
    for bucket in buckets:
        yield tuned((64, best, 4, 3), bucket)
    for merge in ((16, 4), (64, 4), (32, 1), (32, 16)):
        yield tuned((64, best, 4, 3), merge=merge)
    for least in (best - 1, best + 1, best + 3):
        yield tuned((64, least, 4, 3))
    yield tuned((128, 2 * best, 8, 3))


def past_blocks(kind: str, length: int, groups: int) -> Tensor:
    """int32 [1, S, G, n]: block 0, the last two, and others before them."""
    n, size = GEOMETRY.num_selected_blocks, GEOMETRY.select_block_size
    current = torch.arange(length, device="cuda")[:, None, None] // size
    free = n - 3
    if kind == "random":
        drawn = torch.rand(length, groups, free, device="cuda")
    else:
        epoch = (torch.rand(length, groups, free, device="cuda") > 0.8).long().cumsum(0)
        table = torch.rand(length, groups, free, device="cuda")
        drawn = table.gather(0, epoch.clamp(max=length - 1))
    # Distinct inside a token: the i-th draw from the i-th of `free` strides.
    lane = torch.arange(free, device="cuda")
    others = 1 + lane + free * (drawn * ((current - 3) / free).clamp(min=0)).long()
    others = torch.where(others < current - 1, others, -1)
    forced = torch.cat([torch.zeros_like(current), current - 1, current], -1).expand(
        length, groups, 3
    )
    return torch.cat([forced, others], -1).int()[None]


def truths(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, scale: float) -> tuple[Tensor, ...]:
    """golden, rounded, magnitude [H, S, D], lse and top [H, S] of a small dense case, batch 1."""
    length, groups = q.shape[1], k.shape[2]
    heads, size = q.shape[2] // groups, GEOMETRY.select_block_size
    row = torch.arange(length, device=q.device)
    # [S, G, S]
    seen = (blocks[0].long()[:, :, :, None] == (row // size)).any(2) & (row <= row[:, None])[
        :, None
    ]
    hidden = ~seen.transpose(0, 1).repeat_interleave(heads, 0)
    q64, k64, v64 = (x[0].double().transpose(0, 1) for x in (q, k, v))
    k64, v64 = (x.repeat_interleave(heads, 0) for x in (k64, v64))
    scores = (q64 @ k64.transpose(1, 2) * scale).masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(-1)
    p = (scores - lse[..., None]).exp()
    low = (scores.float() - scores.float().amax(-1, keepdim=True)).exp()
    rounded = (low.to(q.dtype).float() @ v64.float() / low.sum(-1, keepdim=True)).to(q.dtype)
    top = scores.masked_fill(hidden, 0).abs().amax(-1)
    return p @ v64, rounded, p @ v64.abs(), lse, top


CHECKED = tuple(
    itertools.product(
        (torch.bfloat16, torch.float16, torch.float32),
        ((16, 128, 128), (4, 128, 128), (6, 64, 64), (1, 64, 64), (7, 192, 128)),
        (1, 4),
    )
)


def check_one(dtype: torch.dtype, shape: tuple[int, int, int], least: int) -> str:
    """The verdict on a small case; least > 1: with buckets."""
    heads, dk, dv = shape
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    length, groups = 1500, 2
    sizes = ((heads * groups, dk), (groups, dk), (groups, dv))
    q, k, v = (torch.randn(1, length, h, d, device="cuda", dtype=dtype) for h, d in sizes)
    blocks = past_blocks("near", length, groups)
    call = SlotCall(GEOMETRY, dk**-0.5)
    small = dtype == torch.float32 or dk > 128
    settings = tuned((64 if not small else 32, least, 4, 3), (64 if not small else 16, 8, 4, 3))
    if small:
        settings["sel_forward"] |= {"KEYS": 32, "num_stages": 1}
        settings["sel_bucket"] |= {"num_stages": 1}
    name = f"{dtype} h={heads} {dk}/{dv} least {least}:"
    try:
        o, lse = sel_forward.forward(q, k, v, blocks, call=call, tuned=settings)
        golden, rounded, magnitude, true_lse, top = truths(q, k, v, blocks, call.scale)
        verdict = judge(o[0].transpose(0, 1), golden, rounded, magnitude, dtype)
        of_lse = judge_lse(lse[0], true_lse, top, dtype)
        again, _ = sel_forward.forward(q, k, v, blocks, call=call, tuned=settings)
    except FAILURES as error:  # the other cases still count
        return f"{name} {type(error).__name__}: {str(error)[:200]}"
    words = (
        f"row {verdict.row:.2f} elem {verdict.elem:.2f} bias {verdict.bias:.2f}"
        f" {verdict.why or 'right'};"
    )
    words += f" lse {of_lse.elem:.1f} {of_lse.why or 'right'}; "
    return f"{name} {words}{'same bits' if torch.equal(o, again) else 'OTHER BITS'}"


def workers() -> ProcessPoolExecutor:
    """Processes that compile at the same time, each with a context on the GPU."""
    count = max(1, min(12, (os.cpu_count() or 2) - 2))
    return ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))


def median_ms(function: Callable[[], Any], quick: bool) -> float:
    """Median of do_bench."""
    from triton.testing import do_bench

    return float(do_bench(function, warmup=5, rep=30 if quick else 100, return_mode="median"))


def parts(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, call: SlotCall, settings: Tuned, quick: bool
) -> list[float]:
    """ms of unions, tile kernel, pair lists, buckets with merge and lists."""
    seqs, heads = Sequences.of(q, call), q.shape[2] // k.shape[2]
    size = sel_forward.tile_tokens(settings["sel_forward"]["ROWS"], heads)
    least = min(settings["sel_forward"]["LEAST"], size)

    def unions() -> sel_union.Unions:
        return sel_union.build(
            blocks, seqs, call.geometry, size, least, leave=settings["sel_forward"]["LEAST"] > 1
        )

    union = unions()
    o, lse = sel_forward.forward(q, k, v, blocks, call=call, tuned=settings)
    tiles, _ = sel_forward._prepare(q, k, v, blocks, seqs, call, settings)
    times = [median_ms(unions, quick)]
    times += [
        median_ms(
            lambda: tiles.launch(q, k, v, union.entries, union.counts, o, lse, seqs.cu), quick
        )
    ]
    if settings["sel_forward"]["LEAST"] == 1:
        return [*times, 0.0, 0.0]
    runs = list(sel_forward._runs(o, heads, blocks.shape[-1]))
    times += [
        median_ms(
            lambda: [
                pair_lists.build(blocks, seqs, call.geometry, kept=union.left, rows=r) for r in runs
            ],
            quick,
        )
    ]
    times += [
        median_ms(
            lambda: [
                sel_forward._attend_buckets(
                    q, k, v, blocks, union.left, o, lse, seqs, call, r, settings
                )
                for r in runs
            ],
            quick,
        )
    ]
    return times


def inputs(case: int, kind: str, checkpoints: Path | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v in bf16 and blocks of a shape, batch 1."""
    _, n_heads, groups, width, length = SHAPES[case]
    torch.manual_seed(0)
    if kind == "real":
        sys.path.append(str(Path(__file__).resolve().parents[1]))
        from real_blocks import real_inputs  # in benchmarks/

        assert checkpoints is not None, "--kind real needs --checkpoints"
        checkpoint = checkpoints / f"{n_heads}-{groups}-{width}.safetensors"
        real = real_inputs(
            f"{n_heads}/{groups}/{width}", length, "cuda", torch.bfloat16, checkpoint
        )
        return real.q, real.k[1], real.v[1], real.blocks
    q, k, v = (
        torch.randn(1, length, h, width, device="cuda", dtype=torch.bfloat16)
        for h in (n_heads, groups, groups)
    )
    return q, k, v, past_blocks(kind, length, groups)


def compile_one(case: int, settings: Tuned) -> None:
    """Put the kernels of ``settings`` into triton's cache: the binaries depend on the shape, not on
    the length.
    """
    _, n_heads, groups, width, _ = SHAPES[case]
    q, k, v = (
        torch.zeros(1, 256, h, width, device="cuda", dtype=torch.bfloat16)
        for h in (n_heads, groups, groups)
    )
    blocks = past_blocks("random", 256, groups)
    with contextlib.suppress(*FAILURES):  # told when it is measured
        sel_forward.forward(q, k, v, blocks, call=SlotCall(GEOMETRY, width**-0.5), tuned=settings)


def prepare(cases: list[int], checked: bool) -> None:
    """Compile what :func:`measure` will run; print a verdict for each small case if ``checked``."""
    jobs = [
        (case, settings)
        for case in cases
        for settings in configurations(SHAPES[case][1] // SHAPES[case][2])
    ]
    with workers() as pool:
        verdicts = pool.map(check_one, *zip(*CHECKED)) if checked else iter(())
        compiled = pool.map(compile_one, *zip(*jobs)) if jobs else iter(())
        for verdict in verdicts:
            print(verdict, flush=True)
        list(compiled)


def measure(case: int, kind: str, quick: bool, checkpoints: Path | None) -> None:
    """A table row per configuration."""
    name, n_heads, groups, width, length = SHAPES[case]
    q, k, v, blocks = inputs(case, kind, checkpoints)
    call = SlotCall(GEOMETRY, width**-0.5)
    heads, seqs = n_heads // groups, Sequences.of(q, call)
    flops = 4 * width * n_heads * length * 1024
    sizes = {
        size: sel_union.build(blocks, seqs, GEOMETRY, size, 1).counts[:, 0].float().mean().item()
        for size in (2, 4, 8, 16, 32)
    }
    print(
        f"\n{name} {kind}: union of 2..32 tokens "
        + " ".join(f"{size}:{mean:.0f}" for size, mean in sizes.items())
    )
    for settings in configurations(heads):
        rows = [list(row.values()) for row in settings.values()]
        try:
            ms = median_ms(
                lambda s=settings: sel_forward.forward(q, k, v, blocks, call=call, tuned=s), quick
            )
            split = " ".join(
                f"{part:.2f}" for part in parts(q, k, v, blocks, call, settings, quick)
            )
            print(
                f"{ms:7.2f} ms {flops / ms / 1e9:5.0f} TFLOP/s  unions, tiles, lists, buckets:"
                f" {split}  {rows}",
                flush=True,
            )
        except FAILURES as error:  # a configuration may not fit; the others still count
            print(f"        {type(error).__name__}: {str(error)[:150]}  {rows}", flush=True)
            torch.cuda.empty_cache()


def main() -> None:
    """Check, then measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument(
        "--kind", nargs="*", default=["random", "near"], choices=["random", "near", "real"]
    )
    parser.add_argument("--checkpoints", type=Path, help="where real_blocks.py put its layers")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--no-check", action="store_true")
    args = parser.parse_args()
    prepare(args.case, not args.no_check)
    for case, kind in itertools.product(args.case, args.kind):
        measure(case, kind, args.quick, args.checkpoints)


if __name__ == "__main__":
    main()

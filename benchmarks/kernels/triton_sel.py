"""Tune the forward of sel: check small cases, then time tile shapes on several kinds of blocks.

    python benchmarks/kernels/triton_sel.py [--case 0 1 2] [--kind random near real]
        [--checkpoints DIRECTORY] [--quick] [--no-check]

Kinds of blocks:

    random   the initial and local blocks, and 13 random earlier ones
    near     each of the 13 equals that of the previous token with probability 0.8
    real     activations of the layers that real_blocks.py trained into DIRECTORY

Several processes compile all configurations before the first one is timed. Times are medians of
do_bench in bf16 at batch 1. They are also given by part: the unions, the tile kernel, the pair
lists, and the buckets with their lists and merge.
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

from nsa_backend_triton.host.descriptors import key_descriptor
from nsa_backend_triton.host.launch_cache import aligned
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
FAILURES = (RuntimeError, TritonError)  # out of memory of either kind, or a failed compilation
COMPILER_OPTIONS = {"num_warps": 4, "num_stages": 2}
Tuned = dict[str, dict[str, int]]


def tuned(
    forward: tuple[int, ...],
    bucket: tuple[int, ...] = (64, 16, 4, 2),
    merge: tuple[int, int] = (32, 4),
) -> Tuned:
    """Return the settings of the three kernels.

    Args:
        forward: BLOCK_M, MIN_SHARING_TOKENS, warps, stages[, maximum of registers, BLOCK_N].
        bucket: BLOCK_M, TILES_PER_PROGRAM, warps, stages[, maximum of registers].
        merge: BLOCK_M, UNROLL.

    A maximum of 0 registers leaves the number to the compiler.
    """
    forward_settings = {
        "BLOCK_N": 64,
        "SHARE_ALL_MAX_LEN": 0,
        "USE_TMA": int(torch.cuda.get_device_capability() >= (9, 0)),
    }
    names = ("BLOCK_M", "MIN_SHARING_TOKENS", "num_warps", "num_stages", "maxnreg", "BLOCK_N")
    forward_settings |= zip(names, forward)
    names = ("BLOCK_M", "TILES_PER_PROGRAM", "num_warps", "num_stages", "maxnreg")
    bucket_settings = dict(zip(names, bucket))
    for settings in (forward_settings, bucket_settings):
        if not settings.get("maxnreg", 1):
            del settings["maxnreg"]
    return {
        "sel_forward": forward_settings,
        "sel_bucket": bucket_settings,
        "sel_merge": dict(zip(("BLOCK_M", "UNROLL"), merge)) | COMPILER_OPTIONS,
    }


def configurations(group: int) -> Iterator[Tuned]:
    """Yield the settings to time for ``group`` heads per kv head: without buckets, then with."""
    without_buckets = [
        (64, 1, 4, 3),
        (64, 1, 4, 2),
        (64, 1, 4, 3, 168),
        (64, 1, 4, 3, 168, 32),
        (64, 1, 4, 4, 0, 32),
        (128, 1, 8, 3),
        (128, 1, 8, 2),
    ]
    for forward in without_buckets:
        yield tuned(forward)
    buckets = [
        (64, 16, 4, 2),
        (64, 16, 4, 3),
        (64, 16, 4, 2, 168),
        (64, 32, 4, 2, 168),
        (64, 8, 4, 2, 168),
    ]
    if group >= 16:
        for bucket in buckets[:3]:
            yield tuned((64, 2, 4, 3), bucket)
        return
    best = 4 if group <= 4 else 3
    for bucket in buckets:
        yield tuned((64, best, 4, 3), bucket)
    for merge in ((16, 4), (64, 4), (32, 1), (32, 16)):
        yield tuned((64, best, 4, 3), merge=merge)
    for min_sharing in (best - 1, best + 1, best + 3):
        yield tuned((64, min_sharing, 4, 3))
    yield tuned((128, 2 * best, 8, 3))


def past_blocks(kind: str, length: int, groups: int) -> Tensor:
    """Return int32 [1, S, G, n]: block 0, the last two blocks, and others before them."""
    n, size = GEOMETRY.num_selected_blocks, GEOMETRY.select_block_size
    current = torch.arange(length, device="cuda")[:, None, None] // size
    num_free = n - 3
    if kind == "random":
        drawn = torch.rand(length, groups, num_free, device="cuda")
    else:
        epoch = (torch.rand(length, groups, num_free, device="cuda") > 0.8).long().cumsum(0)
        table = torch.rand(length, groups, num_free, device="cuda")
        drawn = table.gather(0, epoch.clamp(max=length - 1))
    # The blocks of a token are distinct: choice i takes blocks i + 1 modulo num_free.
    choice = torch.arange(num_free, device="cuda")
    others = 1 + choice + num_free * (drawn * ((current - 3) / num_free).clamp(min=0)).long()
    others = torch.where(others < current - 1, others, -1)
    forced = torch.cat([torch.zeros_like(current), current - 1, current], -1).expand(
        length, groups, 3
    )
    return torch.cat([forced, others], -1).int()[None]


def truths(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, scale: float) -> tuple[Tensor, ...]:
    """Return golden, rounded, magnitude [H, S, D], lse and largest |score| [H, S] at batch 1.

    golden is the result in float64, rounded the same with fp32 arithmetic and rounded to the dtype
    of q, and magnitude the sum of |p v|.
    """
    length, groups = q.shape[1], k.shape[2]
    group, size = q.shape[2] // groups, GEOMETRY.select_block_size
    row = torch.arange(length, device=q.device)
    # [S, G, S]
    visible = (blocks[0].long()[:, :, :, None] == (row // size)).any(2) & (row <= row[:, None])[
        :, None
    ]
    hidden = ~visible.transpose(0, 1).repeat_interleave(group, 0)
    q64, k64, v64 = (x[0].double().transpose(0, 1) for x in (q, k, v))
    k64, v64 = (x.repeat_interleave(group, 0) for x in (k64, v64))
    scores = (q64 @ k64.transpose(1, 2) * scale).masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(-1)
    p = (scores - lse[..., None]).exp()
    p32 = (scores.float() - scores.float().amax(-1, keepdim=True)).exp()
    rounded = (p32.to(q.dtype).float() @ v64.float() / p32.sum(-1, keepdim=True)).to(q.dtype)
    largest = scores.masked_fill(hidden, 0).abs().amax(-1)
    return p @ v64, rounded, p @ v64.abs(), lse, largest


CHECKED = tuple(
    itertools.product(
        (torch.bfloat16, torch.float16, torch.float32),
        ((16, 128, 128), (4, 128, 128), (6, 64, 64), (1, 64, 64), (7, 192, 128)),
        (1, 4),
    )
)


def check_one(dtype: torch.dtype, shape: tuple[int, int, int], min_sharing: int) -> str:
    """Return the verdict on a small case; it takes buckets if min_sharing > 1."""
    group, dk, dv = shape
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    length, groups = 1500, 2
    sizes = ((group * groups, dk), (groups, dk), (groups, dv))
    q, k, v = (torch.randn(1, length, h, d, device="cuda", dtype=dtype) for h, d in sizes)
    blocks = past_blocks("near", length, groups)
    call = SlotCall(GEOMETRY, dk**-0.5)
    small = dtype == torch.float32 or dk > 128
    settings = tuned(
        (64 if not small else 32, min_sharing, 4, 3), (64 if not small else 16, 8, 4, 3)
    )
    if small:
        settings["sel_forward"] |= {"BLOCK_N": 32, "num_stages": 1}
        settings["sel_bucket"] |= {"num_stages": 1}
    name = f"{dtype} h={group} {dk}/{dv} min_sharing={min_sharing}:"
    try:
        o, lse = sel_forward.forward(q, k, v, blocks, call=call, tuned=settings)
        golden, rounded, magnitude, true_lse, largest = truths(q, k, v, blocks, call.scale)
        verdict = judge(o[0].transpose(0, 1), golden, rounded, magnitude, dtype)
        lse_verdict = judge_lse(lse[0], true_lse, largest, dtype)
        again, _ = sel_forward.forward(q, k, v, blocks, call=call, tuned=settings)
    except FAILURES as error:  # report it and check the other cases
        return f"{name} {type(error).__name__}: {str(error)[:200]}"
    text = (
        f"row {verdict.row:.2f} elem {verdict.elem:.2f} bias {verdict.bias:.2f}"
        f" {verdict.why or 'right'};"
    )
    text += f" lse {lse_verdict.elem:.1f} {lse_verdict.why or 'right'}; "
    return f"{name} {text}{'same bits' if torch.equal(o, again) else 'OTHER BITS'}"


def workers() -> ProcessPoolExecutor:
    """Return a pool of processes that compile in parallel, each with a context on the GPU."""
    count = max(1, min(12, (os.cpu_count() or 2) - 2))
    return ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))


def median_ms(function: Callable[[], Any], quick: bool) -> float:
    """Return the median time of do_bench in ms."""
    from triton.testing import do_bench

    return float(do_bench(function, warmup=5, rep=30 if quick else 100, return_mode="median"))


def parts(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, call: SlotCall, settings: Tuned, quick: bool
) -> list[float]:
    """Return ms of the unions, the tile kernel, the pair lists, and the buckets with lists."""
    seqs, group = Sequences.of(q, k, call), q.shape[2] // k.shape[2]
    forward_settings = settings["sel_forward"]
    block_t = sel_forward.tile_tokens(forward_settings["BLOCK_M"], group)
    min_sharing = min(forward_settings["MIN_SHARING_TOKENS"], block_t)

    def build_unions() -> sel_union.Unions:
        return sel_union.build(
            blocks,
            seqs,
            call.geometry,
            block_t,
            min_sharing,
            write_unshared=forward_settings["MIN_SHARING_TOKENS"] > 1,
        )

    unions = build_unions()
    o, lse = sel_forward.forward(q, k, v, blocks, call=call, tuned=settings)
    tiles, _ = sel_forward._prepare(q, k, v, blocks, seqs, call, settings, aligned(k, v))
    descriptors = [
        key_descriptor(x, tiles.desc_block_n) if tiles.desc_block_n else None for x in (k, v)
    ]
    times = [median_ms(build_unions, quick)]
    times += [
        median_ms(
            lambda: tiles.launch(
                q, k, v, *descriptors, unions.entries, unions.counts, o, lse, seqs.cu
            ),
            quick,
        )
    ]
    if forward_settings["MIN_SHARING_TOKENS"] == 1:
        return [*times, 0.0, 0.0]
    runs = list(sel_forward._row_runs(o, group, blocks.shape[-1]))
    times += [
        median_ms(
            lambda: [
                pair_lists.build(blocks, seqs, call.geometry, mask=unions.unshared, rows=rows)
                for rows in runs
            ],
            quick,
        )
    ]
    times += [
        median_ms(
            lambda: [
                sel_forward._attend_buckets(
                    q, k, v, blocks, unions.unshared, o, lse, seqs, call, rows, settings
                )
                for rows in runs
            ],
            quick,
        )
    ]
    return times


def inputs(case: int, kind: str, checkpoints: Path | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v in bf16 and blocks of the shape SHAPES[case], batch 1."""
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
    """Put the kernels of ``settings`` into triton's cache; binaries do not depend on the length."""
    _, n_heads, groups, width, _ = SHAPES[case]
    q, k, v = (
        torch.zeros(1, 256, h, width, device="cuda", dtype=torch.bfloat16)
        for h in (n_heads, groups, groups)
    )
    blocks = past_blocks("random", 256, groups)
    with contextlib.suppress(*FAILURES):  # measure() reports them
        sel_forward.forward(q, k, v, blocks, call=SlotCall(GEOMETRY, width**-0.5), tuned=settings)


def prepare(cases: list[int], checked: bool) -> None:
    """Compile the kernels of :func:`measure`; check the small cases first if ``checked``."""
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
    """Print a table row for each configuration."""
    name, n_heads, groups, width, length = SHAPES[case]
    q, k, v, blocks = inputs(case, kind, checkpoints)
    call = SlotCall(GEOMETRY, width**-0.5)
    group, seqs = n_heads // groups, Sequences.of(q, k, call)
    flops = 4 * width * n_heads * length * 1024
    union_sizes = {
        tokens: sel_union.build(blocks, seqs, GEOMETRY, tokens, 1)
        .counts[:, 0]
        .float()
        .mean()
        .item()
        for tokens in (2, 4, 8, 16, 32)
    }
    print(
        f"\n{name} {kind}: blocks in the union of 2..32 tokens: "
        + " ".join(f"{tokens}:{mean:.0f}" for tokens, mean in union_sizes.items())
    )
    for settings in configurations(group):
        values = [list(row.values()) for row in settings.values()]
        try:
            ms = median_ms(
                lambda s=settings: sel_forward.forward(q, k, v, blocks, call=call, tuned=s), quick
            )
            part_times = " ".join(
                f"{part:.2f}" for part in parts(q, k, v, blocks, call, settings, quick)
            )
            print(
                f"{ms:7.2f} ms {flops / ms / 1e9:5.0f} TFLOP/s  unions, tiles, lists, buckets:"
                f" {part_times}  {values}",
                flush=True,
            )
        except FAILURES as error:  # it may not fit: report it and go on
            print(f"        {type(error).__name__}: {str(error)[:150]}  {values}", flush=True)
            torch.cuda.empty_cache()


def main() -> None:
    """Check the small cases, then time the configurations."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument(
        "--kind", nargs="*", default=["random", "near"], choices=["random", "near", "real"]
    )
    parser.add_argument(
        "--checkpoints", type=Path, help="directory of the layers that real_blocks.py trained"
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--no-check", action="store_true")
    args = parser.parse_args()
    prepare(args.case, not args.no_check)
    for case, kind in itertools.product(args.case, args.kind):
        measure(case, kind, args.quick, args.checkpoints)


if __name__ == "__main__":
    main()

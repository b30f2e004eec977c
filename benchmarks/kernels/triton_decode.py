"""Decode steps of the triton backend: judged on small shapes, then timed at the anchors; ms, TB/s,
share of the floor.

    python benchmarks/kernels/triton_decode.py [--quick] [--skip-check] [--shapes 0,1,2,3]
        [--parts] [--json FILE]

A line per shape and configuration: the step in a CUDA graph (L2 flushed by the caches themselves,
which are larger; the small shape is timed warm) and eager, host included; bytes that the step must
read over the graph's time, and the share of that time that they need at 4.3 TB/s. --parts: each
kernel of each configuration by the profiler, then, of the best, each branch alone, and the append.
What fails prints its error.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from decode_shapes import ANCHORS, Data, Shape, make
from graph_time import graph_ms

from nsa_backend_triton.decode import forms
from nsa_backend_triton.host import configs, sequences
from nsa_core.contract import SLOTS
from nsa_verify.checks.decode_fused import append_parity, step_parity
from nsa_verify.checks.decode_parity import decode_parity, quick_steps
from nsa_verify.combination import Combination
from nsa_verify.findings import Finding

FLOOR = 4.3e12  # bytes a second
Change = dict[str, int]


# (of decode_span, of decode_sel), over what ships
CHANGES: list[tuple[Change, Change]] = [
    ({}, {}),
    ({}, {"PROGRAMS_PER_SM": 2}),
    ({}, {"PROGRAMS_PER_SM": 4}),
    ({"RANK_BLOCKS": 256}, {}),
    ({"RANK_BLOCKS": 1024}, {}),
    (
        {"BLOCK_N": 32, "maxnreg": 128, "PROGRAMS_PER_SM": 4},
        {"PROGRAMS_PER_SM": 4},
    ),  # four programs a multiprocessor
    (
        {"BLOCK_N": 32, "maxnreg": 128, "PROGRAMS_PER_SM": 4, "num_stages": 4},
        {"PROGRAMS_PER_SM": 4},
    ),
    (
        {"num_stages": 4, "maxnreg": 0, "PROGRAMS_PER_SM": 2},
        {"PROGRAMS_PER_SM": 2},
    ),  # two, and two tiles of each in flight
    ({"FUSE_STEP": 0}, {}),
    ({"BLOCK_M": 32}, {}),  # of several tokens a step
]


def settings_of(
    shape: Shape, change: tuple[Change, Change], dtype: torch.dtype
) -> tuple[Change, Change]:
    """What ships, changed."""
    traits = {"head_dim": shape.dk, "v_head_dim": shape.dv, "itemsize": dtype.itemsize, "heads": 1}
    here = sequences.architecture(
        torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    )
    names = ("decode_span", "decode_sel")
    span, sel = (dict(configs.pick(name, here, **traits)) | new for name, new in zip(names, change))
    return span, sel


def eager_ms(run: Callable[[], Any], repeats: int = 50) -> float:
    """Mean of ``repeats`` runs from the first call to the end of the last, host included."""
    for _ in range(5):
        run()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / repeats * 1e3


def kernel_us(run: Callable[[], Any], repeats: int = 20) -> list[tuple[float, str]]:
    """(microseconds a run, name) of each kernel, the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    times = (
        (e.device_time_total / repeats, e.key[:60])
        for e in seen.key_averages()
        if e.device_time_total
    )
    return sorted(times, reverse=True)


def parts(
    data: Data, settings: tuple[Change, Change]
) -> Iterator[tuple[str, str | None, Callable[[], Any]]]:
    """(name, branch whose bytes it reads, call) of each form alone."""
    s, call, (span, sel) = data.stores, data.call, settings
    lse = forms.cmp(data.q, *s["cmp"], call=call, settings=span)[1]
    blocks = forms.select(data.q, s["cmp"][0], lse, call=call, settings=span)
    yield "cmp", "cmp", lambda: forms.cmp(data.q, *s["cmp"], call=call, settings=span)
    yield "select", None, lambda: forms.select(data.q, s["cmp"][0], lse, call=call, settings=span)
    yield "sel", "sel", lambda: forms.sel(data.q, *s["sel"], blocks, call=call, settings=sel)
    yield "win", "win", lambda: forms.win(data.q, *s["win"], call=call, settings=span)
    yield "append", None, data.append


def measure(
    shape: Shape, changes: list[tuple[Change, Change]], with_parts: bool, dtype: torch.dtype
) -> list[Any]:
    """A line per configuration, the best last; then the parts of the best."""
    data, results = make(shape, "cuda", dtype), []
    need = shape.bytes_read(dtype.itemsize)
    expected: torch.Tensor | None = None
    for change in changes:
        try:
            settings = settings_of(shape, change, dtype)
            o, _ = data.step(settings)
            torch.cuda.synchronize()
            expected = o if expected is None else expected
            off = (o.float() - expected.float()).abs().max().item()
            ms, slow = (
                graph_ms(lambda s=settings: data.step(s)),
                eager_ms(lambda s=settings: data.step(s)),
            )
            results.append((ms, change, settings))
            told = f"eager {slow:.3f} ms, off by {off:.1e}, {change}"
            print(f"{shape} {line(ms, sum(need.values()))}, {told}", flush=True)
            for us, name in kernel_us(lambda s=settings: data.step(s)) if with_parts else ():
                print(f"{shape}     {us:8.1f} us {name}", flush=True)
        except Exception as error:  # noqa: BLE001  the other configurations still tell something
            print(f"{shape} {change}: {type(error).__name__}: {str(error)[:200]}", flush=True)
    if not results:
        return []
    best = min(results, key=lambda result: result[0])
    print(f"{shape} BEST {line(best[0], sum(need.values()))} {best[1]}", flush=True)
    if with_parts:
        for name, branch, run in parts(data, best[2]):
            ms = graph_ms(run)
            print(
                f"{shape} {name}: {line(ms, need[branch]) if branch else f'{ms * 1e3:.1f} us'}",
                flush=True,
            )
        both = graph_ms(lambda: (data.append(), data.step(best[2])))
        print(f"{shape} append and step: {both:.4f} ms", flush=True)
    return [{"shape": str(shape), "ms": ms, "change": change} for ms, change, _ in results]


def line(ms: float, count: int) -> str:
    """A time as ms, TB/s and share of the floor."""
    return f"{ms:.4f} ms {count / ms / 1e9:.2f} TB/s {count / FLOOR / ms * 1e3:.0%} of the floor"


def judge(job: tuple[str, int, torch.dtype]) -> list[str]:
    """What is wrong with every form on quick step number ``job[1]``."""
    device, number, dtype = job
    subject, step = Combination(dict.fromkeys(SLOTS, "triton"), device), quick_steps()[number]
    try:
        found: list[Finding] = [
            *decode_parity(subject, step, dtype),
            *step_parity(subject, step, dtype),
        ]
        found += append_parity(subject, step, dtype, rope=True, rotate_raw=False, raw_ring=8)
        return [f"{f.slot} {f.case} {f.quantity} {f.detail}" for f in found if f.ok is False]
    except Exception as error:  # noqa: BLE001  the other steps still tell something
        return [f"{type(error).__name__}: {str(error)[:300]}"]


def check(jobs: list[tuple[str, int, torch.dtype]], each: Callable[..., Any] = map) -> bool:
    """Every form against the oracle on quick steps; prints what is wrong. ``each``: a pool's
    map.
    """
    fine = True
    for (_, number, dtype), bad in zip(jobs, each(judge, jobs)):
        fine = fine and not bad
        print(f"{quick_steps()[number].case.name} {str(dtype)[6:]}: {bad[:3] or 'ok'}", flush=True)
    return fine


def compile_one(job: tuple[Shape, tuple[Change, Change]]) -> None:
    """Put a configuration's binaries into Triton's cache; they serve every batch and length of the
    same heads.
    """
    shape, change = job
    small = dataclasses.replace(
        shape, batch=1, length=max(4 * shape.page, 256) if shape.page < 512 else shape.length
    )
    data = make(small, "cuda", torch.bfloat16)
    data.step(settings_of(shape, change, torch.bfloat16))
    data.append()


def main() -> int:
    """Check, then measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="what ships only")
    parser.add_argument("--skip-check", action="store_true")
    parser.add_argument("--parts", action="store_true")
    parser.add_argument(
        "--shapes", default=",".join(map(str, range(len(ANCHORS)))), help="anchors by number"
    )
    parser.add_argument(
        "--changes",
        default=",".join(map(str, range(len(CHANGES)))),
        help="configurations by number",
    )
    parser.add_argument("--json", type=Path, default=None)
    given = parser.parse_args()
    shapes = [ANCHORS[int(i)] for i in given.shapes.split(",")]
    changes = CHANGES[:1] if given.quick else [CHANGES[int(i)] for i in given.changes.split(",")]
    kinds = {dataclasses.replace(shape, batch=1, length=0): shape for shape in shapes}.values()
    began, results = time.perf_counter(), []
    with concurrent.futures.ProcessPoolExecutor(
        12, mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        compiled = [
            pool.submit(compile_one, (shape, change)) for shape in kinds for change in changes
        ]
        jobs = [
            ("cuda", n, dtype)
            for n in range(len(quick_steps()))
            for dtype in (torch.bfloat16, torch.float32)
        ]
        fine = check([] if given.skip_check else jobs, pool.map)
        concurrent.futures.wait(compiled)  # what failed shows again when measured
    print(f"compiled and judged in {time.perf_counter() - began:.0f} s", flush=True)
    for shape in shapes:
        results += measure(shape, changes, given.parts, torch.bfloat16)
        torch.cuda.empty_cache()
    if given.json is not None:
        given.json.write_text(json.dumps(results, indent=1))
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())

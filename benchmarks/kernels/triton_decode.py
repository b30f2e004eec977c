"""Judge the Triton backend's decode steps on small shapes, then time them at the anchor shapes.

    python benchmarks/kernels/triton_decode.py [--quick] [--skip-check] [--shapes 0,1,2,3]
        [--changes 0,1] [--parts] [--json FILE]

Prints one line per shape and configuration:

- the time of the step in a CUDA graph. The caches are larger than L2 and flush it; the small shape
  is timed warm
- the bandwidth: bytes that the step must read over that time, and the share of the time that they
  take at 4.3 TB/s
- the time of an eager step, host included

--parts also prints each kernel's time by the profiler for each configuration and, for the best
configuration, the time of each branch alone and of the append. A configuration that fails prints
its error.
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
from nsa_backend_triton.host import configs, device
from nsa_core.contract import SLOTS
from nsa_verify.checks.decode_fused import append_parity, fused_step
from nsa_verify.checks.decode_parity import decode_parity
from nsa_verify.problems.combination import Combination
from nsa_verify.problems.findings import Finding
from nsa_verify.problems.steps import quick_steps

FLOOR = 4.3e12  # bytes per second of HBM
Change = dict[str, int]


# changes of the tuned settings of (decode_span, decode_sel)
CHANGES: list[tuple[Change, Change]] = [
    ({}, {}),
    ({}, {"PROGRAMS_PER_SM": 2}),
    ({}, {"PROGRAMS_PER_SM": 4}),
    ({"RANK_BLOCKS": 256}, {}),
    ({"RANK_BLOCKS": 1024}, {}),
    (
        {"BLOCK_N": 32, "maxnreg": 128, "PROGRAMS_PER_SM": 4},
        {"PROGRAMS_PER_SM": 4},
    ),  # four programs per multiprocessor
    (
        {"BLOCK_N": 32, "maxnreg": 128, "PROGRAMS_PER_SM": 4, "num_stages": 4},
        {"PROGRAMS_PER_SM": 4},
    ),
    (
        {"num_stages": 4, "maxnreg": 0, "PROGRAMS_PER_SM": 2},
        {"PROGRAMS_PER_SM": 2},
    ),  # two, with two tiles of each in flight
    ({"FUSE_STEP": 0}, {}),
    ({"BLOCK_M": 32}, {}),  # for steps of several tokens
]


def settings_of(
    shape: Shape, change: tuple[Change, Change], dtype: torch.dtype
) -> tuple[Change, Change]:
    """Return the tuned settings of decode_span and decode_sel with ``change`` applied."""
    traits = {"head_dim": shape.dk, "v_head_dim": shape.dv, "itemsize": dtype.itemsize, "heads": 1}
    architecture = device.architecture(
        torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    )
    names = ("decode_span", "decode_sel")
    span, sel = (
        dict(configs.pick(name, architecture, **traits)) | new for name, new in zip(names, change)
    )
    return span, sel


def eager_ms(run: Callable[[], Any], repeats: int = 50) -> float:
    """Return the mean time of ``repeats`` eager runs, host included."""
    for _ in range(5):
        run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats * 1e3


def kernel_us(run: Callable[[], Any], repeats: int = 20) -> list[tuple[float, str]]:
    """Return (microseconds per run, name) of each kernel, the slowest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    times = (
        (e.device_time_total / repeats, e.key[:60])
        for e in profile.key_averages()
        if e.device_time_total
    )
    return sorted(times, reverse=True)


def parts(
    data: Data, settings: tuple[Change, Change]
) -> Iterator[tuple[str, str | None, Callable[[], Any]]]:
    """Yield (name, branch whose bytes it reads, call) of each form alone."""
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
    """Print a line per configuration, then the best one and its parts; return the times."""
    data, results = make(shape, "cuda", dtype), []
    read = shape.bytes_read(dtype.itemsize)
    expected: torch.Tensor | None = None
    for change in changes:
        try:
            settings = settings_of(shape, change, dtype)
            o, _ = data.step(settings)
            torch.cuda.synchronize()
            expected = o if expected is None else expected
            difference = (o.float() - expected.float()).abs().max().item()
            ms, eager = (
                graph_ms(lambda s=settings: data.step(s)),
                eager_ms(lambda s=settings: data.step(s)),
            )
            results.append((ms, change, settings))
            text = f"eager {eager:.3f} ms, off by {difference:.1e}, {change}"
            print(f"{shape} {line(ms, sum(read.values()))}, {text}", flush=True)
            for us, name in kernel_us(lambda s=settings: data.step(s)) if with_parts else ():
                print(f"{shape}     {us:8.1f} us {name}", flush=True)
        except Exception as error:  # noqa: BLE001  the other configurations still run
            print(f"{shape} {change}: {type(error).__name__}: {str(error)[:200]}", flush=True)
    if not results:
        return []
    best = min(results, key=lambda result: result[0])
    print(f"{shape} BEST {line(best[0], sum(read.values()))} {best[1]}", flush=True)
    if with_parts:
        for name, branch, run in parts(data, best[2]):
            ms = graph_ms(run)
            print(
                f"{shape} {name}: {line(ms, read[branch]) if branch else f'{ms * 1e3:.1f} us'}",
                flush=True,
            )
        ms = graph_ms(lambda: (data.append(), data.step(best[2])))
        print(f"{shape} append and step: {ms:.4f} ms", flush=True)
    return [{"shape": str(shape), "ms": ms, "change": change} for ms, change, _ in results]


def line(ms: float, count: int) -> str:
    """Return a time as ms, TB/s and share of the floor; ``count`` is the bytes read."""
    return f"{ms:.4f} ms {count / ms / 1e9:.2f} TB/s {count / FLOOR / ms * 1e3:.0%} of the floor"


def judge(job: tuple[str, int, torch.dtype]) -> list[str]:
    """Return the failures of every form on a quick step; ``job`` is (device, step, dtype)."""
    device, number, dtype = job
    subject, step = Combination(dict.fromkeys(SLOTS, "triton"), device), quick_steps()[number]
    try:
        findings: list[Finding] = [
            *decode_parity(subject, step, dtype),
            *fused_step(subject, step, dtype),
        ]
        findings += append_parity(subject, step, dtype, rope=True, rotate_raw=False, raw_ring=8)
        return [f"{f.slot} {f.case} {f.quantity} {f.detail}" for f in findings if f.ok is False]
    except Exception as error:  # noqa: BLE001  the other steps still run
        return [f"{type(error).__name__}: {str(error)[:300]}"]


def check(jobs: list[tuple[str, int, torch.dtype]], run_all: Callable[..., Any] = map) -> bool:
    """Judge every form on quick steps against the oracle and print the failures.

    ``run_all`` is ``map``, or that of a pool. Returns whether all are right.
    """
    ok = True
    for (_, number, dtype), failures in zip(jobs, run_all(judge, jobs)):
        ok = ok and not failures
        name = quick_steps()[number].case.name
        print(f"{name} {str(dtype)[6:]}: {failures[:3] or 'ok'}", flush=True)
    return ok


def compile_one(job: tuple[Shape, tuple[Change, Change]]) -> None:
    """Put a configuration's binaries into Triton's cache; they serve every batch and length."""
    shape, change = job
    small = dataclasses.replace(
        shape, batch=1, length=max(4 * shape.page, 256) if shape.page < 512 else shape.length
    )
    data = make(small, "cuda", torch.bfloat16)
    data.step(settings_of(shape, change, torch.bfloat16))
    data.append()


def main() -> int:
    """Run the command line; the exit code is 1 if a form is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="time the tuned settings only")
    parser.add_argument("--skip-check", action="store_true", help="do not judge results first")
    parser.add_argument("--parts", action="store_true", help="time kernels and branches, too")
    parser.add_argument(
        "--shapes", default=",".join(map(str, range(len(ANCHORS)))), help="numbers of anchor shapes"
    )
    parser.add_argument(
        "--changes",
        default=",".join(map(str, range(len(CHANGES)))),
        help="numbers of configurations",
    )
    parser.add_argument("--json", type=Path, default=None, help="write the times to this file")
    options = parser.parse_args()
    shapes = [ANCHORS[int(i)] for i in options.shapes.split(",")]
    changes = (
        CHANGES[:1] if options.quick else [CHANGES[int(i)] for i in options.changes.split(",")]
    )
    # shapes of one key share their binaries
    distinct = {dataclasses.replace(shape, batch=1, length=0): shape for shape in shapes}.values()
    start, results = time.perf_counter(), []
    with concurrent.futures.ProcessPoolExecutor(
        12, mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        compiled = [
            pool.submit(compile_one, (shape, change)) for shape in distinct for change in changes
        ]
        jobs = [
            ("cuda", n, dtype)
            for n in range(len(quick_steps()))
            for dtype in (torch.bfloat16, torch.float32)
        ]
        ok = check([] if options.skip_check else jobs, pool.map)
        concurrent.futures.wait(compiled)  # a failed compilation fails again when measured
    print(f"compiled and judged in {time.perf_counter() - start:.0f} s", flush=True)
    for shape in shapes:
        results += measure(shape, changes, options.parts, torch.bfloat16)
        torch.cuda.empty_cache()
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())

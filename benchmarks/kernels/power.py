"""Show whether the power limit of a GPU slows down long calls.

    python benchmarks/kernels/power.py [64/4/128@65536 ...] [--seconds 3] [--json FILE]

Each argument is a shape and a length. A forward and backward of the core runs back to back, then
with pauses of half a second, and then in turns with dense attention on cuDNN, in bf16 on random
inputs, with triton in every slot. Meanwhile nvidia-smi reads clock and power 20 times a second.
Back to back, the limit may lower the clock; after a pause a call begins at the highest clock; after
dense attention it begins at the clock that dense attention's power allows. The median ms of a call,
the median clock and the highest power are printed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from triton_sanitize import leaves

from nsa_bench.environment import machine
from nsa_bench.shapes import parse_shape
from nsa_core import nsa_attention, resolve

CASES = ("64/4/128@32768", "64/4/128@65536", "32/8/128@32768", "12/2/64@65536")
QUERY = "clocks.sm,power.draw.instant"
SAMPLE_MS, PAUSE_S = 50, 0.5


def samples(report: str) -> list[tuple[float, float]]:
    """Return (MHz, watts) of each complete line of nvidia-smi; the last one may be cut."""
    found = []
    for line in report.splitlines():
        with contextlib.suppress(ValueError):
            clock, power = map(float, line.split(","))
            found.append((clock, power))
    return found


@contextlib.contextmanager
def sampled() -> Iterator[list[tuple[float, float]]]:
    """Sample the current GPU inside the block; the list is filled at its end."""
    # Not by index: CUDA_VISIBLE_DEVICES renumbers GPUs for torch alone.
    gpu = f"GPU-{torch.cuda.get_device_properties('cuda').uuid}"
    command = ["nvidia-smi", "-i", gpu, f"--query-gpu={QUERY}"]
    command += ["--format=csv,noheader,nounits", "-lms", str(SAMPLE_MS)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    found: list[tuple[float, float]] = []
    try:
        yield found
    finally:
        process.terminate()
        found += samples(process.communicate()[0])


def core(shape: str, length: int) -> Callable[[], Any]:
    """Return a forward and backward of the core."""
    config = parse_shape(shape).config()
    plan = resolve(config, device="cuda", dtype=torch.bfloat16, backends="triton", needs_grad=True)
    tensors = leaves(config, length)
    gates = torch.rand(1, length, config.n_heads, 3, device="cuda", requires_grad=True)
    do = torch.randn(1, length, config.n_heads, config.v_dim, device="cuda", dtype=torch.bfloat16)

    def call() -> Any:
        o = nsa_attention(*tensors, gates, config=config, plan=plan, nonnegative_gates=True)
        return torch.autograd.grad(o, (*tensors, gates), do)

    return call


def dense(shape: str, length: int) -> Callable[[], Any]:
    """Return a forward and backward of causal attention on cuDNN."""
    q, k, v = (
        x.detach().transpose(1, 2).contiguous().requires_grad_()
        for x in leaves(parse_shape(shape).config(), length)
    )
    do = torch.randn_like(q[..., : v.shape[-1]])

    def call() -> Any:
        assert q.shape[-2] == k.shape[-2], "is_causal needs as many queries as keys"
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            o = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return torch.autograd.grad(o, (q, k, v), do)

    return call


def measure(
    call: Callable[[], Any], seconds: float, between: Callable[[], Any]
) -> dict[str, float]:
    """Call repeatedly for ``seconds``, and ``between`` after each call."""
    call()
    between()
    torch.cuda.synchronize()
    times, end = [], time.monotonic() + seconds
    with sampled() as found:
        while time.monotonic() < end:
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            call()
            events[1].record()
            torch.cuda.synchronize()
            times.append(events[0].elapsed_time(events[1]))
            between()
    return {
        "ms": statistics.median(times),
        "clock_mhz": statistics.median(clock for clock, _ in found),
        "max_watts": max(power for _, power in found),
    }


def main() -> None:
    """Measure every case, and print and save the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", default=CASES, metavar="SHAPE@LENGTH")
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if shutil.which("nvidia-smi") is None:
        parser.error("nvidia-smi is not installed: it comes with the driver of the GPU")
    rows = []
    for case in options.cases:
        shape, at, length = case.partition("@")
        if not (at and length.isdigit()):
            parser.error(f"{case!r} is not of the form SHAPE@LENGTH, such as {CASES[0]}")
        call = core(shape, int(length))
        between = {
            "back to back": lambda: None,
            "pauses": functools.partial(time.sleep, PAUSE_S),
            "dense attention": dense(shape, int(length)),
        }
        for name, other in between.items():
            row = measure(call, options.seconds, other)
            rows.append({"shape": shape, "length": int(length), "between": name} | row)
            print(
                f"{case:16} {name:15} {row['ms']:9.2f} ms {row['clock_mhz']:6.0f} MHz"
                f" {row['max_watts']:6.0f} W",
                flush=True,
            )
    document = {"kind": "power", "schema_version": 2, "machine": machine("cuda"), "rows": rows}
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

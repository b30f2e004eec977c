"""Show whether the power limit of a GPU slows down long calls.

    python benchmarks/kernels/power.py [64/4/128@65536 ...] [--seconds 3] [--json FILE]

Each argument is a shape and a length. A forward and backward of the core runs back to back, and
then with pauses of half a second, in bf16 on random inputs, with triton in every slot. Meanwhile
nvidia-smi reads clock and power 20 times a second. Back to back, the limit may lower the clock;
after a pause a call begins at the highest clock. The median ms of a call, the median clock and the
highest power are printed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
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
def sampled(index: int) -> Iterator[list[tuple[float, float]]]:
    """Sample GPU ``index`` inside the block; the list is filled at its end."""
    command = ["nvidia-smi", "-i", str(index), f"--query-gpu={QUERY}"]
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


def measure(call: Callable[[], Any], seconds: float, pause: float, index: int) -> dict[str, float]:
    """Call repeatedly for ``seconds``, with a pause after each call."""
    call()
    torch.cuda.synchronize()
    times, end = [], time.monotonic() + seconds
    with sampled(index) as found:
        while time.monotonic() < end:
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            call()
            events[1].record()
            torch.cuda.synchronize()
            times.append(events[0].elapsed_time(events[1]))
            time.sleep(pause)
    return {
        "pause_s": pause,
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
    parser.add_argument("--gpu", type=int, default=0, help="index of the GPU for nvidia-smi")
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
        for pause in (0.0, PAUSE_S):
            row = measure(call, options.seconds, pause, options.gpu)
            rows.append({"shape": shape, "length": int(length)} | row)
            print(
                f"{case:16} pause {pause:.1f} s {row['ms']:9.2f} ms {row['clock_mhz']:6.0f} MHz"
                f" {row['max_watts']:6.0f} W",
                flush=True,
            )
    document = {"kind": "power", "schema_version": 1, "machine": machine("cuda"), "rows": rows}
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

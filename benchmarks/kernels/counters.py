"""Read hardware counters of the core's kernels with Nsight Compute (ncu).

    python benchmarks/kernels/counters.py [--shape 64/4/128] [--length 65536] [--json FILE]

The core runs forward and backward twice, in bf16 on random inputs, with triton in every slot. The
counters are those of the second time. ncu repeats each kernel with clocks as they are, so a time
can differ from that of `nsa bench`. Percentages are of the GPU's peak.
"""

from __future__ import annotations

import argparse
import collections
import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from triton_sanitize import leaves

from nsa_bench.environment import machine
from nsa_bench.shapes import parse_shape
from nsa_core import nsa_attention, resolve

METRICS = {
    "ms": "gpu__time_duration.sum",  # reported in ns
    "matrix_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "exp2_percent": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "l2_percent": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "hbm_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "issue_percent": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "warps_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
    "programs_by_registers": "launch__occupancy_limit_registers",
    "programs_by_shared_memory": "launch__occupancy_limit_shared_mem",
}
# Several branches launch these kernels, in this order.
BRANCHES = {
    "span_forward": ("cmp", "win"),
    "span_dq": ("win", "cmp"),
    "span_dkdv": ("win", "cmp"),
    "sel_union_kernel": ("sel forward", "sel backward"),
}
PASSES = 2


def core(shape: str, length: int) -> None:
    """Run forward and backward of the core ``PASSES`` times."""
    config = parse_shape(shape).config()
    plan = resolve(config, device="cuda", dtype=torch.bfloat16, backends="triton", needs_grad=True)
    tensors = leaves(config, length)
    gates = torch.rand(1, length, config.n_heads, 3, device="cuda", requires_grad=True)
    for _ in range(PASSES):
        o = nsa_attention(*tensors, gates, config=config, plan=plan, nonnegative_gates=True)
        torch.autograd.grad(o, (*tensors, gates), torch.ones_like(o))
    torch.cuda.synchronize()


def launches(report: str) -> list[dict[str, Any]]:
    """Return the kernels of the last pass with their counters, from ncu's CSV report.

    Raises:
        ValueError: The report has no counters, or the passes did not launch the same kernels; the
            message ends with ncu's last line.
    """
    lines = [line for line in report.splitlines() if line.startswith('"')]
    by_id: dict[str, dict[str, Any]] = {}
    names = {metric: name for name, metric in METRICS.items()}
    for row in csv.DictReader(lines):
        launch = by_id.setdefault(row["ID"], {"kernel": row["Kernel Name"]})
        value = float(row["Metric Value"].replace(",", ""))
        name = names.get(row["Metric Name"])
        if name is not None:
            launch[name] = value / 1e6 if name == "ms" else value
    kernels = [launch["kernel"] for launch in by_id.values()]
    each = len(kernels) // PASSES
    if not each or kernels != kernels[:each] * PASSES:
        problem = "the passes differ" if kernels else "no counters"
        raise ValueError(f"{problem}: {report.strip().splitlines()[-1:]}")
    found = list(by_id.values())[-each:]
    seen: collections.Counter[str] = collections.Counter()
    for launch in found:
        kernel = launch["kernel"]
        branches = BRANCHES.get(kernel, ())
        launch["branch"] = branches[seen[kernel]] if seen[kernel] < len(branches) else ""
        seen[kernel] += 1
    return found


def main() -> None:
    """Run the core under ncu, and print and save the counters."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="64/4/128", help="Hq/G/D or Hq/G/Dk/Dv")
    parser.add_argument("--length", type=int, default=65536, help="tokens")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--core-only", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.core_only:
        core(options.shape, options.length)
        return
    ncu = shutil.which("ncu")
    if ncu is None:
        parser.error("ncu is not installed: install Nsight Compute of the CUDA toolkit")
    command = [ncu, "--csv", "--clock-control", "none", "--metrics", ",".join(METRICS.values())]
    command += ["--kernel-name", "regex:^(combine|select|sel|span|sum)_", sys.executable]
    command += [__file__, "--core-only", "--shape", options.shape, "--length", str(options.length)]
    report = subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout
    try:
        found = launches(report)
    except ValueError as error:
        sys.exit(f"counters.py: {error}")
    for launch in found:
        name = f"{launch['kernel']} {launch['branch']}"
        parts = (f"{key} {value:g}" for key, value in launch.items() if isinstance(value, float))
        print(f"{name:32}", *parts)
    document = {"kind": "counters", "schema_version": 1, "machine": machine("cuda")}
    document |= {"shape": options.shape, "length": options.length, "launches": found}
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

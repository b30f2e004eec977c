"""Time the compressed branch with every implementation, to decide which one `auto` prefers.

    python benchmarks/kernels/cmp_routes.py [64/4/192/128 ...] [--tokens 8192,65536] [--json FILE]

triton: the kernels of nsa-backend-triton. cudnn: sdpa with the residues as a batch axis on cuDNN,
one call per sequence. fold: sdpa with one folded causal call. fa2: the fold on FlashAttention-2.
flash4: the fold on FlashAttention-4, if it is installed.
Prints ms of forward + backward in a CUDA graph, in bf16.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from graph_time import graph_ms

from nsa_backend_fa2 import flash4
from nsa_backend_sdpa import cudnn
from nsa_bench.environment import machine
from nsa_core import NSAConfig, resolve
from nsa_core.errors import NSAError

# Hq/G/Dk, or Hq/G/Dk/Dv
SHAPES = (
    "12/2/64",
    "64/4/128",
    "32/8/128",
    "64/4/192/128",
)
LENGTHS = ((1, 2048), (8, 2048), (1, 8192), (4, 8192), (1, 16384), (1, 32768), (1, 65536))  # (B, S)
ROUTES = {"triton": "triton", "cudnn": "sdpa", "fold": "sdpa", "fa2": "fa2"}
NEVER = 1 << 30  # tokens or runs from which a route would be taken


def route_ms(config: NSAConfig, backend: str, batch: int, length: int) -> tuple[float, float]:
    """Return the ms of forward and of backward of one backend's cmp."""

    def normal(rows: int, heads: int, width: int) -> torch.Tensor:
        return torch.randn((batch, rows, heads, width), device="cuda", dtype=torch.bfloat16)

    kernel = resolve(
        config, device="cuda", dtype=torch.bfloat16, backends={"cmp": backend}, needs_grad=True
    ).cmp
    # Call the backward operator directly: autograd would run it on the stream of the forward, which
    # is not the captured one.
    namespace, short = kernel.op._schema.name.split("::")
    backward = getattr(getattr(torch.ops, namespace), f"{short}_backward").default
    call_arguments = (None, *kernel.tail(length))
    keys = config.geometry.num_compressed(length)
    heads, groups = config.n_heads, config.n_kv_heads
    q, do = (normal(length, heads, width) for width in (config.qk_dim, config.v_dim))
    k, v = (normal(keys, groups, width) for width in (config.qk_dim, config.v_dim))
    o, lse = kernel(q, k, v)
    return (
        graph_ms(lambda: kernel(q, k, v), repeats=5),
        graph_ms(lambda: backward(do, q, k, v, o, lse, *call_arguments), repeats=5),
    )


def route_row(config: NSAConfig, shape: str, batch: int, length: int) -> dict[str, Any]:
    """Time every route at one shape and length; a route that fails has a reason."""
    row: dict[str, Any] = {"shape": shape, "B": batch, "S": length, "routes": {}}
    least_tokens, least_runs = cudnn.MIN_TOKENS, flash4.MIN_RUNS
    routes = ROUTES if flash4.source().provider is None else {**ROUTES, "flash4": "fa2"}
    for name, backend in routes.items():
        cudnn.MIN_TOKENS = NEVER if name == "fold" else least_tokens
        flash4.MIN_RUNS = least_runs if name == "flash4" else NEVER
        try:
            forward, backward = route_ms(config, backend, batch, length)
            row["routes"][name] = {
                "forward_ms": round(forward, 4),
                "backward_ms": round(backward, 4),
            }
        except (NSAError, RuntimeError) as error:  # go on with the other routes
            row["routes"][name] = {"reason": f"{type(error).__name__}: {str(error)[:200]}"}
        torch.cuda.empty_cache()
    cudnn.MIN_TOKENS, flash4.MIN_RUNS = least_tokens, least_runs
    return row


def line(row: dict[str, Any]) -> str:
    """Format a row for printing."""
    cells = [f"{row['shape']} B={row['B']} S={row['S']}:"]
    for name, times in row["routes"].items():
        if "reason" in times:
            cells.append(f"{name} {times['reason'][:80]}")
        else:
            total = times["forward_ms"] + times["backward_ms"]
            cells.append(f"{name} {times['forward_ms']:.3f}+{times['backward_ms']:.3f}={total:.3f}")
    return "  ".join(cells)


def main() -> None:
    """Time every shape and length; print one line each. The exit code is 1 without any time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shapes", nargs="*", default=SHAPES, metavar="SHAPE")
    parser.add_argument("--tokens", help="lengths of one sequence instead of the usual problems")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    document: dict[str, Any] = {"kind": "cmp-routes", "schema_version": 1, "rows": []}
    document["machine"] = machine("cuda")
    tokens = options.tokens.split(",") if options.tokens else ()
    lengths = [(1, int(length)) for length in tokens] or LENGTHS
    for shape in options.shapes:
        heads, groups, dk, *dv = map(int, shape.split("/"))
        config = NSAConfig(heads * dk, heads, groups, head_dim=dk, v_head_dim=dv[0] if dv else None)
        for batch, length in lengths:
            document["rows"].append(route_row(config, shape, batch, length))
            print(line(document["rows"][-1]), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    routes = (route for row in document["rows"] for route in row["routes"].values())
    if all("reason" in route for route in routes):
        sys.exit("cmp_routes.py: no route ran; the lines above have the reasons")


if __name__ == "__main__":
    main()

"""The compressed branch by every route there is, forward and backward, over lengths: which one
`auto` should take.

    python benchmarks/kernels/cmp_routes.py [64/4/192/128 ...] [--json FILE]

triton: kernels of nsa-backend-triton. cudnn: sdpa's residues on cuDNN, a call a sequence. fold:
sdpa's other route, one folded causal call. fa2: the fold on FlashAttention-2. Milliseconds of
forward + backward in a CUDA graph, bf16.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from graph_time import graph_ms

from nsa_backend_sdpa import cudnn
from nsa_bench.environment import machine
from nsa_core import NSAConfig, resolve
from nsa_core.errors import NSAError

# heads, kv heads, Dk, and Dv where it is another
SHAPES = (
    "12/2/64",
    "64/4/128",
    "32/8/128",
    "64/4/192/128",
)
LENGTHS = ((1, 2048), (8, 2048), (1, 8192), (4, 8192), (1, 16384), (1, 32768), (1, 65536))  # (B, S)
ROUTES = {"triton": "triton", "cudnn": "sdpa", "fold": "sdpa", "fa2": "fa2"}


def route_ms(config: NSAConfig, backend: str, batch: int, length: int) -> tuple[float, float]:
    """Forward and backward of one backend's cmp."""

    def normal(rows: int, heads: int, width: int) -> torch.Tensor:
        return torch.randn((batch, rows, heads, width), device="cuda", dtype=torch.bfloat16)

    kernel = resolve(
        config, device="cuda", dtype=torch.bfloat16, backends={"cmp": backend}, needs_grad=True
    ).cmp
    # The operator itself: autograd would run it on the stream of the forward, which is not the one
    # that is captured.
    namespace, short = kernel.op._schema.name.split("::")
    backward = getattr(getattr(torch.ops, namespace), f"{short}_backward").default
    rest = (None, length, kernel.scale, list(kernel.geometry), kernel.deterministic)
    keys = config.geometry.num_compressed(length)
    heads, groups = config.n_heads, config.n_kv_heads
    q, do = (normal(length, heads, width) for width in (config.qk_dim, config.v_dim))
    k, v = (normal(keys, groups, width) for width in (config.qk_dim, config.v_dim))
    o, lse = kernel(q, k, v)
    return (
        graph_ms(lambda: kernel(q, k, v), repeats=5),
        graph_ms(lambda: backward(do, q, k, v, o, lse, *rest), repeats=5),
    )


def route_row(config: NSAConfig, shape: str, batch: int, length: int) -> dict[str, Any]:
    """Every route's milliseconds at one shape and length, or the reason why it has none."""
    row: dict[str, Any] = {"shape": shape, "B": batch, "S": length, "routes": {}}
    least = cudnn.LEAST_TOKENS
    for name, backend in ROUTES.items():
        cudnn.LEAST_TOKENS = 1 << 30 if name == "fold" else least
        try:
            forward, backward = route_ms(config, backend, batch, length)
            row["routes"][name] = {
                "forward_ms": round(forward, 4),
                "backward_ms": round(backward, 4),
            }
        except (NSAError, RuntimeError) as error:  # the other routes are still worth timing
            row["routes"][name] = {"reason": f"{type(error).__name__}: {str(error)[:200]}"}
        torch.cuda.empty_cache()
    cudnn.LEAST_TOKENS = least
    return row


def line(row: dict[str, Any]) -> str:
    """A row as printed."""
    cells = [f"{row['shape']} B={row['B']} S={row['S']}:"]
    for name, took in row["routes"].items():
        if "reason" in took:
            cells.append(f"{name} {took['reason'][:80]}")
        else:
            total = took["forward_ms"] + took["backward_ms"]
            cells.append(f"{name} {took['forward_ms']:.3f}+{took['backward_ms']:.3f}={total:.3f}")
    return "  ".join(cells)


def main() -> None:
    """A line per shape and length."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("shapes", nargs="*", default=SHAPES, metavar="SHAPE")
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    document: dict[str, Any] = {"kind": "cmp-routes", "schema_version": 1, "rows": []}
    document["machine"] = machine("cuda")
    for shape in given.shapes:
        heads, groups, dk, *rest = map(int, shape.split("/"))
        config = NSAConfig(
            heads * dk, heads, groups, head_dim=dk, v_head_dim=rest[0] if rest else None
        )
        for batch, length in LENGTHS:
            document["rows"].append(route_row(config, shape, batch, length))
            print(line(document["rows"][-1]), flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""The compressed branch by every route there is, forward and backward, over lengths: which one `auto` should take.

    python benchmarks/cmp_routes.py

triton: kernels of nsa-backend-triton. cudnn: sdpa's residues on cuDNN, a call a sequence. fold: sdpa's other route, one
folded causal call. fa2: the fold on FlashAttention-2. Milliseconds of forward + backward in a CUDA graph, bf16.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from nsa_backend_sdpa import cudnn
from nsa_core import NSAConfig, resolve
from nsa_core.errors import NSAError

SHAPES = ((12, 2, 64), (64, 4, 128), (32, 8, 128))
LENGTHS = ((1, 2048), (8, 2048), (1, 8192), (4, 8192), (1, 16384), (1, 32768), (1, 65536))  # (B, S)
ROUTES = {"triton": "triton", "cudnn": "sdpa", "fold": "sdpa", "fa2": "fa2"}


def graph_ms(run: Callable[[], Any], repeats: int = 5) -> float:
    """Median of seven replays of ``repeats`` runs, per run."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            run()
    graph.replay()
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / repeats)
    return statistics.median(times)


def route_ms(config: NSAConfig, backend: str, batch: int, length: int) -> tuple[float, float]:
    """Forward and backward of one backend's cmp."""

    def normal(rows: int, heads: int) -> torch.Tensor:
        shape = (batch, rows, heads, config.qk_dim)
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    kernel = resolve(config, device="cuda", dtype=torch.bfloat16, backends={"cmp": backend}, needs_grad=True).cmp
    keys = config.geometry.num_compressed(length)
    q, k, v = normal(length, config.n_heads), normal(keys, config.n_kv_heads), normal(keys, config.n_kv_heads)
    o, _ = kernel(q, k, v)
    do = torch.randn_like(o)
    with torch.no_grad():
        forward = graph_ms(lambda: kernel(q, k, v))
    return forward, graph_ms(lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True))


def main() -> None:
    """A line per shape and length."""
    least = cudnn.LEAST_TOKENS
    for heads, groups, width in SHAPES:
        config = NSAConfig(dim=heads * width, n_heads=heads, n_kv_heads=groups, head_dim=width)
        for batch, length in LENGTHS:
            cells = [f"{heads}/{groups}/{width} B={batch} S={length}:"]
            for name, backend in ROUTES.items():
                cudnn.LEAST_TOKENS = 1 << 30 if name == "fold" else least
                try:
                    forward, backward = route_ms(config, backend, batch, length)
                    cells.append(f"{name} {forward:.3f}+{backward:.3f}={forward + backward:.3f}")
                except (NSAError, RuntimeError) as error:  # the other routes still tell something
                    cells.append(f"{name} {type(error).__name__}: {str(error)[:60]}")
                torch.cuda.empty_cache()
            print("  ".join(cells), flush=True)


if __name__ == "__main__":
    main()

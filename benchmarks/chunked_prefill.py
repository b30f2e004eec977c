"""Prefilling a cache in chunks beside one call of the layer without a cache: tokens/s, and how far
outputs are apart.

    python benchmarks/chunked_prefill.py [--device cuda --dtype bfloat16 --backends triton]
        [--shape 256:8/2/32] [--length 2048] [--chunks 2048,512,256] [--repeats 3]

``--shape`` is dim:Hq/G/D; l, d, l', n and w are the paper's. A chunk of the whole length is the
ordinary prefill, which also fills the cache. The fastest of ``--repeats`` passes counts. On the CPU
the time is the process's own.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Sequence

import torch

from nsa_core import NSACache, NSAConfig, NSAttention


def run_chunks(attn: NSAttention, cache: NSACache, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The layer's output over ``parts``, one call each."""
    return torch.cat([attn(part, cache=cache) for part in parts], 1)


def seconds(work: Callable[[], torch.Tensor], cuda: bool) -> tuple[float, torch.Tensor]:
    """How long ``work`` takes, and what it gives."""
    clock = time.perf_counter if cuda else time.process_time
    if cuda:
        torch.cuda.synchronize()
    start = clock()
    y = work()
    if cuda:
        torch.cuda.synchronize()
    return clock() - start, y


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--backends", default="sdpa")
    parser.add_argument("--shape", default="256:8/2/32")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--chunks", default="2048,512,256")
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    dim, heads = asked.shape.split(":")
    hq, g, d = (int(n) for n in heads.split("/"))
    torch.manual_seed(0)
    config = NSAConfig(dim=int(dim), n_heads=hq, n_kv_heads=g, head_dim=d)
    attn = NSAttention(config, backends=asked.backends).requires_grad_(False)
    attn = attn.to(asked.device, getattr(torch, asked.dtype))
    x = torch.randn(1, asked.length, config.dim, device=asked.device, dtype=attn.out.weight.dtype)
    cuda = x.device.type == "cuda"
    times, golden = zip(*(seconds(lambda: attn(x), cuda) for _ in range(asked.repeats)))
    print(f"{asked.shape} {asked.length} tokens, {asked.dtype} on {asked.device}, {asked.backends}")
    print(f"{'no cache':>10} {asked.length / min(times):12.0f} tokens/s")
    for chunk in map(int, asked.chunks.split(",")):
        passes = []
        for _ in range(asked.repeats):
            cache = attn.new_cache(1, asked.length)
            parts = x.split(chunk, 1)
            passes.append(seconds(functools.partial(run_chunks, attn, cache, parts), cuda))
        best, y = min(t for t, _ in passes), passes[-1][1]
        apart = (y.double() - golden[-1].double()).abs().max().item()
        print(
            f"{chunk:>10} {asked.length / best:12.0f} tokens/s   largest difference {apart:.1e}",
            flush=True,
        )


if __name__ == "__main__":
    main()

"""Compare chunked prefill of a cache with one call of the layer without a cache.

    python benchmarks/chunked_prefill.py [--device cuda --dtype bfloat16 --backends triton]
        [--shape 256:8/2/32] [--length 2048] [--chunks 2048,512,256] [--repeats 3]

Prints tokens/s and the largest difference of the outputs. ``--shape`` is dim:Hq/G/D; l, d, l', n
and w are the paper's. A chunk of the whole length is an ordinary prefill, which also fills the
cache. The fastest of ``--repeats`` passes counts. On the CPU the time is process time.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Sequence

import torch

from nsa_core import NSACache, NSAConfig, NSAttention


def run_chunks(attn: NSAttention, cache: NSACache, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Run the layer on each part, and return the joined outputs."""
    return torch.cat([attn(part, cache=cache) for part in parts], 1)


def seconds(work: Callable[[], torch.Tensor], cuda: bool) -> tuple[float, torch.Tensor]:
    """Run ``work``; return its time in seconds and its result."""
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
    options = parser.parse_args()
    dim, heads = options.shape.split(":")
    hq, g, d = (int(n) for n in heads.split("/"))
    torch.manual_seed(0)
    config = NSAConfig(dim=int(dim), n_heads=hq, n_kv_heads=g, head_dim=d)
    attn = NSAttention(config, backends=options.backends).requires_grad_(False)
    attn = attn.to(options.device, getattr(torch, options.dtype))
    x = torch.randn(
        1, options.length, config.dim, device=options.device, dtype=attn.out.weight.dtype
    )
    cuda = x.device.type == "cuda"
    times, references = zip(*(seconds(lambda: attn(x), cuda) for _ in range(options.repeats)))
    print(
        f"{options.shape} {options.length} tokens, {options.dtype} on {options.device},"
        f" {options.backends}"
    )
    print(f"{'no cache':>10} {options.length / min(times):12.0f} tokens/s")
    for chunk in map(int, options.chunks.split(",")):
        passes = []
        for _ in range(options.repeats):
            cache = attn.new_cache(1, options.length)
            parts = x.split(chunk, 1)
            passes.append(seconds(functools.partial(run_chunks, attn, cache, parts), cuda))
        best, y = min(t for t, _ in passes), passes[-1][1]
        difference = (y.double() - references[-1].double()).abs().max().item()
        print(
            f"{chunk:>10} {options.length / best:12.0f} tokens/s   largest difference"
            f" {difference:.1e}",
            flush=True,
        )


if __name__ == "__main__":
    main()

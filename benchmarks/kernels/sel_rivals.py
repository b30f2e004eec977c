"""Time the forward of sel beside cuDNN's `NSA.SelectionAttention` (nvidia-cudnn-frontend).

    python benchmarks/kernels/sel_rivals.py [64/4/128 ...] [--tokens 32768,65536] [--json FILE]

One sequence in bf16, random causal blocks. cuDNN's has no backward and takes at most 16 query heads
a kv head. Prints ms and the largest difference of o; a time is the smaller one of two medians of
triton's do_bench, taken in turns.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nsa_bench.environment import machine
from nsa_core import NSAConfig, resolve

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from random_blocks import random_causal_blocks

SHAPES = ("64/4/128", "12/2/64")


def median_ms(call: Callable[[], Any]) -> float:
    """Return the median of do_bench."""
    from triton.testing import do_bench

    return float(do_bench(call, warmup=50, rep=300, return_mode="median"))


def cudnn_call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: torch.Tensor, config: NSAConfig
) -> Callable[[], torch.Tensor]:
    """Return a call of cuDNN's selection attention; it returns o [S, Hq, D]."""
    from cudnn.native_sparse_attention import NSA

    tokens = len(q)
    indices, counts = blocks.clamp(min=0), (blocks >= 0).sum(-1, dtype=torch.int32)
    bounds = torch.tensor([0, tokens], dtype=torch.int32, device=q.device)

    def call() -> torch.Tensor:
        assert q.shape[0] == k.shape[0], "is_causal needs as many queries as keys"
        o: torch.Tensor = NSA.selection_attention_wrapper(
            *(q, k, v, indices, counts),
            cum_seqlen_q_tensor=bounds,
            cum_seqlen_k_tensor=bounds,
            block_size=config.select_block_size,
            scale_softmax=config.softmax_scale,
            max_s_q=tokens,
            max_s_k=tokens,
            is_causal=True,
        )["o_tensor"]
        return o

    return call


def measure(shape: str, tokens: int) -> dict[str, Any]:
    """Return the times of both kernels, and the largest difference of their outputs."""
    heads, groups, width = map(int, shape.split("/"))
    config = NSAConfig(heads * width, heads, groups, head_dim=width)
    sel = resolve(config, device="cuda", dtype=torch.bfloat16, backends={"sel": "triton"}).sel
    q, k, v = (
        torch.randn((tokens, count, width), device="cuda", dtype=torch.bfloat16)
        for count in (heads, groups, groups)
    )
    blocks = random_causal_blocks(tokens, groups, config.geometry, "cuda")
    rival = cudnn_call(q, k, v, blocks[0].contiguous(), config)

    def own() -> torch.Tensor:
        o: torch.Tensor = sel(q[None], k[None], v[None], blocks)[0]
        return o

    row: dict[str, Any] = {"shape": shape, "tokens": tokens}
    row["difference"] = (own()[0].float() - rival().float()).abs().max().item()
    times = [(median_ms(own), median_ms(rival)) for _ in range(2)]
    own_ms, rival_ms = map(min, zip(*times))
    return row | {"triton_ms": round(own_ms, 4), "cudnn_ms": round(rival_ms, 4)}


def main() -> None:
    """Time every shape and length; print one line each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shapes", nargs="*", default=SHAPES, metavar="Hq/G/D")
    parser.add_argument("--tokens", default="32768,65536")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for shape in options.shapes:
        for tokens in map(int, options.tokens.split(",")):
            rows.append(measure(shape, tokens))
            print(json.dumps(rows[-1]), flush=True)
    if options.json is not None:
        document = {"kind": "sel-rivals", "schema_version": 1, "rows": rows}
        document["machine"] = machine("cuda")
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

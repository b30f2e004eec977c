"""Time cmp, win and sel on FlashAttention-2, forward and backward, in bf16 at batch 1.

    python benchmarks/kernels/fa2_pieces.py out.json [--provider flash-attn|PyTorch] [--sel]

Times are medians in ms of triton's do_bench. cmp is timed as the backend runs it and, for
comparison, with copies for the fold. The time of a slot includes views, padding, copies and the
library call.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nsa_backend_fa2 import cmp, fold_strided, providers, sel, win
from nsa_bench.environment import machine
from nsa_core.contract import SlotCall
from nsa_core.fold import fold
from nsa_core.layout import BlockGeometry

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from random_blocks import random_causal_blocks

GEOMETRY = BlockGeometry()
SHAPES = {
    "64/4/128 S=64k": (64, 4, 128, 65536),
    "32/8/128 S=32k": (32, 8, 128, 32768),
    "12/2/64 S=64k": (12, 2, 64, 65536),
}


def median_ms(function: Callable[[], Any]) -> float:
    """Return the median of do_bench."""
    from triton.testing import do_bench

    return float(do_bench(function, warmup=50, rep=300, return_mode="median"))


def tensors(heads: int, groups: int, width: int, rows: int, length: int) -> list[torch.Tensor]:
    """Return random q, k, v and dO."""
    shapes = ((length, heads), (rows, groups), (rows, groups), (length, heads))
    return [
        torch.randn((1, *shape, width), device="cuda", dtype=torch.bfloat16) for shape in shapes
    ]


def measure(
    slot: str, shape: str, forward: Callable[[], Any], backward: Callable[[Any], Callable[[], Any]]
) -> dict[str, Any]:
    """Time forward and backward of one slot; return its row."""
    name, outputs = f"{slot} {shape}", forward()
    times = median_ms(forward), median_ms(backward(outputs))
    print(f"{name:34} {times[0]:8.3f} {times[1]:8.3f}", flush=True)
    return {"piece": name, "forward_ms": times[0], "backward_ms": times[1]}


def pieces(shape: str, with_sel: bool) -> list[dict[str, Any]]:
    """Time every slot at one shape; return the rows."""
    heads, groups, width, length = SHAPES[shape]
    call = SlotCall(GEOMETRY, width**-0.5)
    rows = []
    q, k, v, do = tensors(heads, groups, width, GEOMETRY.num_compressed(length), length)
    variants = {
        "cmp": (fold_strided.forward, fold_strided.backward),
        "cmp folded copies": (cmp.forward_folded, cmp.backward_folded),
    }
    for name, (forward, backward) in variants.items():
        rows.append(
            measure(
                name,
                shape,
                lambda f=forward: f(q, k, v, call),
                lambda out, b=backward: lambda: b(do, q, k, v, *out, call),
            )
        )
    rows.append(
        {
            "piece": f"fold of q alone {shape}",
            "forward_ms": median_ms(lambda: fold(q, groups, GEOMETRY)),
        }
    )
    print(f"{rows[-1]['piece']:34} {rows[-1]['forward_ms']:8.3f}")
    del q, k, v, do
    q, k, v, do = tensors(heads, groups, width, length, length)
    rows.append(
        measure(
            "win",
            shape,
            lambda: win.forward(q, k, v, call=call),
            lambda out: lambda: win.backward(do, q, k, v, *out, call=call),
        )
    )
    if with_sel:
        blocks = random_causal_blocks(length, groups, GEOMETRY, "cuda")
        rows.append(
            measure(
                "sel",
                shape,
                lambda: sel.forward(q, k, v, blocks, call=call),
                lambda out: lambda: sel.backward(do, q, k, v, blocks, *out, call=call),
            )
        )
    return rows


def main() -> None:
    """Time every shape, print and save the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("json", type=Path)
    parser.add_argument(
        "--provider", choices=[source.name for source in providers.sources()], default=None
    )
    parser.add_argument("--sel", action="store_true", help="also time sel, which is slow")
    options = parser.parse_args()
    if options.provider is not None:
        source = next(source for source in providers.sources() if source.name == options.provider)
        if source.provider is None:
            parser.error(str(source.reason))
        providers.sources = lambda: (source,)  # type: ignore[assignment]
    title = providers.active_provider().title
    print(f"{title} on {torch.cuda.get_device_name()}\n{'':34}  forward backward (ms)")
    rows = [row for shape in SHAPES for row in pieces(shape, options.sel)]
    document = {
        "schema_version": 1,
        "provider": title,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
        "machine": machine("cuda"),
    }
    options.json.write_text(
        json.dumps({**document, "rows": rows}, indent=1) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()

"""Measure what quantized keys and values change, on the activations of a trained layer.

    python benchmarks/real_blocks.py --shapes 12/2/64 --checkpoints DIRECTORY
    python benchmarks/quantized_error.py DIRECTORY/12-2-64.safetensors --json quantized_error.json

Keys and values of all branches are rounded as pages hold them: to bf16, or to e4m3 or int8 with a
scale a kv head. The scales come from the first half of the held-out text, and the figures from the
second. All sums are fp32, so that the figures show the rounding alone:

    error    |o - o_fp32| / |o_fp32| of the sum of the branches
    blocks   the part of the selected blocks that fp32 does not select
    loss     nats per byte of the model

The compressed tokens are made of keys and values that are not rounded, as in decoding.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from real_blocks import HELD_OUT

from nsa_bench import bytemodel
from nsa_bench.bytemodel import ByteModel
from nsa_bench.python_docs import library_text
from nsa_core import kv_scale, resolve
from nsa_core.decode.pages import quantize

# name -> dtype of the pages, and the margin of the scales of quantized pages
FORMATS: dict[str, tuple[torch.dtype, float]] = {
    "bf16": (torch.bfloat16, 0.0),
    **{f"fp8 x{m}": (torch.float8_e4m3fn, m) for m in (1.0, 2.0)},
    **{f"int8 x{m}": (torch.int8, m) for m in (1.0, 2.0)},
}


def rounded(x: torch.Tensor, calibration: torch.Tensor, dtype: torch.dtype, margin: float) -> Any:
    """Return x [1, S, G, D] as pages of ``dtype`` hold it."""
    if not margin:
        return x.to(dtype).float()
    scale = kv_scale(calibration, dtype, margin)
    return quantize(x, scale, dtype).float() * scale[:, None]


@torch.no_grad()
def figures(model: ByteModel, length: int, device: str) -> Iterator[dict[str, Any]]:
    """Yield the figures of each format over ``length`` bytes."""
    text = library_text(2 * HELD_OUT)
    parts = [
        bytemodel.byte_tokens(text[first:], 1, length + 1, device)
        for first in (0, HELD_OUT - length - 1)
    ]
    calibration, (q, k, v, gates) = (model.activations(tokens[:, :-1]) for tokens in parts)
    tokens, attn = parts[1], model.attn
    x = model._embedded(tokens[:, :-1])
    plan = resolve(model.config, device=device, dtype="float32", backends="sdpa")

    def attend(k: Any, v: Any) -> tuple[torch.Tensor, torch.Tensor]:
        o_cmp, lse = plan.cmp(q, k[0], v[0])
        blocks = plan.select(q, k[0], lse)
        (o_sel, _), (o_win, _) = plan.sel(q, k[1], v[1], blocks), plan.win(q, k[2], v[2])
        return plan.combine(gates.float(), o_cmp, o_sel, o_win), blocks

    def loss(o: torch.Tensor) -> float:
        logits = model.head(model.head_norm(x + attn.out(o.flatten(-2))))
        return float(F.cross_entropy(logits[0], tokens[0, 1:]))

    expected, right = attend(k, v)
    count = model.config.geometry.num_select_blocks(length) + 1
    chosen = F.one_hot(right[:, -length // 2 :].long() + 1, count).amax(-2)[..., 1:]
    yield {"format": "fp32", "error": 0.0, "blocks": 0.0, "loss": loss(expected)}
    for name, (dtype, margin) in FORMATS.items():
        keys, values = (
            [rounded(x, y, dtype, margin) for x, y in zip(new, old)]
            for new, old in ((k, calibration.k), (v, calibration.v))
        )
        o, blocks = attend(keys, values)
        other = F.one_hot(blocks[:, -length // 2 :].long() + 1, count).amax(-2)[..., 1:]
        yield {
            "format": name,
            "error": float((o - expected).norm() / expected.norm()),
            "blocks": float((other & ~chosen & 1).sum() / other.sum()),
            "loss": loss(o),
        }


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, help="a file that real_blocks.py wrote")
    parser.add_argument("--length", type=int, default=8192, help="bytes of text")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    model, facts = bytemodel.load(options.checkpoint)
    rows = []
    for row in figures(model.to(options.device), options.length, options.device):
        rows.append(row)
        print("{format:8}  error {error:.5f}  blocks {blocks:.4f}  loss {loss:.4f}".format(**row))
    if options.json:
        document = {"kind": "quantized-error", "model": facts, "length": options.length}
        options.json.write_text(json.dumps({**document, "formats": rows}, indent=1))


if __name__ == "__main__":
    main()

"""Train layers whose activations are realistic inputs of benchmarks, and measure their blocks.

    python benchmarks/real_blocks.py --device cuda --json real_blocks.json --checkpoints DIRECTORY

The speed of the kernels depends on how many selected blocks neighbouring tokens share. The script
trains one NSAttention layer per shape on Python's own documentation: next byte, with a fixed seed
and number of steps, on the sdpa backend by default. It measures the selected blocks on held-out
text and writes checkpoints such as DIRECTORY/12-2-64.safetensors for `nsa bench --inputs real
--checkpoint FILE`. The layer is the core that `nsa bench` times: mean compression of rotated keys,
one key/value pair for all branches.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import platform
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from random_blocks import random_causal_blocks

from nsa_bench import bytemodel
from nsa_bench.bytemodel import ByteModel
from nsa_bench.environment import device_name
from nsa_bench.provenance import source
from nsa_bench.python_docs import library_text
from nsa_bench.shapes import parse_lengths, parse_shape
from nsa_core import NSAConfig, resolve
from nsa_core.layout import BlockGeometry
from nsa_core.util.atomic_files import write_atomic

SHAPES = "12/2/64,64/4/128,32/8/128,64/4/192/128"
HELD_OUT = 131072  # first bytes of the text, held out of training for measurements
TEXT_BYTES = 1_000_000
TILES = (2, 4, 8, 16, 32)
SAMPLED = 256  # query rows sampled for the statistics of compressed probabilities


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The training options of a layer."""

    dim: int = 512
    steps: int = 100
    length: int = 2048  # one sequence per step, twice as long as the selected blocks
    learning_rate: float = 2e-3
    # As in long-context models; slow rotary pairs survive the mean over a block.
    rope_base: float = 500_000.0
    seed: int = 0
    backends: str = "sdpa"  # or "auto" for the fastest
    # Training ends after this time on slow machines; the result has the number of steps.
    time_limit_s: float = 120.0

    def config(self, shape: str) -> NSAConfig:
        """Return the layer's configuration."""
        return dataclasses.replace(
            parse_shape(shape).config(),
            dim=self.dim,
            rope_base=self.rope_base,
            rope_before_compress=True,
        )


def train(model: ByteModel, recipe: Recipe, device: str, text: bytes) -> dict[str, Any]:
    """Train ``model`` in place on the text after the held-out bytes; return losses and steps."""
    train_text = (
        torch.frombuffer(bytearray(text[HELD_OUT:] or text), dtype=torch.uint8).long().to(device)
    )
    starts = torch.Generator().manual_seed(recipe.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.01
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, recipe.steps))
    facts: dict[str, Any] = {"loss_before": loss(model, text, device)}
    started, step = time.monotonic(), 0
    while step < recipe.steps and time.monotonic() - started < recipe.time_limit_s:
        first = int(torch.randint(len(train_text) - recipe.length, (1,), generator=starts))
        part = train_text[first : first + recipe.length + 1][None]
        with autocast(device):
            logits = model(part[:, :-1])
        F.cross_entropy(logits.float().flatten(0, 1), part[0, 1:]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        step += 1
    facts |= {
        "steps": step,
        "seconds": round(time.monotonic() - started, 1),
        "loss_after": loss(model, text, device),
    }
    return facts


def rate(step: int, steps: int) -> float:
    """Return the learning rate's factor: a ramp over 20 steps, then a cosine down to a tenth."""
    return min(1.0, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * step / steps))


def autocast(device: str) -> torch.autocast:
    """Return a context with bf16 matrix products on a GPU, and fp32 on the CPU."""
    return torch.autocast(
        torch.device(device).type, torch.bfloat16, enabled=device.startswith("cuda")
    )


@torch.no_grad()
def loss(model: ByteModel, text: bytes, device: str) -> float:
    """Return the loss over the first 8k bytes, in nats per byte."""
    tokens = bytemodel.byte_tokens(text[:8193], 1, min(8193, len(text)), device)
    with autocast(device):
        logits = model(tokens[:, :-1])
    return round(float(F.cross_entropy(logits.float().flatten(0, 1), tokens[0, 1:])), 4)


@torch.no_grad()
def selected(
    model: ByteModel, text: bytes, seq_len: int, device: str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k_cmp and the blocks that sdpa selects, over the first ``seq_len`` bytes.

    Shapes:
        q: [1, S, Hq, Dk]
        k_cmp: [1, n_c, G, Dk]
        blocks: int32 [1, S, G, n]
    """
    x, _ = model.to(device).activations(bytemodel.byte_tokens(text, 1, seq_len, device))
    q, k_cmp, v_cmp = (t.to(dtype) for t in (x.q, x.k_cmp, x.v_cmp))
    plan = resolve(model.config, device=device, dtype=dtype, backends="sdpa")
    _, lse = plan.cmp(q, k_cmp, v_cmp)
    return q, k_cmp, plan.select(q, k_cmp, lse)


def locality(blocks: torch.Tensor, geometry: BlockGeometry) -> dict[str, float]:
    """Return the mean number of distinct blocks of a tile of 2 to 32 neighbouring tokens, over n.

    1 means that all tokens select equal blocks; T means that the T tokens of a tile share none.

    Args:
        blocks: [1, S, G, n], S a multiple of 32.
        geometry: Block sizes.
    """
    _, length, groups, n = blocks.shape
    count = geometry.num_select_blocks(length)
    by_group = blocks[0].transpose(0, 1).long()  # [G, S, n]
    unions = {}
    for tile in TILES:
        index = by_group.reshape(groups, length // tile, tile * n)
        member = torch.zeros(*index.shape[:2], count + 1, dtype=torch.bool, device=blocks.device)
        member.scatter_(-1, index.masked_fill(index < 0, count), True)
        unions[str(tile)] = round(float(member[..., :count].sum(-1).float().mean()) / n, 3)
    return unions


def peakedness(
    q: torch.Tensor, k: torch.Tensor, blocks: torch.Tensor, config: NSAConfig
) -> dict[str, float]:
    """Measure the concentration of the compressed probabilities (Eq. 8).

    The query rows are sampled from the last seven eighths of the sequence.

    Args:
        q: [S, Hq, Dk].
        k: [n_c, G, Dk].
        blocks: The selected blocks [S, G, n].
        config: The layer.
    """
    geometry, k = config.geometry, k.float()
    # Rows from here on see at least two compressed tokens.
    first = max(len(q) // 8, geometry.compress_block_size + geometry.compress_stride)
    rows = torch.linspace(first, len(q) - 1, SAMPLED, device=q.device).long()
    heads = q[rows].float().unflatten(1, (k.shape[1], -1))  # [R, G, h, Dk]
    scores = torch.einsum("rghd,cgd->rghc", heads, k) * config.softmax_scale
    starts = torch.arange(len(k), device=q.device) * geometry.compress_stride
    hidden = starts + geometry.compress_block_size - 1 > rows[:, None]
    p = scores.masked_fill(hidden[:, None, None], -torch.inf).softmax(-1)
    visible = (~hidden).sum(-1)[:, None, None]
    block_of_compressed = (starts // geometry.select_block_size).to(torch.int32)
    chosen = (blocks[rows][..., None] == block_of_compressed).any(-2)  # [R, G, n_c]
    return {
        "entropy_over_log_visible": round(
            float((torch.special.entr(p).sum(-1) / visible.log()).mean()), 4
        ),
        "mass_of_16_largest": round(float(p.topk(min(16, len(k)), -1).values.sum(-1).mean()), 4),
        "mass_in_chosen_blocks": round(float((p * chosen[:, :, None]).sum(-1).mean()), 4),
    }


def measure(
    model: ByteModel, text: bytes, length: int, device: str, dtype: torch.dtype
) -> dict[str, Any]:
    """Measure locality and peakedness of one model at one length."""
    q, k_cmp, blocks = selected(model, text, length, device, dtype)
    return {
        "union_over_n": locality(blocks, model.config.geometry),
        **peakedness(q[0], k_cmp[0], blocks[0], model.config),
    }


def study(
    shape: str, recipe: Recipe, lengths: list[int], device: str, text: bytes, folder: Path | None
) -> Any:
    """Train and measure one shape; save its checkpoint."""
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    model = bytemodel.untrained(recipe.config(shape), recipe.seed, recipe.backends).to(device)
    untrained = {str(n): measure(model, text, n, device, dtype) for n in lengths}
    facts = train(model, recipe, device, text)
    trained = {str(n): measure(model, text, n, device, dtype) for n in lengths}
    facts |= {"untrained": untrained, "trained": trained}
    geometry, groups = model.config.geometry, model.config.n_kv_heads
    random_blocks = {
        n: random_causal_blocks(n, groups, geometry, device, seed=recipe.seed) for n in lengths
    }
    facts["random"] = {
        str(n): {"union_over_n": locality(blocks, geometry)} for n, blocks in random_blocks.items()
    }
    if folder is not None:
        header = {"shape": shape, "recipe": dataclasses.asdict(recipe), "steps": facts["steps"]}
        name = f"{shape.replace('/', '-')}.safetensors"
        bytemodel.save(
            model, folder / name, header | {"loss_after": facts["loss_after"]}, force=True
        )
    return facts


def main() -> None:
    """Train, measure and save every shape; print one line per shape."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--lengths", default="8k,32k,64k")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--checkpoints", type=Path, metavar="DIRECTORY")
    for field in dataclasses.fields(Recipe):
        kind = {"int": int, "float": float, "str": str}[str(field.type)]
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    options = parser.parse_args()
    recipe = Recipe(
        **{field.name: getattr(options, field.name) for field in dataclasses.fields(Recipe)}
    )
    text, lengths = library_text(TEXT_BYTES), parse_lengths(options.lengths)
    if options.checkpoints is not None:
        options.checkpoints.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {
        "kind": "real-blocks",
        "schema_version": 1,
        "recipe": dataclasses.asdict(recipe),
        "shapes": {},
        "text": {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()},
        "environment": {
            "device": device_name(options.device),
            "torch": torch.__version__,
            "python": platform.python_version(),
            **source(),
        },
    }
    for shape in (parse_shape(word).name for word in options.shapes.split(",")):
        started, longest = time.monotonic(), str(max(lengths))
        facts = study(shape, recipe, lengths, options.device, text, options.checkpoints)
        document["shapes"][shape] = facts
        # Write after every shape, so that an interrupted run keeps the finished ones.
        if options.json is not None:
            write_atomic(options.json, json.dumps(document, indent=1) + "\n", force=True)
        unions = {
            name: facts[name][longest]["union_over_n"]["8"]
            for name in ("untrained", "trained", "random")
        }
        print(
            f"{shape}: {facts['steps']} steps in {facts['seconds']} s, loss {facts['loss_before']}"
            f" -> {facts['loss_after']}, distinct blocks of 8 neighbours over n at {longest}:"
            f" {unions}, {time.monotonic() - started:.0f} s in total",
            flush=True,
        )


if __name__ == "__main__":
    main()

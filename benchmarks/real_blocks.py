"""Activations of trained layers, for benchmarks: speed depends on how many blocks neighbouring
tokens share.

    python benchmarks/real_blocks.py --device cuda --json real_blocks.json --checkpoints DIRECTORY

trains one NSAttention layer of each shape on the documentation inside Python (next byte, seeded, as
many steps on every machine, the sdpa backend unless told otherwise), measures its blocks on text it
was not trained on, and writes DIRECTORY/12-2-64.safetensors and so on, which `nsa bench --inputs
real --checkpoint FILE` and :func:`real_inputs` take. The layer is the core that the bench times:
mean compression of the rotated keys, one key/value pair for all branches.
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
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

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
HELD_OUT = 131072  # first bytes of the text: measured on, never trained on
TEXT_BYTES = 1_000_000
TILES = (2, 4, 8, 16, 32)
SAMPLED = 256  # query rows whose compressed probabilities are looked at


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a layer is trained."""

    dim: int = 512
    steps: int = 100
    length: int = 2048  # one sequence a step: twice what the chosen blocks hold
    learning_rate: float = 2e-3
    # as models for long contexts: slow pairs survive the mean over a block
    rope_base: float = 500_000.0
    seed: int = 0
    backends: str = "sdpa"  # or "auto": what is fastest here
    # for machines much slower than an H200: training stops there, and says at which step
    time_limit_s: float = 120.0

    def config(self, shape: str) -> NSAConfig:
        """The layer's configuration."""
        return dataclasses.replace(
            parse_shape(shape).config(),
            dim=self.dim,
            rope_base=self.rope_base,
            rope_before_compress=True,
        )


class RealInputs(NamedTuple):
    """Tensors of every slot, no gradient asked for; k and v hold those of cmp (compressed), sel and
    win.
    """

    q: torch.Tensor  # [1, S, Hq, Dk]
    # [1, n_c, G, Dk], [1, S, G, Dk], [1, S, G, Dk]
    k: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    # [1, n_c, G, Dv], [1, S, G, Dv], [1, S, G, Dv]
    v: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    gates: torch.Tensor  # [1, S, Hq, 3] fp32
    blocks: torch.Tensor  # int32 [1, S, G, n]


def train(model: ByteModel, recipe: Recipe, device: str, text: bytes) -> dict[str, Any]:
    """Train ``model`` in place on what lies behind the held-out bytes; facts about it."""
    seen = torch.frombuffer(bytearray(text[HELD_OUT:] or text), dtype=torch.uint8).long().to(device)
    starts = torch.Generator().manual_seed(recipe.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.01
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, recipe.steps))
    facts: dict[str, Any] = {"loss_before": loss(model, text, device)}
    started, step = time.monotonic(), 0
    while step < recipe.steps and time.monotonic() - started < recipe.time_limit_s:
        first = int(torch.randint(len(seen) - recipe.length, (1,), generator=starts))
        part = seen[first : first + recipe.length + 1][None]
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
    """Share of the learning rate: a ramp over the first 20 steps, then a cosine down to a tenth."""
    return min(1.0, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * step / steps))


def autocast(device: str) -> torch.autocast:
    """bf16 products on a GPU, fp32 on the CPU."""
    return torch.autocast(
        torch.device(device).type, torch.bfloat16, enabled=device.startswith("cuda")
    )


@torch.no_grad()
def loss(model: ByteModel, text: bytes, device: str) -> float:
    """Nats per byte over the first 8k bytes."""
    tokens = bytemodel.tokens_of(text[:8193], 1, min(8193, len(text)), device)
    with autocast(device):
        logits = model(tokens[:, :-1])
    return round(float(F.cross_entropy(logits.float().flatten(0, 1), tokens[0, 1:])), 4)


@torch.no_grad()
def inputs_of(
    model: ByteModel, text: bytes, seq_len: int, device: str, dtype: torch.dtype
) -> RealInputs:
    """What ``model`` hands to its kernels over the first ``seq_len`` bytes, and the blocks that
    follow (sdpa).
    """
    made = model.to(device).activations(bytemodel.tokens_of(text, 1, seq_len, device))
    q, k, v = (
        made.q.to(dtype),
        tuple(t.to(dtype) for t in made.k),
        tuple(t.to(dtype) for t in made.v),
    )
    plan = resolve(model.config, device=device, dtype=dtype, backends="sdpa")
    _, lse = plan.cmp(q, k[0], v[0])
    return RealInputs(q, k, v, made.gates.float(), plan.select(q, k[0], lse))  # type: ignore[arg-type]


def real_inputs(
    shape: str, seq_len: int, device: str, dtype: torch.dtype, checkpoint: str | Path
) -> RealInputs:
    """Real activations of a trained layer of ``shape`` ("64/4/128") over ``seq_len`` bytes that it
    was not trained on.

    Raises:
        InvalidInput: the checkpoint cannot be read, or is of another shape.
    """
    model = bytemodel.load_for(Path(checkpoint), parse_shape(shape))
    return inputs_of(model, library_text(HELD_OUT)[:HELD_OUT], seq_len, device, dtype)


def random_causal_blocks(
    seq_len: int, groups: int, geometry: BlockGeometry, device: str, batch: int = 1, seed: int = 0
) -> torch.Tensor:
    """int32 [batch, seq_len, groups, n]: the forced blocks and others at random, ascending, -1 at
    the end.
    """
    generator = torch.Generator(device).manual_seed(seed)
    size, n = geometry.select_block_size, geometry.num_selected_blocks
    count = geometry.num_select_blocks(seq_len)
    number = torch.arange(count, device=device)
    out = torch.full((batch, seq_len, groups, n), -1, dtype=torch.int32, device=device)
    for first in range(0, seq_len, 4096):
        t = torch.arange(first, min(first + 4096, seq_len), device=device)
        current = (t // size)[:, None, None]
        rank = torch.rand(batch, len(t), groups, count, generator=generator, device=device)
        rank.masked_fill_(
            (number < geometry.init_blocks) | (number > current - geometry.local_blocks), 2.0
        )
        rank.masked_fill_(number > current, -1.0)
        best = rank.topk(min(n, count)).indices
        best = best.masked_fill_(rank.gather(-1, best) < 0, count).sort(-1).values
        out[:, t, :, : best.shape[-1]] = best.masked_fill_(best == count, -1).int()
    return out


def locality(blocks: torch.Tensor, geometry: BlockGeometry) -> dict[str, float]:
    """Mean number of different blocks that tiles of 2 to 32 neighbouring tokens choose together,
    over n.

    1 means that all agree; a tile of T tokens that share nothing has T. blocks [1, S, G, n], S a
    multiple of 32.
    """
    _, length, groups, n = blocks.shape
    count = geometry.num_select_blocks(length)
    spread = blocks[0].transpose(0, 1).long()  # [G, S, n]
    found = {}
    for tile in TILES:
        index = spread.reshape(groups, length // tile, tile * n)
        member = torch.zeros(*index.shape[:2], count + 1, dtype=torch.bool, device=blocks.device)
        member.scatter_(-1, index.masked_fill(index < 0, count), True)
        found[str(tile)] = round(float(member[..., :count].sum(-1).float().mean()) / n, 3)
    return found


def peakedness(real: RealInputs, config: NSAConfig) -> dict[str, float]:
    """How concentrated the compressed probabilities (Eq. 8) are, over sampled rows of the last
    seven eighths.
    """
    geometry, q, k = config.geometry, real.q[0], real.k[0][0].float()
    # at least two are visible
    first = max(len(q) // 8, geometry.compress_block_size + geometry.compress_stride)
    rows = torch.linspace(first, len(q) - 1, SAMPLED, device=q.device).long()
    heads = q[rows].float().unflatten(1, (k.shape[1], -1))  # [R, G, h, Dk]
    scores = torch.einsum("rghd,cgd->rghc", heads, k) * config.softmax_scale
    starts = torch.arange(len(k), device=q.device) * geometry.compress_stride
    hidden = starts + geometry.compress_block_size - 1 > rows[:, None]
    p = scores.masked_fill(hidden[:, None, None], -torch.inf).softmax(-1)
    visible = (~hidden).sum(-1)[:, None, None]
    home = (starts // geometry.select_block_size).to(torch.int32)
    chosen = (real.blocks[0, rows][..., None] == home).any(-2)  # [R, G, n_c]
    return {
        "entropy_over_log_visible": round(
            float((torch.special.entr(p).sum(-1) / visible.log()).mean()), 4
        ),
        "mass_of_16_largest": round(float(p.topk(min(16, len(k)), -1).values.sum(-1).mean()), 4),
        "mass_in_chosen_blocks": round(float((p * chosen[:, :, None]).sum(-1).mean()), 4),
    }


def measured(
    model: ByteModel, text: bytes, length: int, device: str, dtype: torch.dtype
) -> dict[str, Any]:
    """Locality and peakedness of one model at one length."""
    real = inputs_of(model, text, length, device, dtype)
    return {
        "union_over_n": locality(real.blocks, model.config.geometry),
        **peakedness(real, model.config),
    }


def study(
    shape: str, recipe: Recipe, lengths: list[int], device: str, text: bytes, folder: Path | None
) -> Any:
    """Train and measure one shape; write its checkpoint."""
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    model = bytemodel.untrained(recipe.config(shape), recipe.seed, recipe.backends).to(device)
    untrained = {str(n): measured(model, text, n, device, dtype) for n in lengths}
    facts = train(model, recipe, device, text)
    trained = {str(n): measured(model, text, n, device, dtype) for n in lengths}
    facts |= {"untrained": untrained, "trained": trained}
    geometry, groups = model.config.geometry, model.config.n_kv_heads
    flat = {n: random_causal_blocks(n, groups, geometry, device, seed=recipe.seed) for n in lengths}
    facts["random"] = {
        str(n): {"union_over_n": locality(blocks, geometry)} for n, blocks in flat.items()
    }
    if folder is not None:
        kept = {"shape": shape, "recipe": dataclasses.asdict(recipe), "steps": facts["steps"]}
        name = f"{shape.replace('/', '-')}.safetensors"
        bytemodel.save(model, folder / name, kept | {"loss_after": facts["loss_after"]}, force=True)
    return facts


def main() -> None:
    """Train, measure, write; a line per shape on stdout."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--shapes", default=SHAPES)
    options.add_argument("--lengths", default="8k,32k,64k")
    options.add_argument("--json", type=Path)
    options.add_argument("--checkpoints", type=Path, metavar="DIRECTORY")
    for field in dataclasses.fields(Recipe):
        kind = {"int": int, "float": float, "str": str}[str(field.type)]
        options.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    given = options.parse_args()
    recipe = Recipe(
        **{field.name: getattr(given, field.name) for field in dataclasses.fields(Recipe)}
    )
    text, lengths = library_text(TEXT_BYTES), parse_lengths(given.lengths)
    if given.checkpoints is not None:
        given.checkpoints.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {
        "kind": "real-blocks",
        "schema_version": 1,
        "recipe": dataclasses.asdict(recipe),
        "shapes": {},
        "text": {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()},
        "environment": {
            "device": device_name(given.device),
            "torch": torch.__version__,
            "python": platform.python_version(),
            **source(),
        },
    }
    for shape in (parse_shape(word).name for word in given.shapes.split(",")):
        started, longest = time.monotonic(), str(max(lengths))
        facts = study(shape, recipe, lengths, given.device, text, given.checkpoints)
        document["shapes"][shape] = facts
        if (
            given.json is not None
        ):  # after every shape: a run that is cut off keeps what it measured
            write_atomic(given.json, json.dumps(document, indent=1) + "\n", force=True)
        unions = {
            name: facts[name][longest]["union_over_n"]["8"]
            for name in ("untrained", "trained", "random")
        }
        print(
            f"{shape}: {facts['steps']} steps in {facts['seconds']} s, loss {facts['loss_before']}"
            f" -> {facts['loss_after']}, blocks of 8 neighbours over n at {longest}: {unions},"
            f" {time.monotonic() - started:.0f} s in all",
            flush=True,
        )


if __name__ == "__main__":
    main()
